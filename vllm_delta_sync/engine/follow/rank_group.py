"""All ranks of an engine as one: starts operations, waits, and combines what each rank measured."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_delta_sync.engine.commit.transaction import Answer, EnginePort, raise_if_error
from vllm_delta_sync.engine.core.rank_rpc import PerRank
from vllm_delta_sync.engine.model.shard_ownership import Ownership, prove_ownership, region_from_plain
from vllm_delta_sync.engine.planning.commit_plan import UpdatePlan, WeightPosition
from vllm_delta_sync.errors import EngineError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorTable

POLL_SHORTEST_S = 0.001
POLL_LONGEST_S = 0.02


@dataclass(frozen=True)
class ClaimedVersion:
    """What ranks believe to hold: run, its URL, version, fingerprints per tensor id of that run."""

    run: str
    url: str
    version: int
    fingerprints: list[Fingerprint]


@dataclass
class GatheredWeights:
    """What an engine's weights are, over all ranks.

    Attributes:
        fingerprints: per tensor id; None where no rank loads the tensor.
        conflicting: tensor ids of which ranks hold copies that differ.
        noted: what the ranks believe to hold, or None.
        answers: per rank, for status.
    """

    fingerprints: list[Fingerprint | None]
    conflicting: set[int]
    noted: ClaimedVersion | None
    answers: list[Answer]

    def different(self, expected: list[Fingerprint]) -> list[int]:
        """Tensor ids whose weights are not the expected ones; tensors that nobody loads count as right."""
        return [
            tensor
            for tensor, (found, right) in enumerate(zip(self.fingerprints, expected, strict=True))
            if tensor in self.conflicting or (found is not None and found != right)
        ]


class RankGroup:
    """The ranks behind a port.

    Attributes:
        ownership: who holds what; known after ``gather``.
        keys: sequence of keys.json that ranks must find where they read documents by themselves.
    """

    def __init__(self, port: EnginePort, stage_seconds: float) -> None:
        self._port = port
        self._seconds = stage_seconds
        self.ownership: Ownership | None = None
        self.keys = 0
        self._table: TensorTable | None = None
        self._declared = Fingerprint()

    def gather(self, table: TensorTable, arguments: Answer) -> GatheredWeights:
        """Trace every rank's routes, prove that all ranks together hold whole tensors, and hash what they hold.

        Raises:
            ModelError: a tensor cannot be routed, or is held in part.
        """
        answers = self.operate("identify", arguments)
        ownership = prove_ownership(
            table,
            [[[region_from_plain(region) for region in of] for of in answer["regions"]] for answer in answers],
        )
        self.ownership, self._table = ownership, table
        found: list[Fingerprint | None] = []
        conflicting = set()
        for tensor in range(len(table)):
            value = ownership.combine(tensor, [_parse(answer["measured"][tensor]) for answer in answers])
            if value is None:
                conflicting.add(tensor)
            found.append(value if ownership.is_loaded(tensor) else None)
        return GatheredWeights(found, conflicting, _noted(answers), answers)

    def adopt(self, version: int | None, fingerprints: list[Fingerprint], place: WeightPosition | None = None) -> None:
        """Tell every rank what all ranks together hold; None: weights that are no version of the run followed.

        Args:
            place: what they are instead, to be said again by ranks that are asked again.
        """
        ownership = self._proven()
        loaded = [ownership.is_loaded(tensor) for tensor in range(len(fingerprints))]
        hexes = [value.hex() for value in fingerprints]
        groups = PerRank(ownership.groups(rank) for rank in range(len(ownership.slots)))
        arguments: Answer = {"version": version, "fingerprints": hexes, "groups": groups, "loaded": loaded}
        if place is not None:
            arguments["claimed"] = {
                "run": place.run.info.run,
                "url": place.run.bucket.url,
                "version": place.version,
            }
        for answer in self._port.call("set_version", arguments):
            raise_if_error(answer)

    def stage(self, leg: UpdatePlan, held: int | None, rescan: list[int]) -> tuple[Answer, list[str]]:
        """Stage one commit on every rank.

        Args:
            held: the version that they hold; None: none of the run followed.

        Returns:
            {"ms": slowest rank's timings, "bytes": largest rank's, "elements": written over all ranks, "store": each
            one's use of stores}, and the names of rescanned tensors that are not what they should be.
        """
        arguments = {"plan": leg.to_plain(), "current": held, "rescan": rescan, "keys": self.keys}
        return self._staged("stage", arguments, rescan)

    def repair(self, target: Manifest) -> Answer:
        """Stage on every rank whatever makes its weights the target; as ``stage``."""
        return self._staged("repair", {"manifest": target.to_bytes().decode(), "keys": self.keys}, [])[0]

    def _staged(self, operation: str, arguments: Answer, rescan: list[int]) -> tuple[Answer, list[str]]:
        answers = self.operate(operation, arguments)
        declared = {answer["declared"] for answer in answers}
        if len(declared) != 1:
            raise EngineError(f"ranks staged different changes: {', '.join(sorted(declared))}")
        self._declared = Fingerprint.from_hex(declared.pop())
        slowest = {name: max(answer["ms"][name] for answer in answers) for name in answers[0]["ms"]}
        found = {
            "ms": slowest,
            "bytes": max(answer["bytes"] for answer in answers),
            "elements": sum(answer["elements"] for answer in answers),
            "store": [answer["store"] for answer in answers],
        }
        return found, self._differing(rescan, answers)

    def matches(self, answers: list[Answer]) -> bool:
        """Whether commits changed the weights as the staged version declares, over all ranks, copies alike."""
        measured = [
            {int(group): Fingerprint.from_hex(value) for group, value in answer["measured"].items()}
            for answer in answers
        ]
        return self._proven().combine_groups(measured) == self._declared

    def scan(self, tensors: list[int]) -> tuple[Fingerprint | None, list[str]]:
        """Gather and hash tensors.

        Returns:
            their sum (None if copies differ), with what the history declares for those that nobody loads; and the names
            of those that are not what they should be.
        """
        answers = self.operate("scan", {"tensors": tensors})
        return self._sum(tensors, answers), self._differing(tensors, answers)

    def describe(self) -> list[Answer]:
        """See RankWorker.describe."""
        answers = self._port.call("describe", {})
        for answer in answers:
            raise_if_error(answer)
        return answers

    def trust(self, touches: list[int]) -> None:
        """Tell every rank that its weights were rescanned.

        Args:
            touches: per rank, how often somebody else had touched them when they were.
        """
        for answer in self._port.call("clear_external_write", {"external_writes": PerRank(touches)}):
            raise_if_error(answer)

    def _combined(self, tensor: int, answers: list[Answer]) -> Fingerprint | None:
        ownership = self._proven()
        if not ownership.is_loaded(tensor):
            return Fingerprint.from_hex(_of(answers[0]["expected"], tensor))
        return ownership.combine(tensor, [_parse(_of(answer["measured"], tensor)) for answer in answers])

    def _sum(self, tensors: Iterable[int], answers: list[Answer]) -> Fingerprint | None:
        total = Fingerprint()
        for tensor in tensors:
            value = self._combined(tensor, answers)
            if value is None:
                return None
            total += value
        return total

    def _differing(self, tensors: Iterable[int], answers: list[Answer]) -> list[str]:
        table = self._table
        if table is None:
            raise EngineError("the ranks have not been asked yet what they hold")
        found = {name for answer in answers for name in answer["dead"]}
        for tensor in tensors:
            held = {_of(answer["expected"], tensor) for answer in answers}
            value = self._combined(tensor, answers)
            if value is None or held != {value.hex()}:
                found.add(table[tensor].name)
        return sorted(found)

    def _proven(self) -> Ownership:
        if self.ownership is None:
            raise EngineError("the ranks have not been asked yet what they hold")
        return self.ownership

    def operate(self, operation: str, arguments: Answer) -> list[Answer]:
        """Start an operation on every rank and poll until all are done.

        Raises:
            EngineError: a rank does not come to an end in time; it may still, and is busy until then.
        """
        for answer in self._port.call("start", {"operation": operation, "arguments": arguments}):
            raise_if_error(answer)
        pause, deadline = POLL_SHORTEST_S, time.monotonic() + self._seconds
        while True:
            time.sleep(pause)
            answers = self._port.call("poll", {})
            for answer in answers:
                raise_if_error(answer)
            running = [rank for rank, answer in enumerate(answers) if answer["running"]]
            if not running:
                break
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{operation} has run for {self._seconds:.0f} s on rank {', '.join(map(str, running))} without an "
                    "end; what is served stays"
                )
            pause = min(2 * pause, POLL_LONGEST_S)
        answers = self._port.call("outcome", {})
        for answer in answers:
            raise_if_error(answer)
        return answers


def _parse(values: list[str]) -> list[Fingerprint]:
    return [Fingerprint.from_hex(value) for value in values]


def _of(mapping: dict[Any, Any], tensor: int) -> Any:
    # Some ways from a worker to the controller turn keys into text.
    return mapping[tensor] if tensor in mapping else mapping[str(tensor)]


def _noted(answers: list[Answer]) -> ClaimedVersion | None:
    notes = [answer["claimed"] for answer in answers]
    if notes[0] is None or any(note != notes[0] for note in notes):
        return None
    note = notes[0]
    return ClaimedVersion(note["run"], note["url"], note["version"], _parse(note["fingerprints"]))

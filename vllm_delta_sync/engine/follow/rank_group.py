"""``RankGroup`` runs operations on all ranks of an engine, and combines what they measured."""

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
    """What ranks claim to hold: run id, its URL, version, fingerprints per tensor id of that run."""

    run: str
    url: str
    version: int
    fingerprints: list[Fingerprint]


@dataclass
class GatheredWeights:
    """Hashes of an engine's weights, over all ranks.

    Attributes:
        fingerprints: per tensor id; None where no rank loads the tensor.
        conflicting: tensor ids of which ranks hold copies that differ.
        claimed: the version that all ranks claim to hold, or None.
        answers: per rank, for status.
    """

    fingerprints: list[Fingerprint | None]
    conflicting: set[int]
    claimed: ClaimedVersion | None
    answers: list[Answer]

    def mismatches(self, expected: list[Fingerprint]) -> list[int]:
        """Return ids of tensors with other fingerprints than expected. Tensors that no rank loads count as equal."""
        return [
            tensor
            for tensor, (found, right) in enumerate(zip(self.fingerprints, expected, strict=True))
            if tensor in self.conflicting or (found is not None and found != right)
        ]

    def by_claim(self, table: TensorTable) -> list["GatheredWeights"]:
        """Return the weights of each set of ranks that claim one version. ModelError: a set holds tensors in part."""
        ranks: dict[tuple[str, int] | None, list[Answer]] = {}
        for answer in self.answers:
            claim = answer["claimed"]
            ranks.setdefault(None if claim is None else (claim["run"], claim["version"]), []).append(answer)
        return [_combine_ranks(table, answers)[1] for answers in ranks.values()]


class RankGroup:
    """The ranks behind an engine port.

    Attributes:
        ownership: which rank holds which part of each tensor; known after ``gather``.
        keys_sequence: sequence number of keys.json that ranks must at least find when they read documents.
    """

    def __init__(self, port: EnginePort, stage_seconds: float) -> None:
        self._port = port
        self._seconds = stage_seconds
        self.ownership: Ownership | None = None
        self.keys_sequence = 0
        self._table: TensorTable | None = None
        self._declared = Fingerprint()

    def gather(self, table: TensorTable, arguments: Answer) -> GatheredWeights:
        """Trace every rank's routes, prove that all ranks together hold whole tensors, and hash the tensors.

        Raises:
            ModelError: a tensor cannot be routed, or is held in part.
        """
        answers = self.run_operation("identify", arguments)
        self.ownership, held = _combine_ranks(table, answers)
        self._table = table
        return held

    def set_baseline(
        self, version: int | None, fingerprints: list[Fingerprint], position: WeightPosition | None = None
    ) -> None:
        """Set what all ranks together hold; version None means weights that are no version of the run followed.

        Args:
            position: the version of another run that they are instead; ranks claim it in the next ``gather``.
        """
        ownership = self._known_ownership()
        loaded = [ownership.is_loaded(tensor) for tensor in range(len(fingerprints))]
        hexes = [value.hex() for value in fingerprints]
        groups = PerRank(ownership.groups(rank) for rank in range(len(ownership.slots)))
        arguments: Answer = {"version": version, "fingerprints": hexes, "groups": groups, "loaded": loaded}
        if position is not None:
            arguments["claimed"] = {
                "run": position.run.info.run,
                "url": position.run.bucket.url,
                "version": position.version,
            }
        for answer in self._port.call("set_version", arguments):
            raise_if_error(answer)

    def stage(self, plan: UpdatePlan, held: int | None, rescan: list[int]) -> tuple[Answer, list[str]]:
        """Stage one commit on every rank.

        Args:
            held: the version that they hold; None means none of the run followed.

        Returns:
            {"ms": slowest rank's timings, "bytes": largest rank's, "elements": written over all ranks, "store": each
            rank's use of stores}, and the names of rescanned tensors that differ.
        """
        arguments = {"plan": plan.to_plain(), "current": held, "rescan": rescan, "keys": self.keys_sequence}
        return self._staged("stage", arguments, rescan)

    def repair(self, target: Manifest) -> Answer:
        """Stage on every rank what replaces its weights by the target; returns as ``stage``."""
        return self._staged("repair", {"manifest": target.to_bytes().decode(), "keys": self.keys_sequence}, [])[0]

    def _staged(self, operation: str, arguments: Answer, rescan: list[int]) -> tuple[Answer, list[str]]:
        answers = self.run_operation(operation, arguments)
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
        return found, self._mismatching_names(rescan, answers)

    def matches_declared(self, answers: list[Answer]) -> bool:
        """Return whether the commits on all ranks changed the weights by the declared fingerprint, and copies agree."""
        measured = [
            {int(group): Fingerprint.from_hex(value) for group, value in answer["measured"].items()}
            for answer in answers
        ]
        return self._known_ownership().combine_groups(measured) == self._declared

    def scan(self, tensors: list[int]) -> tuple[Fingerprint | None, list[str]]:
        """Gather and hash tensors.

        Returns:
            the sum of their fingerprints (None if copies differ), where tensors that no rank loads count as declared;
            and the names of those that differ.
        """
        answers = self.run_operation("scan", {"tensors": tensors})
        return self._sum(tensors, answers), self._mismatching_names(tensors, answers)

    def describe(self) -> list[Answer]:
        """See RankWorker.describe."""
        answers = self._port.call("describe", {})
        for answer in answers:
            raise_if_error(answer)
        return answers

    def clear_external_writes(self, touches: list[int]) -> None:
        """Tell every rank that its weights were rescanned and are right.

        Args:
            touches: per rank, its count of external writes before the rescan.
        """
        for answer in self._port.call("clear_external_write", {"external_writes": PerRank(touches)}):
            raise_if_error(answer)

    def _combined(self, tensor: int, answers: list[Answer]) -> Fingerprint | None:
        ownership = self._known_ownership()
        if not ownership.is_loaded(tensor):
            return Fingerprint.from_hex(_by_tensor(answers[0]["expected"], tensor))
        return ownership.combine(
            tensor, [_parse_fingerprints(_by_tensor(answer["measured"], tensor)) for answer in answers]
        )

    def _sum(self, tensors: Iterable[int], answers: list[Answer]) -> Fingerprint | None:
        total = Fingerprint()
        for tensor in tensors:
            value = self._combined(tensor, answers)
            if value is None:
                return None
            total += value
        return total

    def _mismatching_names(self, tensors: Iterable[int], answers: list[Answer]) -> list[str]:
        table = self._table
        if table is None:
            raise EngineError("the ranks' weights were not gathered yet")
        found = {name for answer in answers for name in answer["dead"]}
        for tensor in tensors:
            held = {_by_tensor(answer["expected"], tensor) for answer in answers}
            value = self._combined(tensor, answers)
            if value is None or held != {value.hex()}:
                found.add(table[tensor].name)
        return sorted(found)

    def _known_ownership(self) -> Ownership:
        if self.ownership is None:
            raise EngineError("the ranks' weights were not gathered yet")
        return self.ownership

    def run_operation(self, operation: str, arguments: Answer) -> list[Answer]:
        """Start an operation on every rank and poll until all are done.

        Raises:
            EngineError: a rank does not finish in time. It is busy until it does.
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
                    f"{operation} has run for {self._seconds:.0f} s on rank {', '.join(map(str, running))} without "
                    "finishing; the served version stays"
                )
            pause = min(2 * pause, POLL_LONGEST_S)
        answers = self._port.call("outcome", {})
        for answer in answers:
            raise_if_error(answer)
        return answers


def _combine_ranks(table: TensorTable, answers: list[Answer]) -> tuple[Ownership, GatheredWeights]:
    """Prove that ranks together hold whole tensors, and combine what they measured. Raises ModelError."""
    ownership = prove_ownership(
        table,
        [[[region_from_plain(region) for region in of] for of in answer["regions"]] for answer in answers],
    )
    found: list[Fingerprint | None] = []
    conflicting = set()
    for tensor in range(len(table)):
        value = ownership.combine(tensor, [_parse_fingerprints(answer["measured"][tensor]) for answer in answers])
        if value is None:
            conflicting.add(tensor)
        found.append(value if ownership.is_loaded(tensor) else None)
    return ownership, GatheredWeights(found, conflicting, _claimed_version(answers), answers)


def _parse_fingerprints(values: list[str]) -> list[Fingerprint]:
    return [Fingerprint.from_hex(value) for value in values]


def _by_tensor(mapping: dict[Any, Any], tensor: int) -> Any:
    # Some transports between worker and controller turn integer keys into text.
    return mapping[tensor] if tensor in mapping else mapping[str(tensor)]


def _claimed_version(answers: list[Answer]) -> ClaimedVersion | None:
    claims = [answer["claimed"] for answer in answers]
    if claims[0] is None or any(claim != claims[0] for claim in claims):
        return None
    claim = claims[0]
    return ClaimedVersion(claim["run"], claim["url"], claim["version"], _parse_fingerprints(claim["fingerprints"]))

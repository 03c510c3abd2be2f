"""``RankGroup`` runs operations on all ranks of an engine, and combines what they measured."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_delta_sync.engine import protocol
from vllm_delta_sync.engine.commit.agreement import same_declared
from vllm_delta_sync.engine.commit.transaction import EnginePort
from vllm_delta_sync.engine.model.shard_ownership import Ownership, prove_ownership
from vllm_delta_sync.engine.planning.commit_plan import UpdatePlan, WeightPosition
from vllm_delta_sync.engine.protocol import A, BackgroundRequest, ClaimedVersion, Identified, RankState, Scanned, unwrap
from vllm_delta_sync.errors import EngineError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorTable

POLL_SHORTEST_S = 0.001
POLL_LONGEST_S = 0.02
STAGE_SECONDS = 1800.0
"""Staging or a rescan that takes longer than this is reported as hanging."""


@dataclass
class HeldWeights:
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
    answers: list[Identified]

    def mismatches(self, expected: list[Fingerprint]) -> list[int]:
        """Return ids of tensors with other fingerprints than expected.

        Tensors that no rank loads count as equal: a fresh load leaves them out too.
        """
        return [
            tensor
            for tensor, (found, right) in enumerate(zip(self.fingerprints, expected, strict=True))
            if tensor in self.conflicting or (found is not None and found != right)
        ]

    def by_claim(self, table: TensorTable) -> list["HeldWeights"]:
        """Return the weights of each set of ranks that claim one version. ModelError: a set holds tensors in part."""
        ranks: dict[tuple[str, int] | None, list[Identified]] = {}
        for answer in self.answers:
            claim = answer.claimed
            ranks.setdefault(None if claim is None else (claim.run, claim.version), []).append(answer)
        return [_combine_ranks(table, answers)[1] for answers in ranks.values()]


@dataclass(frozen=True)
class StagedUpdate:
    """What all ranks have staged.

    Attributes:
        ms: the slowest rank's timings.
        elements: written over all ranks.
        store: each rank's use of stores.
        mismatching: names of rescanned tensors that differ from the version held.
    """

    ms: dict[str, float]
    elements: int
    store: list[dict[str, Any]]
    mismatching: list[str]


class RankGroup:
    """The ranks behind an engine port.

    Attributes:
        ownership: which rank holds which part of each tensor; known after ``identify``.
    """

    def __init__(self, port: EnginePort) -> None:
        self._port = port
        self.ownership: Ownership | None = None
        self._declared = Fingerprint()

    def identify(self, table: TensorTable, request: protocol.Identify) -> HeldWeights:
        """Trace every rank's routes, prove that all ranks together hold whole tensors, and hash the tensors.

        Raises:
            ModelError: a tensor cannot be routed, or is held in part.
        """
        self.ownership, held = _combine_ranks(table, self.run_operation(request))
        return held

    def set_baseline(
        self, version: int | None, fingerprints: list[Fingerprint], position: WeightPosition | None = None
    ) -> None:
        """Set what all ranks together hold; version None means weights that are no version of the run followed.

        Args:
            position: the version of another run that they are instead; ranks claim it in the next ``identify``.
        """
        ownership = self._known_ownership()
        loaded = [ownership.is_loaded(i) for i in range(len(fingerprints))]
        claimed = None
        if position is not None:
            run = position.run
            claimed = ClaimedVersion(run.info.run, run.bucket.url, position.version, fingerprints)
        groups = [ownership.groups(rank) for rank in range(len(ownership.slots))]
        unwrap(self._port.call(protocol.SetVersion(version, fingerprints, groups, loaded, claimed)))

    def stage(self, plan: UpdatePlan, held: int | None, rescan: list[int]) -> StagedUpdate:
        """Stage one commit on every rank.

        Args:
            held: the version that they hold; None means none of the run followed.
        """
        return self._staged(protocol.Stage(plan.to_plain(), held, rescan), rescan)

    def repair(self, target: Manifest) -> StagedUpdate:
        """Stage on every rank what replaces its weights by the target."""
        return self._staged(protocol.Repair(target.to_bytes()), [])

    def _staged(self, request: BackgroundRequest[protocol.Staged], rescan: list[int]) -> StagedUpdate:
        answers = self.run_operation(request)
        self._declared = same_declared(answers)
        return StagedUpdate(
            ms={name: max(answer.ms[name] for answer in answers) for name in answers[0].ms},
            elements=sum(answer.elements for answer in answers),
            store=[answer.store for answer in answers],
            mismatching=self._mismatching_names(rescan, [answer.rescanned for answer in answers]),
        )

    def matches_declared(self, answers: Sequence[protocol.Committed]) -> bool:
        """Return whether the commits on all ranks changed the weights by the declared fingerprint, and copies agree."""
        return self._known_ownership().combine_groups([answer.measured for answer in answers]) == self._declared

    def scan(self, tensors: list[int]) -> tuple[Fingerprint | None, list[str]]:
        """Gather and hash tensors.

        Returns:
            the sum of their fingerprints (None if copies differ), where tensors that no rank loads count as declared;
            and the names of those that differ.
        """
        answers = self.run_operation(protocol.Scan(tensors))
        return self._sum(tensors, answers), self._mismatching_names(tensors, answers)

    def describe(self) -> list[RankState]:
        """Return what each rank holds."""
        return unwrap(self._port.call(protocol.Describe()))

    def _combined(self, tensor: int, answers: list[Scanned]) -> Fingerprint | None:
        ownership = self._known_ownership()
        if not ownership.is_loaded(tensor):
            return answers[0].expected[tensor]
        return ownership.combine(tensor, [answer.measured[tensor] for answer in answers])

    def _sum(self, tensors: Iterable[int], answers: list[Scanned]) -> Fingerprint | None:
        total = Fingerprint()
        for tensor in tensors:
            value = self._combined(tensor, answers)
            if value is None:
                return None
            total += value
        return total

    def _mismatching_names(self, tensors: Iterable[int], answers: list[Scanned]) -> list[str]:
        table = self._known_ownership().table
        found = {name for answer in answers for name in answer.dead}
        for tensor in tensors:
            value = self._combined(tensor, answers)
            if value is None or any(answer.expected[tensor] != value for answer in answers):
                found.add(table[tensor].name)
        return sorted(found)

    def _known_ownership(self) -> Ownership:
        if self.ownership is None:
            raise EngineError("the ranks' weights were not identified yet")
        return self.ownership

    def run_operation(self, request: BackgroundRequest[A]) -> list[A]:
        """Start an operation on every rank, poll until all are done, and return their outcomes.

        Raises:
            EngineError: a rank does not finish in time. It is busy until it does.
        """
        unwrap(self._port.call(request))
        pause, deadline = POLL_SHORTEST_S, time.monotonic() + STAGE_SECONDS
        while True:
            time.sleep(pause)
            running = [rank for rank, answer in enumerate(unwrap(self._port.call(protocol.Poll()))) if answer.running]
            if not running:
                return unwrap(self._port.call(protocol.Outcome.of(request)))
            if time.monotonic() > deadline:
                busy = ", ".join(map(str, running))
                raise EngineError(
                    f"{request.operation} has run for {STAGE_SECONDS:.0f} s on rank {busy} without finishing; the "
                    "served version stays"
                )
            pause = min(2 * pause, POLL_LONGEST_S)


def _combine_ranks(table: TensorTable, answers: list[Identified]) -> tuple[Ownership, HeldWeights]:
    """Prove that ranks together hold whole tensors, and combine what they measured. Raises ModelError."""
    ownership = prove_ownership(table, [answer.regions for answer in answers])
    found: list[Fingerprint | None] = []
    conflicting = set()
    for tensor in range(len(table)):
        value = ownership.combine(tensor, [answer.measured[tensor] for answer in answers])
        if value is None:
            conflicting.add(tensor)
        found.append(value if ownership.is_loaded(tensor) else None)
    claimed = answers[0].claimed
    common = claimed if all(answer.claimed == claimed for answer in answers) else None
    return ownership, HeldWeights(found, conflicting, common, answers)

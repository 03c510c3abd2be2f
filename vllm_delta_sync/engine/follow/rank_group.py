"""``RankGroup`` runs operations on all ranks of an engine, and combines what they measured.

``prove_ownership`` proves that the ranks together hold every checkpoint tensor whole, each element counted once: under
tensor parallelism a rank loads slices; norms, biases and key/value heads may lie on several ranks. Each rank reports
the source regions of its routes. The regions of two ranks must be equal (copies, whose bits must then agree) or
disjoint; together they must cover the whole tensor, or none of it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vllm_delta_sync.engine import protocol
from vllm_delta_sync.engine.commit.transaction import EnginePort
from vllm_delta_sync.engine.model.route import Region, find_overlap
from vllm_delta_sync.engine.planning.run_history import WeightPosition
from vllm_delta_sync.engine.planning.update_planner import UpdatePlan
from vllm_delta_sync.engine.protocol import A, BackgroundRequest, ClaimedVersion, Identified, RankState, Scanned, unwrap
from vllm_delta_sync.errors import EngineError, ModelError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorTable

POLL_SHORTEST_S = 0.001
POLL_LONGEST_S = 0.02
STAGE_SECONDS = 1800.0
"""Staging or a rescan that takes longer than this is reported as hanging."""

_find_overlap = lru_cache(maxsize=256)(find_overlap)
"""Cached: layers repeat, so the same shapes are cut in the same way many times."""
DUPLICATE = -1
"""Group number of a route whose region another route of the rank already counts."""
Slots = list[list[int]]
"""Per tensor id, per route of one rank: which of the tensor's distinct regions the route loads."""


@dataclass(frozen=True)
class Ownership:
    """Which ranks hold which regions.

    Attributes:
        slots: per rank.
        holders: per tensor id, per distinct region: the ranks that hold it, ascending. Empty for a tensor that no
            rank loads.
        members: per group id: the ranks of the group. A group is a set of ranks that hold copies of the same region.
    """

    table: TensorTable
    slots: list[Slots]
    holders: list[list[tuple[int, ...]]]
    members: list[tuple[int, ...]]

    def groups(self, rank: int) -> list[list[int]]:
        """Return, per tensor id and route of a rank, the group that holds the route's region; DUPLICATE if an earlier
        route of the rank loads the same region."""
        ids = {ranks: position for position, ranks in enumerate(self.members)}
        found = []
        for holders, slots in zip(self.holders, self.slots[rank], strict=True):
            found.append([DUPLICATE if slot in slots[:at] else ids[holders[slot]] for at, slot in enumerate(slots)])
        return found

    def is_loaded(self, tensor: int) -> bool:
        """Return whether any rank holds the tensor."""
        return bool(self.holders[tensor])

    def combine(self, tensor: int, measured: Sequence[Sequence[Fingerprint]]) -> Fingerprint | None:
        """Return a whole tensor's fingerprint from each rank's measurements per route; None if copies differ."""
        found: dict[int, Fingerprint] = {}
        for rank, fingerprints in enumerate(measured):
            for slot, value in zip(self.slots[rank][tensor], fingerprints, strict=True):
                if found.setdefault(slot, value) != value:
                    return None
        return sum(found.values(), Fingerprint())

    def combine_groups(self, measured: Sequence[dict[int, Fingerprint]]) -> Fingerprint | None:
        """Return the total of all ranks' measurements per group, each element once; None if copies differ."""
        total = Fingerprint()
        for group, ranks in enumerate(self.members):
            values = {measured[rank].get(group, Fingerprint()) for rank in ranks}
            if len(values) > 1:
                return None
            total += values.pop()
        return total


def prove_ownership(table: TensorTable, regions: Sequence[Sequence[Sequence[Region]]]) -> Ownership:
    """Prove that ranks hold every tensor whole or not at all, and return which ranks hold what.

    Args:
        regions: per rank, per tensor id: the source region of each of the rank's routes.

    Raises:
        ModelError: a tensor is held in part, or two ranks' parts overlap without being the same.
    """
    slots: list[Slots] = [[] for _ in regions]
    holders: list[list[tuple[int, ...]]] = []
    for tensor, spec in enumerate(table):
        found: dict[Region, list[int]] = {}
        for rank, rank_regions in enumerate(regions):
            for region in rank_regions[tensor]:
                ranks = found.setdefault(region, [])
                if rank not in ranks[-1:]:
                    ranks.append(rank)
        order = {region: slot for slot, region in enumerate(found)}
        for rank, rank_regions in enumerate(regions):
            slots[rank].append([order[region] for region in rank_regions[tensor]])
        holders.append([tuple(ranks) for ranks in found.values()])
        if _find_overlap(tuple(found)) is not None:
            raise ModelError(f"two ranks load parts of tensor {spec.name!r} that overlap without being the same")
        covered = sum(region.numel for region in found)
        if found and covered != spec.numel:
            raise ModelError(
                f"only {covered} of {spec.numel} elements of tensor {spec.name!r} are loaded, over all ranks"
            )
    members = sorted({ranks for of_tensor in holders for ranks in of_tensor})
    return Ownership(table, slots, holders, members)


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
        return self._staged(plan.request(held, rescan), rescan)

    def repair(self, target: Manifest) -> StagedUpdate:
        """Stage on every rank what replaces its weights by the target."""
        return self._staged(protocol.Repair(target.to_bytes()), [])

    def _staged(self, request: BackgroundRequest[protocol.Staged], rescan: list[int]) -> StagedUpdate:
        answers = self.run_operation(request)
        declared = {answer.declared for answer in answers}
        if len(declared) != 1:
            raise EngineError(f"ranks staged different changes: {', '.join(sorted(map(Fingerprint.hex, declared)))}")
        self._declared = declared.pop()
        return StagedUpdate(
            ms={name: max(answer.ms[name] for answer in answers) for name in answers[0].ms},
            elements=sum(answer.elements for answer in answers),
            store=[answer.store for answer in answers],
            mismatching=self._compare(rescan, [answer.rescanned for answer in answers])[1],
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
        return self._compare(tensors, self.run_operation(protocol.Scan(tensors)))

    def describe(self) -> list[RankState]:
        """Return what each rank holds."""
        return unwrap(self._port.call(protocol.Describe()))

    def _compare(self, tensors: list[int], answers: list[Scanned]) -> tuple[Fingerprint | None, list[str]]:
        """As ``scan``, for tensors that the ranks have scanned."""
        ownership = self._known_ownership()
        total: Fingerprint | None = Fingerprint()
        differing = {name for answer in answers for name in answer.dead}
        for tensor in tensors:
            value: Fingerprint | None = answers[0].expected[tensor]
            if ownership.is_loaded(tensor):
                value = ownership.combine(tensor, [answer.measured[tensor] for answer in answers])
            if any(answer.expected[tensor] != value for answer in answers):
                differing.add(ownership.table[tensor].name)
            total = None if total is None or value is None else total + value
        return total, sorted(differing)

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

"""``prove_ownership`` proves that the ranks together hold every checkpoint tensor whole, each element counted once.

Under tensor parallelism a rank loads slices; norms, biases and key/value heads may lie on several ranks. Each rank
reports the source regions of its routes. The regions of two ranks must be equal (copies, whose bits must then agree) or
disjoint; together they must cover the whole tensor, or none of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from vllm_delta_sync.engine.model.route import Region, find_overlap
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorTable

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
        if _overlap(tuple(found)):
            raise ModelError(f"two ranks load parts of tensor {spec.name!r} that overlap without being the same")
        covered = sum(region.numel for region in found)
        if found and covered != spec.numel:
            raise ModelError(
                f"only {covered} of {spec.numel} elements of tensor {spec.name!r} are loaded, over all ranks"
            )
    members = sorted({ranks for of_tensor in holders for ranks in of_tensor})
    return Ownership(table, slots, holders, members)


# Layers repeat, so the same shapes are cut in the same way many times.
@lru_cache(maxsize=256)
def _overlap(regions: tuple[Region, ...]) -> bool:
    return find_overlap(regions) is not None

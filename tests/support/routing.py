"""Routing changes that were decoded at once, and regions written out."""

import itertools

from vllm_delta_sync.engine.model.patch import PatchBuilder, StagedPatch
from vllm_delta_sync.engine.model.route import Region
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.tensors.changes import Changes


def route_changes(version: int, changes: Changes, routes: RouteMap, before: list[Fingerprint]) -> StagedPatch:
    """The patch of a version with these changes; ``before``: see ``PatchBuilder``."""
    builder = PatchBuilder(version, routes, before, changes.fingerprints)
    for group in changes.sparse:
        builder.add(group)
    for full in changes.full:
        builder.add(full)
    return builder.finish()


def all_indices(region: Region) -> list[int]:
    """All flat indices of a region, in row-major order."""
    return [
        region.offset + sum(c * s for c, s in zip(point, region.strides, strict=True))
        for point in itertools.product(*(range(size) for size in region.sizes))
    ]


def densely(region: Region, offset: int, order: list[int]) -> Region:
    """A dense region of the same shape, whose dimensions lie in memory in another order."""
    strides, reach = [0] * len(region.sizes), 1
    for dim in order:
        strides[dim], reach = reach, reach * region.sizes[dim]
    return Region(offset, region.sizes, tuple(strides))

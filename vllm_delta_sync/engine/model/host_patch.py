"""``HostBatch`` is the part of a patch that one compiled loop applies to weights in host memory.

The loop takes the addresses of all arrays, so that a commit makes one call, whatever the number of destinations. The
addresses of the patch are read beside generation, those of the weights in the pause.
"""

from itertools import groupby
from typing import Any

import numpy as np

from vllm_delta_sync.engine.model.device_patch import is_on_device
from vllm_delta_sync.engine.model.patch_parts import SparsePatch
from vllm_delta_sync.engine.model.route import Destination
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.tensors.bits import order_masks


class HostBatch:
    """Patches of one element type and one type of index, all relative or none, and their destinations.

    The batch refers to the memory of the patches' arrays, which must stay where they are.
    """

    def __init__(self, patches: list[SparsePatch], destinations: list[Destination]) -> None:
        first = patches[0]
        self._patches = patches  # keeps alive what the addresses lead to
        self._destinations = destinations
        self._relative = first.relative
        self._types = np.empty(0, first.positions.dtype), np.empty(0, first.data.dtype)
        self._masks = order_masks(first.element)
        self._counts = np.array([patch.positions.size for patch in patches], np.int64)
        self._pointers = np.zeros((len(patches), 4), np.int64)
        for row, patch in zip(self._pointers, patches, strict=True):
            row[1:] = [array.ctypes.data for array in (patch.positions, patch.data, patch.premix)]
        self._sums = np.zeros((len(patches), 2), np.uint64)
        groups = np.array([patch.group for patch in patches])
        self._rows = {group: np.flatnonzero(groups == group) for group in sorted(set(groups.tolist()))}

    def apply(self, reverse: bool) -> dict[int, Fingerprint]:
        """Apply all patches, or take them back: all or none. Returns the change of fingerprint per group of ranks."""
        from vllm_delta_sync.format import kernels

        self._pointers[:, 0] = [destination.address for destination in self._destinations]
        kernels.commit_each(
            self._pointers, self._counts, *self._types, *self._masks, self._relative, reverse, self._sums
        )
        totals = ((group, self._sums[rows].sum(axis=0)) for group, rows in self._rows.items())
        return {group: Fingerprint(int(low), int(high)) for group, (low, high) in totals}


def stage_on_host(sparse: list[SparsePatch], routes: RouteMap) -> list[HostBatch]:
    """Prepare the commit of those patches that write in host memory, in their order."""
    in_memory = [
        (patch, routes.destinations[patch.destination])
        for patch in sparse
        if not is_on_device(routes.destinations[patch.destination], routes)
    ]
    batches: list[HostBatch] = []
    for _, found in groupby(in_memory, lambda pair: _kind(pair[0])):
        patches, destinations = zip(*found, strict=True)
        batches.append(HostBatch(list(patches), list(destinations)))
    return batches


def _kind(patch: SparsePatch) -> tuple[Any, ...]:
    """What the patches of a batch have in common."""
    return patch.element, patch.relative, patch.positions.dtype

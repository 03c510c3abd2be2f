"""``Batch`` is what one launch on a device writes; ``cut_batches`` cuts patches into batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch

from vllm_delta_sync.engine.model.accelerator import ALIGNMENT, Shapes, Slab, bytes_of, carve
from vllm_delta_sync.engine.model.route import Destination, RoutePatch
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.tensors.torch_views import SIGNED

BLOCK = 1024
"""Elements per block of a kernel's grid."""
PACKED_ARRAYS = 5
FIXED_COLUMNS = 5
"""Columns of ``PackedBatch.table`` before those of dimensions."""


@dataclass(frozen=True)
class PackedBatch:
    """A batch as kernels read it: views of one stretch of memory, on the host or on the device.

    Attributes:
        relative: whether ``data`` are distances.
        is_float: whether the monotone order mirrors negative patterns.
        table: (s, FIXED_COLUMNS + 2·dims) int64. Of each segment: address of its route's first element; index in the
            batch of the element after its last; row of ``sums`` that it adds to; seed of its tensor's hashes; flat
            index in the tensor of its route's first element; then ``Route.steps``.
        firsts: (b,) int32: index of the first element of each block.
        segments: (b,) int32: segment of each block.
        positions: (n,) int32 or int64, data: (n,) signed integers of the element's width; see ``RoutePatch``.
    """

    relative: bool
    is_float: bool
    table: torch.Tensor
    firsts: torch.Tensor
    segments: torch.Tensor
    positions: torch.Tensor
    data: torch.Tensor


@dataclass
class BatchPart:
    """Elements ``start`` … ``stop`` − 1 of a patch; ``row`` of the sums is that of the patch's group."""

    patch: RoutePatch
    destination: Destination
    row: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass
class Batch:
    """What one launch writes: parts of patches of one ``kind``, no element twice.

    Attributes:
        uploaded: has the packed batch on the device; None if it is in host memory only.
    """

    parts: list[BatchPart]
    uploaded: Slab | None = None

    @cached_property
    def elements(self) -> int:
        return sum(part.size for part in self.parts)

    @cached_property
    def blocks(self) -> int:
        return sum(-(-part.size // BLOCK) for part in self.parts)

    @cached_property
    def nbytes(self) -> int:
        """Size of the packed batch."""
        return bytes_of(self._shapes)

    @property
    def dims(self) -> int:
        """Dimensions of its routes."""
        return len(self.parts[0].patch.route.steps)

    @property
    def _shapes(self) -> Shapes:
        first = self.parts[0].patch
        return [
            ((len(self.parts), FIXED_COLUMNS + 2 * self.dims), torch.int64),
            ((self.blocks,), torch.int32),
            ((self.blocks,), torch.int32),
            ((self.elements,), SIGNED[first.positions.itemsize]),
            ((self.elements,), SIGNED[first.element.itemsize]),
        ]

    def views(self, memory: torch.Tensor) -> PackedBatch:
        """Return the packed batch in (≥ nbytes,) uint8 memory."""
        first = self.parts[0].patch
        return PackedBatch(first.relative, first.element.is_float, *carve(memory, self._shapes))

    def pack(self, memory: torch.Tensor) -> None:
        """Write the packed batch into (≥ nbytes,) uint8 memory of the host."""
        packed = self.views(memory)
        table, positions, data = (tensor.numpy() for tensor in (packed.table, packed.positions, packed.data))
        firsts, segments = packed.firsts.numpy(), packed.segments.numpy()
        at = block = 0
        for number, part in enumerate(self.parts):
            patch, stretch, end = part.patch, slice(part.start, part.stop), at + part.size
            route, flat = patch.route, part.destination.flat
            positions[at:end] = patch.positions[stretch]
            data[at:end] = patch.data[stretch].view(data.dtype)
            address = flat.data_ptr() + route.target.offset * flat.element_size()
            seed = int(np.uint64(patch.seed).view(np.int64))
            table[number] = address, end, part.row, seed, route.source.offset, *chain.from_iterable(route.steps)
            blocks = -(-part.size // BLOCK)
            firsts[block : block + blocks] = np.arange(at, end, BLOCK)
            segments[block : block + blocks] = number
            at, block = end, block + blocks

    def unpack_data(self, memory: torch.Tensor) -> None:
        """Copy the packed ``data`` in host memory to the patches, after an exchange."""
        data, at = memory.numpy(), 0
        for part in self.parts:
            part.patch.data[part.start : part.stop] = data[at : at + part.size].view(part.patch.data.dtype)
            at += part.size


def kind(patch: RoutePatch) -> tuple[Any, ...]:
    """Return what the patches of a batch have in common, in an order by which they can be sorted."""
    return patch.element.name, not patch.relative, patch.positions.itemsize, len(patch.route.steps)


def cut_batches(patches: list[RoutePatch], routes: RouteMap, groups: list[int], most: int) -> Iterator[Batch]:
    """Cut patches into batches of at most ``most`` bytes, in their order."""
    parts: list[BatchPart] = []
    room = 0
    for patch in patches:
        row, destination = groups.index(patch.group), routes.destinations[patch.route.destination]
        # A row of the table, and one block that is not full.
        part_bytes = 8 * (FIXED_COLUMNS + 2 * len(patch.route.steps)) + 8
        # Per block of elements, and 4 bytes each for the block's first element and segment.
        block_bytes = BLOCK * (patch.positions.itemsize + patch.data.itemsize) + 8
        start = 0
        while start < patch.positions.size:
            is_full = (room - part_bytes) * BLOCK < block_bytes
            if parts and (is_full or kind(patch) != kind(parts[0].patch)):
                yield Batch(parts)
                parts = []
            if not parts:
                room = most - PACKED_ARRAYS * ALIGNMENT
            count = min(patch.positions.size - start, (room - part_bytes) * BLOCK // block_bytes)
            parts.append(BatchPart(patch, destination, row, start, start + count))
            room -= part_bytes + -(-count * block_bytes // BLOCK)
            start += count
    if parts:
        yield Batch(parts)

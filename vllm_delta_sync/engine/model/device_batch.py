"""``Batch`` is what one launch on a device writes; ``cut_batches`` cuts patches into batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from vllm_delta_sync.engine.model.accelerator import Slab
from vllm_delta_sync.engine.model.route import Destination, SparsePatch
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.tensors.torch_views import SIGNED

BLOCK = 1024
"""Elements per block of a kernel's grid."""
ALIGNMENT = 16
PART_BYTES = 8 + 4 + 4 + 8
"""Bytes in a packed batch per part of a patch: address, end, row, and one block that is not full."""
PACKED_ARRAYS = 8


@dataclass(frozen=True)
class PackedBatch:
    """A batch as kernels read it: views of one stretch of memory, on the host or on the device.

    Attributes:
        relative: whether ``data`` are distances.
        is_float: whether the monotone order mirrors negative patterns.
        premix: (n,) int64: position half of each element's hash.
        bases: (s,) int64: address of each segment's destination.
        ends: (s,) int32: index of the element after each segment's last.
        rows: (s,) int32: row of ``sums`` that each segment adds to.
        firsts: (b,) int32: index of the first element of each block.
        segments: (b,) int32: segment of each block.
        positions: (n,) int32 or int64 indices into the destination.
        data: (n,) signed integers of the element's width: distances, or the bits to exchange.
    """

    relative: bool
    is_float: bool
    premix: torch.Tensor
    bases: torch.Tensor
    ends: torch.Tensor
    rows: torch.Tensor
    firsts: torch.Tensor
    segments: torch.Tensor
    positions: torch.Tensor
    data: torch.Tensor


@dataclass
class BatchPart:
    """Elements ``start`` … ``stop`` − 1 of a patch; ``row`` of the sums is that of the patch's group."""

    patch: SparsePatch
    destination: Destination
    row: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass
class Batch:
    """What one launch writes: parts of patches with one element type, all relative or none, no element twice.

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
        return sum(-(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT for count, dtype in self._layout)

    @property
    def _layout(self) -> list[tuple[int, torch.dtype]]:
        first, parts = self.parts[0].patch, len(self.parts)
        index = torch.int32 if first.positions.itemsize == 4 else torch.int64
        return [
            (self.elements, torch.int64),
            (parts, torch.int64),
            (parts, torch.int32),
            (parts, torch.int32),
            (self.blocks, torch.int32),
            (self.blocks, torch.int32),
            (self.elements, index),
            (self.elements, SIGNED[first.element.itemsize]),
        ]

    def views(self, memory: torch.Tensor) -> PackedBatch:
        """Return the packed batch in (≥ nbytes,) uint8 memory."""
        arrays, at = [], 0
        for count, dtype in self._layout:
            arrays.append(memory[at : at + count * dtype.itemsize].view(dtype))
            at += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        first = self.parts[0].patch
        return PackedBatch(first.relative, first.element.is_float, *arrays)

    def pack(self, memory: torch.Tensor) -> None:
        """Write the packed batch into (≥ nbytes,) uint8 memory of the host."""
        packed = self.views(memory)
        premix, positions, data = (tensor.numpy() for tensor in (packed.premix, packed.positions, packed.data))
        firsts, segments = packed.firsts.numpy(), packed.segments.numpy()
        bases, ends, rows = packed.bases.numpy(), packed.ends.numpy(), packed.rows.numpy()
        at = block = 0
        for number, part in enumerate(self.parts):
            patch, stretch, end = part.patch, slice(part.start, part.stop), at + part.size
            premix[at:end] = patch.premix[stretch].view(np.int64)
            positions[at:end] = patch.positions[stretch]
            data[at:end] = patch.data[stretch].view(data.dtype)
            bases[number] = part.destination.flat.data_ptr()
            ends[number], rows[number] = end, part.row
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


def cut_batches(patches: list[SparsePatch], routes: RouteMap, groups: list[int], most: int) -> Iterator[Batch]:
    """Cut patches into batches of at most ``most`` bytes, in their order."""
    parts: list[BatchPart] = []
    kind: tuple[Any, ...] = ()
    room = 0
    for patch in patches:
        row, destination = groups.index(patch.group), routes.destinations[patch.destination]
        # Per block of elements, and 4 bytes each for the block's first element and segment.
        block_bytes = BLOCK * (8 + patch.positions.itemsize + patch.data.itemsize) + 8
        start = 0
        while start < patch.positions.size:
            count = min(patch.positions.size - start, (room - PART_BYTES) * BLOCK // block_bytes)
            if parts and (count <= 0 or kind != (patch.element, patch.relative, patch.positions.dtype)):
                yield Batch(parts)
                parts = []
            if not parts:
                kind, room = (patch.element, patch.relative, patch.positions.dtype), most - PACKED_ARRAYS * ALIGNMENT
                count = min(patch.positions.size - start, (room - PART_BYTES) * BLOCK // block_bytes)
            parts.append(BatchPart(patch, destination, row, start, start + count))
            room -= PART_BYTES + -(-count * block_bytes // BLOCK)
            start += count
    if parts:
        yield Batch(parts)

"""What ``DeviceComparer`` and its kernels share: pieces of tensors, their tables, and the memory for what is found."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainer_side.diff.change_log import ChangeLog
from trainer_side.diff.device_queue import DeviceQueue
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.tensors.torch_views import SIGNED

BLOCK = 2048
"""Elements that one program of a kernel compares."""
WIDTHS = (1, 2, 4, 8)
"""Bytes of an element: ``counters`` begin with one per width."""
COLUMNS = 6
"""int64 words of a piece that kernels read: address of the live elements, address of their baseline, number of
elements, first block in the batch, seed of the tensor's hash, flat index of the first element in the tensor."""


@dataclass
class Piece:
    """Consecutive elements of a tensor. ``start``: flat index of the first one.

    Attributes:
        live: (size,) in the served dtype, or float32 that is rounded to bfloat16; None once it was read.
        base: (size,) signed integers: the baseline, on the device or in host memory.
        bits: (numel,) the baseline of the whole tensor, if it is in host memory.
        first_block: in its batch.
    """

    log: ChangeLog
    spec: TensorSpec
    start: int
    live: torch.Tensor | None
    base: torch.Tensor
    bits: Bits | None
    first_block: int = 0

    def __post_init__(self) -> None:
        self.size = self.base.numel()
        self.blocks = -(-self.size // BLOCK)


@dataclass(frozen=True)
class Kind:
    """What the pieces of a batch have in common.

    Attributes:
        width: bytes of a served element. rounds: live elements are float32, served ones bfloat16.
        is_float: served elements are ordered as floats. on_device: the baseline is.
        aligned: all addresses are multiples of 16, so that kernels may load 16 bytes at a time.
        reserved: there is room for all of their elements before they are compared.
    """

    width: int
    rounds: bool
    is_float: bool
    on_device: bool
    aligned: bool
    reserved: bool


class PieceTables:
    """Tables of all batches until they are collected, in memory of the device.

    Attributes:
        counters: (WIDTHS + pieces,) int64: used room by width, and changed elements by piece.
        table: (pieces, COLUMNS) int64. owners: (blocks,) int32, the piece of each block, counted in its batch.
        firsts, counts: (blocks,) int32 per block: where its changed elements stand in ``Found``, and their number.
        pinned_…: host memory from which the two tables are uploaded, and to which counters come.
        used: (batches, WIDTHS) int64 in pinned memory: used room after a batch.
    """

    def __init__(self, queue: DeviceQueue, pieces: int, blocks: int, batches: int) -> None:
        self.counters = queue.empty("caller", (len(WIDTHS) + pieces,), torch.int64)
        self.table = queue.empty("caller", (pieces, COLUMNS), torch.int64)
        self.owners, self.firsts, self.counts = queue.empty("caller", (3, blocks), torch.int32)
        self.pinned_counters = queue.pinned((len(WIDTHS) + pieces,), torch.int64)
        self.pinned_table = queue.pinned((pieces, COLUMNS), torch.int64)
        self.pinned_owners = queue.pinned((blocks,), torch.int32)
        self.used = queue.pinned((batches, len(WIDTHS)), torch.int64)


class BatchMemory(NamedTuple):
    """The rows of ``PieceTables`` that belong to one batch.

    Attributes:
        counters: all of them. ``counters[slot]`` counts the elements of ``Found`` in use, ``counters[first + i]`` those
            of piece i.
    """

    table: torch.Tensor
    owners: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    counters: torch.Tensor
    slot: int
    first: int


@dataclass
class PieceBatch:
    """Pieces of one kind that are compared in one launch.

    Attributes:
        most: elements that it takes at most.
    """

    kind: Kind
    most: int
    pieces: list[Piece] = field(default_factory=list)
    elements: int = 0
    blocks: int = 0

    def takes(self, piece: Piece, most_pieces: int) -> bool:
        """Return whether a piece fits in beside what it has."""
        return self.elements + piece.size <= self.most and len(self.pieces) < most_pieces

    def append(self, piece: Piece) -> None:
        piece.first_block = self.blocks
        self.pieces.append(piece)
        self.elements += piece.size
        self.blocks += piece.blocks


class Found:
    """Room for changed elements of one width, on the device: blocks in any order, each ascending.

    Attributes:
        where: (room,) int32 index in the piece.
        old, new: (room,) signed integers: bits in the baseline, and those that were read.
    """

    def __init__(self, queue: DeviceQueue, width: int, room: int) -> None:
        self.room = room
        self.where = queue.empty("caller", (room,), torch.int32)
        self.old, self.new = queue.empty("caller", (2, room), SIGNED[width])


class Ordered:
    """Memory for a stretch of blocks whose elements are brought in order, on the device and in pinned host memory.

    Attributes:
        starts: (blocks + 1,) int32: where each block of the stretch begins, and the end of the last.
        where, old, new: (elements,), as in ``Found``.
        relative: (elements,) int16 index in the chunk of ``CHUNK_ELEMENTS``, which begin with the piece.
        distances: (elements,) signed integers: ULP distances new − old.
        sums: (pieces, 2) int64: low and high lane of each piece's fingerprint after minus before.
    """

    def __init__(self, queue: DeviceQueue, width: int, elements: int, blocks: int, pieces: int) -> None:
        element = SIGNED[width]
        self.starts = queue.empty("background", (blocks + 1,), torch.int32)
        self.where = queue.empty("background", (elements,), torch.int32)
        self.relative = queue.empty("background", (elements,), torch.int16)
        self.old, self.new, self.distances = queue.empty("background", (3, elements), element)
        self.sums = queue.empty("background", (pieces, 2), torch.int64)
        self.pinned_counts = queue.pinned((blocks,), torch.int32)
        self.pinned_starts = queue.pinned((blocks + 1,), torch.int32)
        self.pinned_relative = queue.pinned((elements,), torch.int16)
        self.pinned_new, self.pinned_distances = queue.pinned((2, elements), element)
        self.pinned_sums = queue.pinned((pieces, 2), torch.int64)


@dataclass(frozen=True)
class Stretch:
    """Blocks ``first`` … ``last`` − 1 of a batch. ``starts``: (last − first + 1,) int64, as in ``Ordered``."""

    batch: PieceBatch
    memory: BatchMemory
    first: int
    last: int
    starts: npt.NDArray[np.int64]

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return, for each piece with elements in the stretch, its number, and the range of these elements."""
        firsts = [piece.first_block for piece in self.batch.pieces] + [self.batch.blocks]
        bounds = self.starts[np.clip(firsts, self.first, self.last) - self.first].tolist()
        return [(number, start, stop) for number, (start, stop) in enumerate(pairwise(bounds)) if start < stop]


class Kernels(Protocol):
    """Loops over elements of a device: the modules ``compare_triton`` and ``compare_torch``."""

    def compare(
        self, batch: PieceBatch, lives: Sequence[torch.Tensor], bases: Sequence[torch.Tensor], memory: BatchMemory,
        found: Found,
    ) -> None:  # fmt: skip
        """Write what differs to ``found``, as long as there is room, and where to ``memory``.

        Args:
            lives, bases: (size,) per piece, as in ``Piece``; both on the device.
        """

    def order(self, stretch: Stretch, found: Found, ordered: Ordered) -> None:
        """Bring the changed elements of some blocks in order, with distances and hashes; see ``Ordered``."""

    def put(self, stretch: Stretch, ordered: Ordered, bits: torch.Tensor) -> None:
        """Write (elements,) ``bits`` to the baselines, on the device, of what ``order`` has brought in order."""

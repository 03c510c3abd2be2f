"""``Changes``: the decoded changes between two versions, which encoders, decoders and receivers exchange.

``apply_distances`` applies changes to bits in place.

All arrays of bits are flat and C-contiguous, and have the unsigned dtype of their element type (DType.uint). The ULP
distance of two patterns is their difference, modulo 2^width, in a monotone order of all patterns (docs/FORMAT.md), so
that +0.0, −0.0 and every NaN stay distinct.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.limits import MAX_OBJECTS_PER_VERSION, split_by_bytes
from vllm_delta_sync.format.table import DTYPES, DType

Bits = npt.NDArray[np.unsignedinteger]
Positions = npt.NDArray[np.int64]

CHUNK_ELEMENTS = 32_768
"""Elements compared at a time: they fit a core's cache, and an index fits 16 bits."""


@cache
def order_masks(dtype: DType) -> tuple[np.uint64, np.uint64]:
    """Return (sign, mask) for the kernels: the sign bit (0 for integer types) and all bits of the width."""
    width = 8 * dtype.itemsize
    return np.uint64(1 << (width - 1) if dtype.is_float else 0), np.uint64((1 << width) - 1)


def apply_distances(dtype: DType, bits: Bits, positions: Positions, distances: Bits) -> None:
    """Move ``bits`` at ``positions`` by ``distances``, in place."""
    from vllm_delta_sync.format import kernels

    kernels.add_distances(bits, positions, distances, *order_masks(dtype), False)


def revert_distances(dtype: DType, bits: Bits, positions: Positions, distances: Bits) -> None:
    """Undo ``apply_distances`` with the same arguments, in place."""
    from vllm_delta_sync.format import kernels

    kernels.add_distances(bits, positions, distances, *order_masks(dtype), True)


Rectangle = tuple[int, int, int, int]
"""(first row, end of rows, first column, end of columns) of a tensor as the matrix that tiles cut (docs/FORMAT.md)."""


class Matrix(NamedTuple):
    """Bits of a tensor as the matrix that tiles cut: element (row, column) is flat[origin + row · stride + column]."""

    flat: Bits
    origin: int
    stride: int


class InPlace(NamedTuple):
    """Bits that are read where they are, of any moment, as any values, while the context that ``reading`` returns is
    entered: one context for all tensors of a lookup, held for milliseconds."""

    matrix: Matrix
    reading: Callable[[], AbstractContextManager[None]]


class BaseTensor:
    """The base bits of one tensor: its bits at the version that a delta applies to.

    Args:
        bits: (numel,) in row-major order of the whole tensor, undefined outside ``rectangles``; or a function that
            returns them, called only if they are needed.
        rectangles: disjoint parts that this process has; None for the whole tensor.
        in_place: the bits inside ``rectangles`` where they are; None if ``bits`` must be read. While they are
            encoded, the matrix holds nothing else, and does not change.
        after: the bits already include the changes that are being encoded; the encoder derives the old ones from them.
    """

    def __init__(
        self,
        bits: Bits | Callable[[], Bits],
        rectangles: tuple[Rectangle, ...] | None = None,
        in_place: InPlace | None = None,
        after: bool = False,
    ) -> None:
        self._bits = bits
        self.rectangles, self.in_place, self.after = rectangles, in_place, after

    @property
    def bits(self) -> Bits:
        if callable(self._bits):
            self._bits = self._bits()
        return self._bits


BaseLookup = Callable[[int], BaseTensor]
"""Tensor id → its bits before the delta. Called once to decode a tensor, twice to encode it; results are not kept."""


@dataclass
class Sparse:
    """Changed elements of some tensors of one dtype, concatenated in ascending order of tensor id.

    Attributes:
        dtype: safetensors name.
        ids: (k,) uint32 positions in the tensor table, strictly ascending.
        counts: (k,) int64 changed elements per tensor, each at least 1.
        positions: (n,) int64 flat indices in the full tensor, strictly ascending per tensor.
        data: (n,) unsigned of the dtype's width: ULP distances new − old if ``relative``, else new bits.
        relative: how to read ``data``.
    """

    dtype: str
    ids: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.int64]
    positions: Positions
    data: Bits
    relative: bool

    @classmethod
    def empty(cls, element: DType, relative: bool) -> "Sparse":
        """Return a group without tensors."""
        none = np.empty(0, np.int64)
        return cls(element.name, np.empty(0, np.uint32), none, none, np.empty(0, element.uint), relative)

    @property
    def element(self) -> DType:
        return DTYPES[self.dtype]

    def tensors(self) -> Iterator[tuple[int, Positions, Bits]]:
        """Yield (tensor id, positions, data) for each tensor, as views."""
        ends = np.cumsum(self.counts)
        for tensor, end, count in zip(self.ids.tolist(), ends.tolist(), self.counts.tolist(), strict=True):
            yield tensor, self.positions[end - count : end], self.data[end - count : end]

    def rows(self, first: int, last: int) -> "Sparse":
        """Return tensors ``first`` to ``last`` − 1 of the group, as views."""
        ids, counts, start = self.ids[first:last], self.counts[first:last], int(self.counts[:first].sum())
        elements = slice(start, start + int(counts.sum()))
        return replace(self, ids=ids, counts=counts, positions=self.positions[elements], data=self.data[elements])


@dataclass
class Full:
    """One tensor sent in full: its id and flat (numel,) bits."""

    id: int
    bits: Bits


@dataclass
class Changes:
    """Changes of some tensors, such as one delta object carries.

    Attributes:
        fingerprints: per tensor id, fingerprint after minus before, over the elements carried here.
    """

    sparse: list[Sparse] = field(default_factory=list)
    full: list[Full] = field(default_factory=list)
    fingerprints: dict[int, Fingerprint] = field(default_factory=dict)

    @property
    def changed(self) -> int:
        """Elements carried; tensors in full count with all elements."""
        return sum(group.positions.size for group in self.sparse) + sum(tensor.bits.size for tensor in self.full)

    @property
    def fingerprint(self) -> Fingerprint:
        """Sum of ``fingerprints``: change of the model's fingerprint."""
        return sum(self.fingerprints.values(), Fingerprint())

    @property
    def reversible(self) -> bool:
        """Whether all elements are distances, which can be reverted."""
        return not self.full and all(group.relative for group in self.sparse)

    def parts(self, most_bytes: int, most_parts: int = MAX_OBJECTS_PER_VERSION) -> list["Changes"]:
        """Split the changes between tensors into parts of at most ``most_bytes`` decoded bytes; arrays are views.

        A larger tensor gets its own part. Tensor ids ascend within and across parts.

        Raises:
            LimitError: there are more than ``most_parts``.
        """
        sizes: Counter[int] = Counter({full.id: full.bits.nbytes for full in self.full})
        for group in self.sparse:
            width = group.positions.itemsize + group.data.itemsize
            sizes.update(dict(zip(group.ids.tolist(), (group.counts * width).tolist(), strict=True)))
        found = split_by_bytes(sizes, most_bytes, most_parts)
        return [self._only(tensors) for tensors in found] if len(found) > 1 else [self]

    def _only(self, tensors: set[int]) -> "Changes":
        """Return the changes of some tensors, whose rows are adjacent in every group."""
        sparse = []
        for group in self.sparse:
            chosen = [row for row, tensor in enumerate(group.ids.tolist()) if tensor in tensors]
            if chosen:
                sparse.append(group.rows(chosen[0], chosen[-1] + 1))
        full = [full for full in self.full if full.id in tensors]
        return Changes(sparse, full, {id: change for id, change in self.fingerprints.items() if id in tensors})

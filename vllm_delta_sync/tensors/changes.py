"""``Changes``: the decoded changes between two versions, which encoders, decoders and receivers exchange.

``apply_distances`` applies changes to bits in place. ``diff`` finds them; a ``Segment`` holds what it finds: per
element, its index within a chunk and ULP distance.

All arrays of bits are flat and C-contiguous, and have the unsigned dtype of their element type (DType.uint). The ULP
distance of two patterns is their difference, modulo 2^width, in a monotone order of all patterns (docs/FORMAT.md), so
that +0.0, −0.0 and every NaN stay distinct.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import ChainError, TensorMismatchError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.fingerprint import Fingerprint, tensor_seed
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

    def parts(self, most_bytes: int, most_parts: int = limits.MAX_OBJECTS_PER_VERSION) -> list["Changes"]:
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

    def reversed(self) -> "Changes":
        """Return the changes that revert these; raises ChainError unless they are ``reversible``."""
        if not self.reversible:
            raise ChainError("changes that replace bits cannot be reverted: they do not contain the old bits")
        sparse = [replace(group, data=group.data.dtype.type(0) - group.data) for group in self.sparse]
        none = Fingerprint()
        return Changes(sparse, [], {tensor: none - change for tensor, change in self.fingerprints.items()})


def split_by_bytes(sizes: Mapping[int, int], most_bytes: int, most_parts: int) -> list[set[int]]:
    """Split tensor ids, ascending, into parts of at most ``most_bytes``; a larger tensor gets its own part.

    Args:
        sizes: tensor id → bytes.

    Raises:
        LimitError: there are more than ``most_parts``.
    """
    found: list[set[int]] = [set()]
    room = most_bytes
    for tensor in sorted(sizes):
        if found[-1] and sizes[tensor] > room:
            found.append(set())
            room = most_bytes
        found[-1].add(tensor)
        room -= sizes[tensor]
    limits.check_object_count(len(found), most_bytes, sum(sizes.values()), most_parts)
    return found


Counts = Sequence[int] | npt.NDArray[np.int64]

ROOM = 4 * CHUNK_ELEMENTS
CHUNKS = 1024


class StoredEntries(Protocol):
    """The entries of arrays, kept elsewhere. Both methods return ``size`` of them from entry ``first`` on."""

    def distances(self, first: int, size: int) -> Bits: ...

    def relative(self, first: int, size: int) -> npt.NDArray[np.uint16]: ...


@dataclass
class SegmentArrays:
    """Room for the segments of tensors of one element width, one after another. The rest takes no memory until used.

    Attributes:
        relative: (ROOM,) uint16 index in its chunk. distances: (ROOM,) ULP distances new − old.
        starts: (CHUNKS,) int64 flat index of the first element of each chunk with changes. ends: (CHUNKS,) int64 end
            of its entries.
        state: (3,) int64 counters of the loops in diff_kernels.py: used entries, used chunks, compared elements.
        stored: instead of ``relative`` and ``distances``, once they have moved.
    """

    relative: npt.NDArray[np.uint16]
    distances: Bits
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    state: npt.NDArray[np.int64]
    stored: StoredEntries | None = None

    @classmethod
    def empty(cls, element: DType) -> Self:
        starts, ends = np.empty((2, CHUNKS), np.int64)
        state = np.zeros(3, np.int64)
        return cls(np.empty(ROOM, np.uint16), np.empty(ROOM, element.uint), starts, ends, state)

    def as_arguments(
        self,
    ) -> tuple[npt.NDArray[np.uint16], Bits, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the arrays in the order in which the loops in diff_kernels.py take them."""
        return self.relative, self.distances, self.starts, self.ends, self.state

    def move(self, stored: StoredEntries) -> None:
        """Release the entries, which are also stored elsewhere; nothing may be added any more."""
        # Set before anything is released, so that an interrupt in between loses nothing.
        self.stored = stored
        used = int(self.state[1])
        self.starts, self.ends = self.starts[:used].copy(), self.ends[:used].copy()
        self.relative, self.distances = self.relative[:0].copy(), self.distances[:0].copy()

    def distances_from(self, first: int, size: int) -> Bits:
        """(size,) ULP distances from entry ``first`` on."""
        if self.stored is not None:
            return self.stored.distances(first, size)
        return self.distances[first : first + size]

    def relative_from(self, first: int, size: int) -> npt.NDArray[np.uint16]:
        """(size,) indices in their chunks, from entry ``first`` on."""
        if self.stored is None:
            return self.relative[first : first + size]
        return self.stored.relative(first, size)


class Segment:
    """Changed elements of some chunks of one tensor, ascending: a range of the arrays.

    Args:
        start, stop: (entries, chunks) used before it and with it. They may be views that the loops write: the segment
            then counts the elements that the loops have written so far, even if they were interrupted.
    """

    def __init__(self, arrays: SegmentArrays, start: Counts, stop: Counts) -> None:
        self._arrays, self._start, self._stop = arrays, start, stop

    @classmethod
    def open(cls, arrays: SegmentArrays) -> Self:
        """Return one that gets all that is added to the arrays until it is closed."""
        return cls(arrays, arrays.state.tolist(), arrays.state)

    def close(self) -> None:
        """End it, so that the arrays can take another one."""
        self._stop = self._arrays.state.tolist()

    @property
    def size(self) -> int:
        """Number of changed elements."""
        return int(self._stop[0]) - int(self._start[0])

    @property
    def distances(self) -> Bits:
        """(size,) ULP distances new − old."""
        return self._arrays.distances_from(int(self._start[0]), self.size)

    def expand(self, positions: Positions) -> None:
        """Write the flat positions to (size,) int64."""
        from vllm_delta_sync.tensors import diff_kernels

        arrays, (first, first_chunk) = self._arrays, self._start[:2]
        chunks = slice(first_chunk, self._stop[1])
        ends = arrays.ends[chunks] - first
        diff_kernels.expand(arrays.relative_from(int(first), self.size), arrays.starts[chunks], ends, positions)


def joined(segments: list[Segment], element: DType) -> tuple[Positions, Bits]:
    """Return the positions (n,) and distances (n,) of consecutive segments."""
    size = sum(segment.size for segment in segments)
    positions, distances = np.empty(size, np.int64), np.empty(size, element.uint)
    cursor = 0
    for segment in segments:
        end = cursor + segment.size
        segment.expand(positions[cursor:end])
        distances[cursor:end] = segment.distances
        cursor = end
    return positions, distances


def diff(name: str, dtype: DType, old: Bits, new: Bits) -> tuple[Positions, Bits, Fingerprint]:
    """Find the changed elements and update ``old`` to ``new``.

    Args:
        name: tensor name, for the fingerprint.
        old: (numel,) baseline, updated in place.
        new: (numel,) current bits.

    Returns:
        positions (n,) int64 ascending, ULP distances (n,), fingerprint change.

    Raises:
        TensorMismatchError: the arrays differ in size, or do not have the dtype's width.
    """
    if old.shape != new.shape or old.dtype != dtype.uint or new.dtype != dtype.uint:
        raise TensorMismatchError(
            f"tensor {name!r}: {new.size} elements of {new.dtype} against {old.size} of {old.dtype}; "
            f"{dtype.uint} expected"
        )
    from vllm_delta_sync.tensors import diff_kernels

    masks, seed = order_masks(dtype), np.uint64(tensor_seed(name))
    segments, change, done = [], Fingerprint(), 0
    while done < old.size:
        arrays = SegmentArrays.empty(dtype)
        arrays.state[2] = done
        segments.append(Segment.open(arrays))
        low, high = diff_kernels.collect(old, new, 0, *masks, seed, *arrays.as_arguments())
        change += Fingerprint(int(low), int(high))
        done = int(arrays.state[2])
    return *joined(segments, dtype), change

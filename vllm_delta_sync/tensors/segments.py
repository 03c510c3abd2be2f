"""``Segment`` holds the changes of a tensor: per element, its index within a chunk and ULP distance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.format.table import DType
from vllm_delta_sync.tensors.changes import CHUNK_ELEMENTS, Bits, Positions

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
        arrays, first = self._arrays, int(self._start[0])
        if arrays.stored is not None:
            return arrays.stored.distances(first, self.size)
        return arrays.distances[first : first + self.size]

    def expand(self, positions: Positions) -> None:
        """Write the flat positions to (size,) int64."""
        from vllm_delta_sync.tensors import diff_kernels

        arrays, first, size = self._arrays, int(self._start[0]), self.size
        stored = arrays.stored
        relative = arrays.relative[first : first + size] if stored is None else stored.relative(first, size)
        chunks = slice(self._start[1], self._stop[1])
        diff_kernels.expand(relative, arrays.starts[chunks], arrays.ends[chunks] - first, positions)

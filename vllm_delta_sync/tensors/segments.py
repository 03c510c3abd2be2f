"""``Segment``: changes as the detector collects them: per element, its index within a chunk and ULP distance."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.format.dtypes import DType
from vllm_delta_sync.tensors.bits import CHUNK_ELEMENTS, Bits, Positions

ROOM = 4 * CHUNK_ELEMENTS
CHUNKS = 1024
_WIDEST = 8


@dataclass
class Segment:
    """Changed elements of some chunks of one tensor, ascending.

    Attributes:
        relative: (m,) uint16 index in its chunk. distances: (m,) ULP distances new − old.
        starts: (k,) int64 flat index of the first element of each chunk with changes. ends: (k,) int64 end of its
            entries.
        state: (3,) int64 counters of the loops in diff_kernels.py: used entries, used chunks, compared elements. The
            rest of the arrays is unused room.
    """

    relative: npt.NDArray[np.uint16]
    distances: Bits
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    state: npt.NDArray[np.int64]

    @property
    def size(self) -> int:
        """Number of changed elements."""
        return int(self.state[0])

    def closed(self) -> "Segment":
        """Return a copy without unused room."""
        entries, chunks, _ = self.state.tolist()
        return Segment(
            self.relative[:entries].copy(), self.distances[:entries].copy(), self.starts[:chunks].copy(),
            self.ends[:chunks].copy(), self.state.copy(),
        )  # fmt: skip

    def expand(self, positions: Positions) -> None:
        """Write the flat positions to (size,) int64."""
        from vllm_delta_sync.tensors import diff_kernels

        entries, chunks, _ = self.state.tolist()
        diff_kernels.expand(self.relative[:entries], self.starts[:chunks], self.ends[:chunks], positions)


class Scratch:
    """Reusable arrays for one segment at a time, in one thread."""

    def __init__(self) -> None:
        self._relative = np.empty(ROOM, np.uint16)
        self._distances = np.empty(ROOM * _WIDEST, np.uint8)
        self._chunks = np.empty((2, CHUNKS), np.int64)

    def segment(self, element: DType, compared: int = 0) -> Segment:
        """Return an empty segment in these arrays; copy the previous one first (``closed``)."""
        distances = self._distances[: ROOM * element.itemsize].view(element.uint)
        starts, ends = self._chunks
        return Segment(self._relative, distances, starts, ends, np.array([0, 0, compared], np.int64))


def joined(segments: list[Segment], element: DType) -> tuple[Positions, Bits]:
    """Return the positions (n,) and distances (n,) of consecutive segments."""
    size = sum(segment.size for segment in segments)
    positions, distances = np.empty(size, np.int64), np.empty(size, element.uint)
    cursor = 0
    for segment in segments:
        end = cursor + segment.size
        segment.expand(positions[cursor:end])
        distances[cursor:end] = segment.distances[: segment.size]
        cursor = end
    return positions, distances

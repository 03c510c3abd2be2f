"""``ChangeLog``: the changes of one tensor, from which the baseline can be restored at any moment."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer_side.diff.buffers import BaselineBuffer
from trainer_side.diff.change_spool import ChangeSpool
from vllm_delta_sync.format.dtypes import DType
from vllm_delta_sync.tensors.bits import Bits, Positions
from vllm_delta_sync.tensors.segments import Segment

SAMPLE_ELEMENTS = 131_072


@dataclass
class ExpandedChanges:
    """Changed elements with flat positions (n,) int64 ascending, and ULP distances new − old (n,)."""

    positions: Positions
    distances: Bits

    @property
    def size(self) -> int:
        return self.positions.size

    def expand(self, positions: Positions) -> None:
        """Write the positions into (n,) int64."""
        positions[:] = self.positions


@dataclass
class PendingWrite:
    """Bits that are being overwritten; ``undo`` writes them again, which is harmless if they were not overwritten."""

    undo: Callable[[], None]
    size: int = 0


LogEntry = Segment | ExpandedChanges | PendingWrite


class ChangeLog:
    """Changed elements of one tensor, in ascending order.

    An entry is logged before its change is made to the baseline, and undoes nothing if the change was not made: a
    Segment counts the elements written so far; a PendingWrite holds the old bits, and ExpandedChanges replace it in one
    step.

    Attributes:
        spool: what bounds the memory of the entries; None if they all stay in memory.
        parts: entries of consecutive ranges of the tensor; one thread fills each part.
    """

    def __init__(self, element: DType, spool: ChangeSpool | None = None) -> None:
        self.element, self.spool = element, spool
        self.parts: list[list[LogEntry]] = [[]]

    @property
    def size(self) -> int:
        """Number of changed elements, once all are found."""
        return sum(entry.size for part in self.parts for entry in part)

    def revert(self, buffer: BaselineBuffer) -> None:
        """Restore the baseline of the tensor."""
        for entry in [entry for part in self.parts for entry in part][::-1]:
            if isinstance(entry, PendingWrite):
                entry.undo()
            elif entry.size:
                buffer.revert(self.element, *_expanded(entry))

    def pieces(self) -> Iterator[tuple[Positions, Bits]]:
        """Yield (positions, distances) in consecutive pieces: of bounded size, unless part was held back."""
        yield from map(_expanded, self._entries())

    def samples(self, most: int) -> Iterator[tuple[Positions, Bits]]:
        """Yield (positions, distances) of up to ``most`` pieces of SAMPLE_ELEMENTS or fewer, spread evenly."""
        entries = list(self._entries())
        for number in np.unique(np.linspace(0, len(entries) - 1, most).astype(int)).tolist():
            positions, distances = _expanded(entries[number])
            yield positions[:SAMPLE_ELEMENTS], distances[:SAMPLE_ELEMENTS]
            del positions, distances

    def join_into(self, positions: Positions, distances: Bits) -> None:
        """Write all elements into arrays of that size, and keep views of these instead of the entries."""
        cursor = 0
        for entry in self._entries():
            end = cursor + entry.size
            entry.expand(positions[cursor:end])
            distances[cursor:end] = entry.distances
            cursor = end
        self.parts = [[ExpandedChanges(positions, distances)]]

    def hold_back(self, buffer: BaselineBuffer, keep: npt.NDArray[np.bool_]) -> tuple[Positions, Bits, Bits]:
        """Restore the baseline where (n,) ``keep`` is False, and forget these elements.

        Returns:
            Their positions (m,), and their bits before and after the change.
        """
        positions, distances = np.empty(self.size, np.int64), np.empty(self.size, self.element.uint)
        self.join_into(positions, distances)
        kept = ExpandedChanges(positions[keep], distances[keep])
        held = positions[~keep]
        after = buffer.get(held)
        buffer.revert(self.element, held, distances[~keep])
        self.parts = [[kept]]
        return held, buffer.get(held), after

    def _entries(self) -> Iterator[Segment | ExpandedChanges]:
        """Yield the entries that hold changes."""
        for part in self.parts:
            for entry in part:
                if entry.size and not isinstance(entry, PendingWrite):
                    yield entry


def _expanded(entry: Segment | ExpandedChanges) -> tuple[Positions, Bits]:
    if isinstance(entry, ExpandedChanges):
        return entry.positions, entry.distances
    positions = np.empty(entry.size, np.int64)
    entry.expand(positions)
    return positions, entry.distances

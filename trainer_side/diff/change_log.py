"""``ChangeLog``: the changes of one tensor, from which the baseline can be restored at any moment.

``ChangeSpool`` keeps the logs of a version in memory up to a limit, and the rest in a temporary file."""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np
import numpy.typing as npt

from trainer_side.diff.buffers import BaselineBuffer
from vllm_delta_sync.format.table import DType
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.tensors.changes import Bits, Positions
from vllm_delta_sync.tensors.segments import Segment, SegmentArrays

logger = guarded_logger(__name__)


class ChangeSpool:
    """The arrays of one version's changes. Several threads may call ``keep``; no lock, which an interrupt could leave
    held.

    Args:
        limit: bytes that stay in memory. Threads that count at the same moment may keep an array more each.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._failed = False
        self._files: dict[int, _File] = {}

    def keep(self, arrays: SegmentArrays) -> None:
        """Move arrays that nothing is added to any more to a file, if those before have reached the limit.

        Interrupted at any moment, the arrays have their values. If the file cannot be written, they stay in memory.
        """
        used = int(arrays.state[0])
        size = used * (2 + arrays.distances.itemsize)
        if self._failed or self._held + size <= self._limit:
            self._held += size
            return
        try:
            # One for each thread, so that none has to know where another one writes.
            thread = threading.get_ident()
            file = self._files.get(thread) or self._files.setdefault(thread, _File())
            offset = file.end
            file.append(arrays.distances[:used])
            file.append(arrays.relative[:used])
        except OSError as error:
            if not self._failed:
                logger.warning(
                    "the changes of a version stay in memory, more than %s bytes: %s cannot be written (%s); free "
                    "space there, or set TMPDIR to a folder on a disk",
                    f"{self._limit:,}", tempfile.tempdir or "the temporary directory", error.strerror,
                )  # fmt: skip
            self._failed = True
            return
        arrays.move(_Spilled(file.file, offset, used, arrays.distances.dtype))

    def close(self) -> None:
        """Remove the files; arrays in them can no longer be read."""
        for file in self._files.values():
            file.file.close()


class _File:
    """An unnamed temporary file that one thread appends to; the system removes it even if the process is killed."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(prefix="delta-sync-", buffering=0)  # noqa: SIM115
        self.end = 0

    def append(self, array: np.ndarray) -> None:
        view, start = array.data.cast("B"), self.end
        # Before anything refers to these bytes: what is appended next must not overwrite them.
        self.end = start + len(view)
        done = 0
        while done < len(view):
            done += os.pwrite(self.file.fileno(), view[done:], start + done)


@dataclass(frozen=True)
class _Spilled:
    """Entries in the file: first all distances, then the indices in their chunks."""

    file: IO[bytes]
    offset: int
    used: int
    dtype: np.dtype[np.unsignedinteger]

    def distances(self, first: int, size: int) -> Bits:
        return _read(self.file.fileno(), self.dtype, size, self.offset + first * self.dtype.itemsize)

    def relative(self, first: int, size: int) -> npt.NDArray[np.uint16]:
        start = self.offset + self.used * self.dtype.itemsize
        return _read(self.file.fileno(), np.dtype(np.uint16), size, start + first * 2)


def _read(file: int, dtype: np.dtype, size: int, offset: int) -> np.ndarray:
    array = np.empty(size, dtype)
    view, done = array.data.cast("B"), 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], offset + done)
        if not got:
            raise OSError("the temporary file of a version's changes was truncated")
        done += got
    return array


SAMPLE_ELEMENTS = 131_072


@dataclass
class ExpandedChanges:
    """Changed elements with flat positions (n,) int64 ascending, and ULP distances new − old (n,)."""

    positions: Positions
    distances: Bits

    @property
    def size(self) -> int:
        return self.positions.size


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
        counted: the number of changed elements, while they are known on a device only; ``parts`` may have a part of
            them.
    """

    def __init__(self, element: DType, spool: ChangeSpool | None = None) -> None:
        self.element, self.spool = element, spool
        self.parts: list[list[LogEntry]] = [[]]
        self.counted: int | None = None

    @property
    def size(self) -> int:
        """Number of changed elements, once all are found."""
        if self.counted is not None:
            return self.counted
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

    def hold_back(self, buffer: BaselineBuffer, keep: npt.NDArray[np.bool_]) -> tuple[Positions, Bits, Bits]:
        """Restore the baseline where (n,) ``keep`` is False, and forget these elements.

        Returns:
            Their positions (m,), and their bits before and after the change.
        """
        positions, distances = np.empty(self.size, np.int64), np.empty(self.size, self.element.uint)
        cursor = 0
        for where, moved in self.pieces():
            end = cursor + where.size
            positions[cursor:end], distances[cursor:end] = where, moved
            cursor = end
        self.parts = [[ExpandedChanges(positions, distances)]]
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

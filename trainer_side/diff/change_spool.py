"""``ChangeSpool``: keeps the log of a version in memory up to a limit, and the rest in a temporary file."""

import os
import tempfile
import threading
from dataclasses import dataclass
from typing import IO

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.tensors.bits import Bits
from vllm_delta_sync.tensors.segments import SegmentArrays

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

    @property
    def spilled(self) -> int:
        """Bytes in temporary files, which the system removes even if the process is killed."""
        return sum(file.end for file in self._files.values())

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
            offset, runs = file.end, _are_runs(arrays)
            file.append(arrays.distances[:used])
            if not runs:
                file.append(arrays.relative[:used])
        except OSError as error:
            self._fail(error)
            return
        arrays.move(_Spilled(file.file, offset, used, arrays.distances.dtype, runs))

    def close(self) -> None:
        """Remove the files; arrays in them can no longer be read."""
        for file in self._files.values():
            file.file.close()

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            logger.warning(
                "the changes of a version stay in memory, more than %s bytes: %s cannot be written (%s); free space "
                "there, or set TMPDIR to a folder on a disk", f"{self._limit:,}", tempfile.gettempdir(), error.strerror,
            )  # fmt: skip


class _File:
    """An unnamed temporary file that one thread appends to."""

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
    """Entries in the file: first all distances, then, unless each chunk is one run, the indices in their chunks."""

    file: IO[bytes]
    offset: int
    used: int
    dtype: np.dtype[np.unsignedinteger]
    runs: bool

    def distances(self, first: int, size: int) -> Bits:
        return _read(self.file.fileno(), self.dtype, size, self.offset + first * self.dtype.itemsize)

    def relative(self, first: int, size: int) -> npt.NDArray[np.uint16] | None:
        if self.runs:
            return None
        start = self.offset + self.used * self.dtype.itemsize
        return _read(self.file.fileno(), np.dtype(np.uint16), size, start + first * 2)


def _are_runs(arrays: SegmentArrays) -> bool:
    """Return whether the entries of each chunk are the first elements of the chunk, all of them."""
    ends = arrays.ends[: int(arrays.state[1])]
    counts = np.diff(ends, prepend=0)
    # They ascend, so the last one is at least as large as the count says.
    return bool(np.all(arrays.relative[ends - 1] == counts - 1))


def _read(file: int, dtype: np.dtype, size: int, offset: int) -> np.ndarray:
    array = np.empty(size, dtype)
    view, done = array.data.cast("B"), 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], offset + done)
        if not got:
            raise OSError("the temporary file of a version's changes was truncated")
        done += got
    return array

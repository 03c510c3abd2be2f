"""``download``: fetches a large object into a file in parallel ranges, and resumes an unfinished download."""

import os
import stat
import threading
from contextlib import ExitStack
from pathlib import Path

from vllm_delta_sync.bucket.base import Bucket
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.errors import DigestError

PIECE_BYTES = 8 * 1024 * 1024
LONG_PIECE_BYTES = 4 * PIECE_BYTES
LONG_BYTES = 512 * 1024 * 1024
"""Objects of at least this size use long pieces, because stores limit the request rate."""
BUFFER_BYTES = 8 * LONG_PIECE_BYTES
"""Maximum memory of one download, for any number of connections."""
CONNECTIONS = 8
"""Parallel ranges, for a bucket without ``options``."""

# Without O_NONBLOCK, opening a named pipe would block forever.
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def piece_bytes(size: int) -> int:
    """Return the size of an object's pieces, except the last."""
    return PIECE_BYTES if size < LONG_BYTES else LONG_PIECE_BYTES


def download(
    bucket: Bucket, key: str, size: int, path: Path, *, connections: int = CONNECTIONS, journal: Path | None = None
) -> bool:
    """Fetch an object of ``size`` bytes into ``path``.

    Needs memory for ``connections`` pieces, at most ``BUFFER_BYTES``. Only the number of bytes is checked: the caller
    must verify them, and call again without the journal if pieces of an earlier call were wrong. Use it only for
    objects that never change.

    Args:
        path: written in place; one call at a time.
        journal: file that records the pieces fetched so far. A later call with the same two paths, in any process,
            fetches the missing ones. The caller removes the file.

    Returns:
        whether pieces of an earlier call were reused.

    Raises:
        DigestError: the object has fewer bytes. OSError: ``path`` or ``journal`` cannot be written.
        DeltaSyncError: as ``Bucket.get_range``.
            After an error nothing more is written, and both files remain.
    """
    with ExitStack() as stack:
        file = _open_regular(path, stack)
        # The journal is not about a file of another size.
        whole = os.fstat(file).st_size == size
        record = None if journal is None else Journal(_open_regular(journal, stack), key, size, whole)
        os.ftruncate(file, size)
        piece = piece_bytes(size)
        done: set[int] = set() if record is None else record.done
        missing = [number for number in range(-(-size // piece)) if number not in done]
        # Held while a piece is written, so that nothing is written after the download has stopped. This costs no time,
        # because the kernel serializes writes to one file.
        lock = threading.Lock()
        stopped = False

        def stop() -> None:
            nonlocal stopped
            with lock:
                stopped = True

        def fetch(number: int) -> None:
            start = number * piece
            length = min(piece, size - start)
            try:
                data = bucket.get_range(key, start, length)
                if len(data) != length:
                    raise DigestError(
                        f"object {key} of {bucket.url} returned {len(data)} bytes at {start} instead of {length} "
                        f"(of {size} in all): truncated or replaced"
                    )
                with lock:
                    if not stopped:
                        _write(file, data, start)
                        if record is not None:
                            record.mark_done(number)
            except BaseException:  # whatever it is, the other ranges under way write nothing more
                stop()
                raise

        try:
            for _ in in_parallel(fetch, missing, workers=min(connections, BUFFER_BYTES // piece)):
                pass
        finally:
            stop()
        return record is not None and record.resumed


class Journal:
    """Records which pieces of a file are complete: a header line that names the object, then one line per piece.

    Attributes:
        done: numbers of the complete pieces. resumed: whether there were any.
    """

    def __init__(self, file: int, key: str, size: int, usable: bool) -> None:
        self._file = file
        head, count = _journal_head(key, size), -(-size // piece_bytes(size))
        text = os.pread(file, len(head) + count * (len(str(count)) + 1), 0) if usable else b""
        found = _numbers(text[len(head) :], count) if text.startswith(head) else None
        self.done = found or set()
        self.resumed = bool(found)
        if found is None:
            os.ftruncate(file, 0)
            _write(file, head, 0)
            self._end = len(head)
        else:
            # Overwrite an incomplete last line of a killed process.
            self._end = text.rindex(b"\n") + 1
            os.ftruncate(file, self._end)

    def mark_done(self, number: int) -> None:
        """Record that a piece is in the file."""
        line = b"%d\n" % number
        _write(self._file, line, self._end)
        self._end += len(line)


def has_range(journal: bytes, key: str, size: int, start: int, length: int) -> bool:
    """Return whether the pieces that the content of a journal records as complete cover a range of the object."""
    head, piece = _journal_head(key, size), piece_bytes(size)
    done = _numbers(journal[len(head) :], -(-size // piece)) if journal.startswith(head) else None
    return done is not None and set(range(start // piece, -(-(start + length) // piece))) <= done


def _journal_head(key: str, size: int) -> bytes:
    return f"pieces of {piece_bytes(size)} of {size} {key}\n".encode()


def _numbers(text: bytes, count: int) -> set[int] | None:
    """Parse the complete lines; None if one is not the number of a piece."""
    lines = text.split(b"\n")[:-1]
    if not all(line.isdigit() and int(line) < count for line in lines):
        return None
    return {int(line) for line in lines}


def _open_regular(path: Path, stack: ExitStack) -> int:
    file = os.open(path, _OPEN, 0o666)
    stack.callback(os.close, file)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise FileExistsError(f"{path} is not a regular file")
    return file


def _write(file: int, data: bytes, start: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, start)
        rest, start = rest[written:], start + written

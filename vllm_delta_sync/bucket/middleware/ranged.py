"""A large object by many ranges at once, into a file; what an earlier process has fetched of it stays fetched."""

import os
import re
import secrets
import stat
import threading
from collections import deque
from contextlib import ExitStack
from pathlib import Path

from vllm_delta_sync.bucket import transfer_observers
from vllm_delta_sync.bucket.base import Bucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.errors import DigestError, StoreError
from vllm_delta_sync.format.manifest import OBJECTS_PREFIX
from vllm_delta_sync.settings import StoreOptions

PIECE_BYTES = 8 * 1024 * 1024
LONG_PIECE_BYTES = 4 * PIECE_BYTES
LONG_BYTES = 512 * 1024 * 1024
"""From here on pieces are long: stores count requests, and a checkpoint has many such objects."""
BUFFER_BYTES = 8 * LONG_PIECE_BYTES
"""Memory of one download, however many connections there may be."""
LARGE_BYTES = 32 * 1024 * 1024
"""What is smaller comes as fast in one piece."""
CONNECTIONS = 8
"""Ranges asked for at once, of a bucket that does not say how many it wants."""

# Without O_NONBLOCK somebody's named pipe would hold a reader for ever.
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_OBJECT = re.compile(re.escape(OBJECTS_PREFIX) + r"([0-9a-f]{64})\.safetensors")


def piece_bytes(size: int) -> int:
    """Bytes of each piece but the last of an object."""
    return PIECE_BYTES if size < LONG_BYTES else LONG_PIECE_BYTES


def digest_of(key: str) -> str | None:
    """The SHA-256 that the key of an immutable object holds; None for all other keys."""
    match = _OBJECT.fullmatch(key)
    return None if match is None else match[1]


def download(
    bucket: Bucket, key: str, size: int, path: Path, *, connections: int = CONNECTIONS, journal: Path | None = None
) -> bool:
    """Fetch an object of ``size`` bytes into ``path``, in memory of ``connections`` pieces and ``BUFFER_BYTES``.

    Nothing is known of the bytes afterwards but their number: whoever calls verifies them, and starts once more without
    the journal if pieces of an earlier call were wrong. Only an object that never changes comes out whole.

    Args:
        path: written in place; one call at a time.
        journal: file in which the pieces that are there are noted. A later call with the same two paths, in whichever
            process, fetches what is missing. It is left for the caller to remove.

    Returns:
        whether pieces of an earlier call were taken over.

    Raises:
        DigestError: the object has fewer bytes. OSError: ``path`` or ``journal`` cannot be written. Else as
            ``Bucket.get_range``. After any of them nothing is written any more, and what is there stays.
    """
    with ExitStack() as stack:
        file = _opened(path, stack)
        # A file of another size is none that the journal tells of.
        whole = os.fstat(file).st_size == size
        noted = None if journal is None else Journal(_opened(journal, stack), key, size, whole)
        os.ftruncate(file, size)
        work = _Download(bucket, key, size, file, noted)
        work.run(connections)
        return noted is not None and noted.resumed


class Journal:
    """Which pieces of a file are there: a line for each, after one that says what they are pieces of.

    Attributes:
        done: numbers of the pieces. resumed: whether there were any.
    """

    def __init__(self, file: int, key: str, size: int, usable: bool) -> None:
        self._file = file
        piece = piece_bytes(size)
        head = f"pieces of {piece} of {size} {key}\n".encode()
        count = -(-size // piece)
        text = os.pread(file, len(head) + count * (len(str(count)) + 1), 0) if usable else b""
        found = _numbers(text[len(head) :], count) if text.startswith(head) else None
        self.done = found or set()
        self.resumed = bool(found)
        if found is None:
            os.ftruncate(file, 0)
            _write(file, head, 0)
            self._end = len(head)
        else:
            # What a process that was killed wrote of its last line is written over.
            self._end = text.rindex(b"\n") + 1
            os.ftruncate(file, self._end)

    def note(self, number: int) -> None:
        """A piece is in the file."""
        line = b"%d\n" % number
        _write(self._file, line, self._end)
        self._end += len(line)


def _numbers(text: bytes, count: int) -> set[int] | None:
    """Of all lines that were ended; None if one is no piece's number."""
    lines = text.split(b"\n")[:-1]
    if not all(line.isdigit() and int(line) < count for line in lines):
        return None
    return {int(line) for line in lines}


class _Download:
    def __init__(self, bucket: Bucket, key: str, size: int, file: int, journal: Journal | None) -> None:
        self._bucket, self._key, self._size = bucket, key, size
        self._file, self._journal = file, journal
        done: set[int] = set() if journal is None else journal.done
        self._piece = piece_bytes(size)
        self._missing = deque(number for number in range(-(-size // self._piece)) if number not in done)
        # Held while a piece is written, so that nothing is once the download has stopped. Writes to one file take
        # turns in the system anyway.
        self._lock = threading.Lock()
        self._stopped = False
        self._error: BaseException | None = None

    def run(self, connections: int) -> None:
        threads: list[threading.Thread] = []
        try:
            for _ in range(min(connections, len(self._missing), BUFFER_BYTES // self._piece)):
                # Daemons, or an interrupted process would not end before the last range has come.
                thread = threading.Thread(
                    target=transfer_observers.with_observers(self._work), name="delta-sync-download", daemon=True
                )
                thread.start()
                threads.append(thread)
            for thread in threads:
                thread.join()
        finally:
            with self._lock:
                self._stopped = True
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        try:
            while (number := self._next()) is not None:
                start = number * self._piece
                length = min(self._piece, self._size - start)
                self._keep(number, start, length, self._bucket.get_range(self._key, start, length))
        except BaseException as error:  # noqa: BLE001  whatever it is, the thread that waits raises it
            with self._lock:
                self._stopped = True
                self._error = self._error or error

    def _next(self) -> int | None:
        with self._lock:
            return None if self._stopped or not self._missing else self._missing.popleft()

    def _keep(self, number: int, start: int, length: int, data: bytes) -> None:
        if len(data) != length:
            raise DigestError(
                f"object {self._key} of {self._bucket.url} gave {len(data)} bytes at {start}, {length} of its "
                f"{self._size} should be there: truncated or replaced"
            )
        with self._lock:
            if not self._stopped:
                _write(self._file, data, start)
                if self._journal is not None:
                    self._journal.note(number)


class RangedBucket(BucketMiddleware):
    """Copies large objects to files by several ranges at once.

    Only those that never change: two ranges of what was replaced in between do not fit together.
    """

    def __init__(self, inner: Bucket, options: StoreOptions) -> None:
        super().__init__(inner)
        self._connections = options.store_connections

    def get_file(self, key: str, path: Path) -> None:
        size = 0 if digest_of(key) is None else self._inner.stat(key).bytes
        if size < LARGE_BYTES:
            self._inner.get_file(key, path)
            return
        part = path.with_name(f".{secrets.token_hex(8)}.part")
        try:
            download(self._inner, key, size, part, connections=self._connections)
            os.replace(part, path)
        except DigestError:
            # It was put there anew, as a repair does.
            self._inner.get_file(key, path)
        except OSError as error:
            raise no_copy(self, key, path, error) from error
        finally:
            remove(part)


def no_copy(bucket: Bucket, key: str, path: Path, error: OSError) -> StoreError:
    """What ``get_file`` raises where the copy cannot be written."""
    return StoreError(
        f"cannot copy key {key!r} of {bucket.url} to {path}: {error.strerror or error}; free space there, or name "
        "another place"
    )


def remove(path: Path) -> None:
    """Remove a file if that can be done."""
    try:
        path.unlink()
    except OSError:
        pass  # renamed already, or whoever sweeps there gets it


def _opened(path: Path, stack: ExitStack) -> int:
    file = os.open(path, _OPEN, 0o666)
    stack.callback(os.close, file)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise FileExistsError(f"{path} is no regular file")
    return file


def _write(file: int, data: bytes, start: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, start)
        rest, start = rest[written:], start + written

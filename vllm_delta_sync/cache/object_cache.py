"""``ObjectCache``: objects as files on this node; one process downloads an object while the others wait for it."""

import errno
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.base import observed_by
from vllm_delta_sync.bucket.peer import fetching_for
from vllm_delta_sync.bucket.ranged import PIECE_BYTES
from vllm_delta_sync.bucket.verified import check_object, check_stored_size, download_object, fetch_object, time_hashing
from vllm_delta_sync.cache.folder import CacheFolder, touch
from vllm_delta_sync.errors import DeltaSyncError, DigestError
from vllm_delta_sync.format.manifest import ObjectRef
from vllm_delta_sync.logs import ONCE, LogThrottle

logger = logging.getLogger(__name__)

RESUMED_BYTES = PIECE_BYTES
"""Downloads of smaller objects are not resumed: they have a single piece."""
STALL_SECONDS = 600.0
"""A process waits at most this long for a stalled download of another process."""
POLL_SECONDS = 0.02
TOUCH_SECONDS = 0.5
"""While bytes arrive, the file of a download is touched so often, to show those who wait that it moves."""

# Without O_NONBLOCK, opening a named pipe would block forever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_REMEDIES = {
    errno.ENOSPC: "free some space there or lower cache_bytes",
    errno.EDQUOT: "free some space there, raise the quota or lower cache_bytes",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EACCES: "set cache_dir to a directory of this user",
    errno.EPERM: "set cache_dir to a directory of this user, such as a new one below it",
    errno.EEXIST: "set cache_dir to a directory",
    errno.ENOTDIR: "set cache_dir to a directory",
    errno.EROFS: "set cache_dir to a writable directory",
}
_Read = TypeVar("_Read")


class ObjectCache:
    """Objects as files in ``directory``; beyond ``limit_bytes`` or ``MOST_OBJECTS`` the least recently used go.

    The directory is created with mode 700 when first needed; another user's directory is not used. The limit covers
    objects and unfinished downloads; a running download is never evicted. Large objects are downloaded by ranges.
    Interrupted downloads resume, even in another process. A failure of the cache costs a download but never makes a
    read fail; each kind of problem is logged once. Safe for threads and processes.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._folder = CacheFolder(directory, limit_bytes)
        self._log = LogThrottle(logger, ONCE)

    def get(self, ref: ObjectRef, bucket: Bucket) -> bytes:
        """Return the object's bytes, verified by size and SHA-256.

        Args:
            bucket: read if the object is not in the cache. One process of the node downloads it at a time; the others
                wait, unless nothing moves for ``STALL_SECONDS``.

        Raises:
            NotFoundError: no such object. DigestError: its bytes differ from the manifest. StoreError: the store
            failed. Errors of the cache itself are only logged.
        """
        with ExitStack() as stack:
            found = self._find_or_claim(ref, _bytes, stack)
            if not isinstance(found, bool):
                return found
            if found and (data := self._download(ref, bucket, _bytes)) is not None:
                return data
        # The lock is released by now: others must not wait for an object that will not be cached.
        return fetch_object(bucket, ref)

    def open(self, ref: ObjectRef, bucket: Bucket) -> BufferedReader | None:
        """Return the object as a verified file, to be read or mapped; None if the cache cannot hold it.

        The file's content does not change while it is open or mapped, even if it is evicted.

        Raises:
            As ``get``.
        """
        with ExitStack() as stack:
            found = self._find_or_claim(ref, _file, stack)
            if not isinstance(found, bool):
                return found
            return self._download(ref, bucket, _file) if found else None

    def find(self, ref: ObjectRef) -> BufferedReader | None:
        """Return the object as ``open`` does if it is in the cache, else None; fetches nothing. Raises OSError."""
        return self._try_read(ref, _file)

    def _find_or_claim(
        self, ref: ObjectRef, read: Callable[[ObjectRef, BufferedReader], _Read | None], stack: ExitStack
    ) -> _Read | bool:
        """Return what ``read`` returns, or True if the caller must fetch the object, or False to bypass the cache."""
        if ref.bytes > self._folder.limit_bytes:
            return False
        try:
            self._folder.prepare()
            last_progress, deadline = 0, time.monotonic() + STALL_SECONDS
            while (found := self._try_read(ref, read)) is None:
                if self._folder.try_lock(ref.sha256, stack):
                    # Read again: the former holder may have finished between our read and our lock.
                    found = self._try_read(ref, read)
                    return True if found is None else found
                now = time.monotonic()
                if (progress := self._folder.progress(ref.sha256)) != last_progress:
                    last_progress, deadline = progress, now + STALL_SECONDS
                if now >= deadline:
                    seconds = f"{STALL_SECONDS:g} s"
                    problem = f"another process is fetching {ref.key}, and nothing has arrived for {seconds}"
                    self._warn("stall", problem, "check why it is stalled")
                    return False
                time.sleep(POLL_SECONDS)
            return found
        except OSError as error:
            stack.close()
            self._warn_os_error(error)
            return False

    def _try_read(self, ref: ObjectRef, read: Callable[[ObjectRef, BufferedReader], _Read | None]) -> _Read | None:
        """Return what ``read`` returns, or None if the object is missing or damaged."""
        try:
            found = _read(self._folder.object_path(ref.sha256), ref, read)
        except FileNotFoundError:
            return None
        if found is None:
            self._warn("damaged", f"the file of {ref.key} is damaged", "check the disk; the file is replaced")
        return found

    # Fetching, by the holder of the lock

    def _download(
        self, ref: ObjectRef, bucket: Bucket, read: Callable[[ObjectRef, BufferedReader], _Read | None]
    ) -> _Read | None:
        """Download an object into the cache; None if the cache cannot hold it."""
        in_pieces = ref.bytes >= RESUMED_BYTES
        if in_pieces:
            # Check before evicting others: the listed size may be wrong.
            check_stored_size(bucket, ref)
        part, journal = self._folder.part_path(ref.sha256), self._folder.journal_path(ref.sha256)
        found, touched = None, 0.0

        def moved(count: int) -> None:
            nonlocal touched
            # A failed try takes its bytes back, which is no progress.
            if count > 0 and time.monotonic() - touched > TOUCH_SECONDS:
                touched = time.monotonic()
                touch(part)

        try:
            disk_full = self._folder.reserve(ref.sha256, ref.bytes)
            if disk_full is not None:
                self._warn_os_error(disk_full)
            with fetching_for(self._folder.identity()), observed_by(moved):
                found = download_object(
                    bucket, ref, part, lambda: _read(part, ref, read), journal if in_pieces else None
                )
            self._folder.finish(ref.sha256, ref.bytes)
        except OSError as error:
            self._warn_os_error(error)
            self._discard(ref)
        except DeltaSyncError:
            if not in_pieces:
                self._discard(ref)
            raise
        return found

    def _discard(self, ref: ObjectRef) -> None:
        try:
            self._folder.discard(ref.sha256)
        except OSError:
            pass  # the next sweep removes it

    # Problems

    def _warn_os_error(self, error: OSError) -> None:
        remedy = _REMEDIES.get(error.errno or 0, "check the disk or mount it is on")
        self._warn(error.errno or 0, error.strerror or str(error), remedy)

    def _warn(self, kind: int | str, problem: str, remedy: str) -> None:
        self._log.warn(
            f"cache_dir {str(self._folder.path)!r}: {problem}; {remedy}. Objects are still fetched, possibly by each "
            "rank separately; this is logged once",
            str(kind),
        )


def _read(path: Path, ref: ObjectRef, read: Callable[[ObjectRef, BufferedReader], _Read | None]) -> _Read | None:
    """Return what ``read`` returns for a file; None if it is not the object."""
    opened = os.open(path, _READ)
    with ExitStack() as stack:
        stack.callback(os.close, opened)
        info = os.fstat(opened)
        # Compare the actual size first: a read allocates as much as is requested, and the listed size may be wrong.
        if not stat.S_ISREG(info.st_mode) or info.st_size != ref.bytes:
            return None
        with open(opened, "rb", closefd=False) as file:
            found = read(ref, file)
        if found is not None:
            touch(opened)
        return found


def _bytes(ref: ObjectRef, file: BufferedReader) -> bytes | None:
    data = file.read(ref.bytes)
    try:
        check_object(ref, data)
    except DigestError:
        return None
    return data


def _file(ref: ObjectRef, file: BufferedReader) -> BufferedReader | None:
    """Return a file object of its own, independent of ``file``; None if the digest differs."""
    with time_hashing():
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != ref.sha256:
        return None
    file.seek(0)
    return open(os.dup(file.fileno()), "rb")

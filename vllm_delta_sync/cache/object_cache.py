"""Objects through the cache: who downloads, who waits, and that nothing of the cache's own stops anybody."""

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
from vllm_delta_sync.bucket.verified import check_object, check_stored_size, download_object, fetch_object, time_hashing
from vllm_delta_sync.cache.folder import CacheFolder, touch
from vllm_delta_sync.errors import DigestError
from vllm_delta_sync.format.manifest import ObjectRef

logger = logging.getLogger(__name__)

SMALL_BYTES = 1024 * 1024
"""What is smaller is fetched in one piece and written down afterwards."""
STALL_SECONDS = 600.0
"""Nobody waits longer than this for another process's download in which nothing moves."""
POLL_SECONDS = 0.02

# Without O_NONBLOCK somebody's named pipe would hold a reader for ever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MENDS = {
    errno.ENOSPC: "free some space there or lower cache_bytes",
    errno.EDQUOT: "free some space there, raise the quota or lower cache_bytes",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EACCES: "set cache_dir to a directory of this user",
    errno.EPERM: "set cache_dir to a directory of this user",
    errno.EEXIST: "set cache_dir to a directory",
    errno.ENOTDIR: "set cache_dir to a directory",
    errno.EROFS: "set cache_dir to a writable directory",
}
_Read = TypeVar("_Read")


class ObjectCache:
    """Objects as files in ``directory``, least recently used ones removed beyond ``limit_bytes``.

    The directory is made with mode 700 when first needed; one of another user is not used. The limit is on objects and
    on what has come, or was begun, of others; what comes in just now is never removed. Large objects are downloaded by
    ranges, and a download that broke off, even with its process, is gone on with by whoever wants the object next.
    Whatever goes wrong with the cache costs a download, never the object: it is logged once per kind of problem. Safe
    among threads and processes.
    """

    def __init__(self, directory: Path, limit_bytes: int, *, stall_seconds: float = STALL_SECONDS) -> None:
        self._folder = CacheFolder(directory, limit_bytes)
        self._stall_seconds = stall_seconds
        self._warned: set[int | str] = set()

    def get(self, ref: ObjectRef, bucket: Bucket) -> bytes:
        """The object's bytes, checked by size and SHA-256.

        Args:
            bucket: where it is, if not here. One process of the node at a time asks for it, unless nothing moves for
                ``stall_seconds``.

        Raises:
            NotFoundError: it is gone. DigestError: it is not what is listed. StoreError; nothing of the cache's own.
        """
        with ExitStack() as stack:
            found = self._find_or_claim(ref, _bytes, stack)
            if not isinstance(found, bool):
                return found
            if found and ref.bytes < SMALL_BYTES:
                if self._reserve(ref, resume=False):
                    return self._fetch(ref, bucket)
            elif found and (data := self._download(ref, bucket, _bytes)) is not None:
                return data
        # The lock is given back: others shall not wait for what will not be kept.
        return fetch_object(bucket, ref)

    def open(self, ref: ObjectRef, bucket: Bucket) -> BufferedReader | None:
        """The object as a file, to be read or mapped, checked as in ``get``; None: do without the cache.

        The file stays what it is while it is open or mapped, whatever becomes of the cache.

        Raises:
            As ``get``.
        """
        with ExitStack() as stack:
            found = self._find_or_claim(ref, _file, stack)
            if not isinstance(found, bool):
                return found
            return self._download(ref, bucket, _file) if found else None

    def _find_or_claim(
        self, ref: ObjectRef, read: Callable[[ObjectRef, BufferedReader], _Read | None], stack: ExitStack
    ) -> _Read | bool:
        """What is read of the object, or True with the duty to fetch it, or False: do without the cache."""
        if ref.bytes > self._folder.limit_bytes:
            return False
        try:
            self._folder.prepare()
            moved, deadline = 0, time.monotonic() + self._stall_seconds
            while (found := self._look(ref, read)) is None:
                if self._folder.try_lock(ref.sha256, stack):
                    # Read again: the holder before may have finished between reading and locking.
                    found = self._look(ref, read)
                    return True if found is None else found
                now = time.monotonic()
                if (progress := self._folder.progress(ref.sha256)) != moved:
                    moved, deadline = progress, now + self._stall_seconds
                if now >= deadline:
                    seconds = f"{self._stall_seconds:g} s"
                    waited = f"another process has been fetching {ref.key}, of which nothing came for {seconds}"
                    self._warn("stall", waited, "see what holds it up")
                    return False
                time.sleep(POLL_SECONDS)
            return found
        except OSError as error:
            stack.close()
            self._warn_of(error)
            return False

    def _look(self, ref: ObjectRef, read: Callable[[ObjectRef, BufferedReader], _Read | None]) -> _Read | None:
        """What is read of the object if it is there and whole."""
        try:
            found = _read(self._folder.object(ref.sha256), ref, read)
        except FileNotFoundError:
            return None
        if found is None:
            self._warn("damaged", f"the file of {ref.key} is damaged", "check the disk; the file is replaced")
        return found

    # Fetching, by the holder of the lock

    def _reserve(self, ref: ObjectRef, *, resume: bool) -> bool:
        try:
            full = self._folder.reserve(ref.sha256, ref.bytes, resume=resume)
        except OSError as error:
            self._warn_of(error)
            return False
        if full is not None:
            self._warn_of(full)
        return True

    def _fetch(self, ref: ObjectRef, bucket: Bucket) -> bytes:
        kept = False
        try:
            data = fetch_object(bucket, ref)
            self._folder.keep(ref.sha256, data)
            kept = True
        except OSError as error:
            self._warn_of(error)
        finally:
            if not kept:
                self._discard(ref)
        return data

    def _download(
        self, ref: ObjectRef, bucket: Bucket, read: Callable[[ObjectRef, BufferedReader], _Read | None]
    ) -> _Read | None:
        """None: the cache cannot hold it."""
        # Before room is made for a size that may be a lie.
        check_stored_size(bucket, ref)
        if not self._reserve(ref, resume=True):
            return None
        part, pieces = self._folder.part(ref.sha256), self._folder.pieces(ref.sha256)
        try:
            found = download_object(bucket, ref, part, lambda: _read(part, ref, read), pieces)
        except OSError as error:
            self._warn_of(error)
            self._discard(ref)
            return None
        try:
            self._folder.finish(ref.sha256, ref.bytes)
        except OSError as error:
            self._warn_of(error)
            self._discard(ref)
        return found

    def _discard(self, ref: ObjectRef) -> None:
        try:
            self._folder.discard(ref.sha256)
        except OSError:
            pass  # the next sweep gets it

    # Problems

    def _warn_of(self, error: OSError) -> None:
        mend = _MENDS.get(error.errno or 0, "check the disk or mount it is on")
        self._warn(error.errno or 0, error.strerror or str(error), mend)

    def _warn(self, kind: int | str, problem: str, mend: str) -> None:
        if kind in self._warned:
            return
        self._warned.add(kind)
        logger.warning(
            "cache_dir %r: %s; %s. Objects are fetched all the same, if need be by each rank for itself; "
            "this is logged once",
            str(self._folder.path),
            problem,
            mend,
        )


def _read(path: Path, ref: ObjectRef, read: Callable[[ObjectRef, BufferedReader], _Read | None]) -> _Read | None:
    """What ``read`` makes of a file; None if it is not the object."""
    opened = os.open(path, _READ)
    with ExitStack() as stack:
        stack.callback(os.close, opened)
        info = os.fstat(opened)
        # By the size that is there: a read allocates all that it is asked for, and what is listed may be a lie.
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
    """A file of its own."""
    with time_hashing():
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != ref.sha256:
        return None
    file.seek(0)
    return open(os.dup(file.fileno()), "rb")

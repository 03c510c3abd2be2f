"""A directory that the processes of one node share, so that each object is downloaded once.

Per digest there are up to three files: ``<sha256>`` is the object, ``<sha256>.part`` the object while it comes in,
``<sha256>.lock`` is locked by the process that downloads it. Locks are the kernel's: they end with their holder.
"""

import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from vllm_delta_sync.chain.checks import check_object
from vllm_delta_sync.errors import DigestError
from vllm_delta_sync.wire.manifest import ObjectRef

logger = logging.getLogger(__name__)

STALL_SECONDS = 600.0
"""Nobody waits longer than this for another process's download."""
POLL_SECONDS = 0.02

# Without O_NONBLOCK somebody's named pipe would hold a reader for ever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME = re.compile(r"([0-9a-f]{64})(\.lock|\.part)?")
_FULL = (errno.ENOSPC, errno.EDQUOT)
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


class ObjectCache:
    """Objects as files in ``directory``, least recently used ones removed beyond ``limit_bytes``.

    The directory is made with mode 700 when first needed; one of another user is not used. The limit is on whole
    objects; each download under way takes its object's size on top. Whatever goes wrong with the cache costs a
    download, never the object: it is logged once per kind of problem. Safe among threads and processes.
    """

    def __init__(self, directory: Path, limit_bytes: int, *, stall_seconds: float = STALL_SECONDS) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._stall_seconds = stall_seconds
        self._warned: set[int | str] = set()

    def get(self, ref: ObjectRef, fetch: Callable[[], bytes]) -> bytes:
        """The object's bytes, checked by size and SHA-256.

        Args:
            fetch: downloads and checks them. Called at most once, and by one process of the node at a time, unless
                that takes longer than ``stall_seconds``.

        Raises:
            Whatever ``fetch`` raises; nothing of the cache's own.
        """
        if ref.bytes > self._limit_bytes:
            return fetch()
        with ExitStack() as stack:
            found = self._find_or_claim(ref, stack)
            if isinstance(found, bytes):
                return found
            data = fetch()
            if found is not None:
                self._keep(ref, found, data)
            return data

    def _find_or_claim(self, ref: ObjectRef, stack: ExitStack) -> bytes | int | None:
        """The object, or a file for it with the duty to fetch it, or None: do without the cache."""
        try:
            self._prepare()
            deadline = time.monotonic() + self._stall_seconds
            while (data := self._read(ref)) is None:
                if self._try_lock(ref.sha256, stack):
                    # Read again: the holder before may have finished between reading and locking.
                    data = self._read(ref)
                    return self._reserve(ref, stack) if data is None else data
                if time.monotonic() >= deadline:
                    waited = f"another process has been fetching {ref.key} for {self._stall_seconds:g} s"
                    self._warn("stall", waited, "see what holds it up")
                    return None
                time.sleep(POLL_SECONDS)
            return data
        except OSError as error:
            # Let go at once: others shall not wait for a download that will not be kept.
            stack.close()
            self._warn_of(error)
            return None

    def _prepare(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self._directory.stat().st_uid
        if owner != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to user {owner}, this process is user {os.geteuid()}")

    def _read(self, ref: ObjectRef) -> bytes | None:
        """The object if it is there and whole."""
        try:
            opened = os.open(self._directory / ref.sha256, _READ)
        except FileNotFoundError:
            return None
        try:
            info = os.fstat(opened)
            # By the size that is there: a read allocates all that it is asked for, and what is listed may be a lie.
            data = _read_all(opened, ref.bytes) if stat.S_ISREG(info.st_mode) and info.st_size == ref.bytes else b""
            try:
                check_object(ref, data)
            except DigestError as error:
                self._warn("damaged", f"{error.message}", "check the disk; the file is replaced")
                return None
            _touch(opened)
            return data
        finally:
            _close(opened)

    # Locks

    def _try_lock(self, digest: str, stack: ExitStack) -> bool:
        """Whether the digest's lock was free; it is then held until the stack unwinds."""
        path = self._directory / f"{digest}.lock"
        lock = os.open(path, _LOCK, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it before removed the file, and a lock on a file without a name keeps nobody out.
            current = os.path.samestat(os.fstat(lock), os.stat(path, follow_symlinks=False))
        except (BlockingIOError, FileNotFoundError):
            current = False
        except OSError:
            os.close(lock)
            raise
        if current:
            stack.callback(_unlock, lock, path)
        else:
            os.close(lock)
        return current

    def _sweep(self, digest: str) -> None:
        """Remove what a process left that died while it downloaded."""
        with ExitStack() as stack:
            if self._try_lock(digest, stack):
                (self._directory / f"{digest}.part").unlink(missing_ok=True)

    # Writing, by the holder of the lock

    def _reserve(self, ref: ObjectRef, stack: ExitStack) -> int:
        """A file that has the object's size on disk, so that a full disk is known before all wait for a download."""
        # Neither of these can be of use to anybody: one is damaged, the other's writer is dead.
        (self._directory / ref.sha256).unlink(missing_ok=True)
        path = self._part(ref)
        path.unlink(missing_ok=True)
        self._evict(self._limit_bytes - ref.bytes, ref.sha256)
        part = os.open(path, _CREATE, 0o600)
        stack.callback(_discard, part, path)
        try:
            _allocate(part, ref.bytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._warn_of(error)
            # The disk holds less than the limit: else a cache once full would stay as it is for ever.
            self._evict(sum(info.st_size for _, info in self._objects()) - ref.bytes, ref.sha256)
            _allocate(part, ref.bytes)
        return part

    def _keep(self, ref: ObjectRef, part: int, data: bytes) -> None:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(part, rest) :]
            _touch(part)
            # Not synced: what a power failure leaves behind is found damaged and fetched again.
            os.replace(self._part(ref), self._directory / ref.sha256)
            # Once more, because others may have written meanwhile.
            self._evict(self._limit_bytes, ref.sha256)
        except OSError as error:
            self._warn_of(error)

    def _evict(self, limit_bytes: int, keep: str) -> None:
        """Remove objects, least recently used first and never ``keep``, until the rest fits into the limit."""
        objects = self._objects(sweep_except=keep)
        held = sum(info.st_size for _, info in objects)
        for path, info in sorted(objects, key=lambda item: item[1].st_mtime_ns):
            if held <= limit_bytes:
                return
            if path.name != keep:
                path.unlink(missing_ok=True)
                held -= info.st_size

    def _objects(self, sweep_except: str | None = None) -> list[tuple[Path, os.stat_result]]:
        objects = []
        for name in os.listdir(self._directory):
            match = _NAME.fullmatch(name)
            if match is None:
                continue  # not ours
            if match[2]:
                if sweep_except not in (None, match[1]):
                    self._sweep(match[1])
                continue
            path = self._directory / name
            try:
                info = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:
                continue  # evicted by another process meanwhile
            if stat.S_ISREG(info.st_mode):
                objects.append((path, info))
        return objects

    def _part(self, ref: ObjectRef) -> Path:
        return self._directory / f"{ref.sha256}.part"

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
            str(self._directory),
            problem,
            mend,
        )


def _read_all(file: int, size: int) -> bytes:
    with open(file, "rb", closefd=False) as reader:
        return reader.read(size)


def _allocate(file: int, size: int) -> None:
    try:
        if size:
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise


def _touch(file: int) -> None:
    """Note the use of an object. By mtime, because many mounts keep no atime, and in full resolution."""
    now = time.time_ns()
    try:
        os.utime(file, ns=(now, now))
    except OSError:
        pass  # a file that can be read but not touched is merely evicted earlier


def _unlock(lock: int, path: Path) -> None:
    _unlink(path)
    try:
        # Closing alone would leave the lock with a child that was forked meanwhile.
        fcntl.flock(lock, fcntl.LOCK_UN)
    except OSError:
        pass  # a mount that went away has no lock to give back
    finally:
        _close(lock)


def _discard(part: int, path: Path) -> None:
    _unlink(path)
    _close(part)


def _close(file: int) -> None:
    try:
        os.close(file)
    except OSError:
        pass  # late news of a failed write: readers check the digest


def _unlink(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        pass  # renamed already, or the next sweep gets it

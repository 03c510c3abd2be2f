"""``CacheFolder``: the files of a cache: locks between processes, eviction, and cleanup after dead processes.

Each digest has up to four files: ``<sha256>``, the object; ``<sha256>.part``, the object during its download;
``<sha256>.pieces``, the journal of the downloaded pieces; ``<sha256>.lock``, which the downloading process locks. The
kernel releases a lock when its process ends.
"""

import errno
import hashlib
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vllm_delta_sync.durable_files import lock_file, make_own_folder, unlock_file

STALE_SECONDS = 24 * 3600.0
"""An unfinished download of this age is removed."""
MOST_OBJECTS = 2048
"""Each download looks at all files, so a cache of many small objects would make every later version slower."""

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME = re.compile(r"([0-9a-f]{64})(\.lock|\.part|\.pieces)?")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class _CacheEntry:
    """A cached object, or an unfinished download (``complete`` False), and its size on disk."""

    digest: str
    complete: bool
    bytes: int
    used_ns: int


class CacheFolder:
    """The directory of a cache. Every method raises OSError if the directory cannot be used."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.limit_bytes = limit_bytes

    def prepare(self) -> None:
        """Create the directory. Raises PermissionError if it belongs to another user."""
        make_own_folder(self.path)

    def identity(self) -> str:
        """Return a name of this directory that is the same for all processes on this machine, and no other's."""
        info = self.path.stat()
        try:
            machine = Path("/proc/sys/kernel/random/boot_id").read_text()
        except OSError:
            machine = socket.gethostname()
        return hashlib.sha256(f"{machine} {info.st_dev} {info.st_ino}".encode()).hexdigest()[:32]

    def object_path(self, digest: str) -> Path:
        """Return the path of an object."""
        return self.path / digest

    def part_path(self, digest: str) -> Path:
        """Return the path of an object during its download."""
        return self.path / f"{digest}.part"

    def journal_path(self, digest: str) -> Path:
        """Return the path of the journal of a download."""
        return self.path / f"{digest}.pieces"

    def progress(self, digest: str) -> int:
        """Return a number that changes as bytes of an object arrive, but not while its download waits for a peer."""
        try:
            return os.stat(self.part_path(digest), follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            return 0

    # Locks

    def try_lock(self, digest: str, stack: ExitStack) -> bool:
        """Try to lock a digest; if that succeeds, the lock is held until the stack unwinds."""
        path = self.path / f"{digest}.lock"
        lock = lock_file(path)
        if lock is not None:
            stack.callback(_unlock, lock, path)
        return lock is not None

    # For the holder of a digest's lock

    def reserve(self, digest: str, size: int) -> OSError | None:
        """Allocate ``size`` bytes for a download, so that a full disk is noticed before others wait for it.

        Keeps what an earlier download of the object left.

        Returns:
            the error of the disk, if it was full and objects were evicted.
        """
        # The caller has found the object missing or damaged.
        self.object_path(digest).unlink(missing_ok=True)
        resumed = self._can_resume(digest, size)
        if not resumed:
            self.discard(digest)
        self.make_room(digest, size)
        if resumed:
            return None  # all of it was allocated before
        part, disk_full = os.open(self.part_path(digest), _CREATE, 0o600), None
        try:
            try:
                _allocate(part, size)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                # Full below the limit. Without eviction, a full cache would never change again.
                self._evict(list(self._others(digest)), size)
                _allocate(part, size)
                disk_full = error
        except OSError:
            self.discard(digest)
            raise
        finally:
            os.close(part)
        return disk_full

    def finish(self, digest: str, size: int) -> None:
        """Make a complete download the object."""
        touch(self.part_path(digest))
        # Not synced: an object damaged by a power failure is detected and fetched again.
        os.replace(self.part_path(digest), self.object_path(digest))
        self.journal_path(digest).unlink(missing_ok=True)
        # Again, because other processes may have written meanwhile.
        self.make_room(digest, size)

    def discard(self, digest: str) -> None:
        """Remove an unfinished download."""
        self.journal_path(digest).unlink(missing_ok=True)
        self.part_path(digest).unlink(missing_ok=True)

    def _can_resume(self, digest: str, size: int) -> bool:
        try:
            part = os.stat(self.part_path(digest), follow_symlinks=False)
            pieces = os.stat(self.journal_path(digest), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(part.st_mode) and stat.S_ISREG(pieces.st_mode) and part.st_size == size

    # Room

    def make_room(self, digest: str, size: int) -> None:
        """Evict least recently used objects until the others and this one, of ``size`` bytes, fit into the limits."""
        others = list(self._others(digest))
        bytes_above = sum(entry.bytes for entry in others) + size - self.limit_bytes
        self._evict(others, bytes_above, len(others) + 1 - MOST_OBJECTS)

    def _evict(self, entries: list[_CacheEntry], excess: int, surplus: int = 0) -> None:
        """Evict ``excess`` bytes or more, and ``surplus`` objects or more."""
        for entry in sorted(entries, key=lambda entry: entry.used_ns):
            if excess <= 0 and surplus <= 0:
                return
            if entry.complete:
                self.object_path(entry.digest).unlink(missing_ok=True)
            elif not self._sweep(entry.digest):
                continue  # it is being downloaded
            excess, surplus = excess - entry.bytes, surplus - 1

    def _sweep(self, digest: str) -> bool:
        """Remove an unfinished download and its lock file; return False if a process is downloading it."""
        with ExitStack() as stack:
            if not self.try_lock(digest, stack):
                return False
            self.discard(digest)
        return True

    def _others(self, digest: str) -> Iterator[_CacheEntry]:
        """Yield all entries except this object's; removes downloads that cannot or will not be resumed."""
        found: dict[str, dict[str, os.stat_result]] = {}
        with os.scandir(self.path) as files_there:
            for file in files_there:
                match = _NAME.fullmatch(file.name)
                if match is None or match[1] == digest:
                    continue
                try:
                    info = file.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # removed by another process meanwhile
                found.setdefault(match[1], {})[match[2] or ""] = info
        for other, files in found.items():
            complete, part = files.pop("", None), files.get(".part")
            if complete is not None and stat.S_ISREG(complete.st_mode):
                yield _CacheEntry(other, True, complete.st_size, complete.st_mtime_ns)
            if files and not _is_resumable(files) and self._sweep(other):
                continue
            if part is not None and stat.S_ISREG(part.st_mode):
                yield _CacheEntry(other, False, part.st_size, part.st_mtime_ns)


def _is_resumable(files: dict[str, os.stat_result]) -> bool:
    """Return whether an unfinished download may still be resumed."""
    if not {".part", ".pieces"} <= files.keys():
        return False
    return max(info.st_mtime for info in files.values()) > time.time() - STALE_SECONDS


def touch(file: int | Path) -> None:
    """Record the use of an object in its mtime, because many mounts do not update atime."""
    now = time.time_ns()
    try:
        os.utime(file, ns=(now, now))
    except OSError:
        pass  # a readable file that cannot be touched is evicted earlier


def _allocate(file: int, size: int) -> None:
    try:
        if size:
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise


def _unlock(lock: int, path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        pass  # the next sweep removes it
    unlock_file(lock)

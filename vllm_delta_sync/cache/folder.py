"""The files of a cache: locks among processes, room, and what is left by those that died.

Per digest there are up to four: ``<sha256>`` is the object, ``<sha256>.part`` the object while it comes in,
``<sha256>.pieces`` tells which pieces of that are there, ``<sha256>.lock`` is locked by the process that downloads it.
Locks are the kernel's: they end with their holder.
"""

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

STALE_SECONDS = 24 * 3600.0
"""What is left of a download that nobody has gone on with for so long is removed."""

_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CONTINUE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NAME = re.compile(r"([0-9a-f]{64})(\.lock|\.part|\.pieces)?")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class _CacheEntry:
    """An object that is there, or as much of it as has come (``whole`` False), with the room that it takes."""

    digest: str
    whole: bool
    bytes: int
    used_ns: int


class CacheFolder:
    """Every method raises OSError where the directory cannot be used."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.path = path
        self.limit_bytes = limit_bytes

    def prepare(self) -> None:
        """Make the directory. Raises PermissionError too if it is another user's."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self.path.stat().st_uid
        if owner != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to user {owner}, this process is user {os.geteuid()}")

    def object(self, digest: str) -> Path:
        """Where an object lies."""
        return self.path / digest

    def part(self, digest: str) -> Path:
        """Where it lies until it is whole."""
        return self.path / f"{digest}.part"

    def pieces(self, digest: str) -> Path:
        """The journal of its download."""
        return self.path / f"{digest}.pieces"

    def progress(self, digest: str) -> int:
        """Something that changes while an object comes in."""
        try:
            return os.stat(self.part(digest), follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            return 0

    # Locks

    def try_lock(self, digest: str, stack: ExitStack) -> bool:
        """Whether the digest's lock was free; it is then held until the stack unwinds."""
        path = self.path / f"{digest}.lock"
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

    # For the holder of a digest's lock

    def reserve(self, digest: str, size: int, *, resume: bool) -> OSError | None:
        """Make ``part`` with ``size`` bytes on disk, so that a full disk is known before all wait for a download.

        Args:
            resume: whether what an earlier download has left is kept.

        Returns:
            what the disk said, if it was full and room had to be made.
        """
        # Nobody comes here for what is whole.
        self.object(digest).unlink(missing_ok=True)
        begun = resume and self._has_begun(digest, size)
        if not begun:
            self.discard(digest)
        self.make_room(digest, size)
        part, full = os.open(self.part(digest), _CONTINUE if begun else _CREATE, 0o600), None
        try:
            _allocate(part, size)
        except OSError as error:
            if error.errno not in _FULL:
                self.discard(digest)
                raise
            full = error
        finally:
            os.close(part)
        if full is not None:
            self._reserve_on_full(digest, size)
        return full

    def _reserve_on_full(self, digest: str, size: int) -> None:
        """The disk holds less than the limit: else a cache once full would stay as it is for ever."""
        try:
            self._evict(digest, size)
            part = os.open(self.part(digest), _CONTINUE)
            try:
                _allocate(part, size)
            finally:
                os.close(part)
        except OSError:
            self.discard(digest)
            raise

    def keep(self, digest: str, data: bytes) -> None:
        """Write the object into ``part``, and make it the object."""
        with open(os.open(self.part(digest), _CONTINUE), "wb", buffering=0) as part:
            rest = memoryview(data)
            while rest:
                rest = rest[part.write(rest) or 0 :]
        self.finish(digest, len(data))

    def finish(self, digest: str, size: int) -> None:
        """``part`` is the object now."""
        touch(self.part(digest))
        # Not synced: what a power failure leaves behind is found damaged and fetched again.
        os.replace(self.part(digest), self.object(digest))
        self.pieces(digest).unlink(missing_ok=True)
        # Once more, because others may have written meanwhile.
        self.make_room(digest, size)

    def discard(self, digest: str) -> None:
        """Remove what there is of a download."""
        self.pieces(digest).unlink(missing_ok=True)
        self.part(digest).unlink(missing_ok=True)

    def _has_begun(self, digest: str, size: int) -> bool:
        try:
            part = os.stat(self.part(digest), follow_symlinks=False)
            pieces = os.stat(self.pieces(digest), follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(part.st_mode) and stat.S_ISREG(pieces.st_mode) and part.st_size == size

    # Room

    def make_room(self, digest: str, size: int) -> None:
        """Remove what was used least recently, until the rest and ``size`` bytes of this object fit into the limit."""
        self._evict(digest, sum(entry.bytes for entry in self._others(digest)) + size - self.limit_bytes)

    def _evict(self, digest: str, excess: int) -> None:
        for entry in sorted(self._others(digest), key=lambda entry: entry.used_ns):
            if excess <= 0:
                return
            if self._remove(entry):
                excess -= entry.bytes

    def _remove(self, entry: _CacheEntry) -> bool:
        """Whether it could be removed: what comes in just now cannot."""
        if entry.whole:
            self.object(entry.digest).unlink(missing_ok=True)
            return True
        return self._sweep(entry.digest)

    def _sweep(self, digest: str) -> bool:
        """Remove what is left of a download, and of its lock, unless it goes on."""
        with ExitStack() as stack:
            if not self.try_lock(digest, stack):
                return False
            self.discard(digest)
        return True

    def _others(self, digest: str) -> Iterator[_CacheEntry]:
        """All that takes room but this object's. What nobody will go on with is removed."""
        found: dict[str, dict[str, os.stat_result]] = {}
        for name in os.listdir(self.path):
            match = _NAME.fullmatch(name)
            if match is None or match[1] == digest:
                continue
            try:
                info = os.stat(self.path / name, follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed by another process meanwhile
            found.setdefault(match[1], {})[match[2] or ""] = info
        for other, files in found.items():
            whole, part = files.pop("", None), files.get(".part")
            if whole is not None and stat.S_ISREG(whole.st_mode):
                yield _CacheEntry(other, True, whole.st_size, whole.st_mtime_ns)
            if files and not _may_go_on(files) and self._sweep(other):
                continue
            if part is not None and stat.S_ISREG(part.st_mode):
                yield _CacheEntry(other, False, part.st_size, part.st_mtime_ns)


def _may_go_on(files: dict[str, os.stat_result]) -> bool:
    """Whether a download is left that somebody may want to go on with."""
    if not {".part", ".pieces"} <= files.keys():
        return False
    return max(info.st_mtime for info in files.values()) > time.time() - STALE_SECONDS


def touch(file: int | Path) -> None:
    """Note the use of an object. By mtime, because many mounts keep no atime, and in full resolution."""
    now = time.time_ns()
    try:
        os.utime(file, ns=(now, now))
    except OSError:
        pass  # a file that can be read but not touched is merely evicted earlier


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
        pass  # the next sweep gets it
    try:
        # Closing alone would leave the lock with a child that was forked meanwhile.
        fcntl.flock(lock, fcntl.LOCK_UN)
    except OSError:
        pass  # a mount that went away has no lock to give back
    finally:
        os.close(lock)

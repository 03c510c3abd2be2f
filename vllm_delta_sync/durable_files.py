"""``StateFile`` is a small file that a server keeps across restarts; ``write_atomically`` writes any file safely."""

import errno
import fcntl
import os
import stat
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from vllm_delta_sync.errors import ConflictError, StoreError, UsageError

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

_ACQUIRED: set[tuple[int, str]] = set()
"""Process and lock file of what ``StateFile.acquire`` has locked."""
_ACQUIRING = threading.Lock()


class StateFile:
    """A small file of this user. Its folder is created at the first lock, for this user only.

    Every method raises OSError if the disk or the permissions do not allow it. Call ``write`` and ``remove`` only with
    the lock: ``locked`` for a moment, in files that servers share, or ``acquire``, in files of one server.

    Args:
        max_bytes: a longer file is not read.
        lock: the file to lock; by default ``path`` with ``.lock`` appended.
        check_owner: whether to refuse a file that another user owns or every user may write.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, max_bytes: int, *, lock: Path | None = None, check_owner: bool = True) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._lock_path = path.with_name(f"{path.name}.lock") if lock is None else lock
        self._check_owner = check_owner
        self._acquired: weakref.finalize[Any, Any] | None = None

    def exists(self) -> bool:
        """Return whether anything has the file's name, even if ``read`` refuses it; True if a disk does not say."""
        try:
            os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):  # the last: this user has no files there
            return False
        except OSError:
            return True
        return True

    def read(self) -> bytes:
        """Return the content; needs no lock.

        Raises:
            FileNotFoundError: there is no file. OSError: it cannot be read, is a link or no regular file, or other
                users may have written it. ValueError: it is too long.
        """
        with open(self.path, "rb", opener=_open_safely) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            # Its group may write it: Kubernetes gives a volume's files to the group of the pod (fsGroup) at each start.
            if self._check_owner and (found.st_uid != os.getuid() or found.st_mode & stat.S_IWOTH):
                raise PermissionError(errno.EPERM, "other users may have written it")
            data = file.read(self._max_bytes + 1)
        if len(data) > self._max_bytes:
            raise ValueError(f"it has more than {self._max_bytes} bytes")
        return data

    def write(self, data: bytes) -> None:
        """Replace the content durably. If this is interrupted, the file has the old content or the new one."""
        write_atomically(self.path, data, self.path.with_name(f"{self.path.name}.part"))
        sync_path(self.path.parent)

    def remove(self) -> None:
        """Remove the file durably, if it exists."""
        self.path.unlink(missing_ok=True)
        sync_path(self.path.parent)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for the lock and hold it in the block. It excludes other processes and other threads of this one."""
        with self._open_lock() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                _release_lock(lock.fileno())

    def acquire(self) -> bool:
        """Lock the file until ``release``, or until this object or its process ends; False if another one has it."""
        if self._acquired is None:
            held = os.getpid(), os.path.realpath(self._lock_path)
            with _ACQUIRING:
                # A record lock does not exclude its own process, which loses it when it closes any handle of the file.
                if held in _ACQUIRED:
                    return False
                lock = self._open_lock()
                try:
                    # A record lock: forked processes do not inherit it.
                    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    lock.close()
                    return False
                _ACQUIRED.add(held)
            self._acquired = weakref.finalize(self, _release, lock, held)
        return True

    def release(self) -> None:
        """Unlock the file, if ``acquire`` has locked it."""
        if self._acquired is not None:
            self._acquired()
            self._acquired = None

    def _open_lock(self) -> FileIO:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return open(os.open(self._lock_path, _LOCK, 0o600), "r+b", buffering=0)


def lock_file(path: Path) -> int | None:
    """Lock a file, made if it is missing, until ``unlock_file`` or the end of this process and those forked meanwhile.

    Returns:
        None if another process has locked the file, or has just removed it.

    Raises:
        OSError: the file cannot be made or locked; the text says so where no file can be locked.
    """
    with ExitStack() as failing:
        lock = os.open(path, _LOCK | os.O_NONBLOCK, 0o600)
        failing.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A lock on a nameless file would exclude no process.
            held = os.path.samestat(os.fstat(lock), os.stat(path, follow_symlinks=False))
        except (BlockingIOError, FileNotFoundError):
            return None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            no_locks = "no file can be locked there, as on Lustre that is mounted without the option flock"
            raise OSError(error.errno, no_locks) from error
        if held:
            failing.pop_all()
        return lock if held else None


def unlock_file(lock: int) -> None:
    """Release a lock, and close its descriptor."""
    try:
        _release_lock(lock)
    finally:
        os.close(lock)


def _release_lock(lock: int) -> None:
    # Closing alone would leave the lock with a process that was forked meanwhile.
    with suppress(OSError):  # the mount has gone, and the lock with it
        fcntl.flock(lock, fcntl.LOCK_UN)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Name the folder of ``--to`` in what the block raises: UsageError if it is a file, else StoreError."""
    try:
        yield
    except (NotADirectoryError, FileExistsError) as error:
        raise UsageError(f"--to {str(folder)!r} is a file, or lies below one; name a folder") from error
    except OSError as error:
        raise StoreError(f"folder {str(folder)!r} cannot be written: {error.strerror or error}") from error


@contextmanager
def locked_folder(folder: Path, name: str, taken: str) -> Iterator[None]:
    """Make a folder, and lock a file of this name in it for the block.

    Raises:
        ConflictError: another process has locked it; the message is ``taken``. OSError: it cannot be made.
    """
    folder.mkdir(exist_ok=True)
    lock = lock_file(folder / name)
    if lock is None:
        raise ConflictError(taken)
    try:
        yield
    finally:
        unlock_file(lock)


def _release(lock: FileIO, held: tuple[int, str]) -> None:
    lock.close()
    _ACQUIRED.discard(held)


def _open_safely(path: str, flags: int) -> int:
    """Open for reading; a link is refused, and a pipe is opened without waiting for its writer."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def write_atomically(path: Path, data: bytes, part: Path, mode: int | None = None) -> None:
    """Replace a file's content. Readers, and a restart after a crash, find the old content or the new one.

    Args:
        part: written first, in the same folder. If it exists, it is what an interrupted write left and is removed, so
            no two writers may use the same one at a time.
        mode: the file's permissions, whatever the umask is; by default only this user can read it.
    """
    part.unlink(missing_ok=True)
    try:
        with open(os.open(part, _CREATE, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:  # including interrupts: no partial file stays
        part.unlink(missing_ok=True)
        raise


def make_own_folder(path: Path) -> None:
    """Make a folder of this user unless it is there. Raises OSError: it cannot be made, or is of another user."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = path.stat().st_uid
    if owner != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {owner}, this process runs as user {os.geteuid()}")


def sync_path(path: Path) -> None:
    """Make a folder's new, replaced and removed names durable, or a file's content, however it was written."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

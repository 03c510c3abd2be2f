"""``ProcessFolder`` is a temporary folder that does not outlive its process, even if the process is killed.

Every process that uses such a folder keeps a shared lock on a file in it. The kernel releases the lock when the process
ends, in whatever way, and applies it across containers that share the file system, where a process id would name
another process. The next process that makes a folder removes each one whose lock it can take for itself.

These are locks of ``flock``. A forked child inherits them, so the folder stays until the child has ended too. Record
locks (``lockf``) would not work: a process loses its record lock when it closes any descriptor of the file, as it does
when it looks for abandoned folders and finds its own.
"""

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from vllm_delta_sync.errors import StoreError

PREFIX = "delta-sync-tmp-"
"""Begins the names of these folders, and of no others."""
LOCK_NAME = "lock"
FILES_NAME = "files"
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class ProcessFolder:
    """A new folder for files of this process: removed by ``close``, at exit, or, after a kill, by the next process.

    Args:
        parent: where to make it; None for the system's temporary directory.

    Raises:
        StoreError: it cannot be made.

    Attributes:
        path: the folder for files; empty at first, and of this user only.
    """

    def __init__(self, parent: str | Path | None = None) -> None:
        directory = temporary_directory(parent)
        try:
            remove_abandoned(directory)
            while True:
                self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
                self._lock = _lock_shared(self._folder)
                if self._lock is not None:
                    break
            self._owner = os.getpid()
            self.path = self._folder / FILES_NAME
            self.path.mkdir(mode=0o700)
        except OSError as error:
            remedy = "set TMPDIR to another folder" if parent is None else "name another folder"
            raise StoreError(f"no temporary folder can be made: {error}; free space there, or {remedy}") from error
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the folder. In a forked child this does nothing."""
        if self._lock is None or self._owner != os.getpid():
            return
        atexit.unregister(self.close)
        _remove(self._folder)
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def temporary_directory(parent: str | Path | None = None) -> Path:
    """Return ``parent``, or without one the system's temporary directory. Raises StoreError: none can be written."""
    try:
        return Path(tempfile.gettempdir() if parent is None else parent)
    except FileNotFoundError as error:
        raise StoreError(
            f"no temporary directory can be written: {error.strerror}; free space there, or set TMPDIR to another"
        ) from error


def hold_folder(path: Path) -> int:
    """Make a folder that several processes share, unless it exists, and keep it until the descriptor is closed.

    Once no process holds it, ``remove_abandoned`` removes it, if its name begins with ``PREFIX``.

    Returns:
        a file descriptor, which the end of the process closes.

    Raises:
        PermissionError: it is not a folder that only this user can enter. OSError: it cannot be made.
    """
    while True:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue  # another process has just removed it as abandoned
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{str(path)!r} is not a folder that only this user can enter; remove it")
        lock = _lock_shared(path)
        if lock is not None:
            return lock


def remove_abandoned(directory: Path) -> None:
    """Remove the folders of this user in ``directory`` that no running process holds."""
    for path in directory.glob(f"{PREFIX}*"):
        # In use, of another user, not made completely yet, or another process removes it.
        with suppress(OSError):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = os.open(path / LOCK_NAME, _FLAGS)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A lock on a file that is gone says nothing about a new folder of the same name.
                if _is_in(path, lock):
                    _remove(path)
            finally:
                os.close(lock)


def _remove(path: Path) -> None:
    """Remove a folder, as far as possible. The lock goes last: others wait for it, or finish an interrupted removal."""
    with suppress(OSError):
        for child in path.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child, ignore_errors=True)
            elif child.name != LOCK_NAME:
                child.unlink(missing_ok=True)
        if [child.name for child in path.iterdir()] == [LOCK_NAME]:
            (path / LOCK_NAME).unlink()
            path.rmdir()


def _lock_shared(path: Path) -> int | None:
    """Lock a folder against removal; None if it was removed meanwhile."""
    try:
        lock = os.open(path / LOCK_NAME, _FLAGS | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    # A file system without locks gives no process an exclusive one either, so nothing is removed there.
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH)
    if _is_in(path, lock):
        return lock
    os.close(lock)
    return None


def _is_in(path: Path, lock: int) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path / LOCK_NAME, follow_symlinks=False))
    except FileNotFoundError:
        return False

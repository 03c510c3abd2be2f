"""Walk directories below a root without ever following a symbolic link.

Each step opens one name relative to the directory opened before, so there is no moment between a check and
its use in which somebody could swap a directory for a link. Plain OSErrors are left to the caller.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from vllm_delta_sync.errors import StoreError, UsageError

_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER = _ROOT | os.O_NOFOLLOW


@contextmanager
def open_folder(root: Path, parts: Sequence[str], create: bool = False) -> Iterator[int]:
    """Yield a descriptor of the directory ``root/parts…``, making it where ``create`` says so.

    ``root`` itself may be a link; nothing below it may.

    Raises:
        StoreError: one of the parts is a symbolic link.
        UsageError: ``create``, and one of the parts is a file.
        OSError: anything else, FileNotFoundError and NotADirectoryError included.
    """
    if create:
        _make_folders(root)
    opened = os.open(root, _ROOT)
    try:
        for part in parts:
            below = enter(opened, part, create)
            os.close(opened)
            opened = below
        yield opened
    finally:
        os.close(opened)


def enter(parent: int, name: str, create: bool = False) -> int:
    """Open the directory ``name`` in an open one; the caller closes it. Raises as ``open_folder`` does."""
    if create:
        try:
            os.mkdir(name, dir_fd=parent)
            os.fsync(parent)
        except FileExistsError:
            pass
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        refuse_link(name, os.stat(name, dir_fd=parent, follow_symlinks=False))
        if create:
            raise UsageError(f"{name!r} is an object already, so it cannot be a folder; choose another key") from error
        raise


def refuse_link(name: str, found: os.stat_result) -> None:
    """Refuse what ``found`` describes if it is a symbolic link.

    Raises:
        StoreError: naming the link.
    """
    if stat.S_ISLNK(found.st_mode):
        raise StoreError(f"{name!r} is a symbolic link, which is not followed; replace it by what it points to")


def _make_folders(path: Path) -> None:
    """Make a directory with its parents, each entry durable."""
    if path.is_dir():
        return
    _make_folders(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        return
    parent = os.open(path.parent, _ROOT)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


STALE_TRIES = 5
"""How often a call looks everything up after the server said that it no longer knows a handle."""

# What clients call a file that was removed while somebody had it open.
_SILLY = re.compile(r"\.nfs[0-9A-Fa-f.]{4,}")
_Result = TypeVar("_Result")


def is_silly(name: str) -> bool:
    """Whether a file of this name is the remains of a removed one."""
    return _SILLY.fullmatch(name) is not None


def again(call: Callable[[], _Result]) -> _Result:
    """Call until the server knows every handle that is met; ``call`` looks them up afresh each time.

    Raises:
        OSError: what ``call`` raises, ESTALE only after STALE_TRIES.
    """
    for _ in range(STALE_TRIES - 1):
        try:
            return call()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return call()


@dataclass(frozen=True)
class StagedFile:
    """A file that waits for its name: what it is called meanwhile, and which file it is.

    If the reply to a link or a rename is lost, the client asks again and is told that there is nothing left to do.
    Then the name shows whether it was done.
    """

    name: str
    device: int
    inode: int

    @classmethod
    def of(cls, name: str, descriptor: int) -> "StagedFile":
        found = os.fstat(descriptor)
        return cls(name, found.st_dev, found.st_ino)

    def is_at(self, name: str, folder: int) -> bool:
        """Whether ``name`` in an open directory is this file."""
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (self.device, self.inode)


_MENDS = {
    errno.ENOSPC: "free some space there and try again",
    errno.EDQUOT: "free some space there or raise the quota, and try again",
    errno.EFBIG: "raise the file size limit (ulimit -f) and try again",
    errno.EACCES: "give this user access to it",
    errno.EPERM: "give this user access to it",
    errno.EROFS: "mount it writable",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files",
    errno.ENOTDIR: "give a directory as the bucket",
    errno.ESTALE: "its server no longer knows it: mount it again",
}


def failure(action: str, error: OSError) -> str:
    """A message: that ``action`` failed, why, and the mend."""
    mend = _MENDS.get(error.errno or 0, "check the disk or mount it is on and try again")
    return f"cannot {action}: {error.strerror or error}; {mend}"

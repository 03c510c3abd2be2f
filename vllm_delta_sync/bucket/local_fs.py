"""What ``LocalBucket`` needs of a file system: folders without links, retries over NFS, messages for OSErrors.

``open_folder`` walks directories below a root and follows no symbolic link. Each step opens one name relative to the
directory opened before, so no directory can be swapped for a link between a check and its use.

``retry_stale`` and ``StagedFile`` handle two faults of NFS: the server forgets handles (ESTALE), and a reply is lost,
so that the client repeats a request that has already succeeded.
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

from vllm_delta_sync.durable_files import sync_folder
from vllm_delta_sync.errors import StoreError, UsageError

STALE_TRIES = 5
"""Tries of a call that fails with ESTALE."""

_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER = _ROOT | os.O_NOFOLLOW
# NFS clients give this name to a file that is removed while a process has it open.
_NFS_LEFTOVER = re.compile(r"\.nfs[0-9A-Fa-f.]{4,}")
_REMEDIES = {
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
_Result = TypeVar("_Result")


@contextmanager
def open_folder(root: Path, parts: Sequence[str], create: bool = False) -> Iterator[int]:
    """Yield a descriptor of the directory ``root/parts…``.

    ``root`` itself may be a link; nothing below it may.

    Args:
        create: whether to create missing directories.

    Raises:
        StoreError: one of the parts is a symbolic link.
        UsageError: ``create`` is set and one of the parts is a file.
        OSError: anything else, FileNotFoundError and NotADirectoryError included.
    """
    if create:
        _make_folders(root)
    opened = os.open(root, _ROOT)
    try:
        for part in parts:
            below = _open_subfolder(opened, part, create)
            os.close(opened)
            opened = below
        yield opened
    finally:
        os.close(opened)


def _open_subfolder(parent: int, name: str, create: bool) -> int:
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


def _make_folders(path: Path) -> None:
    """Make a directory and its parents, and sync each new entry to disk."""
    if path.is_dir():
        return
    _make_folders(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        return
    sync_folder(path.parent)


def refuse_link(name: str, found: os.stat_result) -> None:
    """Raise StoreError if ``found`` describes a symbolic link."""
    if stat.S_ISLNK(found.st_mode):
        raise StoreError(f"{name!r} is a symbolic link, which is not followed; replace it by what it points to")


def retry_stale(call: Callable[[], _Result]) -> _Result:
    """Call until no handle is stale; ``call`` must look up all names again each time.

    Raises:
        OSError: what ``call`` raises; ESTALE only after STALE_TRIES tries.
    """
    for _ in range(STALE_TRIES - 1):
        try:
            return call()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return call()


def is_nfs_leftover(name: str) -> bool:
    """Return whether NFS clients use such a name for a removed file that is still open."""
    return _NFS_LEFTOVER.fullmatch(name) is not None


@dataclass(frozen=True)
class StagedFile:
    """A file that waits for its final name: its temporary name and its identity.

    If the reply to a link or rename is lost, the client repeats the request, and the server answers that the name
    exists or the file is missing. Then ``is_at`` tells whether the first request succeeded.
    """

    name: str
    device: int
    inode: int

    @classmethod
    def of(cls, name: str, descriptor: int) -> "StagedFile":
        found = os.fstat(descriptor)
        return cls(name, found.st_dev, found.st_ino)

    def is_at(self, name: str, folder: int) -> bool:
        """Return whether ``name`` in an open directory is this file."""
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == (self.device, self.inode)


def describe_failure(action: str, error: OSError) -> str:
    """Return an error message: the action that failed, the reason, and the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "check the disk or mount it is on and try again")
    return f"cannot {action}: {error.strerror or error}; {remedy}"

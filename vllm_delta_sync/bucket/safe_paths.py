"""Walk directories below a root without ever following a symbolic link.

Each step opens one name relative to the directory opened before, so there is no moment between a check and
its use in which somebody could swap a directory for a link. Plain OSErrors are left to the caller.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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

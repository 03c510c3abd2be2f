"""``LocalBucket``: a bucket in a local or shared directory, one file per object, its key as the path.

A put writes the object to a staging directory inside the root, syncs it, and gives it its name in one step: by a hard
link if the name must be new, otherwise by a rename.

``open_folder`` follows no symbolic link below the root. Each step opens one name relative to the directory opened
before, so no directory can be swapped for a link between a check and its use.

Over NFS, a handle becomes stale (ESTALE) when another client replaces the name; then all names are looked up again. If
a reply is lost and the client repeats the request, the file itself shows whether the first one succeeded. A failed
fsync is never retried on the same file, because the kernel may have dropped the bytes: the put fails and removes what
it wrote.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import TypeVar

from vllm_delta_sync.bucket.base import (
    Bucket,
    ObjectInfo,
    check_range,
    check_size,
    conflict_error,
    is_key,
    report_bytes,
    unreadable_error,
)
from vllm_delta_sync.durable_files import sync_path
from vllm_delta_sync.errors import LimitError, NotFoundError, StoreError, UsageError
from vllm_delta_sync.urls import MAX_KEY_BYTES, check_key

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
    errno.EXDEV: "put the whole bucket on one file system that has hard links: no folder in it may be its own mount",
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
    sync_path(path.parent)


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


@dataclass(frozen=True)
class StagedFile:
    """A file that waits for its final name: its temporary name and its identity.

    If the reply to a link or rename is lost, the client repeats the request, and the server answers that the name
    exists or the file is missing. Then ``is_at`` tells whether the first request succeeded.
    """

    name: str
    info: os.stat_result

    def is_at(self, name: str, folder: int) -> bool:
        """Return whether ``name`` in an open directory is this file."""
        try:
            return os.path.samestat(self.info, os.stat(name, dir_fd=folder, follow_symlinks=False))
        except FileNotFoundError:
            return False


def describe_failure(action: str, error: OSError) -> str:
    """Return an error message: the action that failed, the reason, and the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "check the disk or mount it is on and try again")
    return f"cannot {action}: {error.strerror or error}; {remedy}"


STAGING = "~staging"
"""Staging directory; its name is not a valid part of a key, so no object can have it."""
STALE_STAGING_SECONDS = 24 * 3600.0
"""A staging file of this age belongs to a writer that died."""
COPY_BYTES = 1024 * 1024

# Without O_NONBLOCK, opening a named pipe would block forever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalBucket(Bucket):
    """Objects as files below ``root``, which the first ``put`` creates.

    ``root`` may be a symbolic link or lead through one. Links below it are refused with StoreError, and ``list`` omits
    them. The file system must support hard links (all common ones do, NFS included). File modes follow the umask.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(os.path.abspath(root))
        self._swept = False
        self.url = self._root.as_uri()

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        folders, name = _split(key)
        with ExitStack() as stack:
            source = data if isinstance(data, bytes) else stack.enter_context(_open_source(key, data))
            stack.enter_context(self._write_errors(key))
            # Refuse a conflict before any byte is written.
            self._in_folder(folders, lambda folder: self._check_target(key, folder, name, if_absent))
            # A pipe can be read only once.
            readable_once = not isinstance(source, bytes) and not source.seekable()
            staged = self._stage(source) if readable_once else retry_stale(lambda: self._stage(source))
            try:
                self._in_folder(folders, partial(self._publish, key, staged, name, if_absent))
            finally:
                self._discard(staged)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        def read(file: BufferedIOBase, info: ObjectInfo) -> bytes:
            check_size(key, info.bytes, max_bytes)
            try:
                data = file.read(info.bytes)
            except MemoryError as error:
                raise LimitError(
                    f"object {key!r} has {info.bytes} bytes, for which this process has no memory; not read"
                ) from error
            if len(data) != info.bytes:
                raise OSError(errno.EIO, f"{len(data)} of {info.bytes} bytes came")
            report_bytes(len(data))
            return data

        return self._read_object(key, read)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        def read(file: BufferedIOBase, info: ObjectInfo) -> bytes:
            file.seek(min(start, info.bytes))
            data = file.read(max(0, min(length, info.bytes - start)))
            report_bytes(len(data))
            return data

        check_range(key, start, length)
        return self._read_object(key, read)

    def stat(self, key: str) -> ObjectInfo:
        folders, name = _split(key)

        def read_info(folder: int) -> ObjectInfo:
            return self._info(key, os.stat(name, dir_fd=folder, follow_symlinks=False))

        with self._read_errors("look up", key):
            return self._in_folder(folders, read_info, create=False)

    def delete(self, key: str) -> None:
        folders, name = _split(key)

        def remove(folder: int) -> None:
            self._info(key, os.stat(name, dir_fd=folder, follow_symlinks=False))
            os.unlink(name, dir_fd=folder)

        try:
            with self._read_errors("delete", key):
                self._in_folder(folders, remove, create=False)
                self._in_folder(folders, os.fsync, create=False)
        except NotFoundError:
            return

    def _in_folder(self, folders: Sequence[str], call: Callable[[int], _Result], create: bool = True) -> _Result:
        """Call with an open directory; again while a handle is stale, so ``call`` looks up all names itself."""

        def attempt() -> _Result:
            with open_folder(self._root, folders, create) as folder:
                return call(folder)

        return retry_stale(attempt)

    # Writing

    def _check_target(self, key: str, folder: int, name: str, if_absent: bool) -> None:
        """Refuse a put that cannot succeed, before any byte is written."""
        try:
            self._info(key, os.stat(name, dir_fd=folder, follow_symlinks=False))
        except FileNotFoundError:
            return
        except NotFoundError as error:
            raise UsageError(f"key {key!r} is a folder of other keys in {self.url}; choose another") from error
        if if_absent:
            # The object may be the caller's own, from a put whose last fsync failed: make it durable, because the
            # caller accepts it after reading it back.
            os.fsync(folder)
            raise conflict_error(self.url, key)

    def _publish(self, key: str, staged: StagedFile, name: str, if_absent: bool, folder: int) -> None:
        """Give a staged file its name. Safe to repeat after an error whose outcome is unknown."""
        with open_folder(self._root, [STAGING]) as staging:
            if if_absent:
                self._link(key, staging, staged, folder, name)
            else:
                try:
                    os.replace(staged.name, name, src_dir_fd=staging, dst_dir_fd=folder)
                except FileNotFoundError:
                    # The file may have been moved already and the reply lost.
                    if not staged.is_at(name, folder):
                        raise
        os.fsync(folder)

    def _link(self, key: str, staging: int, staged: StagedFile, folder: int, name: str) -> None:
        try:
            os.link(staged.name, name, src_dir_fd=staging, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError as error:
            # Either our link was made already and the reply lost, or another writer made it.
            linked = os.stat(staged.name, dir_fd=staging, follow_symlinks=False).st_nlink > 1
            if not linked and not staged.is_at(name, folder):
                os.fsync(folder)
                raise conflict_error(self.url, key) from error
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            raise StoreError(
                f"cannot write key {key!r} of {self.url}: no hard links there ({error.strerror}), so two "
                "writers could both succeed; use a file system that has them, such as ext4, xfs, tmpfs or NFS"
            ) from error

    def _stage(self, data: bytes | BufferedIOBase) -> StagedFile:
        """Write ``data`` durably to the staging directory, where no reader sees it."""
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        with open_folder(self._root, [STAGING], create=True) as staging:
            try:
                # Closing may fail too: some file systems report lost bytes only then.
                with open(os.open(name, _CREATE, 0o666, dir_fd=staging), "wb") as file:
                    if isinstance(data, bytes):
                        file.write(data)
                        report_bytes(len(data))
                    else:
                        if data.seekable():
                            data.seek(0)
                        for block in _blocks(data):
                            file.write(block)
                    file.flush()
                    os.fsync(file.fileno())
                    staged = StagedFile(name, os.fstat(file.fileno()))
            except BaseException:  # an interrupt must not leave staged bytes behind either
                _unlink(name, staging)
                raise
            self._sweep(staging, staged.info.st_mtime)
        return staged

    def _discard(self, staged: StagedFile) -> None:
        """Remove a staged file, if it was not moved."""
        try:
            with open_folder(self._root, [STAGING]) as staging:
                _unlink(staged.name, staging)
        except (OSError, StoreError):
            return  # a later writer's sweep removes it

    def _sweep(self, staging: int, now: float) -> None:
        """Remove staging files of dead writers.

        ``now`` is the time by the file server's clock: this machine's clock may be wrong by days.
        """
        if self._swept:
            return
        self._swept = True
        try:
            names = os.listdir(staging)
        except OSError:
            return  # a later writer sweeps them
        for name in names:
            try:
                if os.stat(name, dir_fd=staging, follow_symlinks=False).st_mtime < now - STALE_STAGING_SECONDS:
                    os.unlink(name, dir_fd=staging)
            except OSError:
                continue  # removed by another writer, open over NFS, or owned by another user

    # Reading

    def _read_object(self, key: str, read: Callable[[BufferedIOBase, ObjectInfo], _Result]) -> _Result:
        """Open and read an object; start again if its handle becomes stale because it was replaced."""
        folders, name = _split(key)

        def attempt(folder: int) -> _Result:
            # Check before opening, so that the message names a link or pipe; the open refuses them too.
            self._info(key, os.stat(name, dir_fd=folder, follow_symlinks=False))
            opened = os.open(name, _READ, dir_fd=folder)
            with open(opened, "rb") as file:
                return read(file, self._info(key, os.fstat(opened)))

        with self._read_errors("read", key):
            return self._in_folder(folders, attempt, create=False)

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        path, slash, start = prefix.rpartition("/")
        try:
            yield from self._list_folder(path + slash, start)
        except NotFoundError:
            return

    def _list_folder(self, path: str, start: str) -> Iterator[ObjectInfo]:
        folders = path.split("/")[:-1]
        with self._read_errors("list", path):
            names = self._in_folder(folders, lambda folder: _names(folder, start), create=False)
        with ExitStack() as stack:
            with self._read_errors("list", path):
                folder = stack.enter_context(open_folder(self._root, folders))
            for name in names:
                key = path + name
                if _NFS_LEFTOVER.fullmatch(name.removesuffix("/")) or not is_key(key.removesuffix("/")):
                    continue  # the staging directory, or a file that no put made
                try:
                    if not name.endswith("/"):
                        yield from self._list_file(folder, key, name)
                    elif len(key) < MAX_KEY_BYTES:
                        yield from self._list_folder(key, "")
                except NotFoundError:
                    continue  # deleted while listing

    def _list_file(self, folder: int, key: str, name: str) -> Iterator[ObjectInfo]:
        with self._read_errors("list", key):
            try:
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                found = None
            if found is not None and not stat.S_ISREG(found.st_mode):
                return
        yield self.stat(key) if found is None else self._info(key, found)

    def _info(self, key: str, found: os.stat_result) -> ObjectInfo:
        refuse_link(f"{self.url}/{key}", found)
        if stat.S_ISDIR(found.st_mode):
            raise NotFoundError(f"no object {key!r} in {self.url}; it is a folder of other keys")
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"key {key!r} of {self.url} is not a regular file; remove it")
        return ObjectInfo(key, found.st_size, found.st_mtime)

    # Errors

    @contextmanager
    def _read_errors(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self._root.exists():
                raise NotFoundError(f"no object {key!r}: {self.url} does not exist; check the bucket URL") from error
            if not self._root.is_dir():
                raise StoreError(describe_failure(f"{action} key {key!r} of {self.url}", error)) from error
            raise NotFoundError(f"no object {key!r} in {self.url}") from error
        except OSError as error:
            raise StoreError(describe_failure(f"{action} key {key!r} of {self.url}", error)) from error

    @contextmanager
    def _write_errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(describe_failure(f"write key {key!r} of {self.url}", error)) from error


def _names(folder: int, start: str) -> list[str]:
    with os.scandir(folder) as entries:
        # With its slash, a directory sorts where its keys sort: after "a-b" and "a.b", before "a0".
        return sorted(
            entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "")
            for entry in entries
            if entry.name.startswith(start)
        )


def _split(key: str) -> tuple[list[str], str]:
    *folders, name = check_key(key).split("/")
    if any(_NFS_LEFTOVER.fullmatch(part) for part in (*folders, name)):
        raise UsageError(f"key {key!r} has a part that NFS clients use for removed files; choose another")
    return folders, name


def _open_source(key: str, path: Path) -> BufferedIOBase:
    try:
        return open(path, "rb")
    except OSError as error:
        raise unreadable_error(key, path, error) from error


def _blocks(source: BufferedIOBase) -> Iterator[memoryview]:
    """Yield the rest of a file in views of one buffer; each is valid until the next is requested."""
    buffer = memoryview(bytearray(COPY_BYTES))
    while count := source.readinto(buffer):
        report_bytes(count)
        yield buffer[:count]


def _unlink(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        pass  # renamed already, or a later writer's sweep removes it

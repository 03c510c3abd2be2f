"""A bucket in a local or shared directory: one file per object, at the path its key spells.

An object is written to a staging directory inside the root, synced, and then given its name in one step: a
hard link where the name must be new, a rename otherwise.
"""

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from vllm_delta_sync.bucket.base import (
    MAX_KEY_BYTES,
    Bucket,
    ObjectInfo,
    check_key,
    check_prefix,
    check_range,
    check_size,
)
from vllm_delta_sync.bucket.confined import enter, open_folder, refuse_link
from vllm_delta_sync.errors import ConflictError, NotFoundError, StoreError, UsageError

STAGING = "~staging"
"""Not a valid part of a key, so that no object can ever be in its way."""
STALE_STAGING_SECONDS = 24 * 3600.0
"""A staging file untouched for so long belongs to a writer that died."""
COPY_BYTES = 4 * 1024 * 1024

# Without O_NONBLOCK somebody's named pipe would hold a reader for ever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

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
}


class LocalBucket(Bucket):
    """Objects as files below ``root``, which the first ``put`` creates.

    ``root`` itself may be or lead through a symbolic link; below it links are refused with StoreError, and
    ``list`` leaves them out. The file system must have hard links (all common ones do, NFS included). File
    modes follow the umask.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(os.path.abspath(root))
        self._swept = False
        self.url = self._root.as_uri()

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        folders, name = _split(key)
        with ExitStack() as stack:
            source = data if isinstance(data, bytes) else stack.enter_context(_open_source(key, data))
            stack.enter_context(self._writing("write", key))
            folder = stack.enter_context(open_folder(self._root, folders, create=True))
            self._check_target(key, folder, name, if_absent)
            staging, staged = stack.enter_context(self._staged(source))
            if if_absent:
                self._link(key, staging, staged, folder, name)
            else:
                os.replace(staged, name, src_dir_fd=staging, dst_dir_fd=folder)
            os.fsync(folder)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        with self._open_object(key) as (file, info):
            check_size(key, info.bytes, max_bytes)
            data = file.read(info.bytes)
            if len(data) != info.bytes:
                raise OSError(errno.EIO, f"{len(data)} of {info.bytes} bytes came")
            return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(key, start, length)
        with self._open_object(key) as (file, info):
            file.seek(min(start, info.bytes))
            return file.read(max(0, min(length, info.bytes - start)))

    def get_file(self, key: str, path: Path) -> None:
        with self._open_object(key) as (file, _):
            part = path.with_name(f".{secrets.token_hex(8)}.part")
            try:
                with open(part, "xb") as copy:
                    _copy(file, copy)
                os.replace(part, path)
            except OSError as error:
                raise StoreError(_failure(f"copy key {key!r} of {self.url} to {path}", error)) from error
            finally:
                _unlink(part)

    def stat(self, key: str) -> ObjectInfo:
        folders, name = _split(key)
        with self._reading("look up", key), open_folder(self._root, folders) as folder:
            return self._info(key, os.stat(name, dir_fd=folder, follow_symlinks=False))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._list(prefix)

    def delete(self, key: str) -> None:
        folders, name = _split(key)
        try:
            with self._reading("delete", key), open_folder(self._root, folders) as folder:
                self._info(key, os.stat(name, dir_fd=folder, follow_symlinks=False))
                os.unlink(name, dir_fd=folder)
                os.fsync(folder)
        except NotFoundError:
            return

    # Writing

    def _check_target(self, key: str, folder: int, name: str, if_absent: bool) -> None:
        """Refuse what can be refused before any byte is written."""
        try:
            self._info(key, os.stat(name, dir_fd=folder, follow_symlinks=False))
        except FileNotFoundError:
            return
        except NotFoundError as error:
            raise UsageError(f"key {key!r} is a folder of other keys in {self.url}; choose another") from error
        if if_absent:
            raise self._conflict(key)

    def _link(self, key: str, staging: int, staged: str, folder: int, name: str) -> None:
        try:
            os.link(staged, name, src_dir_fd=staging, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError as error:
            # Over NFS a lost reply makes the client link twice, and the second link finds the first.
            if os.stat(staged, dir_fd=staging).st_nlink < 2:
                raise self._conflict(key) from error
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            raise StoreError(
                f"cannot write key {key!r} of {self.url}: no hard links there ({error.strerror}), so two "
                "writers could both win; use a file system that has them, such as ext4, xfs, tmpfs or NFS"
            ) from error

    def _conflict(self, key: str) -> ConflictError:
        return ConflictError(f"key {key!r} exists already in {self.url}; another writer was first")

    @contextmanager
    def _staged(self, data: bytes | IO[bytes]) -> Iterator[tuple[int, str]]:
        """Write ``data`` durably where no reader sees it; yield directory and file name, removed at exit."""
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        with open_folder(self._root, [STAGING], create=True) as staging:
            self._sweep(staging)
            try:
                with open(os.open(name, _CREATE, 0o666, dir_fd=staging), "wb") as file:
                    if isinstance(data, bytes):
                        file.write(data)
                    else:
                        _copy(data, file)
                    file.flush()
                    os.fsync(file.fileno())
                yield staging, name
            finally:
                _unlink(name, staging)

    def _sweep(self, staging: int) -> None:
        if self._swept:
            return
        self._swept = True
        oldest = time.time() - STALE_STAGING_SECONDS
        for name in os.listdir(staging):
            try:
                if os.stat(name, dir_fd=staging, follow_symlinks=False).st_mtime < oldest:
                    os.unlink(name, dir_fd=staging)
            except (FileNotFoundError, PermissionError, IsADirectoryError):
                continue  # swept by another writer meanwhile, or not ours to remove

    # Reading

    @contextmanager
    def _open_object(self, key: str) -> Iterator[tuple[IO[bytes], ObjectInfo]]:
        folders, name = _split(key)
        with self._reading("read", key):
            with open_folder(self._root, folders) as folder:
                # Before opening, so that a link or a pipe is refused by its name; the open refuses them too.
                self._info(key, os.stat(name, dir_fd=folder, follow_symlinks=False))
                opened = os.open(name, _READ, dir_fd=folder)
            with open(opened, "rb") as file:
                yield file, self._info(key, os.fstat(opened))

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        path, slash, begin = prefix.rpartition("/")
        with ExitStack() as stack:
            try:
                with self._reading("list", prefix):
                    folder = stack.enter_context(open_folder(self._root, path.split("/") if slash else []))
            except NotFoundError:
                return
            yield from self._list_folder(folder, path + slash, begin)

    def _list_folder(self, folder: int, path: str, begin: str) -> Iterator[ObjectInfo]:
        with self._reading("list", path), os.scandir(folder) as entries:
            # With its slash a directory sorts where its keys do: after "a-b" and "a.b", before "a0".
            names = [
                entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "")
                for entry in entries
                if entry.name.startswith(begin)
            ]
        names.sort()
        for name in names:
            key = path + name
            if not _is_key(key.removesuffix("/")):
                continue  # staging, or a file that no put has made
            try:
                if not name.endswith("/"):
                    yield from self._list_file(folder, key, name)
                elif len(key) < MAX_KEY_BYTES:
                    yield from self._list_below(folder, key, name.removesuffix("/"))
            except NotFoundError:
                continue  # deleted while listing

    def _list_file(self, folder: int, key: str, name: str) -> Iterator[ObjectInfo]:
        with self._reading("list", key):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            info = self._info(key, found) if stat.S_ISREG(found.st_mode) else None
        if info is not None:
            yield info

    def _list_below(self, folder: int, path: str, name: str) -> Iterator[ObjectInfo]:
        with self._reading("list", path):
            below = enter(folder, name)
        try:
            yield from self._list_folder(below, path, "")
        finally:
            os.close(below)

    def _info(self, key: str, found: os.stat_result) -> ObjectInfo:
        refuse_link(f"{self.url}/{key}", found)
        if stat.S_ISDIR(found.st_mode):
            raise NotFoundError(f"no object {key!r} in {self.url}; it is a folder of other keys")
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"key {key!r} of {self.url} is not a regular file; remove it")
        return ObjectInfo(key, found.st_size, found.st_mtime)

    # Errors

    @contextmanager
    def _reading(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self._root.exists():
                raise NotFoundError(f"no object {key!r}: {self.url} does not exist; check the bucket URL") from error
            if not self._root.is_dir():
                raise StoreError(_failure(f"{action} key {key!r} of {self.url}", error)) from error
            raise NotFoundError(f"no object {key!r} in {self.url}") from error
        except OSError as error:
            raise StoreError(_failure(f"{action} key {key!r} of {self.url}", error)) from error

    @contextmanager
    def _writing(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(_failure(f"{action} key {key!r} of {self.url}", error)) from error


def _split(key: str) -> tuple[list[str], str]:
    *folders, name = check_key(key).split("/")
    return folders, name


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except UsageError:
        return False
    return True


def _failure(action: str, error: OSError) -> str:
    mend = _MENDS.get(error.errno or 0, "check the disk or mount it is on and try again")
    return f"cannot {action}: {error.strerror or error}; {mend}"


def _open_source(key: str, path: Path) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UsageError(f"cannot read {path} to put it under key {key!r}: {error.strerror}; check the path") from error


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    while chunk := source.read(COPY_BYTES):
        target.write(chunk)


def _unlink(path: str | Path, folder: int | None = None) -> None:
    try:
        os.unlink(path, dir_fd=folder)
    except OSError:
        pass  # renamed already, or the sweep of a later writer gets it

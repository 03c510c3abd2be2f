"""S3, Google Cloud Storage, Azure Blob Storage and this process's memory, through obstore."""

import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo, check_key, check_prefix, check_range, check_size
from vllm_delta_sync.bucket.factory import StoreLocation
from vllm_delta_sync.bucket.middleware.ranged import remove
from vllm_delta_sync.bucket.obstore_clients import (
    CREATE_BYTES,
    MOST_PARTS,
    MOST_PARTS_AT_ONCE,
    PART_BYTES,
    Clients,
    clients_of,
    http_clients,
)
from vllm_delta_sync.bucket.obstore_errors import RAISED, Cause, FailedRequest, translated
from vllm_delta_sync.bucket.transfer_observers import report_bytes
from vllm_delta_sync.errors import (
    AccessError,
    ConflictError,
    LimitError,
    NotFoundError,
    StoreError,
    UnavailableError,
    UsageError,
)
from vllm_delta_sync.redaction import public_url, redact
from vllm_delta_sync.settings import StoreOptions

PIECE_BYTES = 1024 * 1024
"""How much comes at once at least, but for the end: what limits of bandwidth go by."""
_LARGEST = (1 << 63) - 1


class ObjectReader(Bucket):
    """The reading half of a bucket whose keys are below ``root`` in a store. A transfer that is cut goes on where it
    was, once or twice, if the object is still the same; then it is UnavailableError.

    Args:
        root: without slashes at its ends; may be empty. scheme: whose names of variables errors tell.
    """

    def __init__(self, url: str, scheme: str, root: str, clients: Clients) -> None:
        self.url = url
        self._scheme = scheme
        self._root = f"{root}/" if root else ""
        self._clients = clients
        self._answered = False

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        path = self._path(key)
        with self._asking(f"read key {key!r}", key):
            found = self._clients.reading.get(path)
            size = found.meta["size"]
            check_size(key, size, max_bytes)
            try:
                data = b"".join(_pieces(found))
            except MemoryError as error:
                raise LimitError(
                    f"object {key!r} has {size} bytes, for which this process has no memory; not read"
                ) from error
        self._check_whole(key, len(data), size)
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(key, start, length)
        path = self._path(key)
        if length == 0 or start >= _LARGEST:
            # Not a range for HTTP, but whether the object is there counts.
            self.stat(key)
            return b""
        with self._asking(f"read key {key!r}", key):
            try:
                found = self._clients.reading.get(path, options={"range": (start, min(start + length, _LARGEST))})
            except RAISED as error:
                if "status code: 416" in str(error) or "StartTooLarge" in str(error):
                    return b""
                raise
            first, end = found.range
            data = b"".join(_pieces(found))
        if first != start:
            raise StoreError(
                f"cannot read key {key!r} of {self.url}: asked for bytes from {start}, the store sent those from "
                f"{first}; use a store that knows Range requests"
            )
        self._check_whole(key, len(data), end - first)
        return data

    def get_file(self, key: str, path: Path) -> None:
        source = self._path(key)
        part = path.with_name(f".{secrets.token_hex(8)}.part")
        with self._asking(f"read key {key!r}", key):
            found = self._clients.reading.get(source)
        try:
            with open(part, "xb") as copy:
                size = self._copy(key, found, copy, path)
            self._check_whole(key, size, found.meta["size"])
            os.replace(part, path)
        except OSError as error:
            raise self._no_copy(key, path, error) from error
        finally:
            remove(part)

    def stat(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._asking(f"look up key {key!r}", key):
            return info_of(key, self._clients.reading.head(path))

    def _copy(self, key: str, found: Any, copy: IO[bytes], path: Path) -> int:
        """Write what comes to a file; how many bytes."""
        size = 0
        with self._asking(f"read key {key!r}", key):
            for piece in _pieces(found):
                try:
                    size += copy.write(piece)
                except OSError as error:
                    raise self._no_copy(key, path, error) from error
        return size

    def _no_copy(self, key: str, path: Path, error: OSError) -> StoreError:
        return StoreError(
            f"cannot copy key {key!r} of {self.url} to {path}: {error.strerror or error}; check that path and the "
            "space on its disk"
        )

    def _check_whole(self, key: str, came: int, size: int) -> None:
        if came != size:
            raise UnavailableError(f"cannot read key {key!r} of {self.url}: {came} of {size} bytes came; try again")

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    @contextmanager
    def _asking(self, action: str, key: str, writing: bool = False, overwriting: bool = False) -> Iterator[None]:
        """Turn what obstore raises into the project's errors."""
        try:
            yield
        except RAISED as error:
            request = FailedRequest(action, key, self.url, self._scheme, writing, self._answered, overwriting)
            failure = translated(error, request)
            # It has the store's whole answer, which may repeat the request, and is shown below ``failure``.
            error.args = tuple(redact(said) if isinstance(said, str) else said for said in error.args)
            # A store that says that there is no such object has accepted the credentials.
            self._answered = self._answered or isinstance(failure, NotFoundError)
            if isinstance(failure, AccessError):
                self._clients.renew()
            raise failure from error
        self._answered = True


def info_of(key: str, meta: Any) -> ObjectInfo:
    return ObjectInfo(key, meta["size"], meta["last_modified"].timestamp())


def _pieces(found: Any) -> Iterator[Any]:
    """The body of an answer, piece by piece; each is told of when it is here."""
    for piece in found.stream(min_chunk_size=PIECE_BYTES):
        report_bytes(len(piece))
        yield piece


LIST_ITEMS = 50
"""Taken from a listing at once. Stores send pages of 1000; a next one is asked for when these run out."""
_CHARACTERS = "-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"


class ObjectStoreBucket(ObjectReader):
    """Objects below a prefix of a bucket of ``s3://``, ``gs://``, ``az://`` or ``memory://``.

    Credentials and endpoints come from the environment, as obstore reads it: ``AWS_*``, ``GOOGLE_*``, ``AZURE_*``; for
    profiles of AWS boto3 has to be installed. Those that a role gives (web identity, container, instance, profile) are
    renewed before they run out.

    **Create-if-absent** is exact up to ``CREATE_BYTES`` (64 MiB), which one request puts; manifests are far smaller.
    For a larger object the key is looked up first and parts are uploaded then, because obstore cannot make the
    completion of an upload conditional: two writers at one moment may both be told that they were first. Where the key
    names the content, as below ``objects/``, both have put the same.

    **Parts.** Larger objects go up in parts of 8 MiB, at most ``min(8, store_connections)`` at once, and show when the
    last one is there. A writer that dies leaves parts that nobody sees and the store charges for: give the bucket a
    lifecycle rule that aborts incomplete uploads after a day.

    **Order.** Azure accounts with hierarchical namespace and S3 directory buckets list in an order of their own: from
    ``az://`` and buckets whose name ends with ``--x-s3`` the keys of a folder are gathered and sorted first.

    In ``memory://NAME`` buckets of one name are the same, for as long as the process lives.

    Raises:
        UsageError: the environment has something that obstore does not take, or lacks the account of ``az://``.
    """

    def __init__(self, place: StoreLocation, options: StoreOptions) -> None:
        super().__init__(place.url, place.scheme, place.prefix, clients_of(place, options))
        self._parts_at_once = min(MOST_PARTS_AT_ONCE, options.store_connections)
        # https://cloud.google.com/storage/quotas: one write to the same object name per second.
        self.overwrite_seconds = 1.0 if place.scheme == "gs" else 0.0
        self._sorted = place.scheme != "az" and not place.authority.endswith("--x-s3")

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        path = self._path(key)
        limit = CREATE_BYTES if if_absent else PART_BYTES
        with ExitStack() as stack:
            source = _PutSource(key, data, stack)
            if source.size is None or source.size <= limit:
                data = data if isinstance(data, bytes) else source.take(limit + 1)
                if len(data) <= limit:
                    self._put_whole(key, path, data, if_absent)
                    return
            if if_absent and self._exists(key):
                raise ConflictError(f"key {key!r} exists already in {self.url}; another writer was first")
            self._put_parts(key, path, source)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._list(prefix)

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            with self._asking(f"delete key {key!r}", key):
                self._clients.reading.delete(path)
        except NotFoundError:
            return

    def _put_whole(self, key: str, path: str, data: bytes, if_absent: bool) -> None:
        self._ask_first(key)
        report_bytes(len(data))
        client = self._clients.creating if if_absent else self._clients.writing
        with self._asking(f"write key {key!r}", key, writing=True, overwriting=not if_absent):
            client.put(path, data, mode="create" if if_absent else "overwrite", use_multipart=False)

    def _put_parts(self, key: str, path: str, source: "_PutSource") -> None:
        self._ask_first(key)
        size = max(PART_BYTES, -(-(source.size or 0) // MOST_PARTS))
        with self._asking(f"write key {key!r}", key, writing=True, overwriting=True):
            self._clients.writing.put(
                path, source.pieces(), use_multipart=True, chunk_size=size, max_concurrency=self._parts_at_once
            )

    def _ask_first(self, key: str) -> None:
        """Whatever does not answer at all is found out by a client that does not wait as long as writing does: that
        goes for who gives credentials too, or for nobody at the address where a cloud's machines get them."""
        if self._answered:
            return
        try:
            self.stat(key)
        except NotFoundError:
            return
        except StoreError as error:
            if not isinstance(error.__cause__, Exception) or Cause.of(error.__cause__).status is None:
                raise

    def _exists(self, key: str) -> bool:
        try:
            self.stat(key)
        except NotFoundError:
            return False
        return True

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        last = ""
        for item in self._below(prefix):
            if item.key > prefix and not item.key.startswith(prefix):
                return
            if not item.key.startswith(prefix) or not _is_key(item.key):
                continue
            # Consoles make empty objects called "folder/", which obstore shows as "folder".
            if item.bytes == 0 and not self._exists(item.key):
                continue
            if item.key <= last:
                raise StoreError(
                    f"cannot list {self.url}: the store names {item.key!r} after {last!r}; use a store that lists "
                    "in the order of the keys"
                )
            last = item.key
            yield item

    def _below(self, prefix: str) -> Iterator[ObjectInfo]:
        """What is in the folder that ``prefix`` goes into, ascending; from about the first that starts with it."""
        folder, slash, begin = prefix.rpartition("/")
        top = (self._root + folder).removesuffix("/")
        start = _before(begin)
        offset = f"{self._root}{folder}{slash}{start}" if start and self._sorted else None
        # Stores list by folder here, and know no other beginning of a key than an offset.
        found = self._pages(prefix, top or None, offset)
        return found if self._sorted else iter(sorted(found, key=lambda item: item.key))

    def _pages(self, prefix: str, folder: str | None, offset: str | None) -> Iterator[ObjectInfo]:
        pages: Any = None
        while True:
            try:
                with self._asking(f"list keys {prefix!r}", ""):
                    pages = pages or self._clients.reading.list(folder, offset=offset, chunk_size=LIST_ITEMS)
                    page = next(pages, None)
            except NotFoundError:
                return
            if page is None:
                return
            for meta in page:
                yield info_of(meta["path"].removeprefix(self._root), meta)


class _PutSource:
    """What a put sends. obstore takes the pieces in the thread of the call, and joins them without copying.

    Attributes:
        size: in bytes; None of what is no regular file, such as a pipe.
    """

    def __init__(self, key: str, data: bytes | Path, stack: ExitStack) -> None:
        self._name = "the data" if isinstance(data, bytes) else str(data)
        self._key = key
        self._taken = b""
        self.size: int | None = None
        if isinstance(data, bytes):
            self._file: IO[bytes] = io.BytesIO(data)
            self.size = len(data)
            return
        try:
            self._file = stack.enter_context(data.open("rb"))
            found = os.fstat(self._file.fileno())
        except OSError as error:
            raise UsageError(
                f"cannot read {data} to put it under key {key!r}: {error.strerror}; check the path"
            ) from error
        if stat.S_ISREG(found.st_mode):
            self.size = found.st_size

    def take(self, count: int) -> bytes:
        """The first bytes, ``count`` of them if there are so many. They come again with the pieces."""
        self._taken = self._read(count)
        return self._taken

    def pieces(self) -> Iterator[bytes]:
        """All that there is; each piece is told of as moved when it is asked for."""
        for start in range(0, len(self._taken), PIECE_BYTES):
            piece = self._taken[start : start + PIECE_BYTES]
            report_bytes(len(piece))
            yield piece
        while piece := self._read(PIECE_BYTES):
            report_bytes(len(piece))
            yield piece

    def _read(self, count: int) -> bytes:
        try:
            return self._file.read(count)
        except OSError as error:
            raise StoreError(
                f"cannot read {self._name} to put it under key {self._key!r}: {error.strerror or error}; check its disk"
            ) from error


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except UsageError:
        return False
    return True


def _before(begin: str) -> str:
    """Something close before all that starts with ``begin`` and has the characters of keys; "" if there is nothing."""
    lower = max((character for character in _CHARACTERS if character < begin[-1:]), default="")
    start = begin[:-1] + (f"{lower}zzzzzzzz" if lower else "")
    return "" if start in (".", "..") else start


class HttpBucket(ObjectReader):
    """Objects at ``URL/key``, read by GET, with Range for parts of them, and HEAD. Read-only, and cannot be listed.

    The server has to send Content-Length, and to answer ranges where those are asked for (StoreError otherwise).
    ``stat`` says 0.0 for the time of an object if there is no Last-Modified.

    Raises:
        UsageError: the URL is none of http:// or https://, or has a user, a query or a fragment.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        if not url.startswith(("http://", "https://")) or public_url(url) != url:
            raise UsageError(f"mirror URL {public_url(url)!r} cannot be used: write https://host/path and no more")
        url = url.rstrip("/")
        super().__init__(url, url.partition(":")[0], "", http_clients(url, options))

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        self._refuse(f"write key {key!r}")

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._refuse(f"list keys {prefix!r}")

    def delete(self, key: str) -> None:
        self._refuse(f"delete key {key!r}")

    def _refuse(self, action: str) -> NoReturn:
        raise UsageError(f"cannot {action} of {self.url}: a web server is only read; give the bucket it is a copy of")

"""``ObjectStoreBucket``: a bucket in S3, Google Cloud Storage, Azure Blob Storage or memory, through obstore.

``HttpBucket`` reads a copy of a bucket behind a web server; it may serve as a mirror. Both inherit their reads from
``ObjectReader``.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from vllm_delta_sync.bucket.base import (
    Bucket,
    ObjectInfo,
    ReadOnlyBucket,
    check_range,
    check_size,
    conflict_error,
    exists,
    is_key,
    read_pieces,
    report_bytes,
    size_of_source,
)
from vllm_delta_sync.bucket.obstore_clients import (
    CREATE_BYTES,
    MOST_PARTS,
    MOST_PARTS_AT_ONCE,
    PART_BYTES,
    Clients,
    http_clients,
    make_clients,
)
from vllm_delta_sync.bucket.obstore_errors import CLIENT_ERRORS, Cause, FailedRequest, translate_error
from vllm_delta_sync.errors import AccessError, LimitError, NotFoundError, StoreError, UnavailableError, UsageError
from vllm_delta_sync.logs import public_url, redact
from vllm_delta_sync.settings import StoreOptions
from vllm_delta_sync.urls import StoreLocation, check_key

PIECE_BYTES = 1024 * 1024
"""Minimum size of each piece of a transfer but the last. Bandwidth limits apply once per piece."""
_LARGEST = (1 << 63) - 1


class ObjectReader(Bucket):
    """Reads objects whose keys are below ``root`` in a store.

    Each request is sent once; an interrupted transfer raises UnavailableError.

    Args:
        root: without slashes at its ends; may be empty.
        scheme: of the URL; error messages name the environment variables of that store.
    """

    def __init__(self, url: str, scheme: str, root: str, clients: Clients) -> None:
        self.url = url
        self._scheme = scheme
        self._root = f"{root}/" if root else ""
        self._clients = clients
        self._answered = False

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        path = self._path(key)
        with self._translate_errors(f"read key {key!r}", key):
            found = self._clients["reading"].get(path)
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
            # HTTP has no empty ranges, but a missing object must still raise NotFoundError.
            self.stat(key)
            return b""
        with self._translate_errors(f"read key {key!r}", key):
            try:
                found = self._clients["reading"].get(path, options={"range": (start, min(start + length, _LARGEST))})
            except CLIENT_ERRORS as error:
                if "status code: 416" in str(error) or "StartTooLarge" in str(error):
                    return b""
                raise
            first, end = found.range
            data = b"".join(_pieces(found))
        if first != start:
            raise StoreError(
                f"cannot read key {key!r} of {self.url}: asked for bytes from {start}, the store sent bytes from "
                f"{first}; use a store that supports Range requests"
            )
        self._check_whole(key, len(data), end - first)
        return data

    def stat(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._translate_errors(f"look up key {key!r}", key):
            return info_of(key, self._clients["reading"].head(path))

    def _check_whole(self, key: str, received: int, size: int) -> None:
        if received != size:
            raise UnavailableError(
                f"cannot read key {key!r} of {self.url}: received {received} of {size} bytes; try again"
            )

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    @contextmanager
    def _translate_errors(
        self, action: str, key: str, writing: bool = False, overwriting: bool = False
    ) -> Iterator[None]:
        """Raise this project's errors in place of obstore's."""
        try:
            yield
        except CLIENT_ERRORS as error:
            request = FailedRequest(action, key, self.url, self._scheme, writing, self._answered, overwriting)
            failure = translate_error(error, request)
            # A traceback of ``failure`` shows this error too; its text has the store's answer, which may quote secrets
            # of the request.
            error.args = tuple(redact(text) if isinstance(text, str) else text for text in error.args)
            # A store that answers "no such object" has accepted the credentials.
            self._answered = self._answered or isinstance(failure, NotFoundError)
            if isinstance(failure, AccessError):
                self._clients.renew()
            raise failure from error
        except BaseException as error:  # a panic of obstore's is no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise StoreError(
                f"cannot {action} of {self.url}: its client failed ({str(error)[:200]}); check store_endpoint and the "
                "variables of that store in the environment"
            ) from None
        self._answered = True


def info_of(key: str, meta: Any) -> ObjectInfo:
    return ObjectInfo(key, meta["size"], meta["last_modified"].timestamp())


def _pieces(found: Any) -> Iterator[Any]:
    """Yield the body of an answer in pieces."""
    return _reported(found.stream(min_chunk_size=PIECE_BYTES))


def _reported(pieces: Iterable[Any]) -> Iterator[Any]:
    """Report each piece to the transfer observers when it is taken."""
    for piece in pieces:
        report_bytes(len(piece))
        yield piece


LIST_ITEMS = 50
"""Keys taken from a listing at once. Stores send pages of 1000; the next one is requested when the first runs out."""
_CHARACTERS = "-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"


class ObjectStoreBucket(ObjectReader):
    """Objects below a prefix of a bucket of ``s3://``, ``gs://``, ``az://`` or ``memory://``.

    Credentials and endpoints come from the environment, as obstore reads it: ``AWS_*``, ``GOOGLE_*``, ``AZURE_*``. AWS
    profiles require boto3. Credentials of roles (web identity, container, instance, profile) are renewed before they
    expire.

    **Create-if-absent** is exact up to ``CREATE_BYTES`` (64 MiB), the size of one request; manifests are far smaller.
    For a larger object the key is looked up first and the parts are uploaded afterwards, because obstore cannot make
    the completion of an upload conditional: two simultaneous writers may both succeed. Under ``objects/``, where the
    key names the content, both have written the same bytes.

    **Parts.** Larger objects are uploaded in parts of 8 MiB, at most ``min(8, store_connections)`` at once, and become
    visible when the last part is complete. A writer that dies leaves invisible parts that the store charges for: give
    the bucket a lifecycle rule that aborts incomplete uploads after a day.

    **Order.** Azure accounts with hierarchical namespace and S3 directory buckets do not list by key. So the listing of
    a folder is sorted in memory for ``az://`` and for buckets whose name ends with ``--x-s3``.

    All ``memory://NAME`` buckets of one name in a process are the same bucket.

    Raises:
        UsageError: obstore refuses a value of the environment, or the account of ``az://`` is missing.
    """

    def __init__(self, location: StoreLocation, options: StoreOptions) -> None:
        super().__init__(location.url, location.scheme, location.prefix, make_clients(location, options))
        self._parts_at_once = min(MOST_PARTS_AT_ONCE, options.store_connections)
        # https://cloud.google.com/storage/quotas: one write to the same object name per second.
        self.overwrite_seconds = 1.0 if location.scheme == "gs" else 0.0
        self._sorted = location.scheme != "az" and not location.authority.endswith("--x-s3")

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        path = self._path(key)
        limit = CREATE_BYTES if if_absent else PART_BYTES
        if isinstance(data, bytes) and len(data) <= limit:
            self._put_whole(key, path, data, if_absent)
            return
        pieces, size = read_pieces(key, data, PIECE_BYTES), size_of_source(key, data)
        if size is None or size <= limit:
            # The size of a pipe shows only when it is read.
            first = list(islice(pieces, limit // PIECE_BYTES + 1))
            whole = b"".join(first)
            if len(whole) <= limit:
                self._put_whole(key, path, whole, if_absent)
                return
            pieces = chain(first, pieces)
        if if_absent and exists(self, key):
            raise conflict_error(self.url, key)
        self._put_parts(key, path, pieces, max(PART_BYTES, -(-(size or 0) // MOST_PARTS)))

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            with self._translate_errors(f"delete key {key!r}", key):
                self._clients["reading"].delete(path)
        except NotFoundError:
            return

    def _put_whole(self, key: str, path: str, data: bytes, if_absent: bool) -> None:
        self._probe(key)
        report_bytes(len(data))
        with self._translate_errors(f"write key {key!r}", key, writing=True, overwriting=not if_absent):
            self._clients["writing"].put(path, data, mode="create" if if_absent else "overwrite", use_multipart=False)

    def _put_parts(self, key: str, path: str, pieces: Iterable[bytes], size: int) -> None:
        self._probe(key)
        with self._translate_errors(f"write key {key!r}", key, writing=True, overwriting=True):
            # obstore takes the pieces in the thread of the call.
            self._clients["uploading"].put(
                path, _reported(pieces), use_multipart=True, chunk_size=size, max_concurrency=self._parts_at_once
            )

    def _probe(self, key: str) -> None:
        """Look the key up before the first write with the reading client, whose timeout is shorter.

        This detects an unreachable store or credential service sooner, such as the metadata address outside a cloud.
        """
        if self._answered:
            return
        try:
            self.stat(key)
        except NotFoundError:
            return
        except StoreError as error:
            if not isinstance(error.__cause__, Exception) or Cause.of(error.__cause__).status is None:
                raise

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        last = ""
        for item in self._list_folder(prefix):
            if item.key > prefix and not item.key.startswith(prefix):
                return
            if not item.key.startswith(prefix) or not is_key(item.key):
                continue
            # Web consoles create empty objects called "folder/", which obstore lists as "folder".
            if item.bytes == 0 and not exists(self, item.key):
                continue
            if item.key <= last:
                raise StoreError(
                    f"cannot list {self.url}: the store lists {item.key!r} after {last!r}; use a store that lists "
                    "keys in order"
                )
            last = item.key
            yield item

    def _list_folder(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects of the folder that contains ``prefix``, ascending, from near the first match on."""
        folder, slash, name_start = prefix.rpartition("/")
        top = (self._root + folder).removesuffix("/")
        start = _offset_before(name_start)
        offset = f"{self._root}{folder}{slash}{start}" if start and self._sorted else None
        # obstore lists whole folders; an offset is the only way to skip keys.
        found = self._pages(prefix, top or None, offset)
        return found if self._sorted else iter(sorted(found, key=lambda item: item.key))

    def _pages(self, prefix: str, folder: str | None, offset: str | None) -> Iterator[ObjectInfo]:
        pages: Any = None
        while True:
            try:
                with self._translate_errors(f"list keys {prefix!r}", ""):
                    pages = pages or self._clients["reading"].list(folder, offset=offset, chunk_size=LIST_ITEMS)
                    page = next(pages, None)
            except NotFoundError:
                return
            if page is None:
                return
            for meta in page:
                yield info_of(meta["path"].removeprefix(self._root), meta)


def _offset_before(prefix: str) -> str:
    """Return a string that sorts shortly before every key that starts with ``prefix``; "" if there is none."""
    lower = max((character for character in _CHARACTERS if character < prefix[-1:]), default="")
    start = prefix[:-1] + (f"{lower}zzzzzzzz" if lower else "")
    return "" if start in (".", "..") else start


class HttpBucket(ReadOnlyBucket, ObjectReader):
    """Objects at ``URL/key``, read by GET, GET with Range, and HEAD. Read-only; cannot be listed.

    The server must send Content-Length and support Range; otherwise reads raise StoreError. ``stat`` returns 0.0 as
    the time of an object without Last-Modified.

    Raises:
        UsageError: the URL is not http:// or https://, or has a user, a query or a fragment.
    """

    why_read_only = "a web server is read-only; give the bucket it is a copy of"

    def __init__(self, url: str, options: StoreOptions) -> None:
        if not url.startswith(("http://", "https://")) or public_url(url) != url:
            raise UsageError(
                f"mirror URL {public_url(url)!r} is invalid; write https://host/path without user, query or fragment"
            )
        url = url.rstrip("/")
        super().__init__(url, url.partition(":")[0], "", http_clients(url, options))

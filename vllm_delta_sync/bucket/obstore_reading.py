"""Reading through a client of obstore: what object stores and HTTP servers have in common."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo, check_key, check_range, check_size
from vllm_delta_sync.bucket.middleware.ranged import remove
from vllm_delta_sync.bucket.obstore_clients import Clients
from vllm_delta_sync.bucket.obstore_errors import RAISED, FailedRequest, translated
from vllm_delta_sync.bucket.transfer_observers import moved
from vllm_delta_sync.errors import AccessError, LimitError, NotFoundError, StoreError, UnavailableError
from vllm_delta_sync.redaction import redact

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
        moved(len(piece))
        yield piece

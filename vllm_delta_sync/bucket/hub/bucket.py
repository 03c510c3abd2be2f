"""``HubBucket``: a storage bucket of the Hugging Face Hub, ``hf://buckets/NAMESPACE/BUCKET/run``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_delta_sync.bucket.base import (
    Bucket,
    ObjectInfo,
    check_range,
    check_size,
    conflict_error,
    is_key,
    read_pieces,
    report_bytes,
    size_of_source,
)
from vllm_delta_sync.bucket.hub.api import HubApi, HubContent
from vllm_delta_sync.bucket.hub.errors import HubLocation, RefusedError, translate_hub_error
from vllm_delta_sync.bucket.hub.xet import upload
from vllm_delta_sync.errors import NotFoundError, UnavailableError, UsageError
from vllm_delta_sync.settings import StoreOptions
from vllm_delta_sync.urls import StoreLocation, check_key

_BLOCK_BYTES = 1 << 20
_CHECK_FIRST_BYTES = 1 << 23
"""Above this size, create-if-absent also checks before the upload that the key is free."""


class HubBucket(Bucket):
    """Objects as files below a folder of a Hub bucket.

    The bucket must exist. The token is that of ``huggingface_hub.get_token``, looked up for each request. The content
    is uploaded first and named afterwards, so readers see a whole object or none.

    The Hub's API has no create-if-absent. The key is looked up before the write and after it: a writer that was
    overtaken gets ConflictError, but two writers whose requests overlap may both succeed, and the last one's object
    remains.
    """

    supports_conditional_put = False

    def __init__(self, location: StoreLocation, options: StoreOptions) -> None:
        """Raises UsageError: the URL does not name a bucket."""
        parts = location.prefix.split("/")
        if location.authority != "buckets" or len(parts) < 2:
            raise UsageError(f"bucket URL {location.url!r} names no bucket: write hf://buckets/NAMESPACE/BUCKET/run")
        self.url = location.url
        self._root = "".join(f"{part}/" for part in parts[2:])
        self._location = HubLocation(self.url, "/".join(parts[:2]))
        self._api = HubApi(self._location.id, options)
        self._options = options

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        path = self._path(key)
        size = size_of_source(key, data) or 0
        with self._translate_errors(f"write key {key!r}"):
            if if_absent and size > _CHECK_FIRST_BYTES:
                self._check_has(key, path, None)
            hash = upload(self._api, self._options, read_pieces(key, data, _BLOCK_BYTES), size)
            if if_absent:
                self._check_has(key, path, None)
            self._name(path, hash)
            if if_absent:
                self._check_has(key, path, hash)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        path = self._path(key)
        with self._translate_errors(f"read key {key!r}", missing=key), self._api.open_file(path) as opened:
            if opened.size is not None:
                check_size(key, opened.size, max_bytes)
            data = b"".join(self._limited(key, opened, max_bytes))
            if opened.size is not None and len(data) != opened.size:
                raise UnavailableError(f"received {len(data)} of {opened.size} bytes of key {key!r}; try again")
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(key, start, length)
        path = self._path(key)
        if not length:
            self.stat(key)
            return b""
        with self._translate_errors(f"read key {key!r}", missing=key):
            try:
                with self._api.open_file(path, start, length) as opened:
                    return b"".join(self._limited(key, opened, length))
            except RefusedError as error:
                if error.status != 416:
                    raise
                return b""

    def stat(self, key: str) -> ObjectInfo:
        with self._translate_errors(f"look up key {key!r}", missing=key):
            file = self._api.info(self._path(key))
        if file is None:
            raise self._missing(key)
        return ObjectInfo(key, file.bytes, file.modified)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._translate_errors(f"delete key {key!r}"):
            try:
                self._api.remove(path)
            except RefusedError as error:
                if error.no_bucket or (error.status in (404, 422) and self._api.info(path) is None):
                    return
                raise

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        begin = self._root + prefix
        with self._translate_errors(f"list keys {prefix!r}"):
            try:
                # The Hub does not document the order of a listing.
                files = sorted(self._api.tree(begin.rpartition("/")[0]), key=lambda file: file.path)
            except RefusedError as error:
                if not error.no_bucket and not error.no_file:
                    raise
                return
        for file in files:
            key = file.path.removeprefix(self._root)
            if file.path.startswith(begin) and is_key(key):
                yield ObjectInfo(key, file.bytes, file.modified)

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    # Writing

    def _name(self, path: str, hash: str) -> None:
        try:
            self._api.add(path, hash)
        except RefusedError:
            # The bucket may have been deleted and created again since the upload.
            self._api.forget()
            raise

    def _check_has(self, key: str, path: str, hash: str | None) -> None:
        """Raise ConflictError unless the key's file has the content of this hash; None: unless there is no file."""
        file = self._api.info(path)
        if (None if file is None else file.hash) != hash:
            raise conflict_error(self.url, key)

    # Reading

    def _limited(self, key: str, opened: HubContent, max_bytes: int | None) -> Iterator[bytes]:
        """Yield the blocks of an object; raises LimitError beyond ``max_bytes``, even if the Hub reported no size."""
        count = 0
        for block in opened.blocks:
            count += len(block)
            check_size(key, count, max_bytes)
            report_bytes(len(block))
            yield block

    def _missing(self, key: str) -> NotFoundError:
        return NotFoundError(f"no object {key!r} in {self.url}")

    @contextmanager
    def _translate_errors(self, action: str, missing: str | None = None) -> Iterator[None]:
        """Raise this project's errors; status 404 is NotFoundError if ``missing`` names a key."""
        try:
            yield
        except RefusedError as error:
            if missing is not None and error.no_bucket:
                raise NotFoundError(translate_hub_error(error, action, self._location).message) from error
            if missing is not None and error.no_file:
                raise self._missing(missing) from error
            raise translate_hub_error(error, action, self._location) from error
        except Exception as error:  # noqa: BLE001  three libraries raise theirs and builtins: all are translated
            found = translate_hub_error(error, action, self._location)
            raise found from (None if found is error else error)

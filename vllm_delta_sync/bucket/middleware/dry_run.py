"""``DryRunBucket``: reads another bucket and redirects all writes to a temporary directory."""

import heapq
from collections.abc import Iterator
from pathlib import Path

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo, conflict_error, exists
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.process_folders import ProcessFolder


class DryRunBucket(Bucket):
    """Reads ``inner`` and keeps puts and deletions in an overlay until it is closed. Use it in one thread."""

    def __init__(self, inner: Bucket) -> None:
        self._inner = inner
        self._folder = ProcessFolder()
        self._overlay = LocalBucket(str(self._folder.path))
        self._deleted: set[str] = set()
        self.url = inner.url

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        if if_absent and exists(self, key):
            raise conflict_error(self.url, key)
        self._overlay.put(key, data)
        self._deleted.discard(key)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self._bucket_of(key).get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._bucket_of(key).get_range(key, start, length)

    def stat(self, key: str) -> ObjectInfo:
        return self._bucket_of(key).stat(key)

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        last = ""
        for item in heapq.merge(self._overlay.list(prefix), self._inner.list(prefix), key=lambda item: item.key):
            if item.key != last and item.key not in self._deleted:
                yield item
            last = item.key

    def delete(self, key: str) -> None:
        self._overlay.delete(key)
        self._deleted.add(key)

    def close(self) -> None:
        self._folder.close()

    def _bucket_of(self, key: str) -> Bucket:
        if key in self._deleted:
            raise NotFoundError(f"no object {key!r} in {self.url}")
        return self._overlay if exists(self._overlay, key) else self._inner

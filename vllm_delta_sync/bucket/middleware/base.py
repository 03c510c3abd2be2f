"""``BucketMiddleware``: the base of all middleware; forwards every call unchanged."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo


class BucketMiddleware(Bucket):
    """A bucket that wraps another one and closes it with itself."""

    def __init__(self, inner: Bucket) -> None:
        self._inner = inner
        self.url = inner.url
        self.supports_conditional_put = inner.supports_conditional_put
        self.overwrite_seconds = inner.overwrite_seconds

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        self._inner.put(key, data, if_absent=if_absent)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self._inner.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._inner.get_range(key, start, length)

    def get_file(self, key: str, path: Path) -> None:
        self._inner.get_file(key, path)

    def stat(self, key: str) -> ObjectInfo:
        return self._inner.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    @contextmanager
    def transfer(self, key: str) -> Iterator[None]:
        with self._inner.transfer(key):
            yield

    def close(self) -> None:
        self._inner.close()


def size_of(data: bytes | Path) -> int:
    """Return the size of a put's data; 0 for an unreadable file, which the put itself reports."""
    if isinstance(data, bytes):
        return len(data)
    try:
        return data.stat().st_size
    except OSError:
        return 0

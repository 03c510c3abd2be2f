"""``LimitedBucket``: limits requests in flight and bandwidth in each direction."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo, check_prefix
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, size_of
from vllm_delta_sync.bucket.middleware.deadline import Pages
from vllm_delta_sync.bucket.middleware.metrics import Tally
from vllm_delta_sync.bucket.threads import SLICE_SECONDS
from vllm_delta_sync.bucket.transfer_observers import observed_by, report_wait
from vllm_delta_sync.settings import StoreOptions

BURST_SECONDS = 1.0
"""After an idle period, this many seconds' worth of bytes passes at full speed."""
PIECE_SECONDS = 0.25
"""Long waits are reported in slices of this length, so that an outer deadline is extended while they last."""


class LimitedBucket(BucketMiddleware):
    """Keeps the calls of this instance within the limits of its options.

    A call beyond ``store_connections`` waits until another one ends. A transfer that is too fast is slowed down as its
    bytes move, or after the call if the store does not report them. ``close`` ends all waits for bandwidth.
    """

    def __init__(self, inner: Bucket, options: StoreOptions) -> None:
        super().__init__(inner)
        self._slots = threading.Semaphore(options.store_connections)
        self._closed = threading.Event()
        self._up = _rate(options.store_upload_limit, self._closed)
        self._down = _rate(options.store_download_limit, self._closed)

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        with self._transfer(self._up) as throttle:
            self._inner.put(key, data, if_absent=if_absent)
        if throttle is not None and not throttle.bytes:
            throttle.on_bytes(size_of(data))

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        with self._transfer(self._down) as throttle:
            data = self._inner.get(key, max_bytes=max_bytes)
        if throttle is not None and not throttle.bytes:
            throttle.on_bytes(len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._transfer(self._down) as throttle:
            data = self._inner.get_range(key, start, length)
        if throttle is not None and not throttle.bytes:
            throttle.on_bytes(len(data))
        return data

    def get_file(self, key: str, path: Path) -> None:
        with self._transfer(self._down) as throttle:
            self._inner.get_file(key, path)
        if throttle is not None and not throttle.bytes:
            throttle.on_bytes(size_of(path))

    def stat(self, key: str) -> ObjectInfo:
        with self._slot():
            return self._inner.stat(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._list(prefix)

    def delete(self, key: str) -> None:
        with self._slot():
            self._inner.delete(key)

    def close(self) -> None:
        self._closed.set()
        super().close()

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        pages = Pages(self._inner, prefix)
        try:
            while page := self._page(pages):
                yield from page
        finally:
            pages.close()

    def _page(self, pages: Pages) -> Sequence[ObjectInfo]:
        with self._slot():
            return pages.read_page()

    @contextmanager
    def _slot(self) -> Iterator[None]:
        if not self._slots.acquire(blocking=False):
            began = time.monotonic()
            while not self._slots.acquire(timeout=SLICE_SECONDS):
                pass
            report_wait(time.monotonic() - began)
        try:
            yield
        finally:
            self._slots.release()

    @contextmanager
    def _transfer(self, rate: "_Rate | None") -> "Iterator[_Throttle | None]":
        with self._slot():
            if rate is None:
                yield None
                return
            throttle = _Throttle(rate)
            with observed_by(throttle):
                yield throttle


class _Rate:
    """A limit of bytes per second, shared by all transfers."""

    def __init__(self, limit: int, closed: threading.Event) -> None:
        self._limit = limit
        self._closed = closed
        self._lock = threading.Lock()
        self._scheduled_until = time.monotonic() - BURST_SECONDS
        """The time by which all bytes so far would have been transferred at exactly the limit."""

    def consume(self, count: int) -> None:
        """Wait until the limit allows for ``count`` more bytes, which have been transferred already."""
        with self._lock:
            self._scheduled_until = max(self._scheduled_until, time.monotonic() - BURST_SECONDS) + count / self._limit
            until = self._scheduled_until
        while not self._closed.is_set() and (left := until - time.monotonic()) > 0:
            piece = min(left, PIECE_SECONDS)
            # Report before waiting: a deadline within this slice has to be extended in time.
            report_wait(piece)
            began = time.monotonic()
            self._closed.wait(piece)
            report_wait(max(0.0, time.monotonic() - began - piece))


class _Throttle(Tally):
    """Slows one transfer down."""

    def __init__(self, rate: _Rate) -> None:
        super().__init__()
        self._rate = rate

    def on_bytes(self, count: int) -> None:
        super().on_bytes(count)
        self._rate.consume(count)


def _rate(limit: int | None, closed: threading.Event) -> _Rate | None:
    return None if limit is None else _Rate(limit, closed)

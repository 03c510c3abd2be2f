"""``LimitedBucket``: counts requests and bytes, and limits both."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, Call
from vllm_delta_sync.bucket.middleware.usage import Metrics, Tally
from vllm_delta_sync.bucket.threads import SLICE_SECONDS
from vllm_delta_sync.bucket.transfer_observers import observed_by, report_wait
from vllm_delta_sync.errors import StoreError
from vllm_delta_sync.settings import StoreOptions

BURST_SECONDS = 1.0
"""After an idle period, this many seconds' worth of bytes passes at full speed."""
PIECE_SECONDS = 0.25
"""Long waits are reported in slices of this length, so that an outer deadline is extended while they last."""
_SUMS = {"up": ("sent_bytes", "send_seconds"), "down": ("received_bytes", "receive_seconds")}
_Result = TypeVar("_Result")


class LimitedBucket(BucketMiddleware):
    """Keeps the calls of this instance within the limits of its options, and counts them.

    A call beyond ``store_connections`` waits until another one ends. A transfer that is too fast is slowed down as its
    bytes move, or at the end of the call if the store does not report them. ``close`` ends all waits for bandwidth.
    """

    def __init__(self, inner: Bucket, options: StoreOptions, metrics: Metrics) -> None:
        super().__init__(inner)
        self._metrics = metrics
        self._slots = threading.Semaphore(options.store_connections)
        self._closed = threading.Event()
        limits = {"up": options.store_upload_limit, "down": options.store_download_limit}
        self._rates = {way: None if limit is None else _Rate(limit, self._closed) for way, limit in limits.items()}

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        if call.method != "list":
            self._metrics.add(calls=1)
        try:
            with self._slot():
                return run() if call.direction is None else self._transfer(call, run, call.direction)
        except StoreError as error:
            self._metrics.count_failure(error)
            raise

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._metrics.add(calls=1)
        return self._list_pages(prefix)

    def close(self) -> None:
        self._closed.set()
        super().close()

    def _transfer(self, call: Call, run: Callable[[], _Result], way: Literal["up", "down"]) -> _Result:
        byte_sum, seconds = _SUMS[way]
        meter = _Meter(self._metrics, byte_sum, self._rates[way])
        began = time.monotonic()
        try:
            with observed_by(meter):
                result = run()
                if not meter.bytes:
                    meter.on_bytes(call.transferred(result))
                return result
        finally:
            self._metrics.add(**{seconds: max(0.0, time.monotonic() - began - meter.wait_seconds)})

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


class _Meter(Tally):
    """Counts the bytes of one transfer, and slows it down."""

    def __init__(self, metrics: Metrics, byte_sum: str, rate: _Rate | None) -> None:
        super().__init__()
        self._metrics, self._byte_sum, self._rate = metrics, byte_sum, rate

    def on_bytes(self, count: int) -> None:
        super().on_bytes(count)
        self._metrics.add(**{self._byte_sum: count})
        if self._rate is not None:
            self._rate.consume(count)

    def on_wait(self, seconds: float) -> None:
        super().on_wait(seconds)
        self._metrics.add(waited_seconds=seconds)

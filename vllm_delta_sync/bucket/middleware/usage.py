"""``LimitedBucket`` limits the requests in flight, and counts all of them in ``StoreUsage``."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo, observed_by
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, Call
from vllm_delta_sync.errors import AccessError, DeadlineError, StoreError, UnavailableError
from vllm_delta_sync.settings import StoreOptions

FAILURE_KINDS = tuple(error.kind for error in (StoreError, AccessError, UnavailableError, DeadlineError))
_COUNTS = (
    *("calls", "failures", *(f"failures_{kind}" for kind in FAILURE_KINDS), "retries", "peer_failures"),
    *("sent_bytes", "received_bytes", "peer_bytes"),
)
_SECONDS = ("send_seconds", "receive_seconds")
_SUMS = {"up": ("sent_bytes", "send_seconds"), "down": ("received_bytes", "receive_seconds")}
_Result = TypeVar("_Result")


class StoreUsage:
    """Sums over all calls of the buckets that share this object. Any number of threads may use it.

    ``calls``: requests to the store; a listing counts once. ``failures``: calls that raised StoreError, and by its kind
    ``failures_store``, ``failures_access``, ``failures_unavailable``, ``failures_deadline``; a missing or existing
    object is not a failure. ``retries``: tries after the first one. ``sent_bytes``, ``received_bytes``: failed tries
    included. ``send_seconds``, ``receive_seconds``: time spent in transfers, summed over parallel ones. Counted apart:
    ``peer_bytes``, read from peers instead, and ``peer_failures``, the times that one was given up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float | int] = dict.fromkeys(_COUNTS, 0) | dict.fromkeys(_SECONDS, 0.0)

    def add(self, **amounts: float | int) -> None:
        """Add to some of the sums, by their names."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def count_failure(self, error: StoreError) -> None:
        """Count a failure by its kind; an unlisted kind counts as ``store``."""
        kind = error.kind if error.kind in FAILURE_KINDS else StoreError.kind
        self.add(failures=1, **{f"failures_{kind}": 1})

    def snapshot(self) -> dict[str, float | int]:
        """Return all sums."""
        with self._lock:
            return dict(self._values)


PROCESS = StoreUsage()
"""StoreUsage of all stores that this process uses, except plain directories."""


class LimitedBucket(BucketMiddleware):
    """Counts the calls of this instance, and makes a call beyond ``store_connections`` wait until another one ends."""

    def __init__(self, inner: Bucket, options: StoreOptions, metrics: StoreUsage) -> None:
        super().__init__(inner)
        self._metrics = metrics
        self._slots = threading.Semaphore(options.store_connections)

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        if call.method != "list":
            self._metrics.add(calls=1)
        try:
            with self._slots:
                return run() if call.direction is None else self._transfer(call, run)
        except StoreError as error:
            self._metrics.count_failure(error)
            raise

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._metrics.add(calls=1)
        return self._list_pages(prefix)

    def _transfer(self, call: Call, run: Callable[[], _Result]) -> _Result:
        byte_sum, seconds = _SUMS[call.direction or "down"]
        began = time.monotonic()
        try:
            with observed_by(lambda count: self._metrics.add(**{byte_sum: count})):
                return run()
        finally:
            self._metrics.add(**{seconds: time.monotonic() - began})

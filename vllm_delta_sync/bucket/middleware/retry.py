"""``RetryingBucket``: retries requests after transient failures."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo, observed_by, report_bytes
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, Call
from vllm_delta_sync.bucket.middleware.usage import StoreUsage
from vllm_delta_sync.bucket.threads import wait_interruptibly
from vllm_delta_sync.errors import DeadlineError, UnavailableError
from vllm_delta_sync.logs import LogThrottle, guarded_logger
from vllm_delta_sync.settings import StoreOptions

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
_Result = TypeVar("_Result")

logger = guarded_logger("vllm_delta_sync.bucket")


class RetryingBucket(BucketMiddleware):
    """Retries calls that raise UnavailableError, and no others.

    Pauses between tries grow from 0.1 to 5 s, with random jitter so that clients do not return at the same moment. No
    try begins later than ``retry_seconds`` after the first. What the longest try took beyond ``store_deadline`` does
    not count; otherwise a large transfer that fails late, or has waited for others, would get no second try.
    When time is up, DeadlineError reports the number of tries and the last failure.

    If a try of a create-if-absent took effect and its answer was lost, the next try raises ConflictError: callers read
    the object back (``base.create_if_absent``). An interrupted listing continues after the last key. A put from a
    source that can be read only once, such as a pipe, is not retried. The bytes of a failed try are reported to outer
    observers as a negative number.
    """

    def __init__(self, inner: Bucket, options: StoreOptions, metrics: StoreUsage) -> None:
        super().__init__(inner)
        self._options = options
        self._metrics = metrics
        self._closed = threading.Event()
        self._log = LogThrottle(logger)

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        tries = _Tries()
        while True:
            try:
                with observed_by(tries.on_bytes):
                    return run()
            except UnavailableError as error:
                report_bytes(-tries.bytes)
                self._pause(tries, call.action, error)

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        if isinstance(data, Path) and data.exists() and not data.is_file():
            self._inner.put(key, data, if_absent=if_absent)
        else:
            super().put(key, data, if_absent=if_absent)

    def close(self) -> None:
        self._closed.set()
        super().close()

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        last, tries = "", _Tries()
        while True:
            progressed = False
            try:
                for item in self._inner.list(prefix):
                    if item.key > last:
                        last, progressed = item.key, True
                        yield item
                return
            except UnavailableError as error:
                if progressed:
                    tries = _Tries()
                self._pause(tries, Call("list", prefix).action, error)

    def _pause(self, tries: "_Tries", action: str, error: UnavailableError) -> None:
        """Wait for the next try; raises DeadlineError if time is up, UnavailableError if the bucket was closed."""
        spent = tries.end_try()
        left = self._options.retry_seconds + max(0.0, tries.longest - self._options.store_deadline) - spent
        if left <= 0:
            count = "1 try" if tries.count == 1 else f"{tries.count} tries"
            failure = DeadlineError(
                f"cannot {action} of {self.url}: given up after {count} in {spent:.1f} s; raise store_deadline if the "
                f"store is only slow. The last failure: {error.message}"
            )
            self._metrics.count_failure(failure)
            raise failure from error
        longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(tries.count - 1, 16))
        pause = min(random.uniform(0, longest), left)
        self._log.warn(f"cannot {action}, next try in {pause:.1f} s: {error.message}", error.kind)
        if wait_interruptibly(self._closed.wait, pause):
            raise UnavailableError(
                f"cannot {action} of {self.url}: closed before another try; open it again"
            ) from error
        tries.start_try()
        self._metrics.add(retries=1)


class _Tries:
    """The tries of one request. Attributes: bytes: that the current try has moved. longest: seconds of the longest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self.longest = 0.0
        self._first = time.monotonic()
        self.start_try()

    def start_try(self) -> None:
        self.bytes = 0
        self._began = time.monotonic()

    def on_bytes(self, count: int) -> None:
        with self._lock:
            self.bytes += count

    def end_try(self) -> float:
        """End a failed try; return the seconds since the first one began."""
        now = time.monotonic()
        self.count += 1
        self.longest = max(self.longest, now - self._began)
        return now - self._first

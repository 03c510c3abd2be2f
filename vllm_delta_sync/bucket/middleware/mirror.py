"""``MirrorBucket``: reads objects from a mirror, and verifies them by the digest in their key."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import TypeVar

from vllm_delta_sync.bucket.base import Bucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.bucket.middleware.deadline import DeadlineBucket
from vllm_delta_sync.bucket.ranged import digest_of
from vllm_delta_sync.errors import DeltaSyncError, DigestError
from vllm_delta_sync.log_throttle import ONCE, LogThrottle
from vllm_delta_sync.settings import StoreOptions

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
"""Deadline of a mirror's answer, plus a second per MB: a slow mirror is of no use."""
FAILURES = 3
"""After this many failures in a row a mirror is suspended for ``PAUSE_SECONDS``, and then gets one try."""
PAUSE_SECONDS = 60.0

_Result = TypeVar("_Result")


_used_mirrors: "ContextVar[set[MirrorBucket] | None]" = ContextVar("delta_sync_used_mirrors", default=None)


@contextmanager
def allow_mirrors() -> "Iterator[set[MirrorBucket]]":
    """Allow mirrors to answer ``get_range`` in the block, and yield the set of those that did.

    The caller verifies the object and reports the outcome to them (``report_verified``).
    """
    used: set[MirrorBucket] = set()
    token = _used_mirrors.set(used)
    try:
        yield used
    finally:
        _used_mirrors.reset(token)


class MirrorBucket(BucketMiddleware):
    """Reads objects whose key holds their digest from ``mirror``, and everything else from ``origin``.

    A faulty mirror costs time, but never makes a read fail or return wrong bytes; each kind of problem is logged once.
    Sizes, listings and writes use the origin.
    """

    def __init__(
        self,
        origin: Bucket,
        mirror: Bucket,
        *,
        patience: float = PATIENCE_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(origin)
        self._mirror = DeadlineBucket(mirror, StoreOptions(store_deadline=patience))
        self._now = now
        self._lock = threading.Lock()
        self._failed = 0
        self._suspended_until = 0.0
        self._log = LogThrottle(logger, ONCE)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        digest = digest_of(key)
        if digest is not None and self._may_use_mirror():
            limit = self._inner.stat(key).bytes if max_bytes is None else max_bytes
            data = self._ask_mirror(lambda: self._mirror.get(key, max_bytes=limit))
            if data is not None:
                good = len(data) <= limit and sha256(data).hexdigest() == digest
                self.report_verified(good)
                if good:
                    return data
        return self._inner.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        used = _used_mirrors.get()
        if used is not None and digest_of(key) is not None and self._may_use_mirror():
            data = self._ask_mirror(lambda: self._whole_range(key, start, length))
            if data is not None:
                used.add(self)
                return data
        return self._inner.get_range(key, start, length)

    def close(self) -> None:
        try:
            self._mirror.close()
        finally:
            self._inner.close()

    def report_verified(self, good: bool) -> None:
        """Report whether the mirror's bytes of an object were good."""
        if not good:
            self._record_failure("damaged", "it serves an object with another SHA-256; empty it")
            return
        with self._lock:
            self._failed = 0

    def _whole_range(self, key: str, start: int, length: int) -> bytes:
        data = self._mirror.get_range(key, start, length)
        if len(data) != length:
            raise DigestError(f"it returned {len(data)} of {length} bytes at {start} of {key}")
        return data

    def _ask_mirror(self, call: Callable[[], _Result]) -> _Result | None:
        """Return the mirror's answer, or None if it fails."""
        try:
            answer = call()
        except DeltaSyncError as error:
            self._record_failure(error.kind, error.message)
            return None
        with self._lock:
            # End the suspension, but keep the count high: the bytes are not verified yet.
            self._failed = min(self._failed, FAILURES - 1)
        return answer

    def _is_suspended(self) -> bool:
        return self._failed >= FAILURES and self._now() < self._suspended_until

    def _may_use_mirror(self) -> bool:
        with self._lock:
            if self._is_suspended():
                return False
            # After a suspension one call tries the mirror; until its outcome is known, others use the origin.
            self._suspended_until = self._now() + PAUSE_SECONDS
            return True

    def _record_failure(self, kind: str, problem: str) -> None:
        with self._lock:
            self._failed += 1
            self._suspended_until = self._now() + PAUSE_SECONDS
        self._log.warn(
            f"mirror {self._mirror.url}: {problem}. Objects are read from {self.url} instead; this is logged once", kind
        )

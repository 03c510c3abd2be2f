"""``UploadBandwidth``: measure how fast this publisher uploads."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Self

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.factory import OpenedBucket

MIN_MEASURED_BYTES = 64 * 1024
"""Uploads below this size would measure the store's latency instead."""
RECENT_UPLOADS = 5


class UploadBandwidth:
    """Bytes per second to the store, from the last uploads. Simultaneous uploads count as one. Thread-safe.

    Args:
        limit: bytes per second that the store's options allow; short uploads may seem faster. None means no limit.
    """

    def __init__(self, limit: float | None = None) -> None:
        self._limit = limit
        self._recent: deque[float] = deque(maxlen=RECENT_UPLOADS)
        self._lock = threading.Lock()
        self._running = 0
        self._bytes = 0
        self._all_succeeded = True
        self._started = 0.0

    @classmethod
    def to(cls, bucket: Bucket) -> Self:
        """Return a new instance for a bucket."""
        return cls(bucket.options.store_upload_limit if isinstance(bucket, OpenedBucket) else None)

    @property
    def bytes_per_second(self) -> float | None:
        """Median of the last uploads; None if none was large enough."""
        with self._lock:
            if not self._recent:
                return None
            measured = median(self._recent)
        return measured if self._limit is None else min(measured, self._limit)

    @contextmanager
    def upload(self, size: int) -> Iterator[None]:
        """Measure the block as an upload of ``size`` bytes, unless it fails."""
        with self._lock:
            if not self._running:
                self._started, self._bytes, self._all_succeeded = time.monotonic(), 0, True
            self._running += 1
        done = False
        try:
            yield
            done = True
        finally:
            with self._lock:
                self._running -= 1
                self._bytes += size
                self._all_succeeded = self._all_succeeded and done
                if not self._running and self._all_succeeded and self._bytes >= MIN_MEASURED_BYTES:
                    self._recent.append(self._bytes / max(time.monotonic() - self._started, 1e-6))

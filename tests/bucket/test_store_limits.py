"""Limits of what a store is asked for, and the counters of it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.store_faults import PlannedBucket, ReportingBucket, fail
from vllm_delta_sync.bucket import Bucket, StoreOptions
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.bucket.middleware.usage import LimitedBucket, StoreUsage
from vllm_delta_sync.errors import (
    AccessError,
    ConflictError,
    DeltaSyncError,
    NotFoundError,
    StoreError,
    UnavailableError,
)


def test_no_more_calls_at_once_than_connections(local: Bucket) -> None:
    class Counting(BucketMiddleware):
        def __init__(self, inner: Bucket) -> None:
            super().__init__(inner)
            self.lock = threading.Lock()
            self.inside = self.most = 0
            self.full = threading.Event()

        def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
            with self.lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
                if self.inside == 3:
                    self.full.set()
            self.full.wait(60)
            with self.lock:
                self.inside -= 1
            return b"x"

    counting = Counting(local)
    bucket = LimitedBucket(counting, StoreOptions(store_connections=3), StoreUsage())
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(bucket.get, ["key"] * 12)) == [b"x"] * 12
    assert (counting.most, counting.inside) == (3, 0)


def test_who_reads_a_listing_has_no_connection_meanwhile(local: Bucket) -> None:
    for number in range(5):
        local.put(f"key{number}", b"%d" % number)
    bucket = LimitedBucket(local, StoreOptions(store_connections=1), StoreUsage())
    assert [bucket.get(item.key) for item in bucket.list()] == [b"0", b"1", b"2", b"3", b"4"]


def test_metrics_add_up(local: Bucket, tmp_path: Path) -> None:
    for inner in (local, ReportingBucket(local, 30)):
        metrics = StoreUsage()
        bucket = LimitedBucket(inner, StoreOptions(), metrics)
        bucket.put("a", bytes(100))
        bucket.get("a")
        bucket.get_range("a", 90, 100)
        (tmp_path / "source").write_bytes(bytes(100))
        bucket.put("b", tmp_path / "source")
        assert len(list(bucket.list())) == 2
        bucket.stat("a")
        bucket.delete("a")
        bucket.delete("b")
        with pytest.raises(NotFoundError):
            bucket.get("a")
        change = metrics.snapshot()
        assert (change["calls"], change["failures"], change["retries"]) == (9, 0, 0)
        assert (change["sent_bytes"], change["received_bytes"]) == (200, 110)
        assert change["send_seconds"] > 0
        assert change["receive_seconds"] > 0


def test_failures_are_counted_by_kind(local: Bucket) -> None:
    metrics = StoreUsage()
    errors: list[type[DeltaSyncError]] = [AccessError, UnavailableError, UnavailableError, StoreError, ConflictError]
    bucket = LimitedBucket(PlannedBucket(local, *(fail(error("no")) for error in errors)), StoreOptions(), metrics)
    for error in errors:
        with pytest.raises(error):
            bucket.put("key", b"x")
    shown = metrics.snapshot()
    assert (shown["calls"], shown["failures"]) == (5, 4)
    assert (shown["failures_access"], shown["failures_unavailable"], shown["failures_store"]) == (1, 2, 1)

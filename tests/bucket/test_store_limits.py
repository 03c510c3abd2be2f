"""Limits of what a store is asked for, and the counters of it."""

import threading
import time
from pathlib import Path

import pytest

from tests.support.store_faults import PlannedBucket, ReportingBucket, SilentBucket, SwallowingBucket, fail
from vllm_delta_sync.bucket import Bucket, StoreOptions, open_bucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.bucket.middleware.deadline import DeadlineBucket
from vllm_delta_sync.bucket.middleware.limits import LimitedBucket
from vllm_delta_sync.bucket.middleware.usage import Metrics, Tally
from vllm_delta_sync.bucket.transfer_observers import observed_by
from vllm_delta_sync.errors import (
    AccessError,
    ConflictError,
    DeltaSyncError,
    NotFoundError,
    StoreError,
    UnavailableError,
)


@pytest.fixture
def local(url: str) -> Bucket:
    return open_bucket(url)


@pytest.mark.parametrize("reports", [True, False], ids=["reported as they move", "not reported"])
@pytest.mark.parametrize("way", ["up", "down"])
def test_bytes_take_their_time(local: Bucket, tmp_path: Path, reports: bool, way: str) -> None:
    limit, size = 1_000_000, 500_000
    options = StoreOptions.model_validate({f"store_{way}load_limit": limit})
    bucket = LimitedBucket(ReportingBucket(local, 100_000) if reports else SilentBucket(local), options, Metrics())
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    tally = Tally()
    began = time.monotonic()
    with observed_by(tally):
        for key in ("a", "b", "c"):
            bucket.put(key, file if key == "a" else bytes(size))
        bucket.get("a")
        bucket.get_range("b", 0, size)
        bucket.get_file("c", file)
    least = 3 * size / limit - 1
    assert time.monotonic() - began >= least
    # Counted twice they would have to wait for 2 s, less what the store itself takes.
    assert tally.wait_seconds <= least + 0.5


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
    bucket = LimitedBucket(counting, StoreOptions(store_connections=3), Metrics())
    threads = [threading.Thread(target=bucket.get, args=("key",)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counting.most, counting.inside) == (3, 0)


def test_who_reads_a_listing_has_no_connection_meanwhile(local: Bucket) -> None:
    for number in range(5):
        local.put(f"key{number}", b"%d" % number)
    bucket = LimitedBucket(local, StoreOptions(store_connections=1), Metrics())
    assert [bucket.get(item.key) for item in bucket.list()] == [b"0", b"1", b"2", b"3", b"4"]


def test_close_ends_waiting_for_bandwidth(local: Bucket) -> None:
    waits = threading.Event()

    class Telling(Tally):
        def on_wait(self, seconds: float) -> None:
            waits.set()

    bucket = LimitedBucket(local, StoreOptions(store_upload_limit=1), Metrics())

    def put() -> None:
        with observed_by(Telling()):
            bucket.put("key", bytes(1_000_000))

    thread = threading.Thread(target=put)
    thread.start()
    assert waits.wait(60)
    bucket.close()
    thread.join(60)
    assert not thread.is_alive()


def test_what_a_limit_holds_back_does_not_run_into_the_deadline(local: Bucket) -> None:
    options = StoreOptions(store_deadline=0.5, store_upload_limit=100_000)
    bucket = LimitedBucket(
        DeadlineBucket(ReportingBucket(SwallowingBucket(local), 10_000), options), options, Metrics()
    )
    began = time.monotonic()
    bucket.put("key", bytes(250_000))
    assert time.monotonic() - began >= 1.5 > options.allowance(250_000)


def test_metrics_add_up(local: Bucket, tmp_path: Path) -> None:
    metrics = Metrics()
    for inner in (local, SilentBucket(local), ReportingBucket(local, 30)):
        bucket = LimitedBucket(inner, StoreOptions(), metrics)
        before = metrics.snapshot()
        bucket.put("a", bytes(100))
        bucket.get("a")
        bucket.get_range("a", 90, 100)
        bucket.get_file("a", tmp_path / "copy")
        bucket.put("b", tmp_path / "copy")
        assert len(list(bucket.list())) == 2
        bucket.stat("a")
        bucket.delete("a")
        bucket.delete("b")
        with pytest.raises(NotFoundError):
            bucket.get("a")
        change = metrics.since(before)
        assert (change["calls"], change["failures"], change["retries"]) == (10, 0, 0)
        assert (change["sent_bytes"], change["received_bytes"]) == (200, 210)
        assert change["send_seconds"] > 0
        assert change["receive_seconds"] > 0
        assert change["waited_seconds"] == 0


def test_failures_are_counted_by_kind(local: Bucket) -> None:
    metrics = Metrics()
    errors: list[type[DeltaSyncError]] = [AccessError, UnavailableError, UnavailableError, StoreError, ConflictError]
    bucket = LimitedBucket(PlannedBucket(local, *(fail(error("no")) for error in errors)), StoreOptions(), metrics)
    for error in errors:
        with pytest.raises(error):
            bucket.put("key", b"x")
    shown = metrics.snapshot()
    assert (shown["calls"], shown["failures"]) == (5, 4)
    assert (shown["failures_access"], shown["failures_unavailable"], shown["failures_store"]) == (1, 2, 1)


def test_time_that_limits_take_is_apart(local: Bucket) -> None:
    metrics = Metrics()
    options = StoreOptions(store_upload_limit=10**6)
    bucket = LimitedBucket(ReportingBucket(local, 100_000), options, metrics)
    began = time.monotonic()
    bucket.put("key", bytes(1_500_000))
    seconds = time.monotonic() - began
    shown = metrics.snapshot()
    assert shown["waited_seconds"] > 0
    assert shown["send_seconds"] + shown["waited_seconds"] <= seconds + 0.05

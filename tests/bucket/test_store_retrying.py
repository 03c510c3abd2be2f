"""What is tried again, for how long, and what then is said."""

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from tests.bucket.dict_machine import DictMachine
from tests.support.running import interrupted
from tests.support.store_faults import (
    CUT,
    FlakyBucket,
    GatedBucket,
    Impatience,
    PlannedBucket,
    dressed,
    fail,
)
from vllm_delta_sync.bucket import Bucket, ObjectInfo, StoreOptions, open_bucket
from vllm_delta_sync.bucket.base import create_if_absent
from vllm_delta_sync.bucket.middleware import retry
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.bucket.middleware.retry import RetryingBucket
from vllm_delta_sync.bucket.middleware.usage import StoreUsage
from vllm_delta_sync.errors import (
    AccessError,
    ConflictError,
    DeadlineError,
    DeltaSyncError,
    NotFoundError,
    StoreError,
    UnavailableError,
    UsageError,
)

OPTIONS = StoreOptions(store_progress="off")


@pytest.mark.parametrize("as_file", [False, True], ids=["bytes", "file"])
@pytest.mark.usefixtures("hurried")
def test_another_writers_object_is_a_conflict_after_a_failure_too(local: Bucket, tmp_path: Path, as_file: bool) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    source = mine if as_file else b"mine"
    for theirs in (b"them", b"other length"):
        bucket = RetryingBucket(PlannedBucket(local, CUT), OPTIONS, StoreUsage())
        local.put("key", theirs)
        with pytest.raises(ConflictError):
            bucket.put("key", source, if_absent=True)
        assert local.get("key") == theirs
    # The same bytes too, which another writer may have put: a caller that puts unique bytes reads them back.
    local.put("key", b"mine")
    with pytest.raises(ConflictError):
        RetryingBucket(PlannedBucket(local, CUT), OPTIONS, StoreUsage()).put("key", source, if_absent=True)
    assert create_if_absent(RetryingBucket(PlannedBucket(local, CUT), OPTIONS, StoreUsage()), "key", b"mine")


@pytest.mark.parametrize("error", [StoreError, AccessError, NotFoundError, ConflictError, UsageError, DeadlineError])
def test_nothing_else_is_repeated(local: Bucket, error: type[DeltaSyncError]) -> None:
    metrics = StoreUsage()
    failing = PlannedBucket(local, fail(error("no")))
    with pytest.raises(error, match="no"):
        RetryingBucket(failing, OPTIONS, metrics).put("key", b"x")
    assert (failing.tries, metrics.snapshot()["retries"]) == (1, 0)


@pytest.mark.usefixtures("hurried")
def test_when_time_is_over_the_error_says_what_was_tried(local: Bucket) -> None:
    metrics = StoreUsage()
    failing = PlannedBucket(local, *[CUT] * 100_000)
    options = StoreOptions(store_deadline=0.5)
    bucket = RetryingBucket(failing, options, metrics)
    began = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        bucket.get("some/key")
    assert time.monotonic() - began >= options.retry_seconds
    shown = metrics.snapshot()
    assert failing.tries == shown["retries"] + 1 > 2
    assert (shown["failures"], shown["failures_deadline"]) == (1, 1)
    for part in ("'some/key'", local.url, f"{failing.tries} tries", " s;", "was cut; check the network"):
        assert part in caught.value.message
    assert isinstance(caught.value.__cause__, UnavailableError)


@pytest.mark.usefixtures("hurried")
def test_a_long_try_that_broke_off_is_repeated_all_the_same(local: Bucket) -> None:
    local.put("key", b"x")

    def long() -> None:
        time.sleep(0.2)
        CUT()

    failing = PlannedBucket(local, long)
    assert RetryingBucket(failing, StoreOptions(store_deadline=0.01), StoreUsage()).get("key") == b"x"
    assert failing.tries == 2


def test_a_pipe_is_read_once(local: Bucket, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    failing = PlannedBucket(local, CUT)
    with pytest.raises(UnavailableError, match="was cut"):
        RetryingBucket(failing, OPTIONS, StoreUsage()).put("key", pipe)
    assert failing.tries == 1


@pytest.mark.usefixtures("hurried")
def test_a_listing_goes_on_where_it_broke_off(local: Bucket) -> None:
    class Breaking(BucketMiddleware):
        """Breaks off after 3 more keys than the time before, and twice without any."""

        breaks = 0

        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            self.breaks += 1
            for number, item in enumerate(self._inner.list(prefix)):
                if number >= 3 * (self.breaks - 2) and self.breaks < 6:
                    CUT()
                yield item

    keys = [f"a/{number:02}" for number in range(20)]
    for key in keys:
        local.put(key, b"x")
    breaking = Breaking(local)
    assert [item.key for item in RetryingBucket(breaking, OPTIONS, StoreUsage()).list("a/")] == keys
    assert breaking.breaks == 6


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Pauses are ten minutes; the event says that one begins."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr(retry, "LONGEST_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    begun = threading.Event()
    monkeypatch.setattr(retry.logger, "warning", lambda *arguments, **options: begun.set())
    return begun


def test_interrupts_end_a_pause(local: Bucket, waiting: threading.Event) -> None:
    bucket = RetryingBucket(PlannedBucket(local, CUT), StoreOptions(store_deadline=3600), StoreUsage())
    with interrupted(waiting):
        bucket.put("key", b"x")


def test_close_ends_a_pause(local: Bucket, waiting: threading.Event) -> None:
    bucket = RetryingBucket(PlannedBucket(local, CUT), StoreOptions(store_deadline=3600), StoreUsage())
    with ThreadPoolExecutor() as pool:
        put = pool.submit(bucket.put, "key", b"x")
        assert waiting.wait(60)
        bucket.close()
        with pytest.raises(UnavailableError, match="closed"):
            put.result(60)


@pytest.mark.usefixtures("hurried")
def test_the_log_says_it_once_a_minute(local: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    bucket = RetryingBucket(PlannedBucket(local, *[CUT] * 200), OPTIONS, StoreUsage())
    bucket.put("some/key", b"x")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "'some/key'" in lines[0]
    assert "next try in 0.0 s" in lines[0]
    assert "was cut" in lines[0]


@pytest.mark.hypothesis
@pytest.mark.usefixtures("hurried")
def test_a_store_that_breaks_off_at_random_is_still_a_dict() -> None:
    failures = [0]

    class Machine(DictMachine):
        answers_are_lost = True

        @initialize(seed=st.integers(0, 2**32))
        def begin(self, seed: int) -> None:
            self.flaky = FlakyBucket(open_bucket(self.folder / "bucket"), random.Random(seed))
            self.metrics = StoreUsage()
            self.bucket = self.stack.enter_context(dressed(self.flaky, OPTIONS, self.metrics))

        def teardown(self) -> None:
            super().teardown()
            if hasattr(self, "flaky"):
                assert self.metrics.snapshot()["retries"] == self.flaky.failures
                failures[0] += self.flaky.failures

    examples = settings().max_examples // 2
    run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=15))
    assert failures[0] > 100, "nothing was tried"


def test_a_hanging_request_is_tried_again_through_all_wrappers(local: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = GatedBucket(local, "put")
    # Once it is given up there is time again.
    monkeypatch.setattr(retry.logger, "warning", lambda *arguments, **options: gated.begun["put"].clear())
    metrics = StoreUsage()
    bucket = dressed(gated, Impatience.while_set(gated.begun["put"]), metrics)
    bucket.put("HEAD.json", b"new", if_absent=True)
    assert local.get("HEAD.json") == b"new"
    assert metrics.snapshot()["retries"] == 1
    gated.let_go("put")
    bucket.put("HEAD.json", b"newer")
    assert local.get("HEAD.json") == b"newer"

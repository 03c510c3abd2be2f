"""How fast uploads are taken to be."""

import threading
from pathlib import Path

import pytest

from trainer_side import link as module
from trainer_side.link import LEAST_BYTES, Link
from vllm_delta_sync.bucket import StoreOptions, open_bucket

BYTES = 10 * LEAST_BYTES


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def send(link: Link, clock: Clock, size: int, seconds: float) -> None:
    with link.upload(size):
        clock.now += seconds


def test_nothing_is_known_before_the_first_upload(clock: Clock) -> None:
    assert Link().bytes_per_second is None
    assert Link(limit=5).bytes_per_second is None


def test_median_of_the_last_ones(clock: Clock) -> None:
    link = Link()
    for seconds in (1, 1, 50, 1):
        send(link, clock, BYTES, seconds)
    assert link.bytes_per_second == BYTES
    for _ in range(3):
        send(link, clock, BYTES, 10)
    assert link.bytes_per_second == BYTES / 10


def test_tiny_and_failed_ones_do_not_count(clock: Clock) -> None:
    link = Link()
    send(link, clock, LEAST_BYTES - 1, 60)
    with pytest.raises(OSError, match="gone"), link.upload(BYTES):
        raise OSError("gone")
    assert link.bytes_per_second is None
    send(link, clock, LEAST_BYTES, 2)
    assert link.bytes_per_second == LEAST_BYTES / 2


def test_those_at_once_are_one(clock: Clock) -> None:
    link = Link()
    with link.upload(BYTES):
        clock.now += 1
        with link.upload(3 * BYTES):
            clock.now += 2
        clock.now += 1
    clock.now += 1000
    assert link.bytes_per_second == 4 * BYTES / 4


def test_one_that_fails_spoils_those_at_once(clock: Clock) -> None:
    link = Link()
    with link.upload(BYTES):
        with pytest.raises(OSError, match="gone"), link.upload(BYTES):
            raise OSError("gone")
        clock.now += 1
    assert link.bytes_per_second is None


def test_any_thread_may_send() -> None:
    link = Link()
    barrier = threading.Barrier(4)

    def work() -> None:
        for _ in range(50):
            with link.upload(BYTES):
                barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert link.bytes_per_second is not None
    # All have ended: the next one is counted by itself.
    with link.upload(BYTES):
        assert link._under_way == 1


def test_no_faster_than_the_store_is_allowed_to(clock: Clock, tmp_path: Path) -> None:
    with open_bucket(tmp_path, StoreOptions(store_upload_limit=1000)) as bucket:
        link = Link.to(bucket)
    send(link, clock, BYTES, 0.001)
    assert link.bytes_per_second == 1000
    plain = Link.to(open_bucket(tmp_path))
    send(plain, clock, BYTES, 0.001)
    assert plain.bytes_per_second == pytest.approx(BYTES / 0.001)

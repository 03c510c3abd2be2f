"""``LogThrottle``: the same trouble is logged at most once in a while, and a flood of different ones not at all."""

import logging
import time

import pytest

from vllm_delta_sync.logs import MAX_SUBJECTS, ONCE, LogThrottle, without_numbers

logger = logging.getLogger("tests.log_throttle")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_subject_is_due_again_after_its_time(clock: Clock) -> None:
    throttle = LogThrottle(logger, 60)
    assert throttle.is_due("one")
    assert throttle.is_due("another")
    # Two that take turns are two, not one at each turn.
    assert not throttle.is_due("one")
    clock.now += 61
    assert throttle.is_due("one")
    assert not throttle.is_due("one")
    throttle.forget("one")
    assert throttle.is_due("one")


def test_texts_that_differ_in_numbers_only_are_one_subject() -> None:
    assert without_numbers("given up after 7 tries in 60.2 s") == without_numbers("given up after 19 tries in 61.0 s")
    assert without_numbers("given up") != without_numbers("another thing")


def test_once_is_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    throttle = LogThrottle(logger, ONCE)
    for second in range(3):
        clock.now += 1e6
        throttle.warn(f"disk full in second {second}", "disk")
    assert [(record.getMessage(), record.module) for record in caplog.records] == [
        ("disk full in second 0", "test_log_throttle")
    ]


def test_a_flood_of_subjects_is_bounded(clock: Clock) -> None:
    throttle = LogThrottle(logger, 60)
    assert sum(throttle.is_due(f"client {number}") for number in range(1000)) == MAX_SUBJECTS
    clock.now += 61
    assert throttle.is_due("client 1")

"""What people see of a slow transfer: bars on a terminal, lines in the log elsewhere, nothing if it is fast."""

import io
import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.running import eventually
from tests.support.store_faults import GatedBucket, ReportingBucket
from vllm_delta_sync.bucket import Bucket, StoreOptions
from vllm_delta_sync.bucket.middleware import progress
from vllm_delta_sync.bucket.middleware.progress import Mode, ProgressBucket
from vllm_delta_sync.bucket.middleware.retry import RetryingBucket
from vllm_delta_sync.bucket.middleware.usage import StoreUsage
from vllm_delta_sync.errors import StoreError, UnavailableError

MB = 1_000_000
KEY = "objects/large"
MODES: tuple[Mode, ...] = ("auto", "bar", "log")


class Lines:
    """Lines of the log as they come, to wait for."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    @property
    def seen(self) -> list[str]:
        return self._caplog.messages

    def wait_for(self, pattern: str) -> None:
        eventually(lambda: any(re.search(pattern, line) for line in self.seen))


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.INFO, "vllm_delta_sync.bucket")
    return Lines(caplog)


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def local(local: Bucket) -> Bucket:
    local.put(KEY, bytes(4 * MB))
    return local


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transfer is shown from its first bytes on, and whenever some move."""
    monkeypatch.setattr(progress, "SHOWN_AFTER_SECONDS", 0)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0)


@contextmanager
def halfway(local: Bucket, mode: Mode, call: str = "get", key: str = KEY) -> Iterator[None]:
    """A transfer of 4 MB that rests in the middle until the end of the block, and has ended after it."""
    go_on = threading.Event()
    pieces = ReportingBucket(local, MB, lambda done: done != 2 * MB or go_on.wait(60))
    arguments: dict[str, tuple[object, ...]] = {"put": (bytes(4 * MB),)}
    method = getattr(ProgressBucket(pieces, mode), call)
    thread = threading.Thread(target=method, args=(key, *arguments.get(call, ())))
    thread.start()
    yield
    go_on.set()
    thread.join(60)


@pytest.mark.parametrize("mode", ["auto", "bar", "log", "off"])
def test_fast_transfers_are_silent_and_cost_no_request(
    local: Bucket, lines: Lines, capfd: pytest.CaptureFixture[str], mode: Mode
) -> None:
    gated = GatedBucket(local)
    with ProgressBucket(gated, mode) as bucket:
        bucket.get(KEY)
        bucket.put("key", bytes(4 * MB))
    assert [name for name, _ in gated.log] == ["get", "put"]
    assert lines.seen == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", ["put", "get"])
def test_lines_in_the_log(local: Bucket, lines: Lines, name: str) -> None:
    way, of = ("up", r" of 4\.0") if name == "put" else ("down", "")
    with halfway(local, "log", name):
        lines.wait_for(rf"^{way} {KEY}: 2\.0{of} MB, \d+\.\d MB/s$")
    assert re.search(rf"^{way} {KEY}: done, 4\.0 MB in \d+\.\d s, \d+\.\d MB/s$", lines.seen[-1])
    assert sum("done" in line for line in lines.seen) == 1


@pytest.mark.usefixtures("at_once")
def test_ranges_of_one_object_are_one_transfer(local: Bucket, lines: Lines) -> None:
    bucket = ProgressBucket(ReportingBucket(local, MB), "log")
    with bucket.transfer(KEY, 4 * MB):
        for start in range(4):
            bucket.get_range(KEY, start * MB, MB)
    assert [line.partition(": ")[2].partition(",")[0] for line in lines.seen] == [
        *(f"{part}.0 of 4.0 MB" for part in (1, 2, 3, 4)),
        "done",
    ]


@pytest.mark.usefixtures("at_once")
def test_a_transfer_that_breaks_off(local: Bucket, lines: Lines) -> None:
    def broken(done: int) -> None:
        raise StoreError("the disk is full")

    with pytest.raises(StoreError, match="disk is full"):
        ProgressBucket(ReportingBucket(local, MB, broken), "log").put("key", bytes(2 * MB))
    assert "interrupted, 1.0 MB in " in lines.seen[-1]


@pytest.mark.usefixtures("at_once")
def test_a_repetition_starts_over(local: Bucket, lines: Lines) -> None:
    failures = [1]

    def cut_late(done: int) -> None:
        if failures and done == 4 * MB:
            failures.pop()
            raise UnavailableError("the connection was cut")

    retried = RetryingBucket(ReportingBucket(local, MB, cut_late), StoreOptions(), StoreUsage())
    ProgressBucket(retried, "log").put("key", bytes(4 * MB))
    moved = [line.partition(": ")[2][:3] for line in lines.seen if "MB/s" in line]
    assert moved[3:6] == ["4.0", "0.0", "1.0"]
    assert "up key: done, 4.0 MB" in lines.seen[-1]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("mode", ["auto", "bar"])
def test_bars_on_a_terminal(local: Bucket, lines: Lines, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "DRAW_SECONDS", 0)
    with halfway(local, mode, "put"):
        eventually(lambda: re.search(r"up large: +50%\|.*\| 2\.00M/4\.00M \[", terminal.getvalue()) is not None)
    # The bar is wiped out, and the cursor is back at the beginning of its line.
    assert re.search(r"\r +\r$", terminal.getvalue())
    assert lines.seen == []


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("stderr", [None, "closed"])
@pytest.mark.parametrize("mode", MODES)
def test_a_lost_terminal_stops_no_transfer(
    local: Bucket, monkeypatch: pytest.MonkeyPatch, mode: Mode, stderr: str | None
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", None if stderr is None else closed)
    assert len(ProgressBucket(ReportingBucket(local, MB), mode).get(KEY)) == 4 * MB

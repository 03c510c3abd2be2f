"""What people see of a slow transfer: bars on a real terminal, lines in the log elsewhere, nothing if it is fast."""

import io
import logging
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.store_faults import GatedBucket, ReportingBucket
from vllm_delta_sync.bucket import Bucket, StoreOptions, open_bucket
from vllm_delta_sync.bucket.middleware import progress
from vllm_delta_sync.bucket.middleware.progress import Mode, ProgressBucket
from vllm_delta_sync.bucket.middleware.retry import RetryingBucket
from vllm_delta_sync.bucket.middleware.usage import StoreUsage
from vllm_delta_sync.errors import StoreError, UnavailableError

MB = 1_000_000
KEY = "objects/large"
MODES: tuple[Mode, ...] = ("auto", "bar", "log")


class Lines(logging.Handler):
    """Lines of the log as they come, to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.seen.append(record.getMessage())
            self._changed.notify_all()

    def wait_for(self, pattern: str) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: any(re.search(pattern, line) for line in self.seen), 60)
        assert found, f"no line matches {pattern!r}: {self.seen}"


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("vllm_delta_sync.bucket"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


class Terminal:
    """A pseudo-terminal in place of stderr, and what was written to it."""

    def __init__(self) -> None:
        self._reader, writer = pty.openpty()
        self.stderr = os.fdopen(writer, "w")
        self.written = ""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def wait_for(self, pattern: str) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: re.search(pattern, self.written), 60)
        assert found, f"nothing matches {pattern!r}: {self.written!r}"

    def write_after(self) -> None:
        """Something that is not a bar."""
        self.stderr.write("what comes after\n")
        self.stderr.flush()
        self.wait_for("what comes after")

    def close(self) -> None:
        self.stderr.close()
        self._thread.join(60)
        os.close(self._reader)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._reader, 65536)
            except OSError:  # how Linux says that the other end is closed
                return
            with self._changed:
                self.written += data.decode()
                self._changed.notify_all()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal()
    yield opened
    opened.close()


@pytest.fixture
def local(url: str) -> Bucket:
    bucket = open_bucket(url)
    bucket.put(KEY, bytes(4 * MB))
    return bucket


@contextmanager
def halfway(local: Bucket, mode: Mode, call: str = "get", key: str = KEY) -> Iterator[None]:
    """A transfer of 4 MB that rests in the middle until the end of the block, and has ended after it."""
    go_on = threading.Event()
    pieces = ReportingBucket(local, MB, lambda done: done != 2 * MB or go_on.wait(60))
    arguments: dict[str, tuple[object, ...]] = {"put": (bytes(4 * MB),)}
    method = getattr(ProgressBucket(pieces, mode, after=0, every=0), call)
    thread = threading.Thread(target=method, args=(key, *arguments.get(call, ())))
    thread.start()
    yield
    go_on.set()
    thread.join(60)


@pytest.mark.parametrize("mode", ["auto", "bar", "log", "off"])
def test_fast_transfers_are_silent_and_cost_no_request(
    local: Bucket, tmp_path: Path, lines: Lines, capfd: pytest.CaptureFixture[str], mode: Mode
) -> None:
    gated = GatedBucket(local)
    with ProgressBucket(gated, mode) as bucket:
        bucket.get(KEY)
        bucket.put("key", bytes(4 * MB))
    assert [name for name, _ in gated.log] == ["get", "put"]
    assert lines.seen == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["put", "get"])
def test_lines_in_the_log(local: Bucket, lines: Lines, name: str) -> None:
    way, of = ("up", r" of 4\.0") if name == "put" else ("down", "")
    with halfway(local, "log", name):
        lines.wait_for(rf"^{way} {KEY}: 2\.0{of} MB, \d+\.\d MB/s$")
    assert re.search(rf"^{way} {KEY}: done, 4\.0 MB in \d+\.\d s, \d+\.\d MB/s$", lines.seen[-1])
    assert sum("done" in line for line in lines.seen) == 1


def test_ranges_of_one_object_are_one_transfer(local: Bucket, lines: Lines) -> None:
    bucket = ProgressBucket(ReportingBucket(local, MB), "log", after=0, every=0)
    with bucket.transfer(KEY, 4 * MB):
        for start in range(4):
            bucket.get_range(KEY, start * MB, MB)
    assert [line.partition(": ")[2].partition(",")[0] for line in lines.seen] == [
        *(f"{part}.0 of 4.0 MB" for part in (1, 2, 3, 4)),
        "done",
    ]


def test_a_transfer_that_breaks_off(local: Bucket, lines: Lines) -> None:
    def broken(done: int) -> None:
        raise StoreError("the disk is full")

    with pytest.raises(StoreError, match="disk is full"):
        ProgressBucket(ReportingBucket(local, MB, broken), "log", after=0).put("key", bytes(2 * MB))
    assert "interrupted, 1.0 MB in " in lines.seen[-1]


def test_a_repetition_starts_over(local: Bucket, lines: Lines) -> None:
    failures = [1]

    def cut_late(done: int) -> None:
        if failures and done == 4 * MB:
            failures.pop()
            raise UnavailableError("the connection was cut")

    retried = RetryingBucket(ReportingBucket(local, MB, cut_late), StoreOptions(), StoreUsage())
    ProgressBucket(retried, "log", after=0, every=0).put("key", bytes(4 * MB))
    moved = [line.partition(": ")[2][:3] for line in lines.seen if "MB/s" in line]
    assert moved[3:6] == ["4.0", "0.0", "1.0"]
    assert "up key: done, 4.0 MB" in lines.seen[-1]


@pytest.mark.parametrize("mode", ["auto", "bar"])
def test_bars_on_a_terminal(
    local: Bucket, terminal: Terminal, lines: Lines, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stderr)
    monkeypatch.setattr(progress, "DRAW_SECONDS", 0)
    with halfway(local, mode, "put"):
        terminal.wait_for(r"up large: +50%\|.*\| 2\.00M/4\.00M \[")
    terminal.write_after()
    # The bar is wiped out, and the cursor is back at the beginning of its line.
    assert re.search(r"\r +\rwhat comes after", terminal.written)
    assert lines.seen == []


@pytest.mark.parametrize("stderr", [None, "closed"])
@pytest.mark.parametrize("mode", MODES)
def test_a_lost_terminal_stops_no_transfer(
    local: Bucket, monkeypatch: pytest.MonkeyPatch, mode: Mode, stderr: str | None
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", None if stderr is None else closed)
    assert len(ProgressBucket(ReportingBucket(local, MB), mode, after=0, every=0).get(KEY)) == 4 * MB

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
from vllm_delta_sync.bucket.middleware.progress import Mode, ProgressBucket
from vllm_delta_sync.bucket.middleware.retry import RetryingBucket
from vllm_delta_sync.bucket.middleware.usage import Metrics
from vllm_delta_sync.errors import NotFoundError, StoreError, UnavailableError

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


def slow(inner: Bucket, mode: Mode, after: float = 0.01, every: float = 3600) -> ProgressBucket:
    return ProgressBucket(inner, mode, after=after, every=every)


@contextmanager
def halfway(local: Bucket, mode: Mode, call: str = "get", every: float = 3600, key: str = KEY) -> Iterator[None]:
    """A transfer of 4 MB that rests in the middle until the end of the block, and has ended after it."""
    go_on = threading.Event()
    pieces = ReportingBucket(local, MB, lambda done: done != 2 * MB or go_on.wait(60))
    arguments: dict[str, tuple[object, ...]] = {"put": (bytes(4 * MB),), "get_file": (Path("copy"),)}
    method = getattr(slow(pieces, mode, every=every), call)
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
        bucket.get_file(KEY, tmp_path / "copy")
        bucket.put("key", tmp_path / "copy")
    assert [name for name, _ in gated.log] == ["get", "get_file", "put"]
    assert lines.seen == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["put", "get", "get_file"])
def test_lines_in_the_log(
    local: Bucket, tmp_path: Path, lines: Lines, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    way = "up" if name == "put" else "down"
    with halfway(local, "log", name, every=0.02):
        lines.wait_for(rf"^{way} {KEY}: 2\.0 of 4\.0 MB, \d+\.\d MB/s$")
    assert re.search(rf"^{way} {KEY}: done, 4\.0 MB in \d+\.\d s, \d+\.\d MB/s$", lines.seen[-1])
    assert sum("done" in line for line in lines.seen) == 1


def test_a_transfer_that_breaks_off(local: Bucket, lines: Lines) -> None:
    def broken(done: int) -> None:
        lines.wait_for("MB/s")
        raise StoreError("the disk is full")

    with pytest.raises(StoreError, match="disk is full"):
        slow(ReportingBucket(local, MB, broken), "log").put("key", bytes(2 * MB))
    assert "interrupted, 1.0 MB in " in lines.seen[-1]


def test_without_a_size_there_are_still_lines(local: Bucket, lines: Lines) -> None:
    class Sizeless(ReportingBucket):
        def stat(self, key: str) -> None:  # type: ignore[override]
            raise NotFoundError("nothing to be seen")

    bucket = slow(Sizeless(local, MB, lambda done: lines.wait_for(r"down objects/large: 1\.0 MB, ")), "log", every=0.01)
    assert len(bucket.get(KEY)) == 4 * MB


def test_a_repetition_starts_over(local: Bucket, lines: Lines) -> None:
    failures = [1]

    def cut_late(done: int) -> None:
        if failures and done == 4 * MB:
            failures.pop()
            raise UnavailableError("the connection was cut")
        if not failures and done == MB:
            lines.wait_for(r"up key: 1\.0 of 4\.0 MB")

    options = StoreOptions()
    bucket = slow(
        RetryingBucket(ReportingBucket(local, MB, cut_late), options, Metrics()), "log", after=0.001, every=0.001
    )
    bucket.put("key", bytes(4 * MB))
    assert "up key: done, 4.0 MB" in lines.seen[-1]


@pytest.mark.parametrize("mode", ["auto", "bar"])
def test_bars_on_a_terminal(
    local: Bucket, terminal: Terminal, lines: Lines, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stderr)
    with halfway(local, mode):
        terminal.wait_for(r"down large: +50%\|.*\| 2\.00M/4\.00M \[")
    terminal.write_after()
    # The bar is wiped out, and the cursor is back at the beginning of its line.
    assert re.search(r"\r +\rwhat comes after", terminal.written)
    assert lines.seen == []


@pytest.mark.slow
def test_bars_of_several_transfers_keep_to_their_lines(
    local: Bucket, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.stderr)
    first, second = (f"objects/{letter * 64}.safetensors" for letter in "ab")
    with halfway(local, "bar", "put", key=first), halfway(local, "bar", "put", key=second):
        for letter in "ab":
            terminal.wait_for(rf"up {letter * 13}\.\.{letter}\.safetensors: +50%")
    terminal.write_after()
    for piece in re.split(r"[\r\n]|\x1b\[A", terminal.written):
        assert re.fullmatch(r"( *|up (a{13}|b{13})\.\.[\w.]{13}: .*\]? *|what comes after)", piece), piece
        assert piece.count("up ") <= 1


def test_a_lost_terminal_stops_no_transfer(local: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    tried = threading.Event()

    def pause(done: int) -> None:
        if done == MB:
            tried.wait(0.1)

    for mode in MODES:
        assert len(slow(ReportingBucket(local, MB, pause), mode).get(KEY)) == 4 * MB
    monkeypatch.setattr(sys, "stderr", None)
    for mode in MODES:
        assert len(slow(ReportingBucket(local, MB, pause), mode).get(KEY)) == 4 * MB

"""``ProgressBucket``: shows long transfers as bars on a terminal or as log lines."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, TypeVar

from vllm_delta_sync.bucket.base import Bucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, Call, size_of
from vllm_delta_sync.bucket.transfer_observers import TransferObserver, observed_by
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.redaction import guarded_logger

Mode = Literal["auto", "bar", "log", "off"]
_Result = TypeVar("_Result")

SHOWN_AFTER_SECONDS = 2.0
LOG_SECONDS = 10.0
TICK_SECONDS = 0.2
IDLE_TICKS = 25
"""The thread that shows transfers ends after this many ticks without one."""
NAME_CHARACTERS = 28
USUAL_COLUMNS, USUAL_ROWS = 80, 24

logger = guarded_logger("vllm_delta_sync.bucket")


class ProgressBucket(BucketMiddleware):
    """Shows puts, gets and get_files that take longer than ``after`` seconds.

    ``bar``: tqdm bars on stderr. ``log``: a line after ``after`` seconds, one every ``every`` seconds, and one at the
    end. ``auto``: bars if stderr is a terminal and this is the main process, otherwise lines. For a download that is
    shown, one more request gets the object's size. An error here never stops a transfer.
    """

    def __init__(
        self, inner: Bucket, mode: Mode, *, after: float = SHOWN_AFTER_SECONDS, every: float = LOG_SECONDS
    ) -> None:
        super().__init__(inner)
        self._mode, self._after, self._every = mode, after, every
        # Methods of sets are atomic. A lock could be left locked by a fork.
        self._transfers: set[_ShownTransfer] = set()
        self._watching_process = 0

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        # ``transfer`` shows ranges.
        if call.direction is None or call.method == "get_range":
            return run()
        with self._show(call):
            return run()

    @contextmanager
    def transfer(self, key: str) -> Iterator[None]:
        with self._show(Call("get", key)), self._inner.transfer(key):
            yield

    @contextmanager
    def _show(self, call: Call) -> Iterator[None]:
        if self._mode == "off":
            yield
            return
        shown = _ShownTransfer(call, lambda: self._size(call), self._every)
        self._transfers.add(shown)
        self._start_watching()
        done = False
        try:
            with observed_by(shown):
                yield
            done = True
        finally:
            self._transfers.discard(shown)
            shown.end(done)

    def _start_watching(self) -> None:
        """Start the thread that shows transfers, unless it runs in this process."""
        if self._watching_process != os.getpid():
            self._watching_process = os.getpid()
            if not _start(self._watch):
                self._watching_process = 0

    def _watch(self) -> None:
        idle = 0
        while idle < IDLE_TICKS:
            time.sleep(min(TICK_SECONDS, self._after))
            idle = 0 if self._transfers else idle + 1
            for transfer in list(self._transfers):
                if time.monotonic() - transfer.began >= self._after:
                    transfer.show(self._mode)
        self._watching_process = 0
        if self._transfers:  # one that began just now
            self._start_watching()

    def _size(self, call: Call) -> int:
        return size_of(call.data) if call.direction == "up" else self._inner.stat(call.key).bytes


class _ShownTransfer(TransferObserver):
    """One transfer, and the bar or the lines that show it."""

    def __init__(self, call: Call, size: Callable[[], int], every: float) -> None:
        self._key, self._direction = call.key, call.direction
        self._size, self._every = size, every
        self.began = time.monotonic()
        self._total: int | None = None
        self._count = threading.Lock()
        self._moved = 0
        self._display = threading.Lock()
        """Held to draw: nothing is drawn after the end."""
        self._ended = False
        self._shown = False
        self._bar: Any = None
        self._next_line = 0.0

    def on_bytes(self, count: int) -> None:
        with self._count:
            self._moved += count

    def show(self, mode: Mode) -> None:
        """Draw the bar, or log a line if one is due."""
        if not self._shown:
            # In another thread, because the store may be slow.
            _start(self._fetch_size)
        bars = _use_bars(mode)
        with self._display:
            if not self._ended:
                self._shown = True
                if bars:
                    self._draw()
                else:
                    self._log()

    def end(self, done: bool) -> None:
        """Remove the bar, or log the last line."""
        with self._display:
            self._ended = True
            if self._bar is not None:
                _ignore_terminal(self._bar.close)
            elif self._shown:
                seconds = time.monotonic() - self.began
                size = self._total if done and self._total is not None else self._bytes
                logger.info(
                    "%s %s: %s, %.1f MB in %.1f s, %.1f MB/s",
                    *(self._direction, self._key, "done" if done else "interrupted"),
                    *(size / 1e6, seconds, size / 1e6 / seconds),
                )

    @property
    def _bytes(self) -> int:
        """Bytes transferred so far; restarts at zero when the store's client sends the same bytes again."""
        moved, total = self._moved, self._total
        return moved if not total or moved <= total else moved % total or total

    def _fetch_size(self) -> None:
        try:
            self._total = self._size()
        except DeltaSyncError:
            pass  # the transfer itself reports the problem

    def _log(self) -> None:
        now = time.monotonic()
        if now < self._next_line:
            return
        self._next_line = now + self._every
        moved, rate = self._bytes / 1e6, self._bytes / 1e6 / (now - self.began)
        of = f"{moved:.1f}" if self._total is None else f"{moved:.1f} of {self._total / 1e6:.1f}"
        logger.info("%s %s: %s MB, %.1f MB/s", self._direction, self._key, of, rate)

    def _draw(self) -> None:
        columns, rows = terminal_size()
        if self._bar is None:
            name = self._key.rpartition("/")[2]
            half = NAME_CHARACTERS // 2 - 1
            name = name if len(name) <= NAME_CHARACTERS else f"{name[:half]}..{name[-half:]}"
            options = {"unit": "B", "unit_scale": True, "leave": False, "ncols": columns, "nrows": rows}
            self._bar = _ignore_terminal(
                lambda: bar_class()(desc=f"{self._direction} {name}", total=self._total, file=sys.stderr, **options)
            )
        if self._bar is not None:
            self._bar.start_t = time.time() - (time.monotonic() - self.began)
            self._bar.ncols, self._bar.nrows = columns, rows
            self._bar.total, self._bar.n = self._total, self._bytes
            _ignore_terminal(self._bar.refresh)


def _use_bars(mode: Mode) -> bool:
    if mode != "auto" or sys.stderr is None:
        return mode == "bar" and sys.stderr is not None
    return multiprocessing.parent_process() is None and bool(_ignore_terminal(sys.stderr.isatty))


def terminal_size() -> tuple[int, int]:
    """Return columns and rows of the terminal, never 0: in containers some report 0, and tqdm draws nothing."""
    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # stderr was replaced by an object that is no terminal, or is closed
        columns, rows = 0, 0
    return columns or USUAL_COLUMNS, rows or USUAL_ROWS


@cache
def bar_class() -> Any:
    """Return tqdm's bar class without its monitor thread."""
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # the monitor thread refreshes stalled bars, which the watching thread does already

    return Bar


def _ignore_terminal(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns; None if the terminal has closed, or stderr is closed."""
    try:
        return call()
    except (OSError, ValueError):
        return None


def _start(work: Callable[[], None]) -> bool:
    try:
        threading.Thread(target=work, name="delta-sync-progress", daemon=True).start()
    except RuntimeError:  # the interpreter is shutting down, or there are too many threads
        return False
    return True

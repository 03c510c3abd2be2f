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
"""The display thread ends after this many ticks without a transfer."""
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
        self._mode = mode
        self._after = after
        self._every = every
        self._board = _ProgressBoard(mode, after)

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        # ``transfer`` shows ranges.
        if call.direction is None or call.method == "get_range":
            return run()
        with self._show_progress(call):
            return run()

    @contextmanager
    def transfer(self, key: str) -> Iterator[None]:
        with self._show_progress(Call("get", key)), self._inner.transfer(key):
            yield

    def close(self) -> None:
        self._board.close()
        super().close()

    @contextmanager
    def _show_progress(self, call: Call) -> Iterator[None]:
        if self._mode == "off":
            yield
            return
        if self._board.pid != os.getpid():
            self._board = _ProgressBoard(self._mode, self._after)  # after a fork, the parent's thread is not here
        board, transfer = self._board, _ShownTransfer(call, lambda: self._size(call), self._every)
        board.add(transfer)
        try:
            with observed_by(transfer):
                yield
            transfer.done = True
        finally:
            board.remove(transfer)

    def _size(self, call: Call) -> int:
        return size_of(call.data) if call.direction == "up" else self._inner.stat(call.key).bytes


class _ShownTransfer(TransferObserver):
    """The progress of one transfer."""

    def __init__(self, call: Call, size: Callable[[], int], every: float) -> None:
        self.key = call.key
        self.began = time.monotonic()
        self.done = False
        self.shown = False
        self.bar: Any = None
        self.total: int | None = None
        self._direction = call.direction
        self._size = size
        self._every = every
        self._lock = threading.Lock()
        self._moved = 0
        self._next_line = 0.0

    def on_bytes(self, count: int) -> None:
        with self._lock:
            self._moved += count

    @property
    def bytes(self) -> int:
        """Bytes transferred so far; restarts at zero when the store's client sends the same bytes again."""
        moved, total = self._moved, self.total
        return moved if not total or moved <= total else moved % total or total

    @property
    def label(self) -> str:
        name = self.key.rpartition("/")[2]
        half = NAME_CHARACTERS // 2 - 1
        return f"{self._direction} {name if len(name) <= NAME_CHARACTERS else f'{name[:half]}..{name[-half:]}'}"

    def fetch_size(self) -> None:
        """Request the object's size in another thread, because the store may be slow."""

        def fetch_size() -> None:
            try:
                self.total = self._size()
            except DeltaSyncError:
                pass  # the transfer itself reports the problem

        _start(fetch_size)

    def log_line(self) -> None:
        """Log the progress, if a line is due."""
        now = time.monotonic()
        if now < self._next_line:
            return
        self._next_line = now + self._every
        of = f"{self.bytes / 1e6:.1f}" if self.total is None else f"{self.bytes / 1e6:.1f} of {self.total / 1e6:.1f}"
        logger.info("%s %s: %s MB, %.1f MB/s", self._direction, self.key, of, self.bytes / 1e6 / (now - self.began))

    def log_end(self) -> None:
        seconds = time.monotonic() - self.began
        how = "done" if self.done else "interrupted"
        size = self.total if self.done and self.total is not None else self.bytes
        megabytes = size / 1e6
        rate = megabytes / seconds
        logger.info("%s %s: %s, %.1f MB in %.1f s, %.1f MB/s", self._direction, self.key, how, megabytes, seconds, rate)


class _ProgressBoard:
    """The current transfers and the one thread that shows them; bars drawn by several threads would overlap."""

    def __init__(self, mode: Mode, after: float) -> None:
        self.pid = os.getpid()
        self._mode = mode
        self._after = after
        self._lock = threading.Lock()
        self._transfers: dict[_ShownTransfer, None] = {}
        self._running = False
        self._closed = threading.Event()

    def add(self, transfer: _ShownTransfer) -> None:
        with self._lock:
            self._transfers[transfer] = None
            if self._running:
                return
            self._running = _start(self._watch)

    def remove(self, transfer: _ShownTransfer) -> None:
        with self._lock:
            self._transfers.pop(transfer, None)
            bar, transfer.bar = transfer.bar, None
            if bar is not None:
                _draw(bar.close)
            elif transfer.shown:
                transfer.log_end()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        idle = 0
        while not self._closed.wait(min(TICK_SECONDS, self._after)):
            due = time.monotonic() - self._after
            with self._lock:
                idle = 0 if self._transfers else idle + 1
                if idle > IDLE_TICKS:
                    break
                late = [transfer for transfer in self._transfers if transfer.began <= due]
            for transfer in late:
                self._show(transfer)
        with self._lock:
            self._running = False

    def _show(self, transfer: _ShownTransfer) -> None:
        if not transfer.shown:
            transfer.fetch_size()
        bars = self._use_bars()
        with self._lock:
            if transfer not in self._transfers:
                return
            transfer.shown = True
            if not bars:
                transfer.log_line()
                return
            if transfer.bar is None:
                transfer.bar = _draw(lambda: _bar(transfer))
            if transfer.bar is not None:
                _draw(lambda: _redraw(transfer.bar, transfer))

    def _use_bars(self) -> bool:
        if self._mode != "auto" or sys.stderr is None:
            return self._mode == "bar" and sys.stderr is not None
        return multiprocessing.parent_process() is None and _is_terminal()


def _bar(transfer: _ShownTransfer) -> Any:
    columns, rows = terminal_size()
    bar = bar_class()(
        desc=transfer.label,
        total=transfer.total,
        unit="B",
        unit_scale=True,
        leave=False,
        ncols=columns,
        nrows=rows,
        file=sys.stderr,
    )
    bar.start_t = time.time() - (time.monotonic() - transfer.began)
    return bar


def _redraw(bar: Any, transfer: _ShownTransfer) -> None:
    bar.ncols, bar.nrows = terminal_size()
    bar.total, bar.n = transfer.total, transfer.bytes
    bar.refresh()


def terminal_size() -> tuple[int, int]:
    """Return columns and rows of the terminal, never 0: in containers some report 0, and tqdm draws nothing."""
    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, AttributeError):  # stderr was replaced by an object that is no terminal
        columns, rows = 0, 0
    return columns or USUAL_COLUMNS, rows or USUAL_ROWS


@cache
def bar_class() -> Any:
    """Return tqdm's bar class without its monitor thread."""
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # the monitor thread refreshes stalled bars, which the display thread does already

    return Bar


def _draw(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (OSError, ValueError):  # the terminal has closed, or stderr is closed
        return None


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (OSError, ValueError):
        return False


def _start(work: Callable[[], None]) -> bool:
    try:
        threading.Thread(target=work, name="delta-sync-progress", daemon=True).start()
    except RuntimeError:  # the interpreter is shutting down, or there are too many threads
        return False
    return True

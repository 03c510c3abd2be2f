"""What people see of a transfer that takes its time: a bar on a terminal, lines in a log elsewhere."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

from vllm_delta_sync.bucket.base import Bucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, size_of
from vllm_delta_sync.bucket.transfer_observers import TransferObserver, observed_by
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.redaction import guarded_logger

Mode = Literal["auto", "bar", "log", "off"]

SHOWN_AFTER_SECONDS = 2.0
LOG_SECONDS = 10.0
TICK_SECONDS = 0.2
IDLE_TICKS = 25
"""The thread that shows transfers waits so long for the next one before it ends."""
NAME_CHARACTERS = 28
USUAL_COLUMNS, USUAL_ROWS = 80, 24

logger = guarded_logger("vllm_delta_sync.bucket")


class ProgressBucket(BucketMiddleware):
    """Shows puts, gets and get_files that take over ``after`` seconds.

    ``bar``: tqdm bars on stderr. ``log``: a line then, one every ``every`` seconds, and one at the end. ``auto``: bars
    if stderr is a terminal and this is the main process, else lines. A transfer that is over before that costs no
    request; for one that is not, the size of what comes is asked for once. Nothing that goes wrong here stops it.
    """

    def __init__(
        self, inner: Bucket, mode: Mode, *, after: float = SHOWN_AFTER_SECONDS, every: float = LOG_SECONDS
    ) -> None:
        super().__init__(inner)
        self._mode = mode
        self._after = after
        self._every = every
        self._board = _Board(mode, after)

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        with self._shown(key, "up", lambda: size_of(data)):
            self._inner.put(key, data, if_absent=if_absent)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        with self._shown(key, "down", lambda: self._inner.stat(key).bytes):
            return self._inner.get(key, max_bytes=max_bytes)

    def get_file(self, key: str, path: Path) -> None:
        with self._shown(key, "down", lambda: self._inner.stat(key).bytes):
            self._inner.get_file(key, path)

    @contextmanager
    def transfer(self, key: str) -> Iterator[None]:
        with self._shown(key, "down", lambda: self._inner.stat(key).bytes), self._inner.transfer(key):
            yield

    def close(self) -> None:
        self._board.close()
        super().close()

    @contextmanager
    def _shown(self, key: str, way: str, size: Callable[[], int]) -> Iterator[None]:
        if self._mode == "off":
            yield
            return
        if self._board.pid != os.getpid():
            self._board = _Board(self._mode, self._after)  # after a fork, whose other half shows its own
        board, transfer = self._board, _Transfer(key, way, size, self._every)
        board.add(transfer)
        try:
            with observed_by(transfer):
                yield
            transfer.done = True
        finally:
            board.remove(transfer)


class _Transfer(TransferObserver):
    """What is known of one transfer."""

    def __init__(self, key: str, way: str, size: Callable[[], int], every: float) -> None:
        self.key = key
        self.began = time.monotonic()
        self.done = False
        self.shown = False
        self.bar: Any = None
        self.total: int | None = None
        self._way = way
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
        """What has moved; from zero again where a client repeats what its store did not take."""
        moved, total = self._moved, self.total
        return moved if not total or moved <= total else moved % total or total

    @property
    def label(self) -> str:
        name = self.key.rpartition("/")[2]
        half = NAME_CHARACTERS // 2 - 1
        return f"{self._way} {name if len(name) <= NAME_CHARACTERS else f'{name[:half]}..{name[-half:]}'}"

    def ask(self) -> None:
        """Learn the size, from another thread because the store may be what is slow."""

        def ask() -> None:
            try:
                self.total = self._size()
            except DeltaSyncError:
                pass  # the transfer itself will say what is wrong

        _start(ask)

    def line(self) -> None:
        """Log how far it is, if a line is due."""
        now = time.monotonic()
        if now < self._next_line:
            return
        self._next_line = now + self._every
        of = f"{self.bytes / 1e6:.1f}" if self.total is None else f"{self.bytes / 1e6:.1f} of {self.total / 1e6:.1f}"
        logger.info("%s %s: %s MB, %.1f MB/s", self._way, self.key, of, self.bytes / 1e6 / (now - self.began))

    def last_line(self) -> None:
        seconds = time.monotonic() - self.began
        how = "done" if self.done else "broken off"
        size = self.total if self.done and self.total is not None else self.bytes
        rate = size / 1e6 / seconds
        logger.info("%s %s: %s, %.1f MB in %.1f s, %.1f MB/s", self._way, self.key, how, size / 1e6, seconds, rate)


class _Board:
    """The transfers under way, and the one thread that shows them: bars that one thread draws do not mix."""

    def __init__(self, mode: Mode, after: float) -> None:
        self.pid = os.getpid()
        self._mode = mode
        self._after = after
        self._lock = threading.Lock()
        self._transfers: dict[_Transfer, None] = {}
        self._running = False
        self._closed = threading.Event()

    def add(self, transfer: _Transfer) -> None:
        with self._lock:
            self._transfers[transfer] = None
            if self._running:
                return
            self._running = _start(self._watch)

    def remove(self, transfer: _Transfer) -> None:
        with self._lock:
            self._transfers.pop(transfer, None)
            bar, transfer.bar = transfer.bar, None
            if bar is not None:
                _draw(bar.close)
            elif transfer.shown:
                transfer.last_line()

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

    def _show(self, transfer: _Transfer) -> None:
        if not transfer.shown:
            transfer.ask()
        bars = self._in_bars()
        with self._lock:
            if transfer not in self._transfers:
                return
            transfer.shown = True
            if not bars:
                transfer.line()
                return
            if transfer.bar is None:
                transfer.bar = _draw(lambda: _bar(transfer))
            if transfer.bar is not None:
                _draw(lambda: _draw_again(transfer.bar, transfer))

    def _in_bars(self) -> bool:
        if self._mode != "auto" or sys.stderr is None:
            return self._mode == "bar" and sys.stderr is not None
        return multiprocessing.parent_process() is None and _is_terminal()


def _bar(transfer: _Transfer) -> Any:
    columns, rows = window()
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


def _draw_again(bar: Any, transfer: _Transfer) -> None:
    bar.ncols, bar.nrows = window()
    bar.total, bar.n = transfer.total, transfer.bytes
    bar.refresh()


def window() -> tuple[int, int]:
    """Columns and rows of the terminal. Some, as in containers, say 0 of both, for which tqdm would draw nothing."""
    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, AttributeError):  # somebody's own stderr, which is no terminal
        columns, rows = 0, 0
    return columns or USUAL_COLUMNS, rows or USUAL_ROWS


@cache
def bar_class() -> Any:
    """tqdm's bar, without the thread that it would start."""
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # it would only wake bars that nobody refreshes

    return Bar


def _draw(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (OSError, ValueError):  # the terminal is gone, or stderr is closed
        return None


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (OSError, ValueError):
        return False


def _start(work: Callable[[], None]) -> bool:
    try:
        threading.Thread(target=work, name="delta-sync-progress", daemon=True).start()
    except RuntimeError:  # the interpreter ends, or there are too many threads
        return False
    return True

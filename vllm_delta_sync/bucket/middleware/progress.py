"""``ProgressBucket``: shows long transfers as bars on a terminal or as log lines."""

import multiprocessing
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Literal, TypeVar

from vllm_delta_sync.bucket.base import Bucket, observed_by
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, Call, size_of
from vllm_delta_sync.logs import guarded_logger

Mode = Literal["auto", "bar", "log", "off"]
_Result = TypeVar("_Result")

SHOWN_AFTER_SECONDS = 2.0
LOG_SECONDS = 10.0
DRAW_SECONDS = 0.2
NAME_CHARACTERS = 28

logger = guarded_logger("vllm_delta_sync.bucket")


class ProgressBucket(BucketMiddleware):
    """Shows puts, gets and transfers that take longer than ``SHOWN_AFTER_SECONDS``, while their bytes move.

    ``bar``: tqdm bars on stderr. ``log``: a line after that time, one every ``LOG_SECONDS``, and one at the end.
    ``auto``: bars if stderr is a terminal and this is the main process, otherwise lines. An error here never stops a
    transfer.
    """

    def __init__(self, inner: Bucket, mode: Mode) -> None:
        super().__init__(inner)
        self._mode = mode

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        # ``transfer`` shows ranges.
        if call.direction is None or call.method == "get_range":
            return run()
        with self._show(call.direction, call.key, size_of(call.data)):
            return run()

    @contextmanager
    def transfer(self, key: str, size: int) -> Iterator[None]:
        with self._show("down", key, size), self._inner.transfer(key, size):
            yield

    @contextmanager
    def _show(self, direction: Literal["up", "down"], key: str, size: int) -> Iterator[None]:
        if self._mode == "off":
            yield
            return
        shown = _ShownTransfer(direction, key, size, _use_bars(self._mode))
        done = False
        try:
            with observed_by(shown.on_bytes):
                yield
            done = True
        finally:
            shown.end(done)


class _ShownTransfer:
    """One transfer, and the bar or the lines that show it. Args: size: in bytes, 0 if it is not known."""

    def __init__(self, direction: Literal["up", "down"], key: str, size: int, bars: bool) -> None:
        self._direction, self._key, self._size = direction, key, size
        self._bars = bars
        self._began = time.monotonic()
        self._due = self._began + SHOWN_AFTER_SECONDS
        self._lock = threading.Lock()
        self._moved = 0
        self._logged = False
        self._bar: Any = None

    def on_bytes(self, count: int) -> None:
        with self._lock:
            self._moved += count
            now = time.monotonic()
            if now < self._due:
                return
            self._due = now + (DRAW_SECONDS if self._bars else LOG_SECONDS)
            if self._bars:
                with suppress(OSError, ValueError):  # the terminal has closed, or stderr is closed
                    self._draw(now)
            else:
                self._logged = True
                of = f"{self._moved / 1e6:.1f}" + (f" of {self._size / 1e6:.1f}" if self._size else "")
                rate = self._moved / 1e6 / max(now - self._began, 1e-6)
                logger.info("%s %s: %s MB, %.1f MB/s", self._direction, self._key, of, rate)

    def end(self, done: bool) -> None:
        """Remove the bar, or log the last line."""
        with self._lock:
            self._due = float("inf")  # an abandoned call may move bytes later
            if self._bar is not None:
                with suppress(OSError, ValueError):
                    self._bar.close()
            elif self._logged:
                seconds, moved = time.monotonic() - self._began, self._moved / 1e6
                logger.info(
                    "%s %s: %s, %.1f MB in %.1f s, %.1f MB/s",
                    *(self._direction, self._key, "done" if done else "interrupted"),
                    *(moved, seconds, moved / seconds),
                )

    def _draw(self, now: float) -> None:
        columns, rows = shutil.get_terminal_size()
        if self._bar is None:
            name = self._key.rpartition("/")[2]
            half = NAME_CHARACTERS // 2 - 1
            name = name if len(name) <= NAME_CHARACTERS else f"{name[:half]}..{name[-half:]}"
            description, total = f"{self._direction} {name}", self._size or None
            self._bar = new_bar(desc=description, total=total, unit="B", unit_scale=True)
            # tqdm wipes out no bar that was drawn last before it began.
            self._bar.start_t -= now - self._began
        self._bar.ncols, self._bar.nrows, self._bar.n = columns, rows, self._moved
        self._bar.refresh()


def _use_bars(mode: Mode) -> bool:
    if mode != "auto" or sys.stderr is None:
        return mode == "bar" and sys.stderr is not None
    try:
        return multiprocessing.parent_process() is None and sys.stderr.isatty()
    except ValueError:  # stderr is closed
        return False


def new_bar(**options: Any) -> Any:
    """Return a bar of tqdm's on stderr that vanishes when it is closed. Args: options: further ones of tqdm."""
    columns, rows = shutil.get_terminal_size()
    return _bar_class()(leave=False, ncols=columns, nrows=rows, file=sys.stderr, **options)


@cache
def _bar_class() -> Any:
    """Return tqdm's bar class without its monitor thread."""
    from tqdm import tqdm

    class Bar(tqdm):
        monitor_interval = 0  # the monitor thread refreshes stalled bars, of which nothing new is to be said

    return Bar

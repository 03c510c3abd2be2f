"""``BackgroundReader`` reads a run in a thread, at most every few seconds and only while its result is asked for."""

import threading
import time
from collections.abc import Callable
from typing import Any

from vllm_delta_sync.dashboard.overview import RunView
from vllm_delta_sync.errors import DeltaSyncError, EngineError

READ_SECONDS = 5.0
"""Shortest interval between two reads of the bucket, however many viewers there are."""


class BackgroundReader:
    """The newest view of a run, for any number of viewers.

    Args:
        read: see ``PageReader.read``; called in a thread of its own, never twice at once.
        seconds: shortest time from the end of a read to the beginning of the next; None: ``READ_SECONDS``.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], seconds: float | None = None) -> None:
        self._read, self._seconds = read, READ_SECONDS if seconds is None else seconds
        self._lock = threading.Lock()
        self._reading: threading.Thread | None = None
        self._due = 0.0
        self._view = RunView(None)

    def latest(self, may_read: bool = True) -> RunView:
        """Return the last view at once, and begin to read again if it is old.

        Args:
            may_read: whether a read may begin now; False while an engine is paused.
        """
        with self._lock:
            if may_read and self._reading is None and time.monotonic() >= self._due:
                reading = threading.Thread(target=self._work, name="delta-sync-page", daemon=True)
                # This fails where there are too many threads. The thread takes the lock before it ends.
                reading.start()
                self._reading = reading
            return self._view

    def wait(self, seconds: float) -> RunView:
        """Return the view, after the read that is under way, or ``seconds`` at most."""
        self.latest()
        with self._lock:
            reading = self._reading
        if reading is not None:
            reading.join(seconds)
        return self.latest(may_read=False)

    def _work(self) -> None:
        view = self._view
        try:
            view = RunView(self._read(), None, time.time())
        except DeltaSyncError as error:
            view = RunView(view.document, error, view.at)
        except Exception as error:  # noqa: BLE001  the page shows it, and the next read may succeed
            view = RunView(view.document, EngineError(f"unexpected {type(error).__name__}: {error}"), view.at)
        with self._lock:
            self._view, self._reading = view, None
            self._due = time.monotonic() + self._seconds

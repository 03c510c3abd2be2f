"""``BackgroundThread``: run calls in one thread, and wait for them so that an interrupt at any moment does no harm.

``threading.Event`` and ``concurrent.futures`` wait on condition variables written in Python: a signal handler that
raises in the middle of one leaves its lock held or released twice. Here the main thread makes one C call at a time.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

_POLL_SECONDS = 1.0

_Result = TypeVar("_Result")


class BackgroundJob:
    """A call that a background thread makes. ``error``: what it raised, once ``done``."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.done = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the call has returned or failed; return whether it has, within ``timeout`` seconds if given."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done:
            left = end - time.monotonic()
            if left <= 0:
                return False
            # An interrupted waiter may keep the lock, so other waiters also poll.
            if self._gate.acquire(timeout=min(left, _POLL_SECONDS)):
                self._gate.release()
        return True

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error
        self.done = True
        self._gate.release()
        # The waiting thread raises the error, not this one.
        return True


class BackgroundThread:
    """A thread that makes calls one after another, in the order of submission.

    Without ``close`` the thread ends when this object is garbage, and at the end of the program; in both cases it first
    makes the calls submitted before. It keeps nothing of a call that has ended.
    """

    def __init__(self, name: str) -> None:
        self._queue: _Calls = SimpleQueue()
        # The thread holds the queue only: with this object, it would keep a publisher and its model alive.
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name=name)
        weakref.finalize(self, self._queue.put, None).atexit = False
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether this very thread asks."""
        return threading.current_thread() is self._thread

    def submit(self, job: BackgroundJob, work: Callable[[], None]) -> None:
        """Make the call ``work``, and record its outcome in ``job``."""
        self._queue.put((job, work))

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Make the call ``work``, wait for it, and return or raise what it does; from this very thread, at once."""
        if self.is_current:
            return work()
        found: list[_Result] = []
        job = BackgroundJob()
        self.submit(job, lambda: found.append(work()))
        job.join()
        if job.error is not None:
            raise job.error
        return found[0]

    def close(self) -> None:
        """Make the calls submitted so far and end the thread. May be called twice, and by the thread itself."""
        self._queue.put(None)
        if not self.is_current:
            self._thread.join()


_Calls = SimpleQueue[tuple[BackgroundJob, Callable[[], None]] | None]


def _serve(calls: _Calls) -> None:
    while True:
        try:
            item = calls.get(timeout=_POLL_SECONDS)
        except Empty:
            if threading.main_thread().is_alive():
                continue
            return
        if item is None:
            return
        job, work = item
        with job:
            work()
        del item, job, work

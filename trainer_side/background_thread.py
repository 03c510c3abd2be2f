"""One background thread, and waiting for it in a way that an interrupt at any moment leaves whole.

``threading.Event`` and ``concurrent.futures`` wait on condition variables written in Python: a signal handler
that raises in the middle of one leaves its lock held or released twice. What the main thread does here is one
C call at a time.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from types import TracebackType

_POLL_SECONDS = 1.0


class BackgroundJob:
    """A call made by the worker.

    Attributes:
        error: what it raised, once done.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._done = False
        self._gate = threading.Lock()
        self._gate.acquire()

    @property
    def done(self) -> bool:
        return self._done

    def join(self) -> None:
        """Wait until it is done, whether it failed or not."""
        while not self._done:
            # An interrupted waiter may keep the gate, so that others must look for themselves now and then.
            if self._gate.acquire(timeout=_POLL_SECONDS):
                self._gate.release()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        self._done = True
        self._gate.release()
        # Raised to whoever waits, not in the worker.
        return True


class BackgroundThread:
    """Makes calls in a thread of its own, one after another, in the order given.

    At the end of the program calls that were given before are still made, without ``close`` too.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[BackgroundJob, Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name)
        self._thread.start()

    def submit(self, job: BackgroundJob, work: Callable[[], None]) -> None:
        """Have ``work`` called, and its outcome noted in ``job``."""
        self._queue.put((job, work))

    def call(self, work: Callable[[], None]) -> None:
        """Have ``work`` called, wait for it, and raise what it raises."""
        job = BackgroundJob()
        self.submit(job, work)
        job.join()
        if job.error is not None:
            raise job.error

    def close(self) -> None:
        """Finish what was given and end the thread. May be called twice."""
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_POLL_SECONDS)
            except Empty:
                if threading.main_thread().is_alive():
                    continue
                return
            if item is None:
                return
            job, work = item
            with job:
                work()

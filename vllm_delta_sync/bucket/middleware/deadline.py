"""``DeadlineBucket``: runs calls in threads and abandons a call that misses its deadline.

Timeouts of the stores' clients do not cover everything: an unanswered connection, a lock inside the client, a resolver
that hangs. A thread in such a call cannot be ended, so it is abandoned. It can do no harm later: its result is dropped,
and a newer write of the key waits for it, so that a late put cannot undo a newer one.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo, observed_by, with_observers
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, Call, size_of
from vllm_delta_sync.bucket.threads import SLICE_SECONDS, wait_interruptibly
from vllm_delta_sync.errors import UnavailableError
from vllm_delta_sync.settings import StoreOptions

_Result = TypeVar("_Result")


class DeadlineBucket(BucketMiddleware):
    """Abandons a call after ``options.allowance(size)`` seconds and raises UnavailableError.

    For a put, ``size`` is the size of the data; for a read, the bytes received so far, because the size of the object
    is not known in advance.
    """

    def __init__(self, inner: Bucket, options: StoreOptions) -> None:
        super().__init__(inner)
        self._options = options
        # List methods are atomic. A lock could be left locked by a fork.
        self._abandoned_writes: list[_ThreadCall[Any]] = []

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        if call.method not in ("put", "delete"):
            return self._run(call.action, _ThreadCall(run, self._options))
        content = _content(call.data)
        for earlier in list(self._abandoned_writes):
            # An earlier write may still take effect, which does not matter if it writes the same content.
            if earlier.key != call.key or earlier.content == content:
                continue
            if not earlier.ends_within(self._options.allowance(earlier.size)):
                raise self._timeout_error(
                    f"cannot {call.action} of {self.url}: an earlier write of it was abandoned and has not ended, so "
                    "it could overwrite this one; restart this process if this error persists"
                )
        size = size_of(call.data)
        writing = _ThreadCall(run, self._options, size, call.key, content, self._abandoned_writes)
        return self._run(call.action, writing)

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._list_pages(prefix)

    def close(self) -> None:
        try:
            self._run("close", _ThreadCall(super().close, self._options))
        except UnavailableError:
            pass  # the caller cannot act on it

    def _run(self, action: str, call: "_ThreadCall[_Result]") -> _Result:
        try:
            with observed_by(call.on_bytes):
                run = with_observers(call.run)
            try:
                # A daemon, so that a call that hangs does not delay the end of the process.
                threading.Thread(target=run, name="delta-sync-store", daemon=True).start()
            except RuntimeError:  # the interpreter is shutting down, or there are too many threads
                run()
            while not call.ends_within(max(0.0, min(call.seconds_left(), SLICE_SECONDS))):
                if call.seconds_left() <= 0 and call.abandon():
                    raise self._timeout_error(
                        f"cannot {action} of {self.url}: no answer within {call.allowance():.1f} s"
                    )
            return call.result()
        except BaseException:  # also on an interrupt; has no effect on a call that has ended
            call.abandon()
            raise

    def _timeout_error(self, what: str) -> UnavailableError:
        return UnavailableError(f"{what}; check the network, or raise store_deadline")


class _ThreadCall(Generic[_Result]):
    """One call in a thread of its own, which may be abandoned.

    Attributes:
        key, content: what a write writes. size: in bytes.
        abandoned: the list that holds a write from when it is abandoned until it ends; None for other calls.
        finished: locked until the call has ended.
    """

    def __init__(
        self,
        work: Callable[[], _Result],
        options: StoreOptions,
        size: int = 0,
        key: str = "",
        content: object = None,
        abandoned: "list[_ThreadCall[Any]] | None" = None,
    ) -> None:
        self._work: Callable[[], _Result] | None = work
        self._options = options
        self.size, self.key, self.content = size, key, content
        self._all_abandoned = abandoned
        self.finished = threading.Lock()
        self.finished.acquire()
        self._lock = threading.Lock()
        self._moved = 0
        self._ended = self._abandoned = False
        self._result: _Result | None = None
        self._error: BaseException | None = None
        self._began = time.monotonic()

    def on_bytes(self, count: int) -> None:
        with self._lock:
            self._moved += count
        if self._abandoned:
            # The result would be dropped, so end the transfer.
            raise UnavailableError("the call missed its deadline and was abandoned; try again")

    def allowance(self) -> float:
        """Return the seconds that the call may take, by the size that is known now."""
        return self._options.allowance(max(self.size, self._moved))

    def seconds_left(self) -> float:
        """Return the seconds until the deadline."""
        return self.allowance() - (time.monotonic() - self._began)

    def run(self) -> None:
        """Make the call, in its thread."""
        work, self._work = self._work, None
        try:
            if work is not None:
                self._result = work()
        except BaseException as error:  # noqa: BLE001  raised in the waiting thread
            self._error = error
        with self._lock:
            self._ended = True
        if self._abandoned:
            self._result = self._error = None
            if self._all_abandoned is not None:
                self._all_abandoned.remove(self)
        self.finished.release()

    def abandon(self) -> bool:
        """Abandon the call; return False if it has ended already."""
        with self._lock:
            if not self._ended and not self._abandoned:
                self._abandoned = True
                if self._all_abandoned is not None:
                    self._all_abandoned.append(self)
            return self._abandoned

    def ends_within(self, seconds: float) -> bool:
        """Wait for the call to end; several threads may wait."""
        if not wait_interruptibly(lambda left: self.finished.acquire(timeout=left), seconds):
            return False
        self.finished.release()
        return True

    def result(self) -> _Result:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # the error's traceback refers to this frame: avoid a reference cycle
        result, self._result = self._result, None
        return result  # type: ignore[return-value]  # None only where the work gave None


def _content(data: bytes | Path | None) -> object:
    """Return a value that is equal only for equal data; a rewritten file is unequal to its former self."""
    if not isinstance(data, Path):
        return data
    try:
        found = os.stat(data)
    except OSError:
        return object()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

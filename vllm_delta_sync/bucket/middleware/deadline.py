"""``DeadlineBucket``: runs calls in threads and abandons a call that misses its deadline.

Timeouts of the stores' clients do not cover everything: an unanswered connection, a lock inside the client, a resolver
that hangs. A thread in such a call cannot be ended, so it is abandoned. It can do no harm later: its result is dropped,
and a newer write of the key waits for it, so that a late put cannot undo a newer one.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo, observed_by
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, Call, size_of
from vllm_delta_sync.bucket.threads import SLICE_SECONDS, start_call, wait_interruptibly
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
        self._abandoned: list[_Write] = []

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        if call.method not in ("put", "delete"):
            return self._run(call.action, run)
        write = _Write(call.key, _content(call.data), size_of(call.data))
        for earlier in list(self._abandoned):
            # An earlier write may still take effect, which does not matter if it writes the same content.
            if earlier.key != write.key or earlier.content == write.content or earlier.future is None:
                continue
            allowance = self._options.allowance(earlier.size)
            if not wait_interruptibly(partial(_has_ended, earlier.future), allowance):
                raise self._timeout_error(
                    f"cannot {call.action} of {self.url}: an earlier write of it was abandoned and has not ended, so "
                    "it could overwrite this one; restart this process if this error persists"
                )
        return self._run(call.action, run, write)

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._list_pages(prefix)

    def close(self) -> None:
        try:
            self._run("close", super().close)
        except UnavailableError:
            pass  # the caller cannot act on it

    def _run(self, action: str, run: Callable[[], _Result], write: "_Write | None" = None) -> _Result:
        meter, began = _Meter(0 if write is None else write.size), time.monotonic()
        with observed_by(meter.on_bytes):
            try:
                future = start_call(run)
            except RuntimeError:  # the interpreter is shutting down, or there are too many threads
                return run()
        try:
            while not future.done():
                allowance = self._options.allowance(meter.size)
                left = began + allowance - time.monotonic()
                if not _has_ended(future, max(0.0, min(left, SLICE_SECONDS))) and left <= 0:
                    raise self._timeout_error(f"cannot {action} of {self.url}: no answer within {allowance:.1f} s")
            return future.result()
        except BaseException:  # also on an interrupt; a call that has ended is not abandoned
            meter.abandoned = not future.done()
            if write is not None and meter.abandoned:
                write.future = future
                self._abandoned.append(write)
                future.add_done_callback(lambda _: self._abandoned.remove(write))
            raise

    def _timeout_error(self, what: str) -> UnavailableError:
        return UnavailableError(f"{what}; check the network, or raise store_deadline")


@dataclass
class _Write:
    """What a put or a deletion writes; ``future``: of one that was abandoned."""

    key: str
    content: object
    size: int
    future: "Future[Any] | None" = None


class _Meter:
    """Counts the bytes of a call, and ends the transfer of an abandoned one. Attributes: size: known so far."""

    def __init__(self, size: int) -> None:
        self.size, self._moved, self.abandoned = size, 0, False
        self._lock = threading.Lock()

    def on_bytes(self, count: int) -> None:
        with self._lock:
            self._moved += count
            self.size = max(self.size, self._moved)
        if self.abandoned:
            # The result would be dropped.
            raise UnavailableError("the call missed its deadline and was abandoned; try again")


def _has_ended(future: "Future[Any]", seconds: float) -> bool:
    """Wait for a call to end."""
    return bool(wait((future,), seconds).done)


def _content(data: bytes | Path | None) -> object:
    """Return a value that is equal only for equal data; a rewritten file is unequal to its former self."""
    if not isinstance(data, Path):
        return data
    try:
        found = os.stat(data)
    except OSError:
        return object()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

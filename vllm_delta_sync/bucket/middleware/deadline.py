"""``DeadlineBucket``: runs calls in threads and abandons a call that misses its deadline.

Timeouts of the stores' clients do not cover everything: an unanswered connection, a lock inside the client, a resolver
that hangs. A thread in such a call cannot be ended, so it is abandoned. It can do no harm later: its result is dropped,
and a newer write of the key waits for it, so that a late put cannot undo a newer one.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo, check_prefix
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, size_of
from vllm_delta_sync.bucket.threads import SLICE_SECONDS, DaemonPool, wait_interruptibly
from vllm_delta_sync.bucket.transfer_observers import TransferObserver, observed_by, with_observers
from vllm_delta_sync.errors import DeltaSyncError, StoreError, UnavailableError
from vllm_delta_sync.settings import StoreOptions

PAGE = 1000
"""Keys requested at once in a listing."""
_DELETED = "nothing"
_Result = TypeVar("_Result")


class DeadlineBucket(BucketMiddleware):
    """Abandons a call after ``options.allowance(size)`` seconds and raises UnavailableError.

    For a put, ``size`` is the size of the data; for a read, the bytes received so far, because the size of the object
    is not known in advance. Time in which limits delayed the call does not count.
    """

    def __init__(self, inner: Bucket, options: StoreOptions) -> None:
        super().__init__(inner)
        self._options = options
        self._pool = DaemonPool()
        self._abandoned_writes: dict[str, list[_ThreadCall[Any]]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        action, size = f"write key {key!r}", size_of(data)
        content = _content(data)
        self._wait_for_abandoned(key, action, content)
        call = _ThreadCall(lambda: self._inner.put(key, data, if_absent=if_absent), self._options, size)
        call.write = _WriteInProgress(self._abandoned_writes, self._lock, key, content)
        self._run(action, call)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self._run(f"read key {key!r}", self._call(lambda: self._inner.get(key, max_bytes=max_bytes)))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._run(f"read key {key!r}", self._call(lambda: self._inner.get_range(key, start, length)))

    def get_file(self, key: str, path: Path) -> None:
        part = path.with_name(f".{secrets.token_hex(8)}.part")
        call = self._call(lambda: self._inner.get_file(key, part))
        call.cleanup = lambda: _unlink(part)
        try:
            self._run(f"read key {key!r}", call)
            os.replace(part, path)
        except OSError as error:
            raise StoreError(
                f"cannot copy key {key!r} of {self.url} to {path}: {error.strerror}; check the path"
            ) from error
        finally:
            _unlink(part)

    def stat(self, key: str) -> ObjectInfo:
        return self._run(f"look up key {key!r}", self._call(lambda: self._inner.stat(key)))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return self._list(prefix)

    def delete(self, key: str) -> None:
        action = f"delete key {key!r}"
        self._wait_for_abandoned(key, action, _DELETED)
        call = self._call(lambda: self._inner.delete(key))
        call.write = _WriteInProgress(self._abandoned_writes, self._lock, key, _DELETED)
        self._run(action, call)

    def close(self) -> None:
        try:
            self._run("close", self._call(super().close))
        except UnavailableError:
            pass  # the caller cannot act on it
        self._pool.close()

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        pages = Pages(self._inner, prefix)
        try:
            while page := self._page(pages, prefix):
                yield from page
        finally:
            pages.close()

    def _page(self, pages: "Pages", prefix: str) -> Sequence[ObjectInfo]:
        call = self._call(pages.read_page)
        call.cleanup = pages.close
        return self._run(f"list keys {prefix!r}", call)

    def _call(self, work: Callable[[], _Result]) -> "_ThreadCall[_Result]":
        return _ThreadCall(work, self._options, 0)

    def _run(self, action: str, call: "_ThreadCall[_Result]") -> _Result:
        try:
            with observed_by(call):
                run = with_observers(call.run)
            self._pool.submit(run, call.end)
            while not call.finished.acquire(timeout=max(0.0, min(call.seconds_left(), SLICE_SECONDS))):
                if call.seconds_left() <= 0 and call.abandon():
                    raise self._timeout_error(
                        f"cannot {action} of {self.url}: no answer within {call.allowance():.1f} s"
                    )
            return call.result()
        except BaseException:  # also on an interrupt; has no effect on a call that has ended
            call.abandon()
            raise

    def _wait_for_abandoned(self, key: str, action: str, content: object) -> None:
        """Wait for abandoned writes of the key, which may still take effect, unless they write the same content."""
        if not self._abandoned_writes:
            return
        with self._lock:
            calls = list(self._abandoned_writes.get(key, ()))
        for call in calls:
            if call.write is None or call.write.content == content:
                continue
            if not call.ends_within(self._options.allowance(call.size)):
                raise self._timeout_error(
                    f"cannot {action} of {self.url}: an earlier write of it was abandoned and has not ended, so it "
                    "could overwrite this one; restart this process if this error persists"
                )

    def _timeout_error(self, what: str) -> UnavailableError:
        return UnavailableError(f"{what}; check the network, or raise store_deadline")


class Pages:
    """A listing that is read in pages; an error is raised after the keys that were read before it."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._items: Iterator[ObjectInfo] | None = None
        self._error: DeltaSyncError | None = None
        self._busy = threading.Lock()

    def read_page(self) -> Sequence[ObjectInfo]:
        """Return the next page; empty at the end."""
        with self._busy:
            if self._error is not None:
                raise self._error
            if self._items is None:
                self._items = self._bucket.list(self._prefix)
            page: list[ObjectInfo] = []
            try:
                page.extend(islice(self._items, PAGE))
            except DeltaSyncError as error:
                if not page:
                    raise
                self._error = error
            return page

    def close(self) -> None:
        """Release the listing's connection, unless a page is being read: then the reading thread does so."""
        if self._busy.acquire(blocking=False):
            try:
                close = getattr(self._items, "close", None)
                if close is not None:
                    close()
            finally:
                self._busy.release()


class _WriteInProgress:
    """Registers an abandoned write of a key until it has ended."""

    def __init__(
        self, calls: "dict[str, list[_ThreadCall[Any]]]", lock: threading.Lock, key: str, content: object
    ) -> None:
        self._calls = calls
        self._lock = lock
        self._key = key
        self.content = content

    def register(self, call: "_ThreadCall[Any]") -> None:
        with self._lock:
            self._calls.setdefault(self._key, []).append(call)

    def unregister(self, call: "_ThreadCall[Any]") -> None:
        with self._lock:
            self._calls[self._key].remove(call)
            if not self._calls[self._key]:
                del self._calls[self._key]


class _ThreadCall(TransferObserver, Generic[_Result]):
    """One call in another thread: its deadline, its result, and its cleanup if it is abandoned."""

    def __init__(self, work: Callable[[], _Result], options: StoreOptions, size: int) -> None:
        self._work: Callable[[], _Result] | None = work
        self._options = options
        self.size = size
        self.write: _WriteInProgress | None = None
        self.cleanup: Callable[[], None] | None = None
        self.finished = threading.Lock()
        """Locked until the call has ended."""
        self.finished.acquire()
        self._lock = threading.Lock()
        self._moved = 0
        self._waited = 0.0
        self._running = self._ended = self._abandoned = False
        self._result: _Result | None = None
        self._error: BaseException | None = None
        self._began = time.monotonic()

    def on_bytes(self, count: int) -> None:
        with self._lock:
            self._moved += count
        if self._abandoned:
            # The result would be dropped, so end the transfer.
            raise UnavailableError("the call missed its deadline and was abandoned; try again")

    def on_wait(self, seconds: float) -> None:
        with self._lock:
            self._waited += seconds

    def allowance(self) -> float:
        """Return the seconds that the call may take, by the size that is known now."""
        return self._options.allowance(max(self.size, self._moved))

    def seconds_left(self) -> float:
        """Return the seconds until the deadline."""
        return self.allowance() + self._waited - (time.monotonic() - self._began)

    def run(self) -> None:
        with self._lock:
            if self._abandoned:
                return
            self._running = True
        work, self._work = self._work, None
        try:
            if work is not None:
                self._result = work()
        except BaseException as error:  # noqa: BLE001  raised in the waiting thread
            self._error = error

    def end(self) -> None:
        """Finish the call, as the last step of its thread."""
        with self._lock:
            self._ended = True
            abandoned = self._abandoned and self._running
        try:
            if abandoned:
                self._result = self._error = None
                if self.cleanup is not None:
                    self.cleanup()
                if self.write is not None:
                    self.write.unregister(self)
        finally:
            self.finished.release()

    def abandon(self) -> bool:
        """Abandon the call; return False if it has ended already."""
        with self._lock:
            if self._ended or self._abandoned:
                return self._abandoned
            self._abandoned = True
            if self._running and self.write is not None:
                self.write.register(self)
        return True

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


def _content(data: bytes | Path) -> object:
    """Return a value that is equal only for equal data; a rewritten file is unequal to its former self."""
    if isinstance(data, bytes):
        return data
    try:
        found = os.stat(data)
    except OSError:
        return object()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # no such folder, or not writable: the call itself reports that

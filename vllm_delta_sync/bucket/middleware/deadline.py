"""An answer in time, whatever the client of a store does: calls run in threads that can be given up.

Stores' clients have time-outs, and some of them do not work: a connection that nobody answers, a lock within the
client, a resolver that hangs. Nothing can end a thread in such a call; here it is left behind, and cannot harm what
comes later: what it still writes goes to nobody, and a late put does not undo a newer one.
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
"""Keys that are asked for at once in a listing."""
_DELETED = "nothing"
_Result = TypeVar("_Result")


class DeadlineBucket(BucketMiddleware):
    """Gives a call up after ``options.allowance(size)`` seconds, with UnavailableError.

    The size is that of a put, and what has come of whatever is read: neither a limit that a caller sets himself nor an
    open range says how long it should take. Time in which limits held the call back does not count.
    """

    def __init__(self, inner: Bucket, options: StoreOptions) -> None:
        super().__init__(inner)
        self._options = options
        self._pool = DaemonPool()
        self._late: dict[str, list[_ThreadCall[Any]]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        action, size = f"write key {key!r}", size_of(data)
        content = _content(data)
        self._wait_for_late(key, action, content)
        call = _ThreadCall(lambda: self._inner.put(key, data, if_absent=if_absent), self._options, size)
        call.late = _Late(self._late, self._lock, key, content)
        self._run(action, call)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self._run(f"read key {key!r}", self._call(lambda: self._inner.get(key, max_bytes=max_bytes)))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._run(f"read key {key!r}", self._call(lambda: self._inner.get_range(key, start, length)))

    def get_file(self, key: str, path: Path) -> None:
        part = path.with_name(f".{secrets.token_hex(8)}.part")
        call = self._call(lambda: self._inner.get_file(key, part))
        call.clean = lambda: _unlink(part)
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
        self._wait_for_late(key, action, _DELETED)
        call = self._call(lambda: self._inner.delete(key))
        call.late = _Late(self._late, self._lock, key, _DELETED)
        self._run(action, call)

    def close(self) -> None:
        try:
            self._run("close", self._call(super().close))
        except UnavailableError:
            pass  # there is nothing that anybody could do about it
        self._pool.close()

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        pages = Pages(self._inner, prefix)
        try:
            while page := self._page(pages, prefix):
                yield from page
        finally:
            pages.close()

    def _page(self, pages: "Pages", prefix: str) -> Sequence[ObjectInfo]:
        call = self._call(pages.take)
        call.clean = pages.close
        return self._run(f"list keys {prefix!r}", call)

    def _call(self, work: Callable[[], _Result]) -> "_ThreadCall[_Result]":
        return _ThreadCall(work, self._options, 0)

    def _run(self, action: str, call: "_ThreadCall[_Result]") -> _Result:
        try:
            with observed_by(call):
                run = with_observers(call.run)
            self._pool.submit(run, call.end)
            while not call.over.acquire(timeout=max(0.0, min(call.left(), SLICE_SECONDS))):
                if call.left() <= 0 and call.give_up():
                    raise self._hung(f"cannot {action} of {self.url}: no answer within {call.allowance():.1f} s")
            return call.result()
        except BaseException:  # an interrupt too leaves the call behind; one that has ended cannot be given up
            call.give_up()
            raise

    def _wait_for_late(self, key: str, action: str, content: object) -> None:
        """Calls that were given up may still write. What writes the same is in nobody's way."""
        if not self._late:
            return
        with self._lock:
            calls = list(self._late.get(key, ()))
        for call in calls:
            if call.late is None or call.late.content == content:
                continue
            if not call.ends_within(self._options.allowance(call.size)):
                raise self._hung(
                    f"cannot {action} of {self.url}: an earlier write of it was given up and has not ended, so it "
                    "could come last; start this process again if that does not end"
                )

    def _hung(self, what: str) -> UnavailableError:
        return UnavailableError(f"{what}; check the network, or raise store_deadline")


class Pages:
    """A listing, read some keys at a time; the error that ends it comes after the keys that came before it."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._items: Iterator[ObjectInfo] | None = None
        self._error: DeltaSyncError | None = None
        self._busy = threading.Lock()

    def take(self) -> Sequence[ObjectInfo]:
        """The next page; empty at the end."""
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
        """Give back what the listing holds, unless a page is being read: whoever reads it closes it then."""
        if self._busy.acquire(blocking=False):
            try:
                close = getattr(self._items, "close", None)
                if close is not None:
                    close()
            finally:
                self._busy.release()


class _Late:
    """Where a write that was given up stands until it has ended."""

    def __init__(
        self, calls: "dict[str, list[_ThreadCall[Any]]]", lock: threading.Lock, key: str, content: object
    ) -> None:
        self._calls = calls
        self._lock = lock
        self._key = key
        self.content = content

    def begin(self, call: "_ThreadCall[Any]") -> None:
        with self._lock:
            self._calls.setdefault(self._key, []).append(call)

    def end(self, call: "_ThreadCall[Any]") -> None:
        with self._lock:
            self._calls[self._key].remove(call)
            if not self._calls[self._key]:
                del self._calls[self._key]


class _ThreadCall(TransferObserver, Generic[_Result]):
    """One call in another thread: how long it may take, how it ended, and what is left to do if nobody waits for it."""

    def __init__(self, work: Callable[[], _Result], options: StoreOptions, size: int) -> None:
        self._work: Callable[[], _Result] | None = work
        self._options = options
        self.size = size
        self.late: _Late | None = None
        self.clean: Callable[[], None] | None = None
        self.over = threading.Lock()
        """Held until the call has ended."""
        self.over.acquire()
        self._lock = threading.Lock()
        self._moved = 0
        self._waited = 0.0
        self._running = self._ended = self._given_up = False
        self._result: _Result | None = None
        self._error: BaseException | None = None
        self._began = time.monotonic()

    def on_bytes(self, count: int) -> None:
        with self._lock:
            self._moved += count
        if self._given_up:
            # Nobody takes what this would bring: the sooner it ends, the better.
            raise UnavailableError("given up meanwhile; try again")

    def on_wait(self, seconds: float) -> None:
        with self._lock:
            self._waited += seconds

    def allowance(self) -> float:
        """Seconds that it may take, as far as is known now."""
        return self._options.allowance(max(self.size, self._moved))

    def left(self) -> float:
        """Seconds until it is given up."""
        return self.allowance() + self._waited - (time.monotonic() - self._began)

    def run(self) -> None:
        with self._lock:
            if self._given_up:
                return
            self._running = True
        work, self._work = self._work, None
        try:
            if work is not None:
                self._result = work()
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits for it
            self._error = error

    def end(self) -> None:
        """The last thing that its thread does."""
        with self._lock:
            self._ended = True
            given_up = self._given_up and self._running
        try:
            if given_up:
                self._result = self._error = None
                if self.clean is not None:
                    self.clean()
                if self.late is not None:
                    self.late.end(self)
        finally:
            self.over.release()

    def give_up(self) -> bool:
        """Leave it to itself, unless it has ended."""
        with self._lock:
            if self._ended or self._given_up:
                return self._given_up
            self._given_up = True
            if self._running and self.late is not None:
                self.late.begin(self)
        return True

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end, beside whoever else does."""
        if not wait_interruptibly(lambda left: self.over.acquire(timeout=left), seconds):
            return False
        self.over.release()
        return True

    def result(self) -> _Result:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it holds this frame, and this frame would hold it
        result, self._result = self._result, None
        return result  # type: ignore[return-value]  # None only where the work gave None


def _content(data: bytes | Path) -> object:
    """Equal only for what holds the same bytes; a file that was written again is another one."""
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
        pass  # no folder of that name, or not ours to write in: the call says so

"""Buckets that fail, hang, or report, for the tests of what is put around stores."""

import random
import threading
from collections.abc import Callable, Iterator
from contextvars import Context
from pathlib import Path
from typing import Any, Self, TypeVar
from unittest import mock

from pydantic import PrivateAttr

from vllm_delta_sync.bucket import Bucket, ObjectInfo, StoreOptions
from vllm_delta_sync.bucket.base import report_bytes
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, Call, size_of
from vllm_delta_sync.bucket.middleware.deadline import DeadlineBucket
from vllm_delta_sync.bucket.middleware.progress import ProgressBucket
from vllm_delta_sync.bucket.middleware.retry import RetryingBucket
from vllm_delta_sync.bucket.middleware.usage import LimitedBucket, StoreUsage
from vllm_delta_sync.errors import DeltaSyncError, UnavailableError

_Result = TypeVar("_Result")
GATE_SECONDS = 600.0


def dressed(bucket: Bucket, options: StoreOptions, metrics: StoreUsage) -> Bucket:
    """A store with all its wrappers, in the order in which they are worn."""
    tried = RetryingBucket(LimitedBucket(DeadlineBucket(bucket, options), options, metrics), options, metrics)
    return ProgressBucket(tried, options.store_progress)


class FlakyBucket(BucketMiddleware):
    """Breaks off at random, before or after what was asked for has happened, but never four times in a row."""

    def __init__(self, inner: Bucket, chance: random.Random) -> None:
        super().__init__(inner)
        self.failures = self._row = 0
        self._chance = chance

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        self._fail_at_times()
        report_bytes(size_of(call.data))
        result = run()
        self._fail_at_times()
        return result

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for item in self._inner.list(prefix):
            self._fail_at_times()
            yield item
        self._fail_at_times()

    def _fail_at_times(self) -> None:
        if self._row < 3 and self._chance.random() < 0.5:
            self._row += 1
            self.failures += 1
            raise UnavailableError("the connection was cut; check the network")
        self._row = 0


class PlannedBucket(BucketMiddleware):
    """Does what each of the plans says, one for each call of put, get and delete; then what was asked for."""

    def __init__(self, inner: Bucket, *plans: Callable[[], None]) -> None:
        super().__init__(inner)
        self.plans = list(plans)
        self.tries = 0

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        if call.method in ("put", "get", "delete"):
            self._next()
        return run()

    def _next(self) -> None:
        self.tries += 1
        if self.plans:
            self.plans.pop(0)()


def fail(error: DeltaSyncError) -> Callable[[], None]:
    def plan() -> None:
        raise error

    return plan


CUT = fail(UnavailableError("the connection was cut; check the network"))


class GatedBucket(BucketMiddleware):
    """The calls in ``gates`` say that they have begun, and hang until they are let go. Once each."""

    def __init__(self, inner: Bucket, *calls: str) -> None:
        super().__init__(inner)
        self.gates = {call: threading.Event() for call in calls}
        self.begun = {call: threading.Event() for call in calls}
        self.ended = {call: threading.Event() for call in calls}
        self.log: list[tuple[Any, ...]] = []
        self._fresh = set(calls)
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        name = call.method
        self.log.append((name, call.key))
        if name not in self._fresh:
            return run()
        self._fresh.remove(name)
        try:
            self.before()
            self.begun[name].set()
            if not self.gates[name].wait(GATE_SECONDS):
                raise UnavailableError("nobody opened the gate")
            self.after()
            return run()
        finally:
            self.ended[name].set()

    def let_go(self, name: str) -> None:
        self.gates[name].set()


class Impatience(StoreOptions):
    """Calls have a minute, and a tenth of a second while the event says that one hangs."""

    store_deadline: float = 60.0
    _hangs: threading.Event = PrivateAttr(default_factory=threading.Event)

    @classmethod
    def while_set(cls, hangs: threading.Event) -> Self:
        options = cls(store_progress="off")
        options._hangs = hangs
        return options

    def allowance(self, size: int) -> float:
        return super().allowance(size) - (self.store_deadline - 0.1 if self._hangs.is_set() else 0)


class SwallowingBucket(BucketMiddleware):
    """Takes what is put, at once, and forgets it."""

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        return None


class SilentBucket(BucketMiddleware):
    """A store that says nothing of the bytes that move."""

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        return Context().run(run)


class ReportingBucket(BucketMiddleware):
    """Tells of bytes in pieces as they move, and stops at ``pause`` on the way if that is given."""

    def __init__(self, inner: Bucket, piece: int, pause: Callable[[int], object] = lambda done: None) -> None:
        super().__init__(SilentBucket(inner))
        self._piece = piece
        self._pause = pause

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        if call.direction == "up":
            self._report(size_of(call.data))
        result = run()
        if isinstance(result, bytes):
            self._report(len(result))
        return result

    def _report(self, size: int) -> None:
        for start in range(0, size, self._piece):
            report_bytes(min(self._piece, size - start))
            self._pause(min(start + self._piece, size))


def asked_of(bucket: Bucket, *methods: str) -> list[str]:
    """The keys and prefixes that these methods of a bucket are called with from now on."""
    asked: list[str] = []

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(key: str = "", **named: Any) -> Any:
            asked.append(key)
            return method(key, **named)

        return noted

    for name in methods:
        setattr(bucket, name, noting(getattr(bucket, name)))
    return asked


def failing_put(key: str, late: bool, error: BaseException) -> Any:
    """Let the put of one key into a folder fail: before it happens, or after."""
    real = LocalBucket.put

    def put(bucket: LocalBucket, at: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        if late or at != key:
            real(bucket, at, data, if_absent=if_absent)
        if at == key:
            raise error

    return mock.patch.object(LocalBucket, "put", put)

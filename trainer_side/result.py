"""``PublishResult``: what ``publish`` returns; ``PublisherStatus``: how publishing goes.

Fields of a result that depend on encoding or upload are filled in later."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from trainer_side.background_thread import BackgroundJob
from vllm_delta_sync.errors import DeltaSyncError, PublishError, PublishTimeoutError, UsageError
from vllm_delta_sync.format.manifest import HeldBack

Kind = Literal["delta", "skipped"]

METRICS = "delta_sync/"
"""Prefix of all metric names."""


class PublishProgress(BackgroundJob):
    """One version that is being published, shared by the publisher, its background thread and the result.

    Attributes:
        sidecars: bytes committed with the version, by name. exact: whether the budget does not apply to it.
        seconds: durations so far. payload_bytes, codec: of the objects; 0 and None if there are none.
        changed: elements of all ranks, where several publish together.
        quarantined: why the gate quarantined the version.
        held_back: what the budget held back; None if the version is exact.
        error_raised: whether the caller has already received the error, if there is one.
    """

    def __init__(self, sidecars: Mapping[str, bytes] | None = None, exact: bool = False) -> None:
        super().__init__()
        self.sidecars = sidecars or {}
        self.exact = exact
        self.seconds: dict[str, float] = {}
        self.payload_bytes = 0
        self.changed = 0
        self.codec: str | None = None
        self.quarantined: tuple[str, ...] = ()
        self.held_back: HeldBack | None = None
        self.error_raised = False

    def __getstate__(self) -> dict[str, Any]:
        # Of a result that a worker returns to another process, such as an actor of Ray: a copy has nothing to wait for.
        self.join()
        return {**vars(self), "_gate": None, "error": self.failure, "sidecars": {}}

    @classmethod
    def skipped(cls, seconds: float) -> Self:
        """Return that of a call that publishes nothing: there is nothing to wait for."""
        progress = cls()
        progress.seconds = {"diff": seconds, "encode": 0.0, "upload": 0.0, "total": seconds}
        with progress:
            pass
        return progress

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the version is durable or has failed.

        Raises:
            PublishError, ConflictError: it failed. PublishTimeoutError: ``timeout`` seconds have passed.
        """
        if not self.join(timeout):
            raise PublishTimeoutError(f"the version is not durable within {timeout:g} s; it goes on in the background")
        failure = self.failure
        if failure is not None:
            self.error_raised = True
            raise failure

    @property
    def failure(self) -> DeltaSyncError | None:
        """What ``wait`` raises, once done."""
        return None if self.error is None else as_publish_error(self.error)


def as_publish_error(error: BaseException) -> DeltaSyncError:
    """Return an error of the background thread as callers get it."""
    if isinstance(error, DeltaSyncError):
        return error
    failure = PublishError(f"publishing failed unexpectedly: {error!r}; the baseline was reverted")
    failure.__cause__ = error
    return failure


class Seconds(Mapping[str, float]):
    """Durations in seconds. ``diff`` is available immediately; reading another waits for the background thread.

    ``encode`` and ``upload`` (objects, manifest, head, notice) run in the background; ``total`` is the time from the
    call of ``publish`` until the version was durable.
    """

    KEYS = ("diff", "encode", "upload", "total")

    def __init__(self, progress: PublishProgress) -> None:
        self._progress = progress

    def __getitem__(self, key: str) -> float:
        if key not in self.KEYS:
            raise KeyError(key)
        if key != "diff":
            self._progress.wait()
        return self._progress.seconds[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.KEYS)

    def __len__(self) -> int:
        return len(self.KEYS)

    def __repr__(self) -> str:
        if not self._progress.done or self._progress.error:
            return f"Seconds(diff={self['diff']:.3f})"
        return f"Seconds({', '.join(f'{key}={value:.3f}' for key, value in self.items())})"


class PublishResult:
    """Outcome of one ``publish``. To pickle it waits until the version is durable or has failed.

    Attributes:
        version: number of the new version; None if the call was skipped.
        step: the argument of ``publish``.
        kind: ``delta``, or ``skipped`` (not every call publishes, or the previous version is still under way, or
            nothing has changed).
        changed: elements whose bits changed, those included that a budget holds back; of a sharded model, in this
            rank's shards. total: elements of the model.
        full_bytes: bytes of the model in the served dtypes.
        seconds: durations, see ``Seconds``; reading some of them waits.
    """

    def __init__(
        self, *, version: int | None, step: int, changed: int, total: int, full_bytes: int, progress: PublishProgress
    ) -> None:
        self.version = version
        self.step = step
        self.kind: Kind = "skipped" if version is None else "delta"
        self.changed = changed
        self.total = total
        self.full_bytes = full_bytes
        self.seconds = Seconds(progress)
        self._progress = progress

    @property
    def done(self) -> bool:
        """Whether the version is durable or has failed, so that no field waits any more. True if skipped."""
        return self._progress.done

    @property
    def failed(self) -> bool:
        """Whether the version is known to have failed; the next ``publish`` or ``flush`` raises the reason."""
        return self._progress.done and self._progress.error is not None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the version is durable; returns at once if the call was skipped.

        Raises:
            PublishError, ConflictError: it could not be made durable.
            PublishTimeoutError: ``timeout`` seconds have passed; the version goes on in the background.
        """
        self._progress.wait(timeout)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this publish for loggers, by name; waits until the version is durable, see ``done``.

        ``delta_sync/version``, ``/step``, ``/changed_percent`` (of all elements), ``/payload_bytes``,
        ``/diff_seconds``, ``/encode_seconds``, ``/upload_seconds`` and ``/skipped`` (0). For a skipped call only
        ``/skipped`` (1).

        Raises:
            PublishError, ConflictError: the version could not be made durable.
        """
        if self.version is None:
            return {f"{METRICS}skipped": 1}
        figures = {
            "version": self.version,
            "step": self.step,
            "changed_percent": 100 * self._waited.changed / self.total if self.total else 0.0,
            "payload_bytes": self.payload_bytes,
            "diff_seconds": self.seconds["diff"],
            "encode_seconds": self.seconds["encode"],
            "upload_seconds": self.seconds["upload"],
            "skipped": 0,
        }
        return {METRICS + name: figure for name, figure in figures.items()}

    @property
    def payload_bytes(self) -> int:
        """Bytes of the version's objects; waits until it is durable.

        Raises:
            PublishError, ConflictError: the version could not be made durable.
        """
        return self._waited.payload_bytes

    @property
    def codec(self) -> str | None:
        """Codec of the version's objects, None if it has none; waits until the version is durable.

        Raises:
            PublishError, ConflictError: the version could not be made durable.
        """
        return self._waited.codec

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Why the gate quarantined the version; empty if it is sound. Waits until the version is durable.

        Raises:
            GateError: the gate refused it. PublishError, ConflictError: it could not be made durable.
        """
        return self._waited.quarantined

    @property
    def held_back(self) -> HeldBack | None:
        """What the budget held back: ``elements`` and ``relative_norm``; None if the version is the trainer's exact
        state. Waits until the version is durable.

        Raises:
            PublishError, ConflictError: the version could not be made durable.
        """
        return self._waited.held_back

    @property
    def _waited(self) -> PublishProgress:
        self._progress.wait()
        return self._progress

    def __repr__(self) -> str:
        return (
            f"PublishResult(version={self.version}, step={self.step}, kind={self.kind!r}, "
            f"changed={self.changed}, total={self.total}, seconds={self.seconds!r})"
        )


OnVersion = Callable[[PublishResult], None]


class Stopwatch:
    """Durations since construction, by name."""

    def __init__(self) -> None:
        self.start = self._last = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        now = time.perf_counter()
        lap, self._last = now - self._last, now
        return lap

    @property
    def total(self) -> float:
        return time.perf_counter() - self.start


@dataclass(frozen=True)
class PublisherStatus:
    """How publishing goes, at one moment.

    Attributes:
        version, step: of the newest durable version.
        skipped: calls in a row that published nothing, since the last one that did.
        failed: calls and versions in a row that failed, since a version became durable.
        error: ``kind: message`` of the last failure; None once a version is durable again.
        seconds: since a version became durable, or since construction.
        payload_bytes: bytes of the objects of the last version of this publisher, 0 before there is one.
        total_payload_bytes: the same of all its versions.
    """

    version: int
    step: int
    skipped: int = 0
    failed: int = 0
    error: str | None = None
    seconds: float = 0.0
    payload_bytes: int = 0
    total_payload_bytes: int = 0


class Deadline:
    """A moment in the future.

    Args:
        seconds: how far away; None, infinity, or more than a lock can wait (292 years) means that it never comes.
        name: of the argument that gives it.

    Raises:
        UsageError: it is no number.
    """

    def __init__(self, seconds: float | None, name: str = "timeout") -> None:
        if seconds is not None and (not isinstance(seconds, int | float) or math.isnan(seconds)):
            raise UsageError(f"{name} is {seconds!r}; give a number of seconds, or None for no limit")
        self._seconds = None if seconds is None or seconds > threading.TIMEOUT_MAX else seconds
        self._end = math.inf if self._seconds is None else time.monotonic() + self._seconds

    @classmethod
    def of(cls, timeout: "float | Deadline | None") -> "Deadline":
        """Return the deadline that is given, or the one after so many seconds."""
        return timeout if isinstance(timeout, Deadline) else cls(timeout)

    @property
    def left(self) -> float:
        """Seconds until then, at least 0; infinity without end."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.left == 0.0

    def __str__(self) -> str:
        return "any time" if self._seconds is None else f"{self._seconds:g} s"


NEVER = Deadline(None)
"""A deadline that never comes."""

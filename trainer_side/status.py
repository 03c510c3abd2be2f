"""``PublisherStatus``: how publishing goes. ``Deadline``: until when a caller waits."""

import math
import threading
import time
from dataclasses import dataclass, replace

from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.manifest import Manifest


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


class PublishRecord:
    """Counts what becomes of calls and versions; from any thread. ``newest``: the version to begin with."""

    def __init__(self, newest: Manifest) -> None:
        self._lock = threading.Lock()
        self._at = time.monotonic()
        self._status = PublisherStatus(newest.version, newest.step)

    def status(self) -> PublisherStatus:
        """Return the status now; waits for nothing."""
        with self._lock:
            return replace(self._status, seconds=time.monotonic() - self._at)

    def handed_over(self) -> None:
        """Count a call that publishes."""
        with self._lock:
            self._status = replace(self._status, skipped=0)

    def skipped(self) -> None:
        """Count a call that publishes nothing."""
        with self._lock:
            self._status = replace(self._status, skipped=self._status.skipped + 1)

    def failed(self, error: BaseException) -> None:
        """Count a call that raised, or a version that could not be made durable."""
        text = f"{error.kind}: {error.message}" if isinstance(error, DeltaSyncError) else repr(error)
        with self._lock:
            self._status = replace(self._status, failed=self._status.failed + 1, error=text)

    def durable(self, newest: Manifest) -> None:
        """Record that a version is durable."""
        with self._lock:
            before, self._at = self._status, time.monotonic()
            self._status = PublisherStatus(
                newest.version, newest.step, before.skipped, payload_bytes=newest.payload_bytes,
                total_payload_bytes=before.total_payload_bytes + newest.payload_bytes,
            )  # fmt: skip


class Deadline:
    """A moment in the future. ``seconds``: how far away; None means that it never comes."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds until then, at least 0; None without end."""
        return None if self._seconds is None else max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.left == 0.0

    def __str__(self) -> str:
        return "any time" if self._seconds is None else f"{self._seconds:g} s"

"""``MirrorBucket``: reads objects from peers and a mirror, and verifies them by the digest in their key."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from hashlib import sha256

from vllm_delta_sync.bucket.base import Bucket, digest_of
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.bucket.middleware.deadline import DeadlineBucket
from vllm_delta_sync.bucket.middleware.usage import StoreUsage
from vllm_delta_sync.bucket.peer import AskedItself, BeingFetched
from vllm_delta_sync.errors import DeltaSyncError, DigestError, NotFoundError, UnavailableError
from vllm_delta_sync.logs import ONCE, LogThrottle
from vllm_delta_sync.settings import StoreOptions

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
"""Deadline of a mirror's answer, plus a second per MB: a slow mirror is of no use."""
FAILURES = 3
"""After this many failures in a row a mirror is suspended for ``PAUSE_SECONDS``, and then gets one try."""
PAUSE_SECONDS = 60.0
ASK_SECONDS = 0.25
"""A peer that is fetching an object is asked for it again after so long, or when it has answered."""


_used_mirrors: "ContextVar[set[Source] | None]" = ContextVar("delta_sync_used_mirrors", default=None)


@contextmanager
def allow_mirrors() -> "Iterator[set[Source]]":
    """Allow mirrors and peers to answer ``get_range`` in the block, and yield the set of those that did.

    The caller verifies the object and reports the outcome to them (``report_verified``).
    """
    used: set[Source] = set()
    token = _used_mirrors.set(used)
    try:
        yield used
    finally:
        _used_mirrors.reset(token)


class Source:
    """A mirror or a peer: it answers, or fails and is suspended for a while; each kind of problem is logged once.

    Args:
        patience: deadline in seconds of an answer, plus a second per MB.
    """

    role, failures = "mirror", FAILURES

    def __init__(
        self, bucket: Bucket, *, patience: float = PATIENCE_SECONDS, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.bucket = DeadlineBucket(bucket, StoreOptions(store_deadline=patience))
        self._now = now
        self._lock = threading.Lock()
        self._failed = 0
        self._suspended_until = 0.0
        self._log = LogThrottle(logger, ONCE)

    def ask(self, call: Callable[[Bucket], bytes]) -> bytes | None:
        """Return the answer, or None if it fails or is suspended."""
        with self._lock:
            if self._failed >= self.failures:
                if self._now() < self._suspended_until:
                    return None
                # After a suspension one call tries; until its outcome is known, others use what comes next.
                self._suspended_until = self._now() + PAUSE_SECONDS
        try:
            answer = self._call(call)
        except DeltaSyncError as error:
            self._record_failure(error.kind, error.message)
            return None
        if answer is not None:
            with self._lock:
                # End the suspension, but keep the count high: the bytes are not verified yet.
                self._failed = min(self._failed, self.failures - 1)
        return answer

    def report_verified(self, good: bool) -> None:
        """Report whether the bytes of an object that it answered with were good."""
        if not good:
            self._record_failure("damaged", "it serves an object with another SHA-256; empty it")
            return
        with self._lock:
            self._failed = 0

    def _call(self, call: Callable[[Bucket], bytes]) -> bytes | None:
        """Return the answer; None if it is no failure that there is none."""
        return call(self.bucket)

    def _record_failure(self, kind: str, problem: str) -> None:
        with self._lock:
            self._failed += 1
            self._suspended_until = self._now() + PAUSE_SECONDS
        self._log.warn(
            f"{self.role} {self.bucket.url}: {problem}. Objects are read from the bucket instead; this is logged once",
            kind,
        )


class PeerSource(Source):
    """A peer. It is suspended after one failure; and it may answer that it is fetching the object itself.

    Then it is asked again, as long as its own transfer moves, for at most ``longest`` seconds.

    Args:
        metrics: counts ``peer_bytes`` and ``peer_failures``.
    """

    role, failures = "peer", 1

    def __init__(self, bucket: Bucket, longest: float, metrics: StoreUsage, *, patience: float = PATIENCE_SECONDS):
        super().__init__(bucket, patience=patience)
        self._patience, self._longest, self._metrics = patience, longest, metrics

    def _call(self, call: Callable[[Bucket], bytes]) -> bytes | None:
        began = moved = time.monotonic()
        progress = None
        while True:
            asked = time.monotonic()
            try:
                data = call(self.bucket)
                self._metrics.add(peer_bytes=len(data))
                return data
            except NotFoundError:
                return None
            except BeingFetched as fetching:
                now = time.monotonic()
                if fetching.progress != progress:
                    progress, moved = fetching.progress, now
                if now > min(moved + self._patience, began + self._longest):
                    raise UnavailableError(f"it has been fetching {fetching.key} for {now - began:.1f} s") from None
                # A busy peer answers at once.
                time.sleep(max(0.0, asked + ASK_SECONDS - now))

    def _record_failure(self, kind: str, problem: str) -> None:
        self._metrics.add(peer_failures=1)
        super()._record_failure(kind, problem)


class MirrorBucket(BucketMiddleware):
    """Reads objects whose key holds their digest from the first of ``sources`` that has them, else from ``origin``.

    A faulty source costs time, but never makes a read fail or return wrong bytes. Sizes, listings and writes use the
    origin.
    """

    def __init__(self, origin: Bucket, sources: Sequence[Source]) -> None:
        super().__init__(origin)
        self._sources = sources

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        digest = digest_of(key)
        if digest is None:
            return self._inner.get(key, max_bytes=max_bytes)
        limit = self._inner.stat(key).bytes if max_bytes is None else max_bytes
        for source, data in self._answers(lambda bucket: bucket.get(key, max_bytes=limit)):
            good = len(data) <= limit and sha256(data).hexdigest() == digest
            source.report_verified(good)
            if good:
                return data
        return self._inner.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        def read(bucket: Bucket) -> bytes:
            data = bucket.get_range(key, start, length)
            if len(data) != length:
                raise DigestError(f"it returned {len(data)} of {length} bytes at {start} of {key}")
            return data

        used = _used_mirrors.get()
        if used is not None and digest_of(key) is not None:
            for source, data in self._answers(read):
                used.add(source)
                return data
        return self._inner.get_range(key, start, length)

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._inner.close)
            for source in self._sources:
                stack.callback(source.bucket.close)

    def _answers(self, call: Callable[[Bucket], bytes]) -> Iterator[tuple[Source, bytes]]:
        """Yield each source's answer, if it has one, until the caller takes it."""
        asked_itself = False
        for source in self._sources:
            # Peers wait only for those before them in the list: two that waited for each other would wait in vain.
            if asked_itself and isinstance(source, PeerSource):
                continue
            try:
                data = source.ask(call)
            except AskedItself:
                asked_itself = True
                continue
            if data is not None:
                yield source, data

"""A mirror in front of a bucket: objects that are named by their digest may come from anywhere, since it shows."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TypeVar

from vllm_delta_sync.bucket.base import Bucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.bucket.middleware.deadline import DeadlineBucket
from vllm_delta_sync.bucket.middleware.ranged import CONNECTIONS, digest_of, download, no_copy, remove
from vllm_delta_sync.errors import DeltaSyncError, DigestError
from vllm_delta_sync.settings import StoreOptions

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
"""For one answer, and a second for each MB on top: a mirror is near, or it is none."""
FAILURES = 3
"""After so many in a row a mirror is left out for ``PAUSE_SECONDS``, and then has one try."""
PAUSE_SECONDS = 60.0

_Result = TypeVar("_Result")


class MirrorUse:
    """Mirrors that ranges came from while a download went on.

    Attributes:
        mirrors: those that gave any.
    """

    def __init__(self) -> None:
        self.mirrors: set[MirrorBucket] = set()

    def report_verified(self, good: bool) -> None:
        """The whole was verified."""
        for mirror in self.mirrors:
            mirror.report_verified(good)


_verifying: ContextVar[MirrorUse | None] = ContextVar("delta_sync_verifying", default=None)


@contextmanager
def allow_mirrors() -> Iterator[MirrorUse]:
    """``get_range`` within may be answered by a mirror: the caller verifies the whole, and says how it turned out."""
    used = MirrorUse()
    token = _verifying.set(used)
    try:
        yield used
    finally:
        _verifying.reset(token)


class MirrorBucket(BucketMiddleware):
    """Reads objects that are named by their digest from ``mirror``, and everything else from ``origin``.

    Whatever is wrong with the mirror is logged once per kind of problem and costs time, never the object and never
    a wrong byte. Sizes and listings are the origin's, and so is all that is written.
    """

    def __init__(
        self,
        origin: Bucket,
        mirror: Bucket,
        *,
        connections: int = CONNECTIONS,
        patience: float = PATIENCE_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(origin)
        self._mirror = DeadlineBucket(mirror, StoreOptions(store_deadline=patience))
        self._connections = connections
        self._now = now
        self._lock = threading.Lock()
        self._failed = 0
        self._left_out_until = 0.0
        self._warned: set[str] = set()

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        digest = digest_of(key)
        if digest is not None and self._takes_part():
            limit = self._inner.stat(key).bytes if max_bytes is None else max_bytes
            data = self._asked(lambda: self._mirror.get(key, max_bytes=limit))
            if data is not None:
                good = len(data) <= limit and sha256(data).hexdigest() == digest
                self.report_verified(good)
                if good:
                    return data
        return self._inner.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        used = _verifying.get()
        if used is not None and digest_of(key) is not None and self._takes_part():
            data = self._asked(lambda: self._whole_range(key, start, length))
            if data is not None:
                used.mirrors.add(self)
                return data
        return self._inner.get_range(key, start, length)

    def get_file(self, key: str, path: Path) -> None:
        digest = digest_of(key)
        if digest is None or self._left_out():
            self._inner.get_file(key, path)
            return
        size = self._inner.stat(key).bytes
        part = path.with_name(f".{secrets.token_hex(8)}.part")
        try:
            with allow_mirrors() as used:
                # By ranges, so that a mirror cannot fill the disk.
                download(self, key, size, part, connections=self._connections)
            with part.open("rb") as file:
                good = file_digest(file, "sha256").hexdigest() == digest
            used.report_verified(good)
            if good:
                os.replace(part, path)
                return
        except DigestError:
            pass  # The origin's was put there anew meanwhile.
        except OSError as error:
            raise no_copy(self, key, path, error) from error
        finally:
            remove(part)
        self._inner.get_file(key, path)

    def close(self) -> None:
        try:
            self._mirror.close()
        finally:
            self._inner.close()

    def report_verified(self, good: bool) -> None:
        """What the mirror gave of an object was verified."""
        if not good:
            self._failure("damaged", "what it gives of an object has another SHA-256; empty it")
            return
        with self._lock:
            self._failed = 0

    def _whole_range(self, key: str, start: int, length: int) -> bytes:
        data = self._mirror.get_range(key, start, length)
        if len(data) != length:
            raise DigestError(f"it gave {len(data)} bytes of {length} at {start} of {key}")
        return data

    def _asked(self, ask: Callable[[], _Result]) -> _Result | None:
        """The mirror's answer; None if it has none."""
        try:
            answer = ask()
        except DeltaSyncError as error:
            self._failure(error.kind, error.message)
            return None
        with self._lock:
            # Back in use, until something else is wrong: what it gave is not verified yet.
            self._failed = min(self._failed, FAILURES - 1)
        return answer

    def _left_out(self) -> bool:
        return self._failed >= FAILURES and self._now() < self._left_out_until

    def _takes_part(self) -> bool:
        with self._lock:
            if self._left_out():
                return False
            # Who comes first after a pause tries; the others wait for how that turns out.
            self._left_out_until = self._now() + PAUSE_SECONDS
            return True

    def _failure(self, kind: str, problem: str) -> None:
        with self._lock:
            self._failed += 1
            self._left_out_until = self._now() + PAUSE_SECONDS
            first = kind not in self._warned
            self._warned.add(kind)
        if first:
            logger.warning(
                "mirror %s: %s. Objects are read from %s instead; this is logged once",
                self._mirror.url,
                problem,
                self.url,
            )

"""``ObjectServer``: serves the objects of a cache by digest, and fetches what is missing once for all who ask."""

import logging
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from vllm_delta_sync.admin_token import AdminToken
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.ranged import has_range
from vllm_delta_sync.bucket.threads import start_call
from vllm_delta_sync.cache.folder import CacheFolder, touch
from vllm_delta_sync.cache.object_cache import ObjectCache
from vllm_delta_sync.errors import DeltaSyncError, NotFoundError, StoreError, UsageError
from vllm_delta_sync.format.manifest import ObjectRef, object_key
from vllm_delta_sync.logs import ONCE, LogThrottle

logger = logging.getLogger(__name__)

DIGEST = r"[0-9a-f]{64}"
MAX_FETCHES = 8
"""Objects that are fetched from the bucket at once."""
WAIT_SECONDS = 1.0
"""A request for an object that is being fetched is answered after so long: ask again."""
CHECK_SECONDS = 0.1
CHUNK_BYTES = 256 * 1024
FAILURE_SECONDS = 1.0
"""For so long all who ask for an object get the error of the last attempt to fetch it."""
MAX_VERIFIED = 10_000

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")


@dataclass(frozen=True)
class Slice:
    """Bytes of an open file: ``length`` from ``start``, of an object of ``size`` bytes. ``close`` it."""

    file: int
    start: int
    length: int
    size: int
    partial: bool

    @property
    def status(self) -> int:
        """The HTTP status code of an answer."""
        return 206 if self.partial else 200

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an answer."""
        end = f"bytes {self.start}-{self.start + self.length - 1}/{self.size}"
        return {
            "content-type": "application/octet-stream",
            "content-length": str(self.length),
            "cache-control": "no-store",
            **({"content-range": end} if self.partial else {}),
        }

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes; fewer if the file was cut short."""
        position, end = self.start, self.start + self.length
        while position < end and (data := os.pread(self.file, min(CHUNK_BYTES, end - position), position)):
            yield data
            position += len(data)

    def close(self) -> None:
        os.close(self.file)


class ObjectServer:
    """Serves objects of the cache in ``directory``, to holders of the run's token.

    What the cache lacks is fetched from the bucket into it, by the process of the node that asks first. Pieces of a
    large object are served as they arrive. The bytes of an unfinished download are not verified yet; the reader does
    that in any case. Any thread may use it.

    Args:
        open_bucket: opens the run's bucket, without peers, so that servers never wait for one another in a circle.
        token: None: no request is served.
        fetched: called with digest, size and seconds of each object that was fetched from the bucket.
    """

    def __init__(
        self,
        directory: Path,
        limit_bytes: int,
        open_bucket: Callable[[], Bucket],
        token: AdminToken | None,
        fetched: Callable[[str, int, float], object] = lambda *_: None,
    ) -> None:
        self._folder = CacheFolder(directory, limit_bytes)
        self._cache = ObjectCache(directory, limit_bytes)
        self._open_bucket, self._token, self._fetched = open_bucket, token, fetched
        self._lock = threading.Lock()
        self._bucket: Bucket | None = None
        self._jobs: dict[str, Future[None]] = {}
        self._verifying: set[str] = set()
        self._failures: dict[str, tuple[float, DeltaSyncError]] = {}
        self._log = LogThrottle(logger, ONCE)
        # Digest → inode of the file that was verified.
        self._verified: OrderedDict[str, int] = OrderedDict()

    def allows(self, authorization: str) -> bool:
        """Return whether the value of an Authorization header has the run's token for peers."""
        scheme, _, given = authorization.partition(" ")
        return self._token is not None and scheme.lower() == "bearer" and self._token.matches_peer(given.strip())

    def is_cache(self, caller: str | None) -> bool:
        """Return whether a request comes from this cache itself (``CALLER_HEADER``), which waits for the answer."""
        try:
            return caller == self._folder.identity()
        except OSError:
            return False

    def progress(self, digest: str) -> str:
        """Return a short text that changes while an object is fetched or verified, or others before it are."""
        with self._lock:
            running, verifying = list(self._jobs), len(self._verifying)
        moments = [f"{time.monotonic():.0f}"] if verifying else []
        state = ", ".join([str(self._folder.progress(each)) for each in sorted({digest, *running})] + moments)
        # Readers compare its first characters.
        return sha256(state.encode()).hexdigest()[:32]

    def find(self, digest: str, requested: str | None) -> Slice | None:
        """Return an object, or a range of it; None after ``WAIT_SECONDS`` if it is still being fetched.

        Args:
            requested: the value of a Range header, or None.

        Raises:
            UsageError: a range that cannot be served. NotFoundError: the bucket has no such object, or the cache cannot
            hold it. StoreError: it cannot be fetched.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        try:
            while (found := self._slice(digest, requested)) is None:
                job = self._fetch_once(digest)
                if time.monotonic() >= deadline:
                    return None
                if job is None:
                    time.sleep(CHECK_SECONDS)
                else:
                    wait((job,), CHECK_SECONDS)
            return found
        except OSError as error:
            raise StoreError(f"cache_dir {str(self._folder.path)!r}: {error.strerror}; check its disk") from error

    def _slice(self, digest: str, requested: str | None) -> Slice | None:
        """Return a range of a verified object, or of the pieces of one that has been fetched so far."""
        with ExitStack() as stack:
            try:
                file = os.open(self._folder.object_path(digest), _READ)
                stack.callback(os.close, file)
                info = os.fstat(file)
                if self._verified.get(digest) != info.st_ino:
                    return None
                touch(file)
            except FileNotFoundError:
                try:
                    file = os.open(self._folder.part_path(digest), _READ)
                    stack.callback(os.close, file)
                    info = os.fstat(file)
                    journal = self._folder.journal_path(digest).read_bytes()
                except FileNotFoundError:
                    return None
                start, length = _range(requested, info.st_size)
                if requested is None or not has_range(journal, object_key(digest), info.st_size, start, length):
                    return None
            if not stat.S_ISREG(info.st_mode):
                return None
            start, length = _range(requested, info.st_size)
            stack.pop_all()
            return Slice(file, start, length, info.st_size, requested is not None)

    def _fetch_once(self, digest: str) -> Future[None] | None:
        """Return the fetch of an object, started if nothing fetches it; None if too many fetches or threads run."""
        with self._lock:
            now = time.monotonic()
            self._failures = {each: item for each, item in self._failures.items() if now < item[0] + FAILURE_SECONDS}
            if digest in self._failures:
                raise self._failures[digest][1]
            if digest not in self._jobs and len(self._jobs) < MAX_FETCHES:
                with suppress(RuntimeError):  # there are too many threads: who asked is to ask again
                    self._jobs[digest] = start_call(self._fetch, digest)
            return self._jobs.get(digest)

    def _fetch(self, digest: str) -> None:
        """Verify an object in the cache, or fetch it into the cache."""
        failure, fetched = None, None
        try:
            fetched = self._verify_or_fetch(digest)
        except DeltaSyncError as error:
            failure = error
        except OSError as error:
            failure = StoreError(f"cache_dir {str(self._folder.path)!r}: {error.strerror}; check its disk")
        finally:
            # Also after an error that no one foresaw: with its job left here, the object could never be fetched again.
            with self._lock:
                if failure is not None:
                    self._failures[digest] = time.monotonic(), failure
                del self._jobs[digest]
        if failure is not None and not isinstance(failure, NotFoundError):
            self._log.warn(f"cannot serve objects: {failure.message}; this is logged once", failure.kind)
        if fetched is not None:
            with suppress(OSError):  # where that is printed to may be gone, and the object is there
                self._fetched(digest, *fetched)

    def _verify_or_fetch(self, digest: str) -> tuple[int, float] | None:
        """Return size and seconds of an object that was not in the cache."""
        key, found, fetched = object_key(digest), None, None
        with self._lock:
            self._verifying.add(digest)
        try:
            size = self._folder.object_path(digest).stat().st_size
            found = self._cache.find(ObjectRef(key=key, bytes=size, sha256=digest))
        except FileNotFoundError:
            pass
        finally:
            with self._lock:
                self._verifying.discard(digest)
        if found is None:
            began, bucket = time.monotonic(), self._origin()
            size = bucket.stat(key).bytes
            found = self._cache.open(ObjectRef(key=key, bytes=size, sha256=digest), bucket)
            if found is None:
                problem = f"{key} has {size} bytes, which this cache cannot hold; see cache_bytes"
                # Those who asked read it from the bucket, each for itself. Any other reason the cache has logged.
                if size > self._folder.limit_bytes:
                    self._log.warn(f"cannot serve an object: {problem}; this is logged once", NotFoundError.kind)
                raise NotFoundError(problem)
            fetched = size, time.monotonic() - began
        with found, self._lock:
            self._verified[digest] = os.fstat(found.fileno()).st_ino
            if len(self._verified) > MAX_VERIFIED:
                self._verified.popitem(last=False)
        return fetched

    def _origin(self) -> Bucket:
        with self._lock:
            if self._bucket is None:
                self._bucket = self._open_bucket()
            return self._bucket


def _range(requested: str | None, size: int) -> tuple[int, int]:
    """Return start and length of what a Range header names. Raises UsageError."""
    if requested is None:
        return 0, size
    found = _RANGE.fullmatch(requested)
    if found is None or not int(found[1]) <= int(found[2]) < size:
        raise UsageError(f"Range {requested[:60]!r} is not one range within {size} bytes; send bytes=FIRST-LAST")
    return int(found[1]), int(found[2]) - int(found[1]) + 1

"""``ObjectPrefetch`` downloads the objects of a version into the node's cache before its manifest is there."""

import time
from collections.abc import Callable

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.threads import in_parallel, start_call
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.manifest import Manifest, ObjectRef, object_key
from vllm_delta_sync.notice import Upcoming

MAX_BYTES = 64 * 1024**2
"""Most bytes of one download. A forged message costs no more, and the objects of a larger version take so long that the
round trips saved do not matter."""
MIN_SECONDS = 1.0
MAX_SECONDS = 60.0
"""Shortest and longest time from a download of objects that no version lists yet to the next download."""


class ObjectPrefetch:
    """Downloads what ``Upcoming`` names, one message at a time.

    Anyone may send such a message where notices are not signed. It decides nothing: objects are cached under their
    digest, and the ranks read those that a manifest lists. While no version is seen that lists the objects of the last
    download, the time until the next one doubles.

    ``offer`` and ``seen`` may be called from different threads.
    """

    def __init__(self, cache: ObjectCache, bucket: Callable[[], Bucket]) -> None:
        """Args: bucket: returns the bucket of the run followed; it may raise DeltaSyncError."""
        self._cache, self._bucket = cache, bucket
        self._last: frozenset[str] = frozenset()
        self._is_seen = True
        self._not_before = 0.0
        self._delay = MIN_SECONDS
        self._busy = False

    def offer(self, upcoming: Upcoming) -> bool:
        """Begin to download the objects in the background; return False if they are left to the ranks."""
        digests = frozenset(digest for digest, _ in upcoming.objects)
        # Publishers repeat their last message.
        if self._busy or digests == self._last or sum(size for _, size in upcoming.objects) > MAX_BYTES:
            return False
        if not self._is_seen and time.monotonic() < self._not_before:
            return False
        self._busy, self._last, self._is_seen = True, digests, False
        self._not_before = time.monotonic() + self._delay
        self._delay = min(2 * self._delay, MAX_SECONDS)
        start_call(self._download, upcoming)
        return True

    def seen(self, manifest: Manifest) -> None:
        """Take note of a version: if it lists what was downloaded last, the message was true."""
        if not self._is_seen and self._last <= {ref.sha256 for ref in manifest.objects}:
            self._is_seen, self._delay = True, MIN_SECONDS

    def _download(self, upcoming: Upcoming) -> None:
        try:
            bucket = self._bucket()
            refs = [ObjectRef(key=object_key(digest), bytes=size, sha256=digest) for digest, size in upcoming.objects]
            for _ in in_parallel(lambda ref: self._cache.get(ref, bucket), refs):
                pass
        except DeltaSyncError as error:
            # The ranks report it, if a version lists these objects.
            logger.debug("objects of the next version were not downloaded early: %s", error.message)
        finally:
            self._busy = False

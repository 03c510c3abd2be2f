"""``Prefetcher`` fetches a run's small documents early and in parallel, and caches manifests during checks."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.base import check_size
from vllm_delta_sync.bucket.threads import in_parallel, start_call, wait_for_call
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.format.manifest import VERSIONS_PREFIX
from vllm_delta_sync.urls import is_remote

MAX_EXPECTED = 4
"""Maximum number of manifests of new versions that are requested before it is known whether they exist."""
KEPT_BYTES = 128 * 1024**2
"""Memory for manifests that are cached while a run is checked; holds about 100,000 of them."""
READ_AHEAD = 64
"""Maximum number of documents that ``read_ahead`` reads before the caller has taken them."""
READERS = 32
"""Most documents that ``read_ahead`` reads at once. They are small: more of them cost no bandwidth."""
_BATCH = 4096

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def read_ahead(read: Callable[[_Item], _Found], items: Sequence[_Item]) -> Iterator[_Found]:
    """Yield ``read(item)`` for each item in order. Reads run in parallel, up to ``READ_AHEAD`` of them ahead.

    Raises:
        Whatever the first failing ``read`` raises.
    """
    for start in range(0, len(items), _BATCH):
        yield from in_parallel(read, items[start : start + _BATCH], READ_AHEAD, READERS)


class Prefetcher:
    """Reads a bucket's small documents; some are fetched before they are needed, and manifests can be cached.

    A prefetched document is used once. ``get`` requests one that was missing again, because a document that names it
    may have been read later.

    Attributes:
        is_remote: whether requests take longer than starting a thread.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.is_remote = is_remote(bucket.url)
        self._under_way: dict[str, Future[bytes]] = {}
        self._manifest_cache: _ManifestCache | None = None

    @contextmanager
    def prefetching(self, wanted: dict[str, int]) -> Iterator[None]:
        """Begin to fetch documents that ``get`` will need within the block.

        Args:
            wanted: key → the most bytes that the document may have.
        """
        try:
            if self.is_remote:
                with suppress(RuntimeError):  # there are too many threads: ``get`` reads what is not under way
                    for key, most in wanted.items():
                        self._under_way[key] = start_call(self._bucket.get, key, max_bytes=most)
            yield
        finally:
            self._under_way = {}

    @contextmanager
    def caching_manifests(self) -> Iterator[None]:
        """Fetch each manifest only once in the block; the cache holds the last used ``KEPT_BYTES``, for all threads.

        For checks and listings: if a manifest is replaced meanwhile, the bytes read first are used.
        """
        if self._manifest_cache is not None:
            yield
            return
        self._manifest_cache = _ManifestCache()
        try:
            yield
        finally:
            self._manifest_cache = None

    def is_under_way(self, key: str) -> bool:
        """Return whether a document is being fetched and was not used yet."""
        return key in self._under_way

    def get(self, key: str, max_bytes: int) -> bytes:
        """As ``Bucket.get``."""
        early = self._under_way.pop(key, None)
        if early is not None:
            try:
                return early.result()
            except NotFoundError:
                pass
        return self.stored(key, max_bytes)

    def probe(self, key: str, max_bytes: int) -> bytes:
        """As ``get``, for a document that nothing names: one that was missing when it was prefetched is missing."""
        early = self._under_way.pop(key, None)
        return self.stored(key, max_bytes) if early is None else early.result()

    def stored(self, key: str, max_bytes: int) -> bytes:
        """As ``get``, but never from what was prefetched."""
        cache = self._manifest_cache
        if cache is None or not key.startswith(VERSIONS_PREFIX):
            return self._bucket.get(key, max_bytes=max_bytes)
        data = cache.get(key, lambda: self._bucket.get(key, max_bytes=max_bytes))
        check_size(key, len(data), max_bytes)
        return data


class _ManifestCache:
    """Documents by key, with least-recently-used eviction. Failed reads are not cached."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._documents: OrderedDict[str, Future[bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        """Return the document; if another thread is fetching it, wait for that."""
        with self._lock:
            known = self._documents.get(key)
            if known is None:
                made: Future[bytes] = Future()
                self._documents[key] = made
            else:
                self._documents.move_to_end(key)
        if known is not None:
            wait_for_call(known)
            # The other thread may have failed for a reason that does not concern this one.
            return known.result() if known.exception() is None else fetch()
        try:
            data = fetch()
        except BaseException as error:
            with self._lock:
                del self._documents[key]
            made.set_exception(error)
            raise
        made.set_result(data)
        self._make_room(len(data))
        return data

    def _make_room(self, added: int) -> None:
        with self._lock:
            self._bytes += added
            while self._bytes > KEPT_BYTES:
                # Usually the first; documents that are still being fetched are passed over.
                oldest = next(key for key, future in self._documents.items() if future.done())
                self._bytes -= len(self._documents.pop(oldest).result())

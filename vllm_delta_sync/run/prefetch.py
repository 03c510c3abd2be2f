"""Reading ahead and keeping: the small documents of a run are fetched early, several at a time, and manifests once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from vllm_delta_sync.bucket import Bucket, scheme_of
from vllm_delta_sync.bucket.base import check_size
from vllm_delta_sync.bucket.parallel import begun, ended, in_parallel
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.format.manifest import VERSIONS_PREFIX

LOCAL_SCHEMES = ("file", "memory")
"""Schemes of stores that answer sooner than a thread is started."""
MAX_EXPECTED = 4
"""Manifests of new versions that are asked for before it is known that they are there."""
KEPT_BYTES = 128 * 1024**2
"""Of manifests that are kept while a run is checked: some 100,000 of them."""
READ_AHEAD = 32
"""Documents that are read before the one at hand is done with."""
_BATCH = 4096

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def read_ahead(read: Callable[[_Item], _Found], items: Sequence[_Item]) -> Iterator[_Found]:
    """Yield ``read(item)`` in the order of the items, with several reads under way, and ``READ_AHEAD`` of them in memory.

    Raises what the first read that fails raises.
    """
    for start in range(0, len(items), _BATCH):
        yield from in_parallel(read, items[start : start + _BATCH], READ_AHEAD)


class Prefetcher:
    """A bucket's small documents, some of them fetched before they are asked for, or kept for when they are again.

    What was found early is taken from there, once. What was missing is asked for again: a document that names it may
    have been read after it.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._is_remote = scheme_of(bucket.url) not in LOCAL_SCHEMES
        self._under_way: dict[str, Future[bytes]] = {}
        self._manifest_cache: _ManifestCache | None = None

    @contextmanager
    def prefetching(self, wanted: dict[str, int]) -> Iterator[None]:
        """Within the block, ``get`` has begun to fetch these already.

        Args:
            wanted: by key, how many bytes it may have.
        """
        if self._is_remote:
            self._under_way = {key: begun(self._bucket.get, key, max_bytes=most) for key, most in wanted.items()}
        try:
            yield
        finally:
            self._under_way = {}

    @contextmanager
    def caching_manifests(self) -> Iterator[None]:
        """Within the block a manifest is fetched once, by any thread, as long as ``KEPT_BYTES`` hold those read last.

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

    def get(self, key: str, max_bytes: int) -> bytes:
        """As ``Bucket.get``."""
        early = self._under_way.pop(key, None)
        if early is not None:
            try:
                return early.result()
            except NotFoundError:
                pass
        return self.stored(key, max_bytes)

    def stored(self, key: str, max_bytes: int) -> bytes:
        """As ``get``, and never what ``reading`` has fetched."""
        cache = self._manifest_cache
        if cache is None or not key.startswith(VERSIONS_PREFIX):
            return self._bucket.get(key, max_bytes=max_bytes)
        data = cache.get(key, lambda: self._bucket.get(key, max_bytes=max_bytes))
        check_size(key, len(data), max_bytes)
        return data


class _ManifestCache:
    """Documents by key; those used last, as far as they fit. What could not be read is not cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._documents: OrderedDict[str, Future[bytes]] = OrderedDict()
        self._bytes = 0

    def get(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        """The document; while another thread fetches it, that is waited for."""
        with self._lock:
            known = self._documents.get(key)
            if known is None:
                made: Future[bytes] = Future()
                self._documents[key] = made
            else:
                self._documents.move_to_end(key)
        if known is not None:
            ended(known)
            # The other one may have failed for a reason of its own.
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
            for key, future in list(self._documents.items()) if self._bytes > KEPT_BYTES else ():
                if self._bytes <= KEPT_BYTES:
                    break
                if future.done():
                    del self._documents[key]
                    self._bytes -= len(future.result())

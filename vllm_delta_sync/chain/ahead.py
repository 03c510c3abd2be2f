"""Reading ahead: what a look into a distant store reads one after the other is fetched at once."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from vllm_delta_sync.bucket import Bucket, scheme_of
from vllm_delta_sync.bucket.calls import begun
from vllm_delta_sync.errors import NotFoundError

NEAR = ("file", "memory")
"""Schemes of stores that answer sooner than a thread is started."""
MOST_EXPECTED = 4
"""Manifests of new versions that are asked for before it is known that they are there."""


class Ahead:
    """A bucket's small documents, some of them fetched before they are asked for.

    What was found is taken from there, once. What was missing is asked for again: a document that names it may have
    been read after it.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._far = scheme_of(bucket.url) not in NEAR
        self._begun: dict[str, Future[bytes]] = {}

    @contextmanager
    def reading(self, wanted: dict[str, int]) -> Iterator[None]:
        """Within the block, ``get`` has begun to fetch these already.

        Args:
            wanted: by key, how many bytes it may have.
        """
        if self._far:
            self._begun = {key: begun(self._bucket.get, key, max_bytes=most) for key, most in wanted.items()}
        try:
            yield
        finally:
            self._begun = {}

    def get(self, key: str, max_bytes: int) -> bytes:
        """As ``Bucket.get``."""
        early = self._begun.pop(key, None)
        if early is not None:
            try:
                return early.result()
            except NotFoundError:
                pass
        return self._bucket.get(key, max_bytes=max_bytes)

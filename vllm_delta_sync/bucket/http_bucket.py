"""A copy of a run behind a web server or cache: what a mirror may be."""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from vllm_delta_sync.bucket.base import ObjectInfo
from vllm_delta_sync.bucket.obstore_clients import http_clients
from vllm_delta_sync.bucket.obstore_reading import ObjectReader
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.redaction import public_url
from vllm_delta_sync.settings import StoreOptions


class HttpBucket(ObjectReader):
    """Objects at ``URL/key``, read by GET, with Range for parts of them, and HEAD. Read-only, and cannot be listed.

    The server has to send Content-Length, and to answer ranges where those are asked for (StoreError otherwise).
    ``stat`` says 0.0 for the time of an object if there is no Last-Modified.

    Raises:
        UsageError: the URL is none of http:// or https://, or has a user, a query or a fragment.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        if not url.startswith(("http://", "https://")) or public_url(url) != url:
            raise UsageError(f"mirror URL {public_url(url)!r} cannot be used: write https://host/path and no more")
        url = url.rstrip("/")
        super().__init__(url, url.partition(":")[0], "", http_clients(url, options))

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        self._refuse(f"write key {key!r}")

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._refuse(f"list keys {prefix!r}")

    def delete(self, key: str) -> None:
        self._refuse(f"delete key {key!r}")

    def _refuse(self, action: str) -> NoReturn:
        raise UsageError(f"cannot {action} of {self.url}: a web server is only read; give the bucket it is a copy of")

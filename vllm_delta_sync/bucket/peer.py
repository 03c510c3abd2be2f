"""``PeerBucket``: reads objects that another server of the run, or ``delta-sync mirror``, has in its cache."""

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from urllib.parse import urlsplit

from vllm_delta_sync.bucket.base import ObjectInfo, ReadOnlyBucket, check_size, digest_of, report_bytes
from vllm_delta_sync.errors import AccessError, NotFoundError, StoreError, UnavailableError, UsageError
from vllm_delta_sync.server_client import check_server_url, connection_to, cut_after

OBJECTS_PATH = "/delta_sync/objects/"
"""Path of the route, before the digest."""
CALLER_HEADER = "X-Delta-Sync-Cache"
"""Request header with the identity of the cache that the object is for."""
PROGRESS_HEADER = "X-Delta-Sync-Progress"
"""Header of the answer 202: a value that changes while the peer's own transfer of the object moves."""
SILENT_SECONDS = 5.0
"""Longest time until a peer has sent the head of its answer, and then without a byte from it."""
PIECE_BYTES = 1024 * 1024

_caller: ContextVar[str | None] = ContextVar("delta_sync_caller", default=None)


@contextmanager
def fetching_for(cache: str) -> Iterator[None]:
    """Name the cache that the block fetches an object for; until it has ended, that cache makes others wait."""
    token = _caller.set(cache)
    try:
        yield
    finally:
        _caller.reset(token)


class BeingFetched(Exception):
    """The peer is fetching the object itself: ask again. Attributes: progress: see ``PROGRESS_HEADER``."""

    def __init__(self, key: str, progress: str) -> None:
        super().__init__(key)
        self.key, self.progress = key, progress


class AskedItself(Exception):
    """The peer shares the cache that the object is for."""


class PeerBucket(ReadOnlyBucket):
    """Objects in the cache of a peer, by their digest: ``get`` and ``get_range`` of keys under ``objects/``.

    Each read is one request over a connection of its own, through no proxy; no redirect is followed, and no more is
    read than was asked for.

    Args:
        token: ``AdminToken.for_peers`` of the run's token.

    Raises:
        UsageError: the URL is not http:// or https://, or has a user, a query or a fragment. Reads also raise
            BeingFetched and AskedItself.
    """

    why_read_only = "a peer only serves objects; use the bucket"

    def __init__(self, url: str, token: str) -> None:
        try:
            check_server_url(url)
        except UsageError as error:
            raise UsageError(f"peer: {error.message}") from error
        self.url, self._token = url.rstrip("/"), token

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self._read(key, {}, max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._read(key, {"Range": f"bytes={start}-{start + length - 1}"}, length)

    def _read(self, key: str, headers: dict[str, str], max_bytes: int | None) -> bytes:
        connection = connection_to(self.url, SILENT_SECONDS)
        headers["Authorization"] = f"Bearer {self._token}"
        if (caller := _caller.get()) is not None:
            headers[CALLER_HEADER] = caller
        try:
            # A call that was abandoned ends with the next piece of the body, but would read a head for ever.
            with cut_after(connection, SILENT_SECONDS):
                connection.request("GET", f"{urlsplit(self.url).path}{OBJECTS_PATH}{digest_of(key)}", headers=headers)
                answer = connection.getresponse()
            self._check(key, answer)
            size = answer.length
            if size is None:
                raise StoreError(f"cannot read {key!r}: the answer has no length; name a server of this project")
            check_size(key, size, max_bytes)
            pieces, left = [], size
            while left and (piece := answer.read1(min(left, PIECE_BYTES))):
                report_bytes(len(piece))
                pieces.append(piece)
                left -= len(piece)
        except (OSError, http.client.HTTPException, RuntimeError) as error:  # the last: there are too many threads
            reason = getattr(error, "strerror", None) or str(error)[:200] or type(error).__name__
            raise UnavailableError(f"cannot read {key!r}: {reason}; check whether that server runs") from error
        finally:
            connection.close()
        if left:
            raise UnavailableError(f"cannot read {key!r}: received {size - left} of {size} bytes; try again")
        return b"".join(pieces)

    def _check(self, key: str, answer: http.client.HTTPResponse) -> None:
        """Raise what a peer's status code means, unless the object follows."""
        match answer.status:
            case 200 | 206:
                return
            case 202:
                raise BeingFetched(key, answer.getheader(PROGRESS_HEADER, "")[:100])
            case 404:
                raise NotFoundError(f"{self.url} does not have {key!r}")
            case 421:
                raise AskedItself
            case 401 | 403:
                raise AccessError("it refuses this server's token; set the same admin token on both")
        raise UnavailableError(f"it answers with HTTP status {answer.status}; see its log")

    def stat(self, key: str) -> ObjectInfo:
        self._refuse(f"look up key {key!r}")

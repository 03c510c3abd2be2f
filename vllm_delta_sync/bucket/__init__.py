"""Where runs live. ``open_bucket(url)`` picks the implementation; the contract is on ``Bucket``."""

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vllm_delta_sync.bucket.base import Bucket, ObjectInfo, check_key
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.redaction import public_url

__all__ = ["Bucket", "ObjectInfo", "check_key", "open_bucket", "scheme_of"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//)?")
_UNDERSTOOD = "a path, or file:///absolute/path"


def open_bucket(url: str | os.PathLike[str]) -> Bucket:
    """Open the bucket that ``url`` names, without touching the store yet.

    A bare path, absolute or relative, and ``file:///absolute/path`` name a local directory, which is made
    by the first ``put``. In a ``file:`` URL ``%20`` and the like are decoded; in a bare path nothing is.

    Raises:
        UsageError: the URL is empty, has an unknown scheme, names another machine's files, or holds credentials.
    """
    _check_public(os.fspath(url))
    # Implementations are imported here so that reading a local directory does not load every store's client.
    from vllm_delta_sync.bucket.local import LocalBucket

    return LocalBucket(_local_path(os.fspath(url)))


def scheme_of(url: str) -> str:
    """The scheme of a bucket URL in lower case; ``file`` for a bare path."""
    scheme = _SCHEME.match(url)
    if scheme is None or (scheme[1].lower() != "file" and scheme[2] is None):
        return "file"
    return scheme[1].lower()


def _check_public(url: str) -> None:
    """A bucket's URL is shown, logged, and written into the runs that branch from it: nothing in it may be secret."""
    if scheme_of(url) != "file" and public_url(url) != url:
        raise UsageError(
            f"bucket URL {url!r} has a user, a password, a query or a fragment; give credentials in the environment, "
            "and leave them out here"
        )


def _local_path(url: str) -> Path:
    if not url or "\0" in url:
        raise UsageError(f"bucket URL {url!r} names nothing; give {_UNDERSTOOD}")
    scheme = _SCHEME.match(url)
    if scheme is None or (scheme[1].lower() != "file" and scheme[2] is None):
        return Path(url)
    if scheme[1].lower() != "file":
        raise UsageError(f"bucket URL {url!r} has the unknown scheme {scheme[1]!r}; understood: {_UNDERSTOOD}")
    parts = urlsplit(url)
    if scheme[2] is None or not parts.path.startswith("/"):
        raise UsageError(f"bucket URL {url!r} has no absolute path; write file:///absolute/path")
    if parts.netloc not in ("", "localhost"):
        raise UsageError(
            f"bucket URL {url!r} names the host {parts.netloc!r}; a file URL has none: file:///absolute/path"
        )
    if parts.query or parts.fragment:
        raise UsageError(f"bucket URL {url!r} has a '?' or '#'; write them as %3F and %23 in a file URL")
    path = unquote(parts.path)
    if "\0" in path:
        raise UsageError(f"bucket URL {url!r} has a zero byte in its path; give {_UNDERSTOOD}")
    return Path(path)

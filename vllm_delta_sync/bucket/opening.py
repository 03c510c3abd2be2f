"""From a URL to a bucket that keeps its promises over a network: the one place where wrappers are put on."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from vllm_delta_sync.bucket.base import Bucket, check_key
from vllm_delta_sync.bucket.options import MOST_CONNECTIONS, StoreOptions, options_from
from vllm_delta_sync.bucket.wrapper import WrappedBucket
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.redaction import public_url

if TYPE_CHECKING:
    from vllm_delta_sync.bucket.metered import Metrics

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//)?")
_MISWRITTEN = re.compile(r"(hf|s3|gs|az|memory)(?::|//)", re.IGNORECASE)
OBJECT_STORES = ("s3", "gs", "az", "memory")
_UNDERSTOOD = (
    "a path, file:///absolute/path, hf://buckets/NAMESPACE/BUCKET/run, s3://bucket/run, gs://bucket/run, "
    "az://container/run or memory://name"
)


class OpenedBucket(WrappedBucket):
    """What ``open_bucket`` gives for anything but a plain directory.

    Attributes:
        options: it was opened with. metrics: what it was used for, without its mirror.
        origin: the same bucket without the mirror in front of it; closed with this one.
    """

    def __init__(self, inner: Bucket, options: StoreOptions, metrics: "Metrics", origin: Bucket | None = None) -> None:
        super().__init__(inner)
        self.origin: Bucket = self if origin is None else origin
        self.options = options
        self.metrics = metrics


@dataclass(frozen=True, slots=True)
class Place:
    """A store's URL, taken apart: ``scheme://authority/prefix``, the prefix without slashes at its ends."""

    scheme: str
    authority: str
    prefix: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}" + (f"/{self.prefix}" if self.prefix else "")


def open_bucket(url: str | os.PathLike[str], options: StoreOptions | None = None) -> Bucket:
    """Open the bucket that ``url`` names, without touching the store yet.

    A bare path, absolute or relative, and ``file:///absolute/path`` name a local directory, which is made
    by the first ``put``. In a ``file:`` URL ``%20`` and the like are decoded; in a bare path nothing is.
    ``hf://``, ``s3://``, ``gs://`` and ``az://`` take credentials from where each store's own tools do.
    ``memory://name`` lives and ends with this process.

    Args:
        options: how to talk to the store; None: what the environment says (``StoreOptions``).

    Raises:
        UsageError: the URL is empty, has an unknown scheme, names another machine's files, or holds credentials; or
            the library for such a store is not installed.
        SettingsError: an option in the environment does not fit.
    """
    url = os.fspath(url)
    _check_public(url)
    options = options_from() if options is None else options
    # Implementations are imported late so that reading a local directory does not load every store's client.
    if scheme_of(url) == "file":
        from vllm_delta_sync.bucket.local import LocalBucket

        bucket: Bucket = LocalBucket(_local_path(url))
        plain = options.mirror is None and options.store_upload_limit is None and options.store_download_limit is None
        return bucket if plain else _dressed(bucket, options, network=False)
    return _dressed(_open_store(url, options), options, network=True)


def check_url(url: str) -> None:
    """Raise UsageError if no bucket can have that URL, whatever the environment says."""
    _check_public(url)
    scheme = scheme_of(url)
    if scheme == "file":
        _local_path(url)
    elif scheme in ("hf", *OBJECT_STORES):
        place_of(url)
    else:
        raise _unknown(url)


def open_beside(bucket: Bucket, url: str | os.PathLike[str]) -> Bucket:
    """Open another bucket with the options of ``bucket``; raises as ``open_bucket``.

    An endpoint is that of one kind of store: another kind has the one that its own environment names.
    """
    if not isinstance(bucket, OpenedBucket):
        return open_bucket(url)
    options = bucket.options
    if scheme_of(os.fspath(url)) != scheme_of(bucket.url):
        options = options.model_copy(update={"store_endpoint": None})
    return open_bucket(url, options)


def scheme_of(url: str) -> str:
    """The scheme of a bucket URL in lower case; ``file`` for a bare path."""
    scheme = _SCHEME.match(url)
    if scheme is None or (scheme[1].lower() != "file" and scheme[2] is None):
        return "file"
    return scheme[1].lower()


def store_of(url: str) -> str:
    """The part of a URL that says where credentials count: scheme and bucket; ``file`` for a directory."""
    scheme = scheme_of(url)
    parts = url.split("/")
    # hf://buckets/NAMESPACE/BUCKET, and scheme://bucket elsewhere.
    return "file" if scheme == "file" else "/".join([f"{scheme}:", *parts[1 : 5 if scheme == "hf" else 3]])


def place_of(url: str) -> Place:
    """Take a store's URL apart.

    Raises:
        UsageError: it has no authority, or its path cannot be the beginning of keys.
    """
    scheme = scheme_of(url)
    authority, _, prefix = url[len(scheme) + 3 :].partition("/")
    prefix = prefix.rstrip("/")
    if re.fullmatch(r"[A-Za-z0-9._-]+:[0-9]+", authority):
        raise UsageError(
            f"bucket URL {url!r} names a host and a port: write {scheme}://bucket/run, and name the address of the "
            "store by store_endpoint"
        )
    if not re.fullmatch(r"[A-Za-z0-9._-]+", authority):
        raise UsageError(f"bucket URL {url!r} names no bucket: write {scheme}://bucket/run")
    if prefix:
        try:
            check_key(prefix)
        except UsageError as error:
            raise UsageError(f"bucket URL {url!r} has a path that cannot be used: {error.message}") from error
    return Place(scheme, authority, prefix)


def _open_store(url: str, options: StoreOptions) -> Bucket:
    scheme = scheme_of(url)
    if scheme == "hf":
        from vllm_delta_sync.bucket.hub import HubBucket

        return HubBucket(place_of(url), options)
    if scheme in OBJECT_STORES:
        from vllm_delta_sync.bucket.object_store import ObjectStoreBucket

        return ObjectStoreBucket(place_of(url), options)
    raise _unknown(url)


def _unknown(url: str) -> UsageError:
    return UsageError(f"bucket URL {url!r} has the unknown scheme {scheme_of(url)!r}; understood: {_UNDERSTOOD}")


def _dressed(bucket: Bucket, options: StoreOptions, network: bool) -> OpenedBucket:
    """A store with everything that is put around it, what is nearest to it first."""
    from vllm_delta_sync.bucket.deadline import DeadlineBucket
    from vllm_delta_sync.bucket.download import RangedBucket
    from vllm_delta_sync.bucket.limited import LimitedBucket
    from vllm_delta_sync.bucket.metered import PROCESS, MeteredBucket, Metrics
    from vllm_delta_sync.bucket.progress import ProgressBucket
    from vllm_delta_sync.bucket.retrying import RetryingBucket

    metrics = Metrics(PROCESS)
    bucket = MeteredBucket(bucket, metrics)
    if network:
        bucket = DeadlineBucket(bucket, options)
    bucket = LimitedBucket(bucket, options)
    if network:
        bucket = RangedBucket(RetryingBucket(bucket, options, metrics), options)
    bucket = ProgressBucket(bucket, options.store_progress)
    origin = OpenedBucket(bucket, options.model_copy(update={"mirror": None}), metrics)
    if options.mirror is None:
        return origin
    from vllm_delta_sync.bucket.mirror import MirrorBucket

    # What there are limits of is this machine's part of the network. Waiting for connections is not told to the
    # mirror's deadline in time.
    limits = options.model_copy(update={"store_connections": MOST_CONNECTIONS})
    mirror = LimitedBucket(open_mirror(options.mirror, options), limits)
    mirrored = MirrorBucket(origin, mirror, connections=options.store_connections)
    return OpenedBucket(mirrored, options, metrics, origin)


def open_mirror(url: str, options: StoreOptions) -> Bucket:
    """The store of a mirror, as it is: what fails there is asked of the bucket itself, and not again.

    Raises as ``open_bucket``.

    Args:
        options: of the bucket that it stands in front of; the endpoint is not the mirror's.
    """
    _check_public(url)
    plain = options.model_copy(update={"mirror": None, "store_endpoint": None})
    if scheme_of(url) in ("http", "https"):
        from vllm_delta_sync.bucket.http_store import HttpBucket

        return HttpBucket(url, plain)
    if scheme_of(url) == "file":
        return open_bucket(url, StoreOptions())
    return _open_store(url, plain)


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
        meant = _MISWRITTEN.match(url)
        if meant is not None:
            # A folder of that name would be made, or waited for, for ever.
            raise UsageError(
                f"bucket URL {url!r} begins like {meant[1].lower()}:// and is a path; write {meant[1].lower()}://…, "
                f"or ./{url} for a folder of that name"
            )
        return Path(url)
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

"""From a URL to a bucket that keeps its promises over a network: the one place where wrappers are put on."""

import os
from typing import TYPE_CHECKING

from vllm_delta_sync.bucket.base import Bucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.settings import MAX_CONNECTIONS, StoreOptions, client_settings
from vllm_delta_sync.urls import OBJECT_STORES, check_no_credentials, local_path, scheme_of, unknown_scheme
from vllm_delta_sync.urls import StoreLocation as StoreLocation
from vllm_delta_sync.urls import parse_store_url as parse_store_url

if TYPE_CHECKING:
    from vllm_delta_sync.bucket.middleware.metrics import Metrics


class OpenedBucket(BucketMiddleware):
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


def open_bucket(url: str | os.PathLike[str], options: StoreOptions | None = None) -> Bucket:
    """Open the bucket that ``url`` names, without touching the store yet.

    A bare path, absolute or relative, and ``file:///absolute/path`` name a local directory, which is made
    by the first ``put``. In a ``file:`` URL ``%20`` and the like are decoded; in a bare path nothing is.
    ``hf://``, ``s3://``, ``gs://`` and ``az://`` take credentials from where each store's own tools do.
    ``memory://name`` lives and ends with this process.

    Args:
        options: how to talk to the store; None: as the settings say (environment, then TOML file).

    Raises:
        UsageError: the URL is empty, has an unknown scheme, names another machine's files, or holds credentials; or
            the library for such a store is not installed.
        SettingsError: ``options`` is None and a setting is unknown or does not fit.
    """
    url = os.fspath(url)
    check_no_credentials(url)
    options = client_settings().store() if options is None else options
    # Implementations are imported late so that reading a local directory does not load every store's client.
    if scheme_of(url) == "file":
        from vllm_delta_sync.bucket.local import LocalBucket

        bucket: Bucket = LocalBucket(local_path(url))
        plain = options.mirror is None and options.store_upload_limit is None and options.store_download_limit is None
        return bucket if plain else _dressed(bucket, options, network=False)
    return _dressed(_open_store(url, options), options, network=True)


def open_beside(bucket: Bucket, url: str | os.PathLike[str], mirrored: bool = True) -> Bucket:
    """Open another bucket with the options of ``bucket``; raises as ``open_bucket``.

    An endpoint is that of one kind of store: another kind has the one that its own environment names.

    Args:
        mirrored: whether a mirror may stand in front of it.
    """
    options = bucket.options if isinstance(bucket, OpenedBucket) else client_settings().store()
    if not mirrored:
        options = options.model_copy(update={"mirror": None})
    if scheme_of(os.fspath(url)) != scheme_of(bucket.url):
        options = options.model_copy(update={"store_endpoint": None})
    return open_bucket(url, options)


def _open_store(url: str, options: StoreOptions) -> Bucket:
    scheme = scheme_of(url)
    if scheme == "hf":
        from vllm_delta_sync.bucket.hub.bucket import HubBucket

        return HubBucket(parse_store_url(url), options)
    if scheme in OBJECT_STORES:
        from vllm_delta_sync.bucket.obstore_bucket import ObjectStoreBucket

        return ObjectStoreBucket(parse_store_url(url), options)
    raise unknown_scheme(url)


def _dressed(bucket: Bucket, options: StoreOptions, network: bool) -> OpenedBucket:
    """A store with everything that is put around it, what is nearest to it first."""
    from vllm_delta_sync.bucket.middleware.deadline import DeadlineBucket
    from vllm_delta_sync.bucket.middleware.limits import LimitedBucket
    from vllm_delta_sync.bucket.middleware.metrics import PROCESS, MeteredBucket, Metrics
    from vllm_delta_sync.bucket.middleware.progress import ProgressBucket
    from vllm_delta_sync.bucket.middleware.ranged import RangedBucket
    from vllm_delta_sync.bucket.middleware.retry import RetryingBucket

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
    from vllm_delta_sync.bucket.middleware.mirror import MirrorBucket

    # What there are limits of is this machine's part of the network. Waiting for connections is not told to the
    # mirror's deadline in time.
    limits = options.model_copy(update={"store_connections": MAX_CONNECTIONS})
    mirror = LimitedBucket(open_mirror(options.mirror, options), limits)
    mirrored = MirrorBucket(origin, mirror, connections=options.store_connections)
    return OpenedBucket(mirrored, options, metrics, origin)


def open_mirror(url: str, options: StoreOptions) -> Bucket:
    """The store of a mirror, as it is: what fails there is asked of the bucket itself, and not again.

    Raises as ``open_bucket``.

    Args:
        options: of the bucket that it stands in front of; the endpoint is not the mirror's.
    """
    check_no_credentials(url)
    plain = options.model_copy(update={"mirror": None, "store_endpoint": None})
    if scheme_of(url) in ("http", "https"):
        from vllm_delta_sync.bucket.http_bucket import HttpBucket

        return HttpBucket(url, plain)
    if scheme_of(url) == "file":
        return open_bucket(url, StoreOptions())
    return _open_store(url, plain)

"""``open_bucket``: opens a bucket from its URL and wraps it in middleware."""

import os
from typing import TYPE_CHECKING

from vllm_delta_sync.bucket.base import Bucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.errors import SettingsError, UsageError
from vllm_delta_sync.settings import StoreOptions, client_settings
from vllm_delta_sync.urls import (
    OBJECT_STORES,
    check_no_credentials,
    local_path,
    parse_store_url,
    scheme_of,
    unknown_scheme,
)

if TYPE_CHECKING:
    from vllm_delta_sync.admin_token import AdminToken
    from vllm_delta_sync.bucket.peer import PeerBucket


class OpenedBucket(BucketMiddleware):
    """A bucket in its middleware: what ``open_bucket`` returns, except for a plain directory.

    Attributes:
        options: the options it was opened with.
        origin: the same bucket without mirror and peers; closed with this one.
    """

    def __init__(self, inner: Bucket, options: StoreOptions, origin: Bucket | None = None) -> None:
        super().__init__(inner)
        self.origin: Bucket = self if origin is None else origin
        self.options = options


def open_bucket(url: str | os.PathLike[str], options: StoreOptions | None = None) -> Bucket:
    """Open the bucket that ``url`` names, without touching the store yet.

    A bare path, absolute or relative, and ``file:///absolute/path`` name a local directory, which the first ``put``
    creates. Percent-escapes such as ``%20`` are decoded in a ``file:`` URL, not in a bare path. ``hf://``, ``s3://``,
    ``gs://`` and ``az://`` find credentials where each store's own tools do. ``memory://name`` ends with the process.

    Args:
        options: how to talk to the store; if None, read the settings (environment, then TOML file).

    Raises:
        UsageError: the URL is neither a string nor a path, is empty, has an unknown scheme, names another machine's
            files, or holds credentials; or the library for the store is not installed.
        SettingsError: ``options`` is None and a setting is unknown or invalid.
    """
    if not isinstance(url, str | os.PathLike):  # such as the value of a variable that is not set
        raise UsageError(f"the bucket is {url!r}; give the URL or the path of a run")
    url = os.fspath(url)
    check_no_credentials(url)
    options = client_settings().store() if options is None else options
    # Imported here so that a local directory does not load the clients of other stores.
    if scheme_of(url) == "file":
        from vllm_delta_sync.bucket.local import LocalBucket

        bucket: Bucket = LocalBucket(local_path(url))
        return bucket if options == options.without_copies() else _wrap(bucket, options, network=False)
    return _wrap(_open_store(url, options), options, network=True)


def open_beside(bucket: Bucket, url: str | os.PathLike[str], mirrored: bool = True) -> Bucket:
    """Open another bucket with the options of ``bucket``; raises what ``open_bucket`` raises.

    ``store_endpoint`` is passed on only if both URLs have the same scheme: another kind of store has another endpoint.

    Args:
        mirrored: whether to use mirror and peers.
    """
    options = bucket.options if isinstance(bucket, OpenedBucket) else client_settings().store()
    if not mirrored:
        options = options.without_copies()
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


def _wrap(bucket: Bucket, options: StoreOptions, network: bool) -> OpenedBucket:
    """Wrap a store in its middleware, innermost first."""
    from vllm_delta_sync.bucket.middleware.deadline import DeadlineBucket
    from vllm_delta_sync.bucket.middleware.progress import ProgressBucket
    from vllm_delta_sync.bucket.middleware.retry import RetryingBucket
    from vllm_delta_sync.bucket.middleware.usage import PROCESS, LimitedBucket

    if network:
        bucket = DeadlineBucket(bucket, options)
    bucket = LimitedBucket(bucket, options, PROCESS)
    if network:
        bucket = RetryingBucket(bucket, options, PROCESS)
    bucket = ProgressBucket(bucket, options.store_progress)
    origin = OpenedBucket(bucket, options.without_copies())
    if options == options.without_copies():
        return origin
    from vllm_delta_sync.bucket.middleware.mirror import MirrorBucket, PeerSource, Source

    sources: list[Source] = [PeerSource(peer, options.store_deadline, PROCESS) for peer in open_peers(options)]
    if options.mirror is not None:
        sources.append(Source(open_mirror(options.mirror, options)))
    return OpenedBucket(MirrorBucket(origin, sources), options, origin)


def open_peers(options: StoreOptions, token: "AdminToken | None" = None) -> "list[PeerBucket]":
    """Open the peers of the setting ``peer``.

    Args:
        token: the run's; if None, that of this process's settings.

    Raises:
        SettingsError: no admin token is set. UsageError: a URL is not valid.
    """
    if options.peer is None:
        return []
    from vllm_delta_sync.bucket.peer import PeerBucket

    token = token or client_settings().admin_token()
    if token is None:
        raise SettingsError(
            "setting 'peer' needs the run's token, which peers ask for: set admin_token_file or DELTA_SYNC_ADMIN_TOKEN "
            "to the same on all of them"
        )
    return [PeerBucket(url.strip(), token.for_peers()) for url in options.peer.split(",")]


def open_mirror(url: str, options: StoreOptions) -> Bucket:
    """Open a mirror without middleware: what fails there is read from the bucket itself, without a retry.

    Raises what ``open_bucket`` raises.

    Args:
        options: those of the mirrored bucket; its endpoint and mirror are ignored.
    """
    check_no_credentials(url)
    plain = options.without_copies().model_copy(update={"store_endpoint": None})
    if scheme_of(url) in ("http", "https"):
        from vllm_delta_sync.bucket.obstore_bucket import HttpBucket

        return HttpBucket(url, plain)
    if scheme_of(url) == "file":
        return open_bucket(url, StoreOptions())
    return _open_store(url, plain)

"""``make_clients``: builds the obstore clients of a bucket from its URL and the environment. Sends no request."""

import importlib.util
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from vllm_delta_sync.bucket.obstore_errors import CLIENT_ERRORS, Cause
from vllm_delta_sync.errors import AccessError, StoreError, UsageError
from vllm_delta_sync.settings import StoreOptions
from vllm_delta_sync.urls import StoreLocation

PART_BYTES = 8 * 1024 * 1024
"""Size of an upload's parts, unless there would be more than MOST_PARTS."""
MOST_PARTS = 9000
"""Maximum number of an upload's parts; S3 and GCS accept 10,000."""
MOST_PARTS_AT_ONCE = 8
_PART_RETRIES = 3
CREATE_BYTES = 64 * 1024 * 1024
"""Objects up to this size are created by one request, which the store refuses if the key exists."""

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_OPTION_OF_ENDPOINT = {"s3": ("endpoint", "aws_endpoint_url_s3"), "gs": ("base_url",), "az": ("endpoint",)}
_TEXTS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"),
    "gs": (),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_TOKEN"),
}
"""Variables that obstore writes into requests as they are."""
_KEYS_OF_AWS = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE")
_ROLES_OF_AWS = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    # Without it obstore ignores AWS_CONTAINER_CREDENTIALS_FULL_URI and asks the metadata service at 169.254.169.254.
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
)
_CONTAINER = "AWS_CONTAINER_CREDENTIALS_FULL_URI"
_PROFILE_SECONDS = 600
"""How long credentials of a profile are used before boto3 is asked again; boto3 renews them 15 minutes before they
expire."""

RENEW_SECONDS = 5.0
"""Minimum age of clients that are replaced because credentials were refused."""

_process: int | None = None
"""The first process that called obstore."""

_memory: dict[str, Any] = {}


Use = Literal["reading", "writing", "uploading"]


class Clients:
    """The clients of one bucket by their use. None retries a request, because RetryingBucket does.

    ``reading`` has short timeouts, to give up a stalled connection soon. ``writing`` has long timeouts, because the
    time to the first byte of the answer includes sending the object. ``uploading`` is like ``writing``, but retries
    the parts of an upload: RetryingBucket could only send all of them again.

    Get the client again for each call: that raises StoreError after a fork (see ``check_process``), and returns new
    clients after ``renew``, or raises AccessError.

    Raises:
        UsageError: obstore refuses a value of the environment.
    """

    def __init__(self, url: str, build: Callable[[dict[str, Any], dict[str, Any]], Any], options: StoreOptions) -> None:
        self._url, self._build, self._options = url, build, options
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._renewed = time.monotonic()
        # Now, so that a wrong environment raises here.
        self._ensure("reading")

    def __getitem__(self, use: Use) -> Any:
        check_process(self._url)
        with self._lock:
            try:
                return self._ensure(use)
            except UsageError as error:
                # The environment was right at the start. A file of credentials may be in the middle of a change.
                raise AccessError(error.message) from error

    def renew(self) -> None:
        """Make the next calls read the credentials again, because they were refused.

        Has no effect within RENEW_SECONDS of the last time.
        """
        with self._lock:
            if time.monotonic() - self._renewed >= RENEW_SECONDS:
                self._renewed = time.monotonic()
                self._clients.clear()

    def _ensure(self, use: Use) -> Any:
        if use not in self._clients:
            deadline = self._options.store_deadline
            longest = self._options.allowance(max(CREATE_BYTES, MOST_PARTS_AT_ONCE * PART_BYTES))
            seconds = max(1.0, deadline / 3) if use == "reading" else longest
            self._clients[use] = self._client(seconds, _PART_RETRIES if use == "uploading" else 0)
        return self._clients[use]

    def _client(self, read_seconds: float, retries: int) -> Any:
        client = {
            "connect_timeout": timedelta(seconds=min(5.0, max(1.0, self._options.store_deadline / 3))),
            "read_timeout": timedelta(seconds=read_seconds),
            # Limits the whole transfer; the default of 30 s is too short for large objects. DeadlineBucket has our
            # deadlines.
            "timeout": timedelta(days=365),
            # Stores close idle connections after 20 s or more, and a request over a closed one fails.
            "pool_idle_timeout": timedelta(seconds=15),
            "user_agent": f"vllm-delta-sync/{version('vllm-delta-sync')}",
        }
        retry = {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=self._options.store_deadline),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
        }
        try:
            return self._build(client, retry)
        except CLIENT_ERRORS as error:
            problem = f"{Cause.of(error).text}; check the variables of that store in the environment"
            if "No CA certificates" in str(error):
                problem = "no CA certificates are here; install ca-certificates, or set SSL_CERT_FILE to a file of them"
            raise UsageError(f"bucket URL {self._url!r} cannot be opened: {problem}") from error


def check_process(url: str) -> None:
    """Refuse a call of obstore in a forked process; call this before each call of obstore.

    obstore's threads do not survive a fork, but the sockets that they wait for are shared with the parent: a call in
    the child would hang, and so would all later calls in the parent.

    Raises:
        StoreError: this process was forked from one that had called obstore.
    """
    global _process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid() and not url.startswith("memory:"):
        raise StoreError(
            f"{url} cannot be used here: this process was forked from process {_process}, which had used such a store "
            "before, and the client does not survive that; start it by spawn instead of fork (of vLLM: "
            "VLLM_WORKER_MULTIPROCESSING_METHOD=spawn), or use the store after the fork only"
        )


def make_clients(location: StoreLocation, options: StoreOptions) -> Clients:
    """Return clients for ``s3``, ``gs``, ``az`` and ``memory``; raises UsageError."""
    build = {"s3": _s3, "gs": _gs_or_az, "az": _gs_or_az, "memory": _in_memory}[location.scheme]
    return Clients(location.url, lambda client, retry: build(location, options, client, retry), options)


def http_clients(url: str, options: StoreOptions) -> Clients:
    """Return clients for what is below an ``http(s)://`` URL; raises UsageError."""

    def build(client: dict[str, Any], retry: dict[str, Any]) -> Any:
        from obstore.store import HTTPStore

        return HTTPStore(url, client_options={**client, "allow_http": url.startswith("http://")}, retry_config=retry)

    return Clients(url, build, options)


def _s3(location: StoreLocation, options: StoreOptions, client: dict[str, Any], retry: dict[str, Any]) -> Any:
    from obstore.store import S3Store

    bundle = os.environ.get("AWS_CA_BUNDLE")
    if bundle:
        client = {**client, "root_certificate": Path(bundle).read_bytes()}
    return S3Store(
        location.authority,
        # Not every S3-compatible store can delete several objects at once, and nothing here needs it.
        config={"disable_bulk_delete": True, **_endpoint(location.scheme, options)},
        client_options={**client, **_plain_http(location.scheme, options)},
        retry_config=retry,
        credential_provider=_aws_credentials(os.environ),
    )


def _gs_or_az(location: StoreLocation, options: StoreOptions, client: dict[str, Any], retry: dict[str, Any]) -> Any:
    from obstore.store import AzureStore, GCSStore

    store: Any = GCSStore if location.scheme == "gs" else AzureStore
    return store(
        location.authority,
        config=_endpoint(location.scheme, options),
        client_options={**client, **_plain_http(location.scheme, options)},
        retry_config=retry,
    )


def _in_memory(location: StoreLocation, options: StoreOptions, client: dict[str, Any], retry: dict[str, Any]) -> Any:
    from obstore.store import MemoryStore

    return _memory.setdefault(location.authority, MemoryStore())


def _endpoint(scheme: str, options: StoreOptions) -> dict[str, str]:
    """Return the configured address of the store as an option of obstore.

    Raises:
        UsageError: it is none, or a variable has a control character: obstore would panic at the first request.
    """
    for name in _TEXTS[scheme]:
        if re.search(r"[\x00-\x1f\x7f]", os.environ.get(name, "")):
            raise UsageError(
                f"environment variable {name} has a control character, such as the line end of a file; remove it"
            )
    given = _given_endpoints(scheme, options)
    for name, address in given.items():
        if not _is_address(address):
            shown = address.rpartition("@")[2].partition("?")[0][:200]
            raise UsageError(
                f"{name} is {shown!r}, which is no address of a store; write http://host:port or https://host:port, or "
                "unset it"
            )
    first = next(iter(given.values()), None)
    # Set every name of this option, or another name in the environment would take precedence. Without the slash at its
    # end: after a path, obstore's clients for Google and Azure add another one, and ask for a container without a name.
    return {} if first is None else dict.fromkeys(_OPTION_OF_ENDPOINT[scheme], first.rstrip("/"))


def _given_endpoints(scheme: str, options: StoreOptions) -> dict[str, str]:
    """Return addresses by the names of the setting or of the variables that give them."""
    if options.store_endpoint is not None:
        return {"store_endpoint": options.store_endpoint}
    return {name: os.environ[name] for name in _ENDPOINTS[scheme] if name in os.environ}


def _is_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return valid and re.fullmatch("[!-~]+", address) is not None


def _plain_http(scheme: str, options: StoreOptions) -> dict[str, bool]:
    """Allow requests without TLS if the configured endpoint is http://."""
    given = next(iter(_given_endpoints(scheme, options).values()), "")
    return {"allow_http": True} if given.startswith("http://") else {}


def _aws_credentials(environment: Mapping[str, str]) -> Callable[[], Any] | None:
    """Return a provider of credentials that obstore does not find: boto3 for profiles; None for obstore's own.

    Keys in the environment take precedence over profiles, as in boto3.

    Raises:
        UsageError: boto3 is required and not installed; or the key is empty, with which obstore would sign requests.
        ValueError: boto3 finds no credentials in a profile.
    """
    if any(environment.get(name) for name in _KEYS_OF_AWS):
        return None
    profile, role = environment.get("AWS_PROFILE"), any(environment.get(name) for name in _ROLES_OF_AWS)
    bare_role = bool(environment.get(_CONTAINER)) and not role
    boto3 = importlib.util.find_spec("boto3") is not None
    if not boto3 and (profile or bare_role):
        name = (
            "AWS_PROFILE is set" if profile else f"{_CONTAINER} is set without AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"
        )
        raise UsageError(
            f"{name}, which requires boto3, and that is not installed; pip install boto3, or set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY instead"
        )
    if boto3 and (profile or bare_role or (_has_profiles(environment) and not role)):
        found = _profile_credentials(profile)
        if found is not None:
            return found
    if "AWS_ACCESS_KEY_ID" in environment:
        raise UsageError("environment variable AWS_ACCESS_KEY_ID is empty; unset it, or set it to the id of a key")
    machine = environment.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true"
    return None if role or (machine and not bare_role) else _none_found


def _profile_credentials(profile: str | None) -> Callable[[], Any] | None:
    import boto3  # type: ignore[import-untyped]
    from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        session = boto3.Session(profile_name=profile)
        if profile is None and session.get_credentials() is None:
            return None
        provider: Callable[[], Any] = Boto3CredentialProvider(session, ttl=timedelta(seconds=_PROFILE_SECONDS))
    except BotoCoreError as error:
        raise ValueError(str(error)) from error
    return provider


def _has_profiles(environment: Mapping[str, str]) -> bool:
    places = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))
    # Unlike those of ``Path``, these raise nothing for a user without a home, or with one that it may not enter.
    return any(os.path.isfile(os.path.expanduser(environment.get(name) or default)) for name, default in places)


def _none_found() -> Any:
    raise LookupError("the environment has no credentials, and the metadata service of this machine is disabled")

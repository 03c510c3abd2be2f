"""``HubGateway``: creates objects if absent through the Hub's S3 gateway, because the Hub's API cannot.

The gateway does not accept the Hub's token. Generate credentials from a token in the settings of the Hub's site (Access
Tokens, Generate S3 credentials) and set the environment variables below.
"""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.bucket.base import read_pieces
from vllm_delta_sync.bucket.hub.errors import HubLocation, is_full
from vllm_delta_sync.bucket.transfer_observers import report_bytes
from vllm_delta_sync.errors import AccessError, StoreError, UsageError
from vllm_delta_sync.redaction import redact
from vllm_delta_sync.settings import StoreOptions

if TYPE_CHECKING:
    from vllm_delta_sync.bucket.obstore_clients import Clients

KEY_ID = "HF_S3_ACCESS_KEY_ID"
SECRET = "HF_S3_SECRET_ACCESS_KEY"
ENDPOINT = "HF_S3_ENDPOINT"
"""URL of the gateway, without namespace."""
DEFAULT_ENDPOINT = "https://s3.hf.co"
MAX_BYTES = 1 << 26
"""Objects above this size would be uploaded in parts, which do not support create-if-absent."""

_HUB = "https://huggingface.co"
_REGION = "us-east-1"
_CREDENTIAL_SECONDS = 600


class HubGateway:
    """Creates objects of one bucket. Safe to use from several threads.

    Args:
        root: prefix of each key, empty or with a trailing slash.
        endpoint: URL of the gateway.
    """

    def __init__(self, location: HubLocation, root: str, endpoint: str, options: StoreOptions) -> None:
        self._location = location
        self._root = root
        self._clients = _clients(location, endpoint, options)

    def create(self, key: str, data: bytes | Path) -> None:
        """Store an object of at most ``MAX_BYTES`` bytes.

        Raises:
            ConflictError: the object exists. UsageError: ``data`` cannot be read. StoreError: as ``Bucket.put``.
        """
        from vllm_delta_sync.bucket.obstore_errors import CLIENT_ERRORS, Cause, FailedRequest, translate_error

        # It never retries: after a lost answer, a second try would report its own object as a conflict.
        client = self._clients.writing
        content = b"".join(read_pieces(key, data, MAX_BYTES))
        report_bytes(len(content))
        try:
            client.put(self._root + key, content, mode="create", use_multipart=False)
        except CLIENT_ERRORS as error:
            action = f"write key {key!r}"
            found = translate_error(error, FailedRequest(action, key, self._location.url, "s3", writing=True))
            error.args = tuple(redact(text) if isinstance(text, str) else text for text in error.args)
            if not isinstance(found, AccessError):
                raise found from error
            text = f"cannot {action} of {self._location.url} through the Hub's S3 gateway: {Cause.of(error).text}"
            if is_full(text):
                raise StoreError(f"{text}; free space (delta-sync gc)") from error
            raise AccessError(f"{text}; check {KEY_ID} and {SECRET}, or unset both") from error


def open_gateway(location: HubLocation, root: str, hub: str, options: StoreOptions) -> HubGateway | None:
    """Return the gateway of the Hub at ``hub``, or None if the environment has no credentials of it.

    Raises:
        UsageError: the environment has some of the variables, but not all.
    """
    key_id, secret, endpoint = (os.environ.get(name) for name in (KEY_ID, SECRET, ENDPOINT))
    if not key_id and not secret:
        return None
    if not key_id or not secret:
        raise UsageError(f"only one of {KEY_ID} and {SECRET} is set; set or unset both")
    if not endpoint:
        if hub != _HUB:
            raise UsageError(
                f"{KEY_ID} is set and the Hub is {hub}: set {ENDPOINT} to its S3 gateway, or unset {KEY_ID}"
            )
        endpoint = DEFAULT_ENDPOINT
    return HubGateway(location, root, endpoint.rstrip("/"), options)


def _clients(location: HubLocation, endpoint: str, options: StoreOptions) -> "Clients":
    from obstore.store import S3Store

    from vllm_delta_sync.bucket.obstore_clients import Clients

    namespace, _, name = location.id.partition("/")
    address = f"{endpoint}/{namespace}"
    # Set every option that AWS_* variables could set: those are for another store.
    config = {
        "endpoint": address,
        "aws_endpoint_url_s3": address,
        "region": _REGION,
        "virtual_hosted_style_request": False,
        "skip_signature": False,
    }

    def build(client: dict[str, Any], retry: dict[str, Any]) -> Any:
        client = {**client, "allow_http": endpoint.startswith("http://")}
        return S3Store(name, config=config, client_options=client, retry_config=retry, credential_provider=_credentials)

    return Clients(location.url, build, options)


def _credentials() -> dict[str, Any]:
    """Return the credentials of the environment; obstore calls this again before they expire."""
    return {
        "access_key_id": os.environ.get(KEY_ID, ""),
        "secret_access_key": os.environ.get(SECRET, ""),
        "token": None,
        "expires_at": datetime.now(UTC) + timedelta(seconds=_CREDENTIAL_SECONDS),
    }

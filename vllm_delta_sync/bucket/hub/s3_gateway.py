"""The Hub's S3 gateway, asked for the one thing that the Hub's own interface lacks: create an object if it is absent.

Its credentials are not the Hub's token: they are made of one in the settings of the Hub's site (Access Tokens, Generate
S3 credentials), and are given in the environment variables below.
"""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from vllm_delta_sync.bucket.hub.errors import HubLocation, is_full
from vllm_delta_sync.bucket.transfer_observers import report_bytes
from vllm_delta_sync.errors import AccessError, StoreError, UsageError
from vllm_delta_sync.redaction import redact
from vllm_delta_sync.settings import StoreOptions

KEY_ID = "HF_S3_ACCESS_KEY_ID"
SECRET = "HF_S3_SECRET_ACCESS_KEY"
ENDPOINT = "HF_S3_ENDPOINT"
"""Of the gateway, without namespace."""
DEFAULT_ENDPOINT = "https://s3.hf.co"
MAX_BYTES = 1 << 26
"""What is larger would go up in parts, and those know no create-if-absent."""

_HUB = "https://huggingface.co"
_REGION = "us-east-1"
_CREDENTIAL_SECONDS = 600


class HubGateway:
    """Creates objects of one bucket. Safe to use from several threads.

    Args:
        root: what comes before each key, empty or with a slash at its end.
        endpoint: of the gateway.
    """

    def __init__(self, site: HubLocation, root: str, endpoint: str, options: StoreOptions) -> None:
        self._site = site
        self._root = root
        self._store = _store(site.id, endpoint, options)

    def create(self, key: str, data: bytes | Path) -> None:
        """Store an object of at most ``MAX_BYTES`` bytes.

        Raises:
            ConflictError: there is one already. UsageError: ``data`` cannot be read. StoreError: as ``Bucket.put``.
        """
        from vllm_delta_sync.bucket.obstore_clients import check_process
        from vllm_delta_sync.bucket.obstore_errors import RAISED, Cause, FailedRequest, translated

        check_process(self._site.url)

        try:
            content = data if isinstance(data, bytes) else data.read_bytes()
        except OSError as error:
            raise UsageError(
                f"cannot read {data!s} to put it under key {key!r}: {error.strerror}; check the path"
            ) from error
        report_bytes(len(content))
        try:
            self._store.put(self._root + key, content, mode="create", use_multipart=False)
        except RAISED as error:
            action = f"write key {key!r}"
            found = translated(error, FailedRequest(action, key, self._site.url, "s3", writing=True))
            error.args = tuple(redact(text) if isinstance(text, str) else text for text in error.args)
            if not isinstance(found, AccessError):
                raise found from error
            said = f"cannot {action} of {self._site.url} through the Hub's S3 gateway: {Cause.of(error).text}"
            if is_full(said):
                raise StoreError(f"{said}; remove what is not needed (delta-sync gc)") from error
            raise AccessError(f"{said}; check {KEY_ID} and {SECRET}, or unset both") from error


def open_gateway(site: HubLocation, root: str, hub: str, options: StoreOptions) -> HubGateway | None:
    """The gateway of the Hub at ``hub``, if the environment has credentials of it.

    Raises:
        UsageError: it has only a part of what is needed.
    """
    key_id, secret, endpoint = (os.environ.get(name) for name in (KEY_ID, SECRET, ENDPOINT))
    if not key_id and not secret:
        return None
    if not key_id or not secret:
        raise UsageError(f"of {KEY_ID} and {SECRET} only one is set; set or unset both")
    if not endpoint:
        if hub != _HUB:
            raise UsageError(
                f"{KEY_ID} is set and the Hub is {hub}: set {ENDPOINT} to its S3 gateway, or unset {KEY_ID}"
            )
        endpoint = DEFAULT_ENDPOINT
    return HubGateway(site, root, endpoint.rstrip("/"), options)


def _store(id: str, endpoint: str, options: StoreOptions) -> Any:
    from obstore.store import S3Store

    namespace, _, name = id.partition("/")
    address = f"{endpoint}/{namespace}"
    return S3Store(
        name,
        # All that AWS_* variables could say otherwise: they are about another store.
        config={
            "endpoint": address,
            "aws_endpoint_url_s3": address,
            "region": _REGION,
            "virtual_hosted_style_request": False,
            "skip_signature": False,
        },
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=min(5.0, options.store_deadline / 3)),
            "read_timeout": timedelta(seconds=options.allowance(MAX_BYTES)),
            "timeout": timedelta(days=365),
        },
        # After an answer that was lost, another try would find its own object and call that a conflict.
        retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
        credential_provider=_credentials,
    )


def _credentials() -> dict[str, Any]:
    """As the environment has them now. obstore asks again when they are about to end."""
    return {
        "access_key_id": os.environ.get(KEY_ID, ""),
        "secret_access_key": os.environ.get(SECRET, ""),
        "token": None,
        "expires_at": datetime.now(UTC) + timedelta(seconds=_CREDENTIAL_SECONDS),
    }

"""``make_head`` builds HEAD.json for a version: signed and with an expiry time if there is a signing key."""

from datetime import UTC, datetime, timedelta

from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.manifest import Head, Manifest
from vllm_delta_sync.trust.keyring import Keyring

HEAD_SECONDS = 600
"""Lifetime of a signed HEAD.json. A publisher rewrites it before it expires."""
MAX_HEAD_SECONDS = 366 * 24 * 3600


def make_head(manifest: Manifest, keyring: Keyring, seconds: int = HEAD_SECONDS) -> Head:
    """Return the HEAD.json that points at ``manifest``; if the keyring can sign, signed and valid for ``seconds``."""
    head = Head(
        run=manifest.run,
        version=manifest.version,
        manifest=manifest.digest,
        epoch=manifest.epoch,
        parent=manifest.parent,
    )
    if not keyring.has_signing_key:
        return head
    now = datetime.now(UTC)
    times = {"created_at": timestamp(now), "expires_at": timestamp(now + timedelta(seconds=seconds))}
    return keyring.signed(head.model_copy(update=times))

"""``make_head`` builds HEAD.json for a version: signed and with an expiry time if there is a signing key."""

from datetime import UTC, datetime, timedelta

from vllm_delta_sync.format.manifest import Head, Manifest
from vllm_delta_sync.trust.keyring import Keyring

HEAD_SECONDS = 600
"""Lifetime of a signed HEAD.json. A publisher rewrites it before it expires."""
MAX_HEAD_SECONDS = 366 * 24 * 3600


def make_head(manifest: Manifest, keyring: Keyring, seconds: int = HEAD_SECONDS) -> Head:
    """Return the HEAD.json that points at ``manifest``; signed and with an expiry time if the keyring can sign.

    Args:
        seconds: lifetime from now on.
    """
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
    times = {"created_at": _iso_utc(now), "expires_at": _iso_utc(now + timedelta(seconds=seconds))}
    return keyring.signed(head.model_copy(update=times))


def _iso_utc(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")

"""HEAD.json as a holder of a key writes it: with the time from when, and until when, it may be taken for the newest."""

from datetime import UTC, datetime, timedelta

from vllm_delta_sync.format.manifest import Head, Manifest
from vllm_delta_sync.trust.keyring import Keyring

HEAD_SECONDS = 600
"""How long a signed HEAD.json holds; whoever publishes writes it again before."""
MAX_HEAD_SECONDS = 366 * 24 * 3600


def make_head(manifest: Manifest, keyring: Keyring, seconds: int = HEAD_SECONDS) -> Head:
    """HEAD.json that points at a version; signed, and with an end, if the keyring has a signing key.

    Args:
        seconds: from now on until it runs out.
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
    times = {"created_at": _spelled(now), "expires_at": _spelled(now + timedelta(seconds=seconds))}
    return keyring.signed(head.model_copy(update=times))


def _spelled(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")

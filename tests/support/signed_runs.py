"""A signed run in memory, read with the root's key."""

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.support.collecting import MemoryBucket
from tests.support.damage import TABLE, Whole
from tests.support.samples import RunWriter, random_bits
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.client import Run
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keys import public_hex


def signer(number: int, *trusted: str) -> Keyring:
    """A key of one's own; it trusts itself, or those that are named."""
    private = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
    return Keyring(trusted or [public_hex(private.public_key())], private)


def name_of(keyring: Keyring) -> str:
    assert keyring.public is not None
    return keyring.public


ROOT, PUBLISHER, NEXT, STRANGER = (signer(number) for number in (1, 2, 3, 4))


class Signed(Whole):
    """As ``Whole``, with everything signed by ``writer.keyring``, and read with the root's key."""

    def __init__(self, keyring: Keyring = ROOT, bucket: Bucket | None = None) -> None:
        self.random = np.random.default_rng(0)
        self.bucket = bucket or MemoryBucket()  # type: ignore[assignment]
        self.writer = RunWriter(self.bucket, TABLE, keyring=keyring)
        self.anchor(random_bits(TABLE, self.random))

    @property
    def run(self) -> Run:
        return Run(self.bucket, Keyring(ROOT.trusted))

    def grown(self) -> "Signed":
        """Documents of every kind."""
        self.deltas("plain", "raw", "plain", "full", "plain")
        self.claim()
        self.deltas("plain", "plain", "plain")
        self.merged_deltas()
        self.beside(5)
        self.tag("best", 3)
        return self

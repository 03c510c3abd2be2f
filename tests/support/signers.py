"""Keys that are always the same, and documents signed with them."""

from hashlib import sha256
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from vllm_delta_sync.format.manifest import Manifest, ObjectRef, RunInfo, object_key
from vllm_delta_sync.trust import Keyring

RUN = "ab" * 16
TIME = "2026-01-01T00:00:00Z"
ROOT, OTHER_ROOT, TRAINER, NEXT, STRANGER = (
    ed25519.Ed25519PrivateKey.from_private_bytes(bytes([number] * 32)) for number in range(1, 6)
)


def public(key: ed25519.Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def ring(signer: ed25519.Ed25519PrivateKey | None, *trusted: ed25519.Ed25519PrivateKey) -> Keyring:
    return Keyring([public(key) for key in trusted], signer)


def by(signer: ed25519.Ed25519PrivateKey, document: Any) -> Any:
    return Keyring((), signer).signed(document)


def manifest(version: int, parent: Manifest | None = None, **fields: Any) -> Manifest:
    data = str((version, sorted(fields))).encode()
    ref = ObjectRef(key=object_key(sha256(data).hexdigest()), bytes=7, sha256=sha256(data).hexdigest())
    given: dict[str, Any] = {
        "run": RUN,
        "version": version,
        "step": 3 * version,
        "kind": "delta" if version else "anchor",
        "base_version": version - 1 if version else None,
        "parent": parent.digest if parent is not None else "9" * 64 if version else None,
        "objects": [ref],
        "changed": 5,
        "total": 100,
        "payload_bytes": 7,
        "full_bytes": 200,
        "fingerprint": "cd" * 16,
        "tensor_fingerprints": None if version else {"a": "cd" * 16},
        "created_at": TIME,
    }
    return Manifest(**(given | fields))


INFO = RunInfo(run=RUN, created_at=TIME, tensors="0" * 64, total=100, full_bytes=200)

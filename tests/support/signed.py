"""What the tests of signed runs share: key pairs, forging, and a check of signatures without this project."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tests.support.exporting import stored
from tests.support.publishers import Trainer
from trainer_side import Publisher
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.base_document import Document, dump_canonical
from vllm_delta_sync.format.manifest import HEAD_KEY, RUN_KEY, Head, object_key
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keys import generate

KINDS = {
    "run.json": "run",
    "HEAD.json": "head",
    "versions": "manifest",
    "anchors": "anchor",
    "merged": "merged-delta",
    "tags": "tag",
    "claims": "claim",
}


class Keys:
    """Key pairs in a folder, made when they are named."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._made: dict[str, str] = {}

    def private(self, name: str) -> Path:
        path = self._folder / name
        if name not in self._made:
            self._made[name] = generate(path)
        return path

    def public(self, name: str) -> Path:
        self.private(name)
        return self._folder / f"{name}.pub"

    def hex(self, name: str) -> str:
        self.private(name)
        return self._made[name]

    def ring(self, name: str, *trusted: str) -> Keyring:
        return Keyring.load([self.public(one) for one in trusted or (name,)], self.private(name))

    def readers(self, *trusted: str) -> Keyring:
        return Keyring.load([self.public(one) for one in trusted])


def assert_signed(data: bytes, kind: str, allowed: set[str]) -> None:
    """Without this project's code: Ed25519 over the kind and RFC 8785 JSON without the field ``signature``."""
    value = json.loads(data)
    signature = value.pop("signature")
    assert set(signature) == {"key", "value"}
    assert signature["key"] in allowed
    message = b"vllm-delta-sync/" + kind.encode() + b"/1\0" + rfc8785.dumps(value)
    Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["key"])).verify(
        bytes.fromhex(signature["value"]), message
    )


def assert_all_signed(folder: Path, *allowed: str) -> set[str]:
    """Every document in the folder, but those whose digest a signed one holds.

    Returns:
        First parts of the keys of all that is there.
    """
    seen = set()
    bucket = open_bucket(str(folder))
    for item in bucket.list():
        key, data = item.key, bucket.get(item.key)
        first = key.split("/")[0]
        seen.add(first)
        if first == "objects":
            assert key == object_key(sha256(data).hexdigest())
        elif first == "tensors.json":
            assert json.loads(bucket.get(RUN_KEY))["tensors"] == sha256(data).hexdigest()
        else:
            assert_signed(data, KINDS[first], set(allowed))
    return seen


def sign_file(folder: Path, key: str, kind: type[Document], keyring: Keyring) -> None:
    """Sign a document of the bucket anew."""
    document = kind.from_bytes((folder / key).read_bytes())
    (folder / key).write_bytes(keyring.signed(document).to_bytes())


def unsign(folder: Path, key: str) -> None:
    value = json.loads((folder / key).read_bytes())
    value["signature"] = None
    (folder / key).write_bytes(dump_canonical(value))


def head_of(folder: Path) -> Head:
    return Head.from_bytes((folder / HEAD_KEY).read_bytes())


def refuse(folder: Path, trainer: Trainer, error: type[DeltaSyncError], match: str, **options: Any) -> None:
    """Nothing is written where a publisher is refused, not even a claim."""
    before = stored(folder)
    with pytest.raises(error, match=match):
        Publisher(trainer.live, str(folder), **options)
    assert stored(folder) == before

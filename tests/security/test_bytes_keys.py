"""Keys of objects that lead elsewhere: in manifests, anchors and folded ranges, in HEAD.json, and on the disk."""

import os
from pathlib import Path

import pytest

from tests.security.build import NEXT, edit, untouched
from tests.security.reader import Reader
from tests.support.forge import forge
from tests.support.written import Written
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire.manifest import HEAD_KEY

SECRET = "not-for-readers-7f3a"
DIGEST = "ab" * 32

KEYS = {
    "up": "../../etc/passwd",
    "up, after a folder": "objects/../../secret.safetensors",
    "absolute": "/etc/passwd",
    "a URL": "file:///etc/passwd",
    "zero byte": f"objects/{DIGEST}\0.safetensors",
    "percent": "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "backslash": "..\\..\\secret",
    "empty": "",
    "a dot": ".",
    "very long": "objects/" + "a" * 100_000,
    "very deep": "a/" * 50_000,
    "look-alike letters": f"оbjects/{DIGEST}.safetensors",
    "look-alike digits": "objects/" + "０" * 64 + ".safetensors",
    "look-alike slash": f"objects∕{DIGEST}.safetensors",
    "upper case": f"objects/{DIGEST.upper()}.safetensors",
    "a line more": f"objects/{DIGEST}.safetensors\n",
    "an escape": f"\x1b[2Jobjects/{DIGEST}.safetensors",
    "another name": f"objects/{DIGEST}.bin",
    "another document": "run.json",
    "staging": "~staging/1-2",
    "home": "~/secret",
}


def with_key(objects: list[dict[str, object]], key: str) -> None:
    objects[0]["key"] = key


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file outside of the bucket, where a key that leads up would find it."""
    path = tmp_path / "secret.safetensors"
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize("name", KEYS)
def test_in_a_manifest(name: str, reader: Reader, written: Written, secret: Path) -> None:
    forge(written.folder, lambda fields: with_key(fields["objects"], KEYS[name]))
    for door in ("head", "tensors", "verify"):
        message = reader.refused(door, written.folder, kind="format")
        assert "versions/0000000005.json" in message
        assert "objects.0" in message
        assert SECRET not in message
    untouched(reader, written)


@pytest.mark.parametrize("name", KEYS)
def test_beside_the_chain(name: str, reader: Reader, written: Written, secret: Path, tmp_path: Path) -> None:
    written.writer.fold(0, 4)
    written.writer.beside(4, tmp_path)
    for key, door in ((side.fold_key(0, 4), ("folded", 0, 4)), (side.anchor_key(4), ("anchor", 4))):
        edit(written.folder, key, lambda value: with_key(value["objects"], KEYS[name]))
        message = reader.refused(door[0], written.folder, *door[1:], kind="format")
        assert key in message
        assert SECRET not in message
    # They are hints: the versions themselves lead to the head.
    assert reader.reads("tensors", written.folder)
    assert {key for key, _, _ in reader.reads("findings", written.folder)} == {
        side.fold_key(0, 4),
        side.anchor_key(4),
    }
    untouched(reader, written)


@pytest.mark.parametrize("name", KEYS)
def test_asked_of_the_bucket(name: str, reader: Reader, written: Written, secret: Path) -> None:
    if name == "another document":
        assert reader("get", written.folder, KEYS[name]).kind is None  # it lies in the bucket
        return
    kind = "not_found" if name in ("another name", "upper case") else "usage"
    assert SECRET not in reader.refused("get", written.folder, KEYS[name], kind=kind)


@pytest.mark.parametrize("digest", ["../../../../etc/passwd", DIGEST.upper(), DIGEST + "\n", "０" * 64, "", DIGEST[1:]])
def test_in_head(digest: str, reader: Reader, written: Written) -> None:
    edit(written.folder, HEAD_KEY, lambda value: value.update(manifest=digest))
    assert "'manifest'" in reader.refused("head", written.folder, kind="format")
    untouched(reader, written)


def test_names_on_the_disk_that_no_key_has(reader: Reader, written: Written) -> None:
    """Files that somebody put there by hand are not listed, and are in nobody's way."""
    before = reader.reads("list", written.folder)
    names = [
        b"..%2f..%2fetc",
        b"\xff\xfe.json",
        b"0000000099.json\n",
        b"\x1b[2J.json",
        "0000000099.jsоn".encode(),
        b"back\\slash",
        b" ",
        b"...json ",
        b"x" * 250 + b"\xe2\x80\xae",
    ]
    for folder in ("versions", "objects", "anchors", "folds", "tags", "claims", "receivers", "."):
        for name in names:
            path = os.path.join(os.fsencode(written.folder), folder.encode(), name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(os.fsdecode(path)).write_bytes(b"{}")
    assert reader.reads("list", written.folder) == before
    assert reader.reads("head", written.folder) == NEXT - 1
    assert reader.reads("findings", written.folder) == []

"""Somebody who may write into the bucket."""

import json
import os
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from tests.e2e.siege.world import Siege, attack
from tests.support.forge import good_parts
from vllm_delta_sync.client import open_run
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.format.base_document import dump_canonical, timestamp
from vllm_delta_sync.format.documents import anchor_key, merged_delta_key
from vllm_delta_sync.format.manifest import HEAD_KEY, RUN_KEY, TABLE_KEY, Head, Manifest, object_key, version_key
from vllm_delta_sync.run.read_plan import MERGE_WIDTH
from vllm_delta_sync.trust import Keyring

ANY_WRITER = "bucket write"
THIEF = "bucket write, a stolen signing key"


def next_version(siege: Siege, keyring: Keyring, **others: Any) -> dict[str, bytes | None]:
    """Files of a well-formed version after the head, signed with a keyring. ``others``: fields of its manifest."""
    run = open_run(str(siege.run))
    fields, changes = good_parts(run)
    context = DeltaContext(fields["run"], fields["version"], fields["base_version"])
    data = encode(changes, run.table, "plain", "none", context)
    digest = sha256(data).hexdigest()
    ref = {"key": object_key(digest), "bytes": len(data), "sha256": digest, "rank": 0}
    fields |= {"objects": [ref], "payload_bytes": len(data), **others}
    manifest = keyring.signed(Manifest.from_bytes(dump_canonical(fields)))
    return {object_key(digest): data, version_key(fields["version"]): manifest.to_bytes()}


def changed_manifest(siege: Siege, keyring: Keyring, change: Callable[[bytes], bytes]) -> dict[str, bytes | None]:
    """As ``next_version``, and then something is done to the manifest."""
    (key, data), (manifest_key, manifest) = next_version(siege, keyring).items()
    return {key: data, manifest_key: change(manifest or b"")}


def other_head(siege: Siege, keyring: Keyring, **fields: Any) -> dict[str, bytes | None]:
    """HEAD.json with other fields, signed with a keyring."""
    pointer = {**json.loads(siege.path(HEAD_KEY).read_bytes()), "signature": None, **fields}
    return {HEAD_KEY: keyring.signed(Head.from_bytes(dump_canonical(pointer))).to_bytes()}


def refused(siege: Siege, files: dict[str, bytes | None], *kinds: str) -> None:
    """Put files into the bucket: the server must show one of the kinds of error, and keep every weight."""
    with siege.untouched(), siege.replaced(files):
        siege.look()
        assert siege.seen.errors & set(kinds), f"expected {kinds}, status shows {siege.seen.errors}"


@attack("version, not signed", ANY_WRITER, "refused: `signature`")
def unsigned(siege: Siege) -> None:
    """A well-formed next version."""
    refused(siege, next_version(siege, Keyring()), "signature")


@attack("version, stranger's key", ANY_WRITER, "refused: `signature`", quick=True)
def by_a_stranger(siege: Siege) -> None:
    """The same, signed by a stranger."""
    refused(siege, next_version(siege, siege.stranger), "signature")


@attack("manifest edited", ANY_WRITER, "refused: `signature`")
def edited(siege: Siege) -> None:
    """One field of a signed manifest changed."""
    files = changed_manifest(siege, siege.keyring, lambda data: data.replace(b'"step":', b'"step":1', 1))
    refused(siege, files, "signature")


@attack("signature moved", ANY_WRITER, "refused: `signature`")
def signature_moved(siege: Siege) -> None:
    """The signature of one version on another."""
    signature = json.loads(open_run(str(siege.run)).head().to_bytes())["signature"]

    def sign(data: bytes) -> bytes:
        return dump_canonical({**json.loads(data), "signature": signature})

    refused(siege, changed_manifest(siege, Keyring(), sign), "signature")


@attack("version of another run", ANY_WRITER, "refused: `chain`")
def of_another_run(siege: Siege) -> None:
    """Signed by the honest key for another run."""
    refused(siege, next_version(siege, siege.keyring, run="0" * 32), "chain")


@attack("object swapped", ANY_WRITER, "refused: `digest`", quick=True)
def object_swapped(siege: Siege) -> None:
    """Other bytes of the same length, in an honest version that is not served yet."""
    if (open_run(str(siege.run)).head().version + 1) % MERGE_WIDTH == 0:
        # Merged deltas and anchors lead to such a version too, and a server that rebuilds it by them is right.
        siege.fresh()
    assert siege.post("/delta_sync/hold") == 200
    answer = siege.publish()
    key = open_run(str(siege.run)).manifest(answer["version"]).objects[0].key
    data = bytearray(siege.path(key).read_bytes())
    data[-1] ^= 1
    # In this order: once the honest bytes are back, the server may take the version by itself.
    with siege.replaced({key: bytes(data)}), siege.untouched():
        siege.post("/delta_sync/release")
        siege.look()
        assert "digest" in siege.seen.errors, siege.seen.errors
    siege.look()
    siege.wait_for(answer)


@attack("tensors renamed", ANY_WRITER, "refused")
def table_swapped(siege: Siege) -> None:
    """Tensors.json and run.json rewritten to match."""
    table = json.loads(siege.path(TABLE_KEY).read_bytes())
    first, second = table["tensors"][0], table["tensors"][1]
    first["name"], second["name"] = second["name"], first["name"]
    table["tensors"].sort(key=lambda tensor: tensor["name"].encode())
    data = dump_canonical(table)
    info = json.loads(siege.path(RUN_KEY).read_bytes())
    info["tensors"] = sha256(data).hexdigest()
    refused(siege, {TABLE_KEY: data, RUN_KEY: dump_canonical(info)}, "signature", "replay", "chain")


@attack("run replaced", ANY_WRITER, "refused")
def run_replaced(siege: Siege) -> None:
    """Another run at the same URL."""
    info = json.loads(siege.path(RUN_KEY).read_bytes())
    info["run"], info["signature"] = "ab" * 16, None
    refused(siege, {RUN_KEY: dump_canonical(info)}, "signature", "replay", "chain")


@attack("older HEAD", ANY_WRITER, "refused: `replay`", quick=True)
def history_cut(siege: Siege) -> None:
    """Two versions hidden, an older signed HEAD put back."""
    siege.fresh()
    head = open_run(str(siege.run)).head()
    before = open_run(str(siege.run)).manifest(head.version - 2)
    pointer = {"version": before.version, "manifest": before.digest, "epoch": before.epoch, "parent": before.parent}
    pointer |= {"created_at": timestamp(), "expires_at": "2126-01-02T03:04:05Z"}
    hidden = dict.fromkeys(version_key(head.version - lower) for lower in (0, 1))
    refused(siege, {**hidden, **other_head(siege, siege.keyring, **pointer)}, "replay")


@attack("older copy of the bucket", ANY_WRITER, "refused: `replay`")
def copy_put_back(siege: Siege) -> None:
    """All of it put back, the server restarted meanwhile."""
    copy, aside = siege.folder / "copy", siege.folder / "aside"
    shutil.copytree(siege.run, copy)
    siege.fresh()
    newest = siege.fresh()
    siege.run.rename(aside)
    copy.rename(siege.run)
    try:
        siege.restart_server()
        siege.look()
        assert "replay" in siege.seen.errors, siege.seen.errors
        served = siege.server.status()["served"]
        assert served is None or served["version"] == 0, served
    finally:
        siege.run.rename(copy)
        aside.rename(siege.run)
        shutil.rmtree(copy)
    siege.look()
    siege.wait_for(newest)


@attack("fork", THIEF, "refused: `fork`", quick=True)
def forked(siege: Siege) -> None:
    """A second signed version of the number served."""
    head = open_run(str(siege.run)).head()
    document = json.loads(head.to_bytes())
    other = Manifest.from_bytes(dump_canonical({**document, "step": document["step"] + 1, "signature": None}))
    other = siege.keyring.signed(other)
    files = {version_key(head.version): other.to_bytes(), **other_head(siege, siege.keyring, manifest=other.digest)}
    refused(siege, files, "fork")


@attack("freeze", ANY_WRITER, "shown: `expired`")
def frozen(siege: Siege) -> None:
    """HEAD.json is not renewed any more."""
    refused(siege, other_head(siege, siege.keyring, expires_at="2026-01-02T03:04:05Z"), "expired")


@attack("HEAD forged", ANY_WRITER, "shown: `signature`")
def head_forged(siege: Siege) -> None:
    """HEAD.json signed by a stranger."""
    refused(siege, other_head(siege, siege.stranger), "signature")


@attack("wrong weights, signed", THIEF, "refused: `fingerprint`; forgotten once the key is not trusted")
def wrong_weights_signed(siege: Siege) -> None:
    """A trusted key signs a version whose result is not what it declares; then the server stops trusting that key."""
    refused(siege, next_version(siege, siege.second), "fingerprint")
    siege.trusted.pop()
    siege.restart_server()


@attack("path traversal", ANY_WRITER, "refused: `format`")
def key_path(siege: Siege) -> None:
    """An object key outside of the bucket."""
    key = b'"key":"objects/../../../etc/passwd"'
    files = changed_manifest(siege, Keyring(), lambda data: re.sub(rb'"key":"objects/[^"]*"', key, data))
    refused(siege, files, "format")


@attack("duplicate JSON keys", ANY_WRITER, "refused: `format`")
def duplicate_keys(siege: Siege) -> None:
    """A manifest with a member twice."""
    files = changed_manifest(siege, siege.keyring, lambda data: data.replace(b'"step":', b'"step":0,"step":', 1))
    refused(siege, files, "format")


@attack("giant integer", ANY_WRITER, "refused: `format`")
def giant_integer(siege: Siege) -> None:
    """4,000 digits in a manifest."""
    files = changed_manifest(siege, siege.keyring, lambda data: data.replace(b'"step":', b'"step":' + b"9" * 4000, 1))
    refused(siege, files, "format")


@attack("symbolic link", "write to a directory bucket", "refused")
def symlink(siege: Siege) -> None:
    """An object is a link to a file outside of the bucket, which has the right bytes."""
    assert siege.post("/delta_sync/hold") == 200
    answer = siege.publish()
    key = open_run(str(siege.run)).manifest(answer["version"]).objects[0].key
    outside = siege.folder / "outside"
    outside.write_bytes(siege.path(key).read_bytes())
    with siege.replaced({key: None}), siege.untouched():
        siege.path(key).symlink_to(outside)
        siege.post("/delta_sync/release")
        siege.look()
        assert siege.seen.errors & {"store", "not_found", "digest", "format"}, siege.seen.errors
    siege.look()
    siege.wait_for(answer)


@attack("named pipe", "write to a directory bucket", "refused: `store`", quick=True)
def named_pipe(siege: Siege) -> None:
    """A manifest is a named pipe."""
    head = open_run(str(siege.run)).head()
    key = version_key(head.version + 1)
    with siege.untouched():
        os.mkfifo(siege.path(key))
        try:
            siege.look()
            assert siege.seen.errors & {"store", "format"}, siege.seen.errors
        finally:
            siege.path(key).unlink()


@attack("merged deltas and anchors forged", ANY_WRITER, "not used")
def side_documents(siege: Siege) -> None:
    """All of them, by a stranger."""
    run = open_run(str(siege.run))
    keys = [*(merged_delta_key(*pair) for pair in run.merged_deltas()), *map(anchor_key, run.anchors())]
    head = run.head().version
    wanted = merged_delta_key(head - head % 4, head - head % 4 + 4)
    document = json.loads(siege.path(keys[0]).read_bytes()) if keys else {"no": "such"}
    document["signature"] = None
    files: dict[str, bytes | None] = {key: dump_canonical(document) for key in [*keys, wanted]}
    with siege.replaced(files):
        siege.fresh()
        siege.note_error()
        assert not siege.seen.errors, siege.seen.errors

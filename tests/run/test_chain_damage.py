"""The golden run, damaged in every way that a bucket can be: it is refused, and the message says what is wrong."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.run.test_chain import HEAD, edit, path
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.chain.checks import object_limit
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    DigestError,
    FingerprintError,
    FormatError,
    LimitError,
    NotFoundError,
    TensorMismatchError,
    UnsupportedError,
)
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.delta import DeltaContext, encode
from vllm_delta_sync.wire.manifest import Manifest
from vllm_delta_sync.wire.table import TensorTable

__all__ = ["path"]


def recommit(path: Path, first: int) -> None:
    """Fix parents and HEAD from version ``first`` on, as somebody who rewrites history would."""
    for version in range(first, HEAD + 1):
        file = path / keys.version_key(version)
        parent = (path / keys.version_key(version - 1)).read_bytes()
        edit(file, {"parent": sha256(parent).hexdigest()})
    edit(path / "HEAD.json", {"manifest": sha256((path / keys.version_key(HEAD)).read_bytes()).hexdigest()})


def delta_object(path: Path, version: int = 2) -> Path:
    manifest = Manifest.from_bytes((path / keys.version_key(version)).read_bytes())
    return path / manifest.objects[0].key


def swap_objects(path: Path) -> None:
    one, two = delta_object(path, 2), delta_object(path, 3)
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)


DAMAGE: list[tuple[str, Callable[[Path], object], type[DeltaSyncError], str]] = [
    ("object missing", lambda p: delta_object(p).unlink(), NotFoundError, "objects/"),
    ("object cut", lambda p: delta_object(p).write_bytes(delta_object(p).read_bytes()[:-1]), DigestError, "truncated"),
    ("object longer", lambda p: delta_object(p).open("ab").write(b"!"), LimitError, "objects/"),
    ("object empty", lambda p: delta_object(p).write_bytes(b""), DigestError, "has 0 bytes"),
    ("objects swapped", swap_objects, DeltaSyncError, "objects/"),
    ("version missing", lambda p: (p / keys.version_key(3)).unlink(), NotFoundError, "0000000003"),
    ("newest version missing", lambda p: (p / keys.version_key(5)).unlink(), NotFoundError, "0000000005"),
    ("step changed", lambda p: edit(p / keys.version_key(2), {"step": 7}), ChainError, "history was rewritten"),
    ("newest step changed", lambda p: edit(p / keys.version_key(5), {"step": 7}), ChainError, "HEAD.json points at"),
    ("unknown field added", lambda p: edit(p / keys.version_key(0), {"new": 1}), ChainError, "names parent"),
    ("parent changed", lambda p: edit(p / keys.version_key(4), {"parent": "0" * 64}), ChainError, "version 5 names"),
    (
        "version replayed",
        lambda p: shutil.copy(p / keys.version_key(2), p / keys.version_key(3)),
        ChainError,
        "0000000003",
    ),
    (
        "manifest of another run",
        lambda p: edit(p / keys.version_key(2), {"run": "0" * 32}),
        ChainError,
        "belongs to run",
    ),
    ("manifest cut", lambda p: (p / keys.version_key(2)).write_bytes(b'{"base"'), FormatError, "versions/0000000002"),
    ("manifest total", lambda p: edit(p / keys.version_key(2), {"total": 1}), ChainError, "contradicts the table"),
    ("manifest pretty", lambda p: (p / keys.version_key(2)).write_text("{\n}"), FormatError, "not in canonical form"),
    ("manifest of later", lambda p: edit(p / keys.version_key(2), {"format_version": 2}), UnsupportedError, "reads 1"),
    ("manifest requires", lambda p: edit(p / keys.version_key(2), {"requires": ["xyz"]}), UnsupportedError, "xyz"),
    ("head of another run", lambda p: edit(p / "HEAD.json", {"run": "0" * 32}), ChainError, "points into run"),
    ("head digest", lambda p: edit(p / "HEAD.json", {"manifest": "0" * 64}), ChainError, "points at manifest 0000"),
    ("head garbage", lambda p: (p / "HEAD.json").write_bytes(b"\0" * 100), FormatError, "HEAD.json"),
    ("head huge", lambda p: (p / "HEAD.json").write_bytes(b" " * 5000), LimitError, "HEAD.json"),
    (
        "table changed",
        lambda p: (p / "tensors.json").write_bytes(TensorTable([]).to_bytes()),
        DigestError,
        "run.json says",
    ),
    ("run id changed", lambda p: edit(p / "run.json", {"run": "0" * 32}), ChainError, "points into run"),
    ("run total", lambda p: edit(p / "run.json", {"total": 4871}), FormatError, "contradicts tensors.json"),
    ("run requires", lambda p: edit(p / "run.json", {"requires": ["xyz"]}), UnsupportedError, "run.json"),
    ("run garbage", lambda p: (p / "run.json").write_bytes(b"hello"), FormatError, "run.json"),
]


@pytest.mark.parametrize(("case", "damage", "error", "match"), DAMAGE, ids=[case for case, *_ in DAMAGE])
def test_damage_is_refused(
    case: str, damage: Callable[[Path], object], error: type[DeltaSyncError], match: str, path: Path
) -> None:
    damage(path)
    with pytest.raises(error, match=match):
        open_run(str(path)).verify()


REWRITTEN: list[tuple[str, int, dict[str, Any], type[DeltaSyncError], str]] = [
    ("fingerprint", 2, {"fingerprint": "0" * 32}, FingerprintError, "version 2: objects lead to fingerprint"),
    ("changed", 2, {"changed": 1}, FormatError, "version 2: blocks carry 57 elements"),
    ("base version", 3, {"base_version": 1}, FormatError, "breaks do not say what this version builds on"),
    ("object left out", 2, {"objects": [], "payload_bytes": 0, "changed": 0}, FingerprintError, "version 2"),
    ("anchor fingerprint", 0, {"fingerprint": "0" * 32}, FingerprintError, "tensor_fingerprints add up to"),
    ("anchor tensors", 0, {"tensor_fingerprints": {}}, TensorMismatchError, "model.embed.weight"),
    ("anchor objects", 0, {"objects": [], "payload_bytes": 0}, FormatError, "does not hold each of 6 tensors once"),
]


@pytest.mark.parametrize(("case", "version", "change", "error", "match"), REWRITTEN, ids=[row[0] for row in REWRITTEN])
def test_a_rewritten_history_still_has_to_add_up(
    case: str, version: int, change: dict[str, Any], error: type[DeltaSyncError], match: str, path: Path
) -> None:
    edit(path / keys.version_key(version), change)
    recommit(path, max(1, version))
    with pytest.raises(error, match=match):
        open_run(str(path)).verify()


def test_an_object_of_another_version_is_refused_though_its_digest_is_right(path: Path) -> None:
    other = json.loads((path / keys.version_key(2)).read_bytes())
    edit(
        path / keys.version_key(3),
        {name: other[name] for name in ("objects", "payload_bytes", "changed", "codec", "compression")},
    )
    recommit(path, 3)
    with pytest.raises(ChainError, match="field 'version' is '2', the manifest says 3"):
        open_run(str(path)).verify()


def test_declared_objects_larger_than_the_model_make_sense_are_not_fetched(path: Path) -> None:
    run = open_run(str(path))
    limit = object_limit(run.table)
    ref = run.manifest(1).objects[0].model_copy(update={"bytes": limit + 1})
    with pytest.raises(LimitError, match="object_limit"):
        run.fetch(ref)


def test_a_tensor_carried_in_full_twice_is_refused(path: Path) -> None:
    run = open_run(str(path))
    manifest = run.manifest(5)
    context = DeltaContext(manifest.run, 5, 4)
    again = encode(run.changes(manifest), run.table, "packed", "none", context)
    digest = sha256(again).hexdigest()
    (path / keys.object_key(digest)).write_bytes(again)
    second = {"key": keys.object_key(digest), "bytes": len(again), "sha256": digest, "rank": 1}
    first = json.loads((path / keys.version_key(5)).read_bytes())
    edit(
        path / keys.version_key(5),
        {"objects": [*first["objects"], second], "payload_bytes": first["payload_bytes"] + len(again)},
    )
    recommit(path, 5)
    with pytest.raises(FormatError, match=r"'model\.embed\.weight' is carried in full and once more"):
        open_run(str(path)).verify()

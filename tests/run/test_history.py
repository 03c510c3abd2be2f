"""Reading a run: the golden one, its head wherever that points, every damage to it, and runs that refer to a base."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import rfc8785
import torch
from safetensors.torch import save_file

from tests.golden.regenerate import DIRECTORY
from tests.support.written import SMALL, reference_run, save_base
from vllm_delta_sync.client import open_run
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.errors import (
    BaseUnavailableError,
    ChainError,
    DeltaSyncError,
    DigestError,
    FingerprintError,
    FormatError,
    LimitError,
    NotFoundError,
    StoreError,
    TensorMismatchError,
    UnsupportedError,
    UsageError,
)
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.run.checks import object_limit

HEAD = 5
NO_DIGEST = "0" * 64
Damage = Callable[[Path], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return shutil.copytree(DIRECTORY, tmp_path / "run")


def manifest_of(path: Path, version: int) -> Path:
    return path / keys.version_key(version)


def digest_of(path: Path, version: int) -> str:
    file = manifest_of(path, version)
    return sha256(file.read_bytes()).hexdigest() if file.exists() else NO_DIGEST


def edit(file: Path, **change: Any) -> None:
    """Rewrite a JSON document with other fields, in canonical form."""
    file.write_bytes(rfc8785.dumps({**json.loads(file.read_bytes()), **change}))


# The head


@pytest.mark.parametrize("pointed", [None, 0, 1, 4, 5])
def test_head_may_lag_or_be_missing(pointed: int | None, path: Path) -> None:
    if pointed is None:
        (path / "HEAD.json").unlink()
    else:
        point(path, pointed)
    run = open_run(str(path))
    assert run.head().version == HEAD
    assert run.verify().head == HEAD


def point(path: Path, version: int) -> None:
    """Let HEAD.json name a version, rightly where there is one."""
    edit(path / "HEAD.json", version=version, manifest=digest_of(path, version))


def break_manifests(path: Path, *versions: int) -> None:
    for version in versions:
        manifest_of(path, version).write_bytes(b'{"base"')


def each(*damages: Damage) -> Damage:
    return lambda path: [damage(path) for damage in damages]


BEHIND: dict[str, tuple[Damage, int, type[DeltaSyncError] | None, str]] = {
    "all good": (lambda p: None, 5, None, ""),
    "target cut": (lambda p: break_manifests(p, 5), 4, FormatError, "0000000005"),
    "target missing": (lambda p: manifest_of(p, 5).unlink(), 4, NotFoundError, "0000000005"),
    "target rewritten": (lambda p: edit(manifest_of(p, 5), step=7), 4, ChainError, "rewritten"),
    "target of later": (lambda p: edit(manifest_of(p, 5), format_version=3), 4, UnsupportedError, "reads 2"),
    "two bad": (lambda p: break_manifests(p, 4, 5), 3, FormatError, "0000000005"),
    "after a lagging head": (
        each(lambda p: point(p, 2), lambda p: break_manifests(p, 4)),
        3,
        FormatError,
        "0000000004",
    ),
    "other parent": (
        each(lambda p: point(p, 2), lambda p: edit(manifest_of(p, 5), parent=NO_DIGEST)),
        *(4, ChainError, "version 5"),
    ),
    "head garbage": (lambda p: (p / "HEAD.json").write_bytes(b"\0"), 5, FormatError, "HEAD.json"),
    "head of another run": (lambda p: edit(p / "HEAD.json", run="0" * 32), 5, ChainError, "run"),
    "head far ahead": (lambda p: point(p, 9_999_999), 5, NotFoundError, "0009999999"),
    "no head, first bad": (
        each(lambda p: (p / "HEAD.json").unlink(), lambda p: break_manifests(p, 0)),
        *(5, FormatError, "0000000000"),
    ),
}


@pytest.mark.parametrize("case", BEHIND)
def test_good_versions_are_reached_though_a_newer_one_is_bad(case: str, path: Path) -> None:
    damage, version, kind, named = BEHIND[case]
    damage(path)
    (path / "versions" / "notes.txt").write_text("not a manifest")
    run = open_run(str(path))
    manifest, error = run.reachable_head()
    assert manifest.version == version
    if kind is None:
        assert error is None
        assert run.head() == manifest
        return
    assert isinstance(error, kind)
    assert named in error.message
    with pytest.raises(kind, match=named):
        run.head()


def test_no_manifest_is_good_or_there(path: Path, tmp_path: Path) -> None:
    break_manifests(path, *range(HEAD + 1))
    run = open_run(str(path))
    for read in (run.reachable_head, run.head):
        with pytest.raises(FormatError, match="0000000005"):
            read()
    shutil.rmtree(path / "versions")
    (path / "HEAD.json").unlink()
    run = open_run(str(path))
    for read_none in (run.head, run.reachable_head, run.verify, lambda: list(run.log()), run.snapshot):
        with pytest.raises(NotFoundError):
            read_none()
    (path / "tensors.json").unlink()
    for place, kind in ((tmp_path / "nothing", NotFoundError), ("gopher://run", UsageError), (path, NotFoundError)):
        with pytest.raises(kind):
            open_run(str(place))


def test_a_store_that_fails_is_not_taken_for_a_bad_manifest(path: Path) -> None:
    run = open_run(str(path))
    good = run.bucket.get

    def get(key: str, *, max_bytes: int | None = None) -> bytes:
        if key == keys.version_key(5):
            raise StoreError("gone")
        return good(key, max_bytes=max_bytes)

    with mock.patch.object(run.bucket, "get", get):
        for pointed in (5, 3):
            point(path, pointed)
            with pytest.raises(StoreError, match="gone"):
                run.reachable_head()


# Damage


def recommit(path: Path, first: int) -> None:
    """Fix parents and HEAD from version ``first`` on, as somebody who rewrites history would."""
    for version in range(first, HEAD + 1):
        edit(manifest_of(path, version), parent=digest_of(path, version - 1))
    point(path, HEAD)


def delta_object(path: Path, version: int = 2) -> Path:
    return path / Manifest.from_bytes(manifest_of(path, version).read_bytes()).objects[0].key


def swap_objects(path: Path) -> None:
    one, two = delta_object(path, 2), delta_object(path, 3)
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)


DAMAGE: dict[str, tuple[Damage, type[DeltaSyncError], str]] = {
    "object missing": (lambda p: delta_object(p).unlink(), NotFoundError, "objects/"),
    "object cut": (lambda p: delta_object(p).write_bytes(delta_object(p).read_bytes()[:-1]), DigestError, "objects/"),
    "object longer": (lambda p: delta_object(p).open("ab").write(b"!"), LimitError, "objects/"),
    "object empty": (lambda p: delta_object(p).write_bytes(b""), DigestError, "has 0 bytes"),
    "objects swapped": (swap_objects, DeltaSyncError, "objects/"),
    "step changed": (lambda p: edit(manifest_of(p, 2), step=7), ChainError, "rewritten"),
    "newest step changed": (lambda p: edit(manifest_of(p, 5), step=7), ChainError, "version 5 has digest"),
    "unknown field added": (lambda p: edit(manifest_of(p, 0), new=1), ChainError, "version 0 has digest"),
    "parent changed": (lambda p: edit(manifest_of(p, 4), parent=NO_DIGEST), ChainError, "version 4 has digest"),
    "version replayed": (lambda p: shutil.copy(manifest_of(p, 2), manifest_of(p, 3)), ChainError, "0000000003"),
    "manifest of another run": (lambda p: edit(manifest_of(p, 2), run="0" * 32), ChainError, "run"),
    "manifest cut": (lambda p: break_manifests(p, 2), FormatError, "versions/0000000002"),
    "manifest total": (lambda p: edit(manifest_of(p, 2), total=1), ChainError, "table"),
    "manifest pretty": (lambda p: manifest_of(p, 2).write_text("{\n}"), FormatError, "canonical"),
    "manifest of later": (lambda p: edit(manifest_of(p, 2), format_version=3), UnsupportedError, "reads 2"),
    "manifest requires": (lambda p: edit(manifest_of(p, 2), requires=["xyz"]), UnsupportedError, "xyz"),
    "head of another run": (lambda p: edit(p / "HEAD.json", run="0" * 32), ChainError, "run"),
    "head digest": (lambda p: edit(p / "HEAD.json", manifest=NO_DIGEST), ChainError, "0000 is named"),
    "head huge": (lambda p: (p / "HEAD.json").write_bytes(b" " * 5000), LimitError, "HEAD.json"),
    "table changed": (lambda p: (p / "tensors.json").write_bytes(TensorTable([]).to_bytes()), DigestError, "run.json"),
    "run id changed": (lambda p: edit(p / "run.json", run="0" * 32), ChainError, "run"),
    "run total": (lambda p: edit(p / "run.json", total=4871), FormatError, "tensors.json"),
    "run requires": (lambda p: edit(p / "run.json", requires=["xyz"]), UnsupportedError, "run.json"),
    "run garbage": (lambda p: (p / "run.json").write_bytes(b"hello"), FormatError, "run.json"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused(case: str, path: Path) -> None:
    damage, error, named = DAMAGE[case]
    damage(path)
    with pytest.raises(error, match=named):
        open_run(str(path)).verify()


REWRITTEN: dict[str, tuple[int, dict[str, Any], type[DeltaSyncError], str]] = {
    "fingerprint": (2, {"fingerprint": "0" * 32}, FingerprintError, "version 2"),
    "changed": (2, {"changed": 1}, FormatError, "version 2: blocks carry 57 elements"),
    "base version": (3, {"base_version": 1}, FormatError, "breaks"),
    "object left out": (2, {"objects": [], "payload_bytes": 0, "changed": 0}, FingerprintError, "version 2"),
    "anchor fingerprint": (0, {"fingerprint": "0" * 32}, FingerprintError, "tensor_fingerprints"),
    "anchor tensors": (0, {"tensor_fingerprints": {}}, TensorMismatchError, "model.embed.weight"),
    "anchor objects": (0, {"objects": [], "payload_bytes": 0}, FormatError, "does not hold each of 6 tensors once"),
}


@pytest.mark.parametrize("case", REWRITTEN)
def test_a_rewritten_history_still_has_to_add_up(case: str, path: Path) -> None:
    version, change, error, named = REWRITTEN[case]
    edit(manifest_of(path, version), **change)
    recommit(path, max(1, version))
    with pytest.raises(error, match=named):
        open_run(str(path)).verify()


def test_an_object_of_another_version_is_refused_though_its_digest_is_right(path: Path) -> None:
    other = json.loads(manifest_of(path, 2).read_bytes())
    moved = ("objects", "payload_bytes", "changed", "codec", "compression")
    edit(manifest_of(path, 3), **{name: other[name] for name in moved})
    recommit(path, 3)
    with pytest.raises(ChainError, match="field 'version' is '2'"):
        open_run(str(path)).verify()


def test_objects_larger_than_the_model_makes_sense_are_not_fetched(path: Path) -> None:
    run = open_run(str(path))
    ref = run.manifest(1).objects[0].model_copy(update={"bytes": object_limit(run.table) + 1})
    with pytest.raises(LimitError, match="object_limit"):
        run.fetch(ref)


def test_a_tensor_carried_in_full_twice_is_refused(path: Path) -> None:
    run = open_run(str(path))
    manifest = run.manifest(5)
    again = encode(run.changes(manifest), run.table, "plain", "none", DeltaContext(manifest.run, 5, 4))
    digest = sha256(again).hexdigest()
    (path / keys.object_key(digest)).write_bytes(again)
    second = {"key": keys.object_key(digest), "bytes": len(again), "sha256": digest, "rank": 1}
    first = json.loads(manifest_of(path, 5).read_bytes())
    payload = first["payload_bytes"] + len(again)
    edit(manifest_of(path, 5), objects=[*first["objects"], second], payload_bytes=payload)
    recommit(path, 5)
    with pytest.raises(FormatError, match=r"'model\.embed\.weight' is carried in full"):
        open_run(str(path)).verify()


# Runs that refer to a base, and anchors in the middle


def test_without_the_base_everything_else_is_checked(tmp_path: Path) -> None:
    run, bits = reference_run(tmp_path / "run", str(tmp_path / "base"))
    report = run.verify()
    assert (report.versions, report.head, report.replayed, report.unreadable) == (3, 2, False, [])
    assert [str(tmp_path / "base") in note for note in report.notes] == [True]
    with pytest.raises(BaseUnavailableError, match="base="):
        run.snapshot()
    last = manifest_of(tmp_path / "run", 2)
    good = last.read_bytes()
    edit(last, fingerprint="0" * 32)
    point(tmp_path / "run", 2)
    with pytest.raises(FingerprintError, match="version 2"):
        run.verify()
    last.write_bytes(good)
    point(tmp_path / "run", 2)
    save_base(tmp_path / "base", bits[0])
    assert run.verify().replayed


def test_another_base_is_named(tmp_path: Path) -> None:
    """By its first tensor that is another; also one that was overwritten since."""
    run, bits = reference_run(tmp_path / "run", str(tmp_path / "base"))
    other = [array.copy() for array in bits[0]]
    other[SMALL.index("w")][7] ^= np.uint16(1)
    save_base(tmp_path / "other", other)
    for read in (run.verify, lambda base: run.snapshot(base=base)):
        with pytest.raises(BaseUnavailableError, match=r"version 0: tensor 'w' .*/other'.* pass base="):
            read(tmp_path / "other")
    (tmp_path / "incomplete").mkdir()
    save_file({"w": torch.zeros(40, 3, dtype=torch.bfloat16)}, tmp_path / "incomplete" / "model.safetensors")
    with pytest.raises(BaseUnavailableError, match="'b'"):
        run.verify(base=tmp_path / "incomplete")
    save_base(tmp_path / "base", bits[1])
    save_base(tmp_path / "original", bits[0])
    with pytest.raises(BaseUnavailableError, match=r"/base'.* pass base="):
        run.verify()
    # No version is damaged.
    report = run.verify(findings=True)
    assert ([finding.error.kind for finding in report.findings], report.unreadable) == (["base"], [])
    save_file({"w": torch.zeros(7), "b": torch.zeros(4)}, tmp_path / "base" / "model.safetensors")
    with pytest.raises(BaseUnavailableError, match=r"'w' has 7 elements .*/base'.* pass base="):
        run.verify()
    assert run.verify(base=tmp_path / "original").replayed


def test_a_base_that_is_asked_for_has_to_be_there(tmp_path: Path, path: Path) -> None:
    run, bits = reference_run(tmp_path / "reference", str(tmp_path / "base"))
    save_base(tmp_path / "base", bits[0])
    (tmp_path / "empty").mkdir()
    anchored = open_run(str(path))
    for typo in (tmp_path / "typo", str(tmp_path / "base" / "model.safetensors")):
        for read in (run.verify, anchored.verify, lambda base: run.snapshot(base=base)):
            with pytest.raises(NotFoundError, match="is not a directory here"):
                read(typo)
    with pytest.raises(BaseUnavailableError, match="has neither"):
        run.verify(tmp_path / "empty")

"""Reading a run: the golden one, its head wherever that points, and runs that refer to a base."""

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

import vllm_delta_sync
from tests.golden.regenerate import DIRECTORY, table, versions
from tests.support.samples import RunWriter, nudge, random_bits
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import Run, open_run
from vllm_delta_sync.chain.verify import VerifyReport
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    FingerprintError,
    FormatError,
    LimitError,
    NotFoundError,
    StoreError,
    TensorMismatchError,
    UnsupportedError,
    UsageError,
)
from vllm_delta_sync.torch_bits import bits_of, tensor_from_bits
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.anchor import write_anchor
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

HEAD = 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    copy = tmp_path / "run"
    shutil.copytree(DIRECTORY, copy)
    return copy


def edit(file: Path, change: dict[str, Any]) -> None:
    """Rewrite a JSON document with other fields, in canonical form."""
    file.write_bytes(rfc8785.dumps({**json.loads(file.read_bytes()), **change}))


def test_a_good_run(path: Path) -> None:
    run = vllm_delta_sync.open_run(str(path))
    assert [manifest.version for manifest in run.log()] == list(range(HEAD + 1))
    assert run.head().version == HEAD
    assert run.head().step == 50
    seen: list[tuple[int, int]] = []
    report = run.verify(progress=lambda so_far: seen.append((so_far.versions, so_far.head)))
    size = sum(file.stat().st_size for file in (path / "objects").iterdir())
    assert report == VerifyReport(versions=6, head=5, objects=5, bytes=size, replayed=True, pointed=5)
    assert seen == [(version + 1, version) for version in range(6)]
    for version, bits in enumerate(versions()):
        found = dict(run.tensors(version))
        for tensor, spec in enumerate(run.table):
            assert tuple(found[spec.name].shape) == spec.shape
            assert np.array_equal(bits_of(found[spec.name]), bits[tensor])
    assert dict(run.tensors())["model.embed.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("pointed", [None, 0, 1, 4, 5])
def test_head_may_lag_or_be_missing(pointed: int | None, path: Path) -> None:
    if pointed is None:
        (path / "HEAD.json").unlink()
    else:
        digest = sha256((path / keys.version_key(pointed)).read_bytes()).hexdigest()
        edit(path / "HEAD.json", {"version": pointed, "manifest": digest})
    run = open_run(str(path))
    assert run.head().version == HEAD
    assert run.verify().head == HEAD


def break_manifests(path: Path, *versions: int) -> None:
    for version in versions:
        (path / keys.version_key(version)).write_bytes(b'{"base"')


def point(path: Path, version: int) -> None:
    """Let HEAD.json name a version, rightly where there is one."""
    file = path / keys.version_key(version)
    digest = sha256(file.read_bytes()).hexdigest() if file.exists() else "0" * 64
    edit(path / "HEAD.json", {"version": version, "manifest": digest})


def break_after_a_lagging_head(path: Path) -> None:
    point(path, 2)
    break_manifests(path, 4)


def other_parent_after_a_lagging_head(path: Path) -> None:
    point(path, 2)
    edit(path / keys.version_key(5), {"parent": "0" * 64})


def break_first_without_a_head(path: Path) -> None:
    (path / "HEAD.json").unlink()
    break_manifests(path, 0)


BEHIND: list[tuple[str, Callable[[Path], object], int, type[DeltaSyncError] | None, str]] = [
    ("all good", lambda p: None, 5, None, ""),
    ("target cut", lambda p: break_manifests(p, 5), 4, FormatError, "0000000005"),
    ("target missing", lambda p: (p / keys.version_key(5)).unlink(), 4, NotFoundError, "0000000005"),
    ("target rewritten", lambda p: edit(p / keys.version_key(5), {"step": 7}), 4, ChainError, "was rewritten"),
    ("target of later", lambda p: edit(p / keys.version_key(5), {"format_version": 2}), 4, UnsupportedError, "reads 1"),
    ("two bad", lambda p: break_manifests(p, 4, 5), 3, FormatError, "0000000005"),
    ("after a lagging head", break_after_a_lagging_head, 3, FormatError, "0000000004"),
    ("other parent", other_parent_after_a_lagging_head, 4, ChainError, "version 5 names parent"),
    ("head garbage", lambda p: (p / "HEAD.json").write_bytes(b"\0"), 5, FormatError, "HEAD.json"),
    ("head of another run", lambda p: edit(p / "HEAD.json", {"run": "0" * 32}), 5, ChainError, "points into run"),
    ("head far ahead", lambda p: point(p, 9_999_999), 5, NotFoundError, "0009999999"),
    ("no head, first bad", break_first_without_a_head, 5, FormatError, "0000000000"),
]


@pytest.mark.parametrize(("case", "damage", "version", "kind", "match"), BEHIND, ids=[case for case, *_ in BEHIND])
def test_good_versions_are_reached_though_a_newer_one_is_bad(
    case: str,
    damage: Callable[[Path], object],
    version: int,
    kind: type[DeltaSyncError] | None,
    match: str,
    path: Path,
) -> None:
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
    assert match in error.message
    with pytest.raises(kind, match=match):
        run.head()


def test_no_manifest_is_good(path: Path) -> None:
    break_manifests(path, *range(HEAD + 1))
    run = open_run(str(path))
    for read in (run.reachable_head, run.head):
        with pytest.raises(FormatError, match="0000000005"):
            read()


def test_a_store_that_fails_is_not_taken_for_a_bad_manifest(path: Path) -> None:
    run = open_run(str(path))
    good = run.bucket.get

    def get(key: str, *, max_bytes: int | None = None) -> bytes:
        if key == keys.version_key(5):
            raise StoreError("gone")
        return good(key, max_bytes=max_bytes)

    with mock.patch.object(run.bucket, "get", get):
        with pytest.raises(StoreError, match="gone"):
            run.reachable_head()
        point(path, 3)
        with pytest.raises(StoreError, match="gone"):
            run.reachable_head()


def test_a_run_without_a_version(path: Path) -> None:
    shutil.rmtree(path / "versions")
    (path / "HEAD.json").unlink()
    run = open_run(str(path))
    for read in (run.head, run.reachable_head, run.verify, lambda: list(run.log()), run.snapshot):
        with pytest.raises(NotFoundError):
            read()


def test_no_run_at_all(tmp_path: Path, path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no run at 'file://.*': there is no such bucket or folder; start a"):
        open_run(str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="gopher"):
        open_run("gopher://run")
    (path / "tensors.json").unlink()
    with pytest.raises(NotFoundError):
        open_run(str(path))


@pytest.mark.parametrize("version", [6, 99, -1])
def test_versions_that_are_not_there(version: int, path: Path) -> None:
    run = open_run(str(path))
    with pytest.raises(NotFoundError, match=f"version {version} is not published; the newest is 5"):
        run.snapshot(version)
    with pytest.raises((NotFoundError, LimitError)):
        run.manifest(version)


# Runs that refer to a base

SMALL = TensorTable([TensorSpec("w", "BF16", (40, 3)), TensorSpec("b", "F32", (4,))])


def reference_run(directory: Path, location: str) -> tuple[Run, list[list[np.ndarray]]]:
    """A run whose version 0 lies in a checkpoint directory, with two deltas."""
    random = np.random.default_rng(4)
    bits = [random_bits(SMALL, random)]
    bits += [nudge(bits[0], random, 0.2)]
    bits += [nudge(bits[1], random, 0.2)]
    writer = RunWriter(open_bucket(str(directory)), SMALL)
    writer.reference(bits[0], location)
    writer.delta(bits[1])
    writer.delta(bits[2], "raw", "none")
    return open_run(str(directory)), bits


def save_base(directory: Path, bits: list[np.ndarray]) -> None:
    directory.mkdir()
    tensors = {spec.name: tensor_from_bits(bits[tensor], spec) for tensor, spec in enumerate(SMALL)}
    save_file(tensors, directory / "model.safetensors")


def test_a_base_at_the_recorded_path(tmp_path: Path) -> None:
    run, bits = reference_run(tmp_path / "run", str(tmp_path / "base"))
    save_base(tmp_path / "base", bits[0])
    assert run.verify().replayed
    for version in range(3):
        assert all(np.array_equal(*pair) for pair in zip(run.snapshot(version).bits, bits[version], strict=True))


def test_a_base_at_another_path(tmp_path: Path) -> None:
    run, bits = reference_run(tmp_path / "run", "/nowhere/base")
    save_base(tmp_path / "moved", bits[0])
    assert run.verify(base=tmp_path / "moved").replayed
    found = dict(run.tensors(base=str(tmp_path / "moved")))
    assert np.array_equal(bits_of(found["w"]), bits[2][SMALL.index("w")])


def test_without_the_base_everything_else_is_checked(tmp_path: Path) -> None:
    run, _ = reference_run(tmp_path / "run", "/nowhere/base")
    report = run.verify()
    assert (report.versions, report.head, report.replayed) == (3, 2, False)
    assert ["weights were not rebuilt" in note and "/nowhere/base" in note for note in report.notes] == [True]
    with pytest.raises(NotFoundError, match="pass base= with its path"):
        run.snapshot()
    edit_last = tmp_path / "run" / keys.version_key(2)
    edit(edit_last, {"fingerprint": "0" * 32})
    edit(tmp_path / "run" / "HEAD.json", {"manifest": sha256(edit_last.read_bytes()).hexdigest()})
    with pytest.raises(FingerprintError, match="version 2: objects lead to"):
        run.verify()


def test_another_base_is_named_by_its_first_tensor(tmp_path: Path) -> None:
    run, bits = reference_run(tmp_path / "run", "/nowhere/base")
    other = [array.copy() for array in bits[0]]
    other[SMALL.index("w")][7] ^= np.uint16(1)
    save_base(tmp_path / "other", other)
    told = r"version 0: tensor 'w' has fingerprint .* in '.*/other' is not the one .* pass --base"
    for read in (run.verify, lambda base: run.snapshot(base=base)):
        with pytest.raises(FingerprintError, match=told):
            read(tmp_path / "other")
    (tmp_path / "incomplete").mkdir()
    save_file({"w": torch.zeros(40, 3, dtype=torch.bfloat16)}, tmp_path / "incomplete" / "model.safetensors")
    with pytest.raises(TensorMismatchError, match="has no tensor 'b'"):
        run.verify(base=tmp_path / "incomplete")


def test_a_base_that_was_overwritten_is_named(tmp_path: Path) -> None:
    run, bits = reference_run(tmp_path / "run", str(tmp_path / "base"))
    save_base(tmp_path / "base", bits[1])
    save_base(tmp_path / "original", bits[0])
    with pytest.raises(FingerprintError, match=r"in '.*/base' is not .*, or was overwritten since; pass --base"):
        run.verify()
    (tmp_path / "base" / "model.safetensors").unlink()
    save_file({"w": torch.zeros(7), "b": torch.zeros(4)}, tmp_path / "base" / "model.safetensors")
    with pytest.raises(TensorMismatchError, match=r"'w' has 7 elements .* in '.*/base' is not .* pass --base"):
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
    with pytest.raises(NotFoundError, match="holds neither"):
        run.verify(tmp_path / "empty")


def test_anchors_in_the_middle_of_a_chain(tmp_path: Path) -> None:
    random = np.random.default_rng(6)
    bits = [random_bits(SMALL, random)]
    writer = RunWriter(open_bucket(str(tmp_path / "run")), SMALL)
    scratch = tmp_path / "anchor"
    for version in range(4):
        if version:
            bits.append(nudge(bits[-1], random, 0.3))
        if version % 2:
            writer.delta(bits[-1])
            continue
        write_anchor(scratch, SMALL, [(spec.name, bits[-1][tensor]) for tensor, spec in enumerate(SMALL)])
        writer.anchor(bits[-1], scratch.read_bytes())
    run = open_run(str(tmp_path / "run"))
    assert [manifest.kind for manifest in run.log()] == ["anchor", "delta", "anchor", "delta"]
    assert run.verify().replayed
    for version in range(4):
        assert all(np.array_equal(*pair) for pair in zip(run.snapshot(version).bits, bits[version], strict=True))


def test_the_golden_table_is_what_it_was() -> None:
    assert open_run(str(DIRECTORY)).table.specs == table().specs

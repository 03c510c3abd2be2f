"""Folded ranges and anchors made from the bucket: bit for bit what the versions do, whoever else writes or removes."""

import tempfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.support.samples import changes_between, nudge
from tests.support.written import TABLE, Written
from vllm_delta_sync.chain import read as chain_read
from vllm_delta_sync.chain.checks import decode_objects
from vllm_delta_sync.chain.lazy import open_step
from vllm_delta_sync.chain.plan import GapError, path
from vllm_delta_sync.chain.read import restore
from vllm_delta_sync.errors import (
    ChainError,
    FingerprintError,
    FormatError,
    NotFoundError,
    StoreError,
    UnsupportedError,
    UsageError,
)
from vllm_delta_sync.upkeep import compaction_weights
from vllm_delta_sync.upkeep.branching import branch
from vllm_delta_sync.upkeep.compaction import compact, make_anchor, make_fold, upkeep
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire import spool as spooling
from vllm_delta_sync.wire.delta import DeltaContext, encode
from vllm_delta_sync.wire.manifest import ObjectRef, object_key, version_key

# Folded ranges


def test_a_fold_does_what_its_versions_do(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 20)
    run = written.run
    for first, last in [(0, 4), (4, 8), (8, 12), (12, 16), (0, 16), (16, 17), (3, 14)]:
        folded = make_fold(run, first, last)
        assert folded.digest == run.folded(first, last).digest
        written.check(first, last)
    assert [(step.start, step.end) for step in path(run, 0, 20)] == [(0, 16), (16, 17), (17, 18), (18, 19), (19, 20)]


def test_a_fold_of_folds_reads_folds(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 16)
    for first in range(0, 16, 4):
        make_fold(written.run, first, first + 4)
    for manifest in written.writer.manifests[1:]:
        for ref in manifest.objects:
            written.lose(ref.key)
    make_fold(written.run, 0, 16)
    written.check(0, 16)
    with pytest.raises(NotFoundError, match="no object"):
        make_fold(written.run, 1, 3)


def test_tensors_in_full_and_changes_after_them(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 1)
    written.publish(full=[0, 2])
    written.publish(full=[3])
    written.publish()
    folded = make_fold(written.run, 0, 4)
    assert not folded.reversible
    written.check(0, 4)
    assert {full.id for full in written.run.changes(folded).full} == {0, 2, 3}


def test_nothing_changed(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 0)
    for _ in range(4):
        written.publish(share=0.0)
    assert make_fold(written.run, 0, 4).changed == 0
    written.check(0, 4)


def test_several_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "SPOOL_ELEMENTS", 1)
    written = Written(tmp_path / "run", 4)
    folded = make_fold(written.run, 0, 4, object_bytes=1)
    assert len(folded.objects) >= 3
    written.check(0, 4)
    state = restore(written.run, written.run.manifest(4)).state
    assert state.fingerprint == written.writer.manifests[4].model_fingerprint


def test_several_ranks(tmp_path: Path) -> None:
    """Objects of several ranks hold different elements of one tensor."""
    written = Written(tmp_path / "run", 0)
    writer = written.writer
    for _ in range(4):
        old = writer.bits[-1]
        new = nudge(old, written.random, 0.2)
        half = [np.concatenate([n[: n.size // 2], o[o.size // 2 :]]) for n, o in zip(new, old, strict=True)]
        version = len(writer.manifests)
        context = DeltaContext(writer.run, version, version - 1)
        parts = [changes_between(TABLE, old, half), changes_between(TABLE, half, new)]
        data = [encode(part, TABLE, "packed", "zstd", context) for part in parts]
        writer._commit(
            new,
            data,
            "delta",
            sum(part.changed for part in parts),
            requires=["packed", "zstd"],
            base_version=version - 1,
            codec="packed",
            compression="zstd",
            reversible=True,
        )
    folded = make_fold(written.run, 0, 4)
    assert len(folded.objects) == 1
    written.check(0, 4)


def test_raw_versions_are_not_folded(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 3)
    written.publish(codec="raw")
    with pytest.raises(UnsupportedError, match="version 4 has codec 'raw'"):
        make_fold(written.run, 0, 4)
    assert upkeep(written.run, written.writer.manifests[4]) == []
    assert not written.run.folds()


def test_ranges_that_make_no_sense(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 5)
    written.publish(base=2)
    for first, last in [(3, 3), (4, 3), (-1, 3)]:
        with pytest.raises(UsageError):
            make_fold(written.run, first, last)
    with pytest.raises(ChainError, match="left behind by a rebase"):
        make_fold(written.run, 4, 6)
    make_fold(written.run, 1, 6)
    written.check(1, 6)


def test_a_damaged_fold_is_passed_over(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 16)
    for first in range(0, 16, 4):
        make_fold(written.run, first, first + 4)
    bad = written.run.folded(4, 8).objects[0].key
    (written.folder / bad).write_bytes(b"x" * written.run.folded(4, 8).objects[0].bytes)
    make_fold(written.run, 0, 16)
    written.check(0, 16)
    # And is made anew when somebody says so.
    assert make_fold(written.run, 4, 8).objects[0].key == bad
    make_fold(written.run, 4, 8, replace=True)
    written.check(4, 8)


def test_what_the_versions_declare_must_add_up(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 4)
    third = written.writer.manifests[3]
    wrong = third.model_copy(update={"fingerprint": "0" * 32})
    fourth = written.writer.manifests[4].model_copy(update={"parent": wrong.digest})
    written.bucket.put(version_key(3), wrong.to_bytes())
    written.bucket.put(version_key(4), fourth.to_bytes())
    with pytest.raises(FingerprintError, match="version"):
        make_fold(written.run, 0, 4)
    assert not written.run.folds()


def test_another_maker_was_first(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 4)
    run = written.run
    theirs: list[side.FoldedRange] = []

    class Slow(type(run.bucket)):  # type: ignore[misc]
        def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
            if key == side.fold_key(0, 4) and not theirs:
                theirs.append(make_fold(written.run, 0, 4, object_bytes=1))
            super().put(key, data, if_absent=if_absent)

    run.bucket = Slow(written.folder)
    assert make_fold(run, 0, 4).digest == theirs[0].digest == written.run.folded(0, 4).digest
    written.check(0, 4)


@pytest.mark.parametrize("make", ["fold", "anchor"])
def test_retention_that_removed_an_object_meanwhile(tmp_path: Path, make: str) -> None:
    """An object that no document names yet looks like nobody's."""
    written = Written(tmp_path / "run", 4)
    run = written.run
    removed: list[str] = []

    class Swept(type(run.bucket)):  # type: ignore[misc]
        def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
            if key.startswith((side.FOLDS_PREFIX, side.ANCHORS_PREFIX)):
                document = (side.FoldedRange if make == "fold" else side.Anchor).from_bytes(bytes(data))  # type: ignore[arg-type]
                removed.append(document.objects[0].key)
                self.delete(removed[0])
            super().put(key, data, if_absent=if_absent)

    run.bucket = Swept(written.folder)
    if make == "fold":
        make_fold(run, 0, 4)
        written.check(0, 4)
    else:
        make_anchor(run, 4)
        assert restore(written.run, written.run.manifest(4)).plan.beside
    assert len(removed) == 1


def test_an_empty_object(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 1)
    step = path(written.run, 0, 1)[0]
    nothing = sha256(b"").hexdigest()
    written.bucket.put(object_key(nothing), b"")
    empty = ObjectRef(key=object_key(nothing), bytes=0, sha256=nothing)
    liar = type(step)(step.run, step.document.model_copy(update={"objects": [empty]}))
    with pytest.raises(FormatError, match="is empty"):
        open_step(liar, tmp_path)


# Anchors


def test_an_anchor_is_a_checkpoint(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 6)
    anchor = make_anchor(written.run, 5, shard_bytes=20_000)
    assert len(anchor.objects) == 3
    found: dict[str, bytes] = {}
    for ref in anchor.objects:
        with safe_open(written.folder / ref.key, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found[name] = file.get_tensor(name).view(torch.uint8).numpy().tobytes()
    assert found == {spec.name: bits.tobytes() for spec, bits in zip(TABLE, written.writer.bits[5], strict=True)}
    assert make_anchor(written.run, 5).digest == anchor.digest
    for version in (5, 6):
        restored = restore(written.run, written.run.manifest(version))
        assert (restored.plan.beside, restored.plan.root.version) == (True, 5)
        assert restored.state.fingerprint == written.writer.manifests[version].model_fingerprint


def test_an_anchor_of_raw_versions_and_of_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction_weights, "IN_MEMORY_BYTES", 0)
    written = Written(tmp_path / "run", 2)
    written.publish(codec="raw")
    anchor = make_anchor(written.run, 3)
    assert anchor.payload_bytes >= TABLE.full_bytes
    assert restore(written.run, written.run.manifest(3)).plan.beside


def test_a_damaged_anchor_is_made_anew(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 4)
    good = make_anchor(written.run, 4)
    written.bucket.put(side.anchor_key(4), good.to_bytes()[:-3])
    assert make_anchor(written.run, 4).objects == good.objects
    other = good.model_copy(update={"manifest": "0" * 64})
    written.bucket.put(side.anchor_key(4), other.to_bytes())
    assert make_anchor(written.run, 4).manifest == written.writer.manifests[4].digest


def test_a_way_that_is_lost(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 4)
    written.lose(version_key(2))
    with pytest.raises(GapError):
        make_fold(written.run, 0, 4)


def test_objects_and_document_must_agree(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 4)
    run = written.run
    step = path(run, 0, 1)[0]
    liar = type(step)(run, step.document.model_copy(update={"changed": step.changed + 1}))
    with pytest.raises(FormatError, match="it says"):
        open_step(liar, tmp_path)
    assert decode_objects(step.document, run.table, [run.fetch(ref) for ref in step.objects]).changed == step.changed


@pytest.mark.parametrize("branched", [False, True])
def test_everything_temporary_goes_where_it_is_told_to(
    branched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Written(tmp_path / "run", 5).run
    expected = restore(run, run.head()).state.fingerprint
    if branched:
        run = branch(run, None, str(tmp_path / "branch"))
    for module, name in ((compaction_weights, "IN_MEMORY_BYTES"), (chain_read, "IN_MEMORY_BYTES")):
        monkeypatch.setattr(module, name, 0)
    monkeypatch.setattr(chain_read, "DECODED_ELEMENTS", 0)
    monkeypatch.setattr(chain_read, "MAPPED_BYTES", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    version = run.head().version
    with pytest.raises(StoreError, match="set TMPDIR"):
        make_anchor(run, version)
    with pytest.raises(StoreError, match="name another folder"):
        make_anchor(run, version, scratch=tmp_path / "nowhere")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert make_anchor(run, version, scratch=scratch).fingerprint == expected.hex()
    assert list(scratch.iterdir()) == []


def test_base_that_is_not_there_is_refused_be_it_needed_or_not(tmp_path: Path) -> None:
    run = Written(tmp_path / "run", 1).run
    with pytest.raises(NotFoundError, match="is not a directory here"):
        compact(run, tmp_path / "nowhere")

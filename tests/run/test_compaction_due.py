"""Which folded ranges and anchors are due, and when they are made."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.samples import RunWriter
from tests.support.written import TABLE, Written
from vllm_delta_sync.bucket import ObjectInfo, open_bucket
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.chain.plan import path
from vllm_delta_sync.chain.read import restore
from vllm_delta_sync.errors import NotFoundError, StoreError
from vllm_delta_sync.upkeep.compaction import compact, due_folds, upkeep
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

CREATED = "2026-01-02T03:04:05Z"


def put_tag(written: Written, name: str, version: int, milestone: bool) -> None:
    tag = side.Tag(
        run=written.writer.run,
        name=name,
        version=version,
        manifest=written.writer.manifests[version].digest,
        milestone=milestone,
        created_at=CREATED,
    )
    written.bucket.put(side.tag_key(name), tag.to_bytes())


def test_due_folds_are_an_aligned_skip_list() -> None:
    assert list(due_folds(0, 20, [])) == [(0, 4), (4, 8), (8, 12), (12, 16), (0, 16), (16, 20)]
    assert list(due_folds(0, 64, []))[-3:] == [(60, 64), (48, 64), (0, 64)]
    assert list(due_folds(4, 16, [])) == [(4, 8), (8, 12), (12, 16)]
    assert list(due_folds(0, 16, [6])) == [(0, 4), (8, 12), (12, 16)]
    assert list(due_folds(0, 16, [4])) == [(4, 8), (8, 12), (12, 16)]
    assert list(due_folds(0, 3, [])) == []


def test_upkeep_after_every_version(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 0)
    made = []
    run = written.run
    for _ in range(20):
        made += upkeep(run, written.publish(share=0.001))
    assert written.run.folds() == sorted(due_folds(0, 20, []))
    assert made == [side.fold_key(*pair) for pair in due_folds(0, 20, [])]
    for first, last in written.run.folds():
        written.check(first, last)


def test_upkeep_that_hears_of_some_versions_only(tmp_path: Path) -> None:
    """The publisher's thread skips those that come while it is busy."""
    written = Written(tmp_path / "run", 3)
    run = written.run
    for _ in range(5):
        for _ in range(3):
            manifest = written.publish(share=0.001)
        upkeep(run, manifest)
    assert manifest.version == 18
    assert written.run.folds() == sorted(due_folds(0, 18, []))


def test_upkeep_looks_into_the_bucket_now_and_then(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 3)
    run = written.run
    calls: list[str] = []

    class Counted(type(run.bucket)):  # type: ignore[misc]
        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            calls.append(prefix)
            return super().list(prefix)  # type: ignore[no-any-return]

        def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
            calls.append(key)
            return super().get(key, max_bytes=max_bytes)  # type: ignore[no-any-return]

    run.bucket = Counted(written.folder)
    upkeep(run, written.writer.manifests[3])
    assert calls == [side.TAGS_PREFIX]
    upkeep(run, written.publish(share=0.001))
    assert calls.count(side.FOLDS_PREFIX + "000000000") == calls.count(side.ANCHORS_PREFIX) == 1
    upkeep(run, written.publish(share=0.001))
    calls.clear()
    for _ in range(2):
        upkeep(run, written.publish(share=0.001))
    assert calls == [side.TAGS_PREFIX] * 2


def test_upkeep_makes_what_was_missed_a_few_at_a_time(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 64)
    first = upkeep(written.run, written.writer.manifests[64])
    assert len(first) == 8
    assert first[:3] == [side.fold_key(60, 64), side.fold_key(48, 64), side.fold_key(0, 64)]
    run = written.run
    for left in (8, 5, 0):
        assert len(upkeep(run, written.writer.manifests[64])) == left
    assert written.run.folds() == sorted(due_folds(0, 64, []))


def test_upkeep_leaves_what_is_gone(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 16)
    gone = side.Retention(run=written.writer.run, gone=[[1, 6]], created_at=CREATED)
    written.bucket.put(side.RETENTION_KEY, gone.to_bytes())
    for version in range(1, 7):
        for ref in written.writer.manifests[version].objects:
            written.lose(ref.key)
    assert upkeep(written.run, written.writer.manifests[16]) == [side.fold_key(12, 16), side.fold_key(8, 12)]
    assert compact(written.run).folds == []


def test_upkeep_across_a_break(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 5)
    written.publish(base=2)
    for _ in range(10):
        written.publish()
    pairs = [(12, 16), (8, 12), (0, 4)]
    assert upkeep(written.run, written.writer.manifests[16]) == [side.fold_key(*pair) for pair in pairs]
    for pair in pairs:
        written.check(*pair)


def test_upkeep_without_folds(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 4)
    assert upkeep(written.run, written.writer.manifests[4], fold=False) == []


def test_every_kth_version_gets_an_anchor(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 0)
    run = written.run
    for _ in range(7):
        upkeep(run, written.publish(share=0.001), anchor_every=3)
    assert written.run.anchors() == [3, 6]
    # Nobody calls when 9 is published.
    for _ in range(3):
        written.publish(share=0.001)
    upkeep(run, written.publish(share=0.001), anchor_every=3)
    upkeep(run, written.publish(share=0.001), anchor_every=3)
    assert written.run.anchors() == [3, 6, 9, 12]


def test_an_anchor_when_replaying_costs_more(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 0)
    made: list[str] = []
    run = written.run
    for _ in range(16):
        made += upkeep(run, written.publish(share=0.5), fold=False)
    sizes = [manifest.payload_bytes for manifest in written.writer.manifests]
    assert sum(sizes[1:5]) < TABLE.full_bytes < sum(sizes[1:9])
    assert made == [side.anchor_key(8), side.anchor_key(16)]


def test_cheap_versions_get_no_anchor(tmp_path: Path) -> None:
    table = TensorTable([TensorSpec("w", "BF16", (100_000,))])
    written = Written(tmp_path / "run", 0, table=table)
    for _ in range(16):
        upkeep(written.run, written.publish(share=0.001))
    assert not written.run.anchors()


def test_a_milestone_gets_an_anchor(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 0)
    run = written.run
    for _ in range(3):
        upkeep(run, written.publish(share=0.001))
    put_tag(written, "old", 1, milestone=False)
    written.bucket.put(side.tag_key("broken"), b"{")
    assert upkeep(run, written.publish(share=0.001)) == [side.fold_key(0, 4)]
    put_tag(written, "best", 2, milestone=True)
    assert upkeep(run, written.publish(share=0.001)) == [side.anchor_key(2)]
    assert upkeep(run, written.publish(share=0.001)) == []
    put_tag(written, "best", 3, milestone=True)
    assert upkeep(run, written.writer.manifests[-1]) == [side.anchor_key(3)]
    assert written.run.anchors() == [2, 3]


def test_upkeep_of_a_damaged_chain_says_so_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = Written(tmp_path / "run", 8)
    written.lose(written.writer.manifests[6].objects[0].key)
    assert upkeep(written.run, written.writer.manifests[8]) == [side.fold_key(0, 4)]
    assert "versions 4 to 8 are not folded" in caplog.text


def test_what_cannot_be_made_is_not_tried_after_each_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = Written(tmp_path / "run", 3)
    written.lose(written.writer.manifests[2].objects[0].key)
    run = written.run
    for _ in range(4):
        assert upkeep(run, written.publish(share=0.001), anchor_every=4) == []
    assert caplog.text.count("versions 0 to 4 are not folded") == 1
    assert caplog.text.count("version 4 gets no anchor") == 1


def test_upkeep_stops_when_told(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 16)
    asked = iter([False] * 20)
    made = upkeep(written.run, written.writer.manifests[16], stop=lambda: next(asked, True))
    assert 0 < len(made) < 5
    assert sorted(made) == [side.fold_key(*pair) for pair in written.run.folds()]


def test_a_full_store_is_not_hidden(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 4)
    run = written.run

    class Full(type(run.bucket)):  # type: ignore[misc]
        def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
            raise StoreError("full")

    run.bucket = Full(written.folder)
    with pytest.raises(StoreError):
        upkeep(run, written.writer.manifests[4])


def test_compact_a_run(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 37)
    planned = compact(written.run, anchor="head", dry_run=True)
    assert not written.run.folds()
    assert not written.run.anchors()
    seen: list[tuple[int, int]] = []
    report = compact(written.run, anchor="head", progress=lambda done, work, _what: seen.append((done, work)))
    assert planned.folds == report.folds == list(due_folds(0, 37, []))
    assert planned.anchor == report.anchor == 37
    assert not report.anchor_present
    assert seen[0] == (0, len(report.folds) + 1)
    assert seen[-1] == (len(report.folds) + 1,) * 2
    for first, last in written.run.folds():
        written.check(first, last)
    folded = sum(written.run.folded(*pair).payload_bytes for pair in report.folds)
    assert report.bytes == folded + written.run.anchor(37).payload_bytes
    again = compact(written.run, anchor=37)
    assert (again.folds, again.present, again.bytes, again.anchor_present) == ([], len(report.folds), 0, True)
    # A reader takes few steps from anywhere.
    assert len(path(written.run, 0, 37)) == 4
    assert max(len(path(written.run, held, 37)) for held in range(37)) <= 9


def test_compact_skips_what_cannot_be_made(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 16)
    lost = written.writer.manifests[6].objects[0].key
    written.lose(lost)
    report = compact(written.run)
    assert report.folds == [(0, 4), (8, 12), (12, 16)]
    assert [row[:2] for row in report.skipped] == [(4, 8), (0, 16)]
    assert lost in report.skipped[0][2]


def test_compact_a_version_of_a_reference(tmp_path: Path) -> None:
    table = TensorTable([TensorSpec("w", "F32", (50,))])
    base = tmp_path / "base"
    base.mkdir()
    bits = [np.arange(50, dtype=np.uint32)]
    save_file({"w": bits[0].view(np.float32)}, base / "model.safetensors")
    writer = RunWriter(open_bucket(tmp_path / "run"), table)
    writer.reference(bits, "/nowhere")
    writer.delta([bits[0] + np.uint32(1)])
    run = open_run(str(tmp_path / "run"))
    with pytest.raises(NotFoundError, match="pass base="):
        compact(run, anchor=1)
    assert compact(run, base, anchor=1).anchor == 1
    assert restore(run, run.manifest(1)).plan.beside

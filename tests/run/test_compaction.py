"""Merged deltas and anchors made from the bucket: what the versions do, bit for bit, when due, and nothing left."""

import os
import shutil
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from tests.support.damage import TABLE as SMALL
from tests.support.running import run_python
from tests.support.written import TABLE, Written, assert_bits, find_steps, reference_run, save_base
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.client import Run
from vllm_delta_sync.codec import delta_reader as reading
from vllm_delta_sync.codec import merge_spool as spooling
from vllm_delta_sync.errors import (
    BaseUnavailableError,
    ChainError,
    FingerprintError,
    FormatError,
    NotFoundError,
    StoreError,
    UnsupportedError,
    UsageError,
)
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format.codecs import RelativeCodec
from vllm_delta_sync.format.manifest import HEAD_KEY, ObjectRef, object_key, version_key
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.maintenance import anchor_writer, merge_writer, rolling_weights
from vllm_delta_sync.maintenance.anchor_writer import make_anchor
from vllm_delta_sync.maintenance.branch import branch
from vllm_delta_sync.maintenance.compact import compact, due_ranges, maintain
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect
from vllm_delta_sync.maintenance.merge_writer import make_merged_delta
from vllm_delta_sync.maintenance.repair.repair import repair
from vllm_delta_sync.maintenance.rolling_weights import RollingWeights, StoppedError
from vllm_delta_sync.run.decode import decode_objects
from vllm_delta_sync.run.objects import open_step_objects
from vllm_delta_sync.run.read_plan import GapError
from vllm_delta_sync.run.restore import restore
from vllm_delta_sync.verify.verify import verify_run

CODECS: tuple[RelativeCodec, RelativeCodec] = ("plain", "tiled")
T = TypeVar("T")


def make(folder: Path, versions: int = 0, **options: Any) -> Written:
    """A run of small versions."""
    written = Written(folder / "run", **options)
    for _ in range(versions):
        written.publish(share=0.001)
    return written


def grown(folder: Path, versions: int, codec: RelativeCodec = "tiled") -> Written:
    """A run of small tensors of which each version changes much."""
    written = Written(folder / "run", table=SMALL)
    for _ in range(versions):
        written.publish(share=0.3, codec=codec)
    return written


def with_put(put: Callable[[Callable[..., None], str, bytes | Path], None], act: Callable[[], T]) -> T:
    """Act while ``put`` is called, with the real one, in place of each put into a folder."""
    real = LocalBucket.put

    def replaced(bucket: LocalBucket, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        put(lambda: real(bucket, key, data, if_absent=if_absent), key, data)

    with mock.patch.object(LocalBucket, "put", replaced):
        return act()


# Merged deltas


def test_a_merged_delta_does_what_its_versions_do(tmp_path: Path) -> None:
    """Also where objects of several ranks hold different elements of one tensor."""
    written = make(tmp_path, 17)
    for _ in range(3):
        written.publish_by_ranks(2)
    run = written.run
    for first, last in [(0, 4), (4, 8), (8, 12), (12, 16), (0, 16), (16, 17), (17, 20), (3, 14)]:
        merged_delta = make_merged_delta(run, first, last)
        assert merged_delta.digest == run.merged_delta(first, last).digest
        written.check(first, last)
    found = [(step.start, step.end) for step in find_steps(run, 0, 20)]
    assert found == [(0, 16), (16, 17), (17, 20)]


def test_merged_deltas_are_made_of_merged_deltas_but_of_no_damaged_one(tmp_path: Path) -> None:
    written = make(tmp_path, 16)
    for first in range(0, 16, 4):
        make_merged_delta(written.run, first, first + 4)
    bad = written.run.merged_delta(4, 8).objects[0]
    good = written.bucket.get(bad.key)
    written.bucket.put(bad.key, b"x" * bad.bytes)
    make_merged_delta(written.run, 0, 16)
    written.check(0, 16)
    # It is made anew where that is asked for.
    assert make_merged_delta(written.run, 4, 8).objects[0].key == bad.key
    make_merged_delta(written.run, 4, 8, replace=True)
    assert written.bucket.get(bad.key) == good
    for version in range(1, 17):
        written.lose(written.object_of(version))
    make_merged_delta(written.run, 0, 16, replace=True)
    written.check(0, 16)
    with pytest.raises(NotFoundError, match="no object"):
        make_merged_delta(written.run, 1, 3)


def test_tensors_in_full_and_changes_after_them(tmp_path: Path) -> None:
    written = make(tmp_path, 1)
    for full in ([0, 2], [3], []):
        written.publish(full=full)
    merged_delta = make_merged_delta(written.run, 0, 4)
    assert not merged_delta.reversible
    written.check(0, 4)
    assert {full.id for full in written.run.changes(merged_delta).full} == {0, 2, 3}


@pytest.mark.parametrize("codec", CODECS)
def test_several_objects(tmp_path: Path, codec: RelativeCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "SPOOL_ELEMENTS", 1)
    monkeypatch.setattr(merge_writer, "OBJECT_BYTES", 1)
    written = make(tmp_path, 4)
    merged_delta = make_merged_delta(written.run, 0, 4, codec=codec, weights=RollingWeights(written.run))
    assert len(merged_delta.objects) >= 3
    written.check(0, 4)
    assert_bits(restore(written.run, written.run.manifest(4)).state, written.writer.bits[4])


def test_ranges_that_there_cannot_be(tmp_path: Path) -> None:
    written = make(tmp_path, 5)
    written.publish(base=2)
    written.publish(codec="raw")
    for first, last in [(3, 3), (4, 3), (-1, 3)]:
        with pytest.raises(UsageError):
            make_merged_delta(written.run, first, last)
    with pytest.raises(ChainError, match="only reverts lead from version 4 to 6"):
        make_merged_delta(written.run, 4, 6)
    with pytest.raises(UnsupportedError, match="version 7 has codec 'raw'"):
        make_merged_delta(written.run, 6, 7)
    make_merged_delta(written.run, 1, 6)
    written.check(1, 6)
    with pytest.raises(NotFoundError, match="is not a directory here"):
        compact(written.run, tmp_path / "nowhere")
    written.lose(version_key(2))
    with pytest.raises(ChainError, match="only reverts lead"):
        make_merged_delta(written.run, 0, 4)


def test_what_the_versions_declare_must_add_up(tmp_path: Path) -> None:
    written = make(tmp_path, 4)
    wrong = written.writer.manifests[3].model_copy(update={"fingerprint": "0" * 32})
    fourth = written.writer.manifests[4].model_copy(update={"parent": wrong.digest})
    written.bucket.put(version_key(3), wrong.to_bytes())
    written.bucket.put(version_key(4), fourth.to_bytes())
    with pytest.raises(FingerprintError, match="version"):
        make_merged_delta(written.run, 0, 4)
    assert not written.run.merged_deltas()
    # So must an object and its document.
    run, step = written.run, find_steps(written.run, 0, 1)[0]
    nothing = sha256(b"").hexdigest()
    written.bucket.put(object_key(nothing), b"")
    empty = ObjectRef(key=object_key(nothing), bytes=0, sha256=nothing)
    for change, named in (({"objects": [empty]}, "is empty"), ({"changed": step.changed + 1}, "it declares")):
        with pytest.raises(FormatError, match=named):
            open_step_objects(type(step)(run, step.document.model_copy(update=change)), tmp_path)
    assert decode_objects(step.document, run.table, [run.fetch(ref) for ref in step.objects]).changed == step.changed


def test_another_maker_was_first(tmp_path: Path) -> None:
    written = make(tmp_path, 4)
    theirs: list[Any] = []

    def put(real: Callable[..., None], key: str, data: bytes | Path) -> None:
        if key == side.merged_delta_key(0, 4) and not theirs:
            theirs.append(None)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(merge_writer, "OBJECT_BYTES", 1)
                theirs[:] = [make_merged_delta(written.run, 0, 4)]
        real()

    made = with_put(put, lambda: make_merged_delta(written.run, 0, 4))
    assert made.digest == theirs[0].digest == written.run.merged_delta(0, 4).digest
    written.check(0, 4)


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("kind", [side.MergedDelta, side.Anchor])
def test_gc_that_removed_an_object_meanwhile(
    tmp_path: Path, kind: type[side.MergedDelta] | type[side.Anchor], repeated: bool
) -> None:
    """An object that no document names yet looks unused; also where a put is repeated because its answer was lost."""
    written = make(tmp_path, 4)
    removed: list[str] = []

    def put(real: Callable[..., None], key: str, data: bytes | Path) -> None:
        if key.startswith((side.MERGED_PREFIX, side.ANCHORS_PREFIX)):
            assert isinstance(data, bytes)
            removed.append(kind.from_bytes(data).objects[0].key)
            written.lose(removed[0])
            if repeated:
                real()
        real()

    if kind is side.MergedDelta:
        with_put(put, lambda: make_merged_delta(written.run, 0, 4))
        written.check(0, 4)
    else:
        with_put(put, lambda: make_anchor(written.run, 4))
        assert restore(written.run, written.run.manifest(4)).plan.root.anchor is not None
    assert len(removed) == 1


# Over versions of codec tiled, and of that codec


@pytest.mark.parametrize(("codec", "batch"), [("plain", 1), ("plain", 100), ("tiled", 100), ("tiled", 1 << 20)])
def test_ranges_over_codec_context(
    tmp_path: Path, codec: RelativeCodec, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of any size, with tensors in full before, between and after deltas of both codecs."""
    monkeypatch.setattr(reading, "LAZY_ELEMENTS", batch)
    monkeypatch.setattr(spooling, "SPOOL_ELEMENTS", 20)
    written = grown(tmp_path, 1, "plain")
    written.publish(share=0.3, codec="tiled")
    written.publish(share=0.3, codec="tiled", full=[1, 2])
    written.publish(share=0.3, codec="tiled")
    for _ in range(2):
        written.publish_by_ranks(2, "tiled")
    written.publish(share=0.3, codec="tiled")
    written.publish(share=0.0, codec="tiled")
    run = written.run
    with pytest.raises(UnsupportedError):
        make_merged_delta(run, 0, 4)
    maintain(run, written.writer.manifests[8])
    assert not run.merged_deltas(), "without weights nothing is merged"
    weights = RollingWeights(run, scratch=tmp_path)
    for first, last in [(0, 4), (4, 8), (0, 8), (3, 5)]:
        merged_delta = make_merged_delta(run, first, last, codec=codec, weights=weights)
        assert codec in merged_delta.requires
        written.check(first, last)
    assert run.merged_delta(4, 8).reversible == (codec == "plain")
    report = verify_run(run)
    assert (report.merged_deltas, report.replayed, report.undecoded) == (4, True, [])
    assert_bits(run.snapshot(8), written.writer.bits[8])
    # Backwards over a range of codec plain, though its versions cannot be taken back.
    if codec == "plain":
        assert [(step.start, step.end) for step in find_steps(run, 8, 4)] == [(8, 4)]
    else:
        with pytest.raises(GapError):
            find_steps(run, 8, 4)


def test_packed_versions_become_a_range_of_codec_context_which_is_repaired(tmp_path: Path) -> None:
    written = grown(tmp_path, 4, "plain")
    small = make_merged_delta(written.run, 0, 4, codec="tiled", weights=RollingWeights(written.run))
    written.check(0, 4)
    written.lose(small.objects[0].key)
    report = repair(written.run)
    assert (report.lost, len(report.repaired)) == ([], 1)
    written.check(0, 4)
    assert small.changed == make_merged_delta(written.run, 0, 4, replace=True).changed


@pytest.mark.parametrize("codec", CODECS)
def test_compact_and_then_collect(tmp_path: Path, codec: RelativeCodec) -> None:
    written = grown(tmp_path, 17)
    report = compact(written.run, codec=codec)
    assert (report.merged_deltas, report.skipped) == ([(0, 4), (4, 8), (8, 12), (12, 16), (0, 16)], [])
    for pair in report.merged_deltas:
        written.check(*pair)
    collect(written.run, RetentionPolicy(keep_last=1, keep_every=8, min_age=0.0), now=4e9)
    checked = verify_run(written.run)
    assert (checked.replayed, checked.gone > 0) == (True, True)
    for version in (8, 16, 17):
        assert_bits(written.run.snapshot(version), written.writer.bits[version])


def test_a_damaged_version_of_codec_context_is_skipped(tmp_path: Path) -> None:
    """A stream that ends too early, under a digest that fits: no range over it, and the others are made."""
    written = grown(tmp_path, 8)
    run, manifest = written.run, written.writer.manifests[8]
    data = bytearray(run.fetch(manifest.objects[0]))
    streams = Container(data, "object").entries["@0.streams"]
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + streams.start : start + streams.end] = bytes(streams.end - streams.start)
    digest = sha256(data).hexdigest()
    ref = manifest.objects[0].model_copy(update={"sha256": digest, "key": object_key(digest)})
    written.bucket.put(ref.key, bytes(data))
    written.bucket.put(version_key(8), manifest.model_copy(update={"objects": [ref]}).to_bytes())
    written.bucket.delete(HEAD_KEY)
    report = compact(run)
    assert (report.merged_deltas, [row[:2] for row in report.skipped]) == ([(0, 4)], [(4, 8)])
    assert "it is damaged, or was made against other weights" in report.skipped[0][2]
    with pytest.raises(FormatError, match="other weights"):
        run.snapshot(8)


# Anchors


def test_an_anchor_is_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchor_writer, "OBJECT_BYTES", 20_000)
    written = make(tmp_path, 6)
    anchor = make_anchor(written.run, 5)
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
        assert (restored.plan.root.anchor is not None, restored.plan.root.version) == (True, 5)
        assert restored.state.fingerprint == written.writer.manifests[version].model_fingerprint
    # A damaged one is made anew.
    for bad in (anchor.to_bytes()[:-3], anchor.model_copy(update={"manifest": "0" * 64}).to_bytes()):
        written.bucket.put(side.anchor_key(5), bad)
        assert make_anchor(written.run, 5).objects == anchor.objects
        assert written.run.anchor(5).manifest == written.writer.manifests[5].digest
    # Of raw versions, and of a model that is large.
    monkeypatch.setattr(rolling_weights, "IN_MEMORY_BYTES", 0)
    written.publish(codec="raw")
    assert make_anchor(written.run, 7).payload_bytes >= TABLE.full_bytes
    assert restore(written.run, written.run.manifest(7)).plan.root.anchor is not None


# Scratch files


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("branched", [False, True])
def test_everything_temporary_goes_where_it_is_told_to(
    branched: bool, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path, 5).run
    expected = restore(run, run.head()).state.fingerprint
    if branched:
        run = branch(run, None, str(tmp_path / "branch"))
    monkeypatch.setattr(rolling_weights, "IN_MEMORY_BYTES", 0)
    for bound in ("restore.IN_MEMORY_BYTES", "restore.DECODED_ELEMENTS", "objects.MAPPED_BYTES"):
        monkeypatch.setattr(f"vllm_delta_sync.run.{bound}", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    version = run.head().version
    for where, named in ((None, "TMPDIR"), (tmp_path / "nowhere", "name another folder")):
        with pytest.raises(StoreError, match=named):
            make_anchor(run, version, scratch=where)
    assert make_anchor(run, version, scratch=scratch).fingerprint == expected.hex()
    assert list(scratch.iterdir()) == []


def test_whatever_ends_it_leaves_nothing(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = make(tmp_path, 4)
    before = set((written.folder / "objects").iterdir())
    for times in range(6):
        asked = iter([False] * times)
        with pytest.raises(StoppedError):
            make_merged_delta(written.run, 0, 4, scratch=scratch, stop=lambda asked=asked: next(asked, True))  # type: ignore[misc]
    with pytest.raises(StoppedError):
        make_anchor(written.run, 4, scratch=scratch, stop=lambda: True)

    def interrupt(real: Callable[..., None], key: str, data: bytes | Path) -> None:
        assert list(scratch.iterdir())
        raise KeyboardInterrupt

    makers: tuple[Callable[[], object], ...] = (
        lambda: make_merged_delta(written.run, 0, 4, scratch=scratch),
        lambda: make_anchor(written.run, 4, scratch=scratch),
    )
    for maker in makers:
        with pytest.raises(KeyboardInterrupt):
            with_put(interrupt, maker)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=100))
    for maker in makers:
        with pytest.raises(StoreError, match="bytes of scratch"):
            maker()
    assert not list(scratch.iterdir())
    assert set((written.folder / "objects").iterdir()) == before
    assert (written.run.merged_deltas(), written.run.anchors()) == ([], [])


SMALL_FILES = """
import resource, sys
from vllm_delta_sync.client import open_run
from vllm_delta_sync.maintenance.merge_writer import make_merged_delta
from vllm_delta_sync.errors import StoreError
make_merged_delta(open_run(sys.argv[4]), 0, 4)  # loops that are compiled here are stored in files
run = open_run(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    make_merged_delta(run, 0, 4, scratch=sys.argv[3])
except StoreError as error:
    print(error)
"""


def test_scratch_that_fills_up(tmp_path: Path, scratch: Path) -> None:
    """Files may become as large as each part, not as all together."""
    written = make(tmp_path)
    for _ in range(4):
        written.publish(share=0.2)
    most = max(manifest.payload_bytes for manifest in written.writer.manifests[1:]) + 100
    copied = shutil.copytree(written.folder, tmp_path / "copied")
    arguments = [str(written.folder), str(most), str(scratch), str(copied)]
    assert "free space there" in run_python("-c", SMALL_FILES, *arguments).stdout
    assert not list(scratch.iterdir())
    assert not written.run.merged_deltas()


# When they are due


def merged_deltas(*pairs: tuple[int, int]) -> list[str]:
    return [side.merged_delta_key(*pair) for pair in pairs]


def test_maintenance_after_every_version_or_some(tmp_path: Path) -> None:
    """The publisher's thread skips those that come while it is busy."""
    for often, name in ((1, "every"), (3, "some")):
        written = make(tmp_path / name)
        made, run = [], written.run
        for _ in range(18 // often):
            for _ in range(often):
                manifest = written.publish(share=0.001)
            made += maintain(run, manifest)
        assert written.run.merged_deltas() == sorted(due_ranges(0, 18, []))
        assert sorted(made) == sorted(merged_deltas(*due_ranges(0, 18, [])))
        for pair in written.run.merged_deltas():
            written.check(*pair)
    assert maintain(make(tmp_path / "without", 4).run, manifest, merge=False) == []


def test_maintenance_makes_what_was_missed_a_few_at_a_time(tmp_path: Path) -> None:
    written = make(tmp_path, 64)
    asked = iter([False] * 20)
    stopped = maintain(written.run, written.writer.manifests[64], stop=lambda: next(asked, True))
    assert 0 < len(stopped) < 5
    assert sorted(stopped) == merged_deltas(*written.run.merged_deltas())
    for key in stopped:
        written.lose(key)
    first = maintain(written.run, written.writer.manifests[64])
    assert (len(first), first[:3]) == (8, merged_deltas((60, 64), (48, 64), (0, 64)))
    run = written.run
    for left in (8, 5, 0):
        assert len(maintain(run, written.writer.manifests[64])) == left
    assert written.run.merged_deltas() == sorted(due_ranges(0, 64, []))


def test_maintenance_leaves_what_is_gone_or_was_left_behind(tmp_path: Path) -> None:
    written = make(tmp_path, 16)
    written.retire((1, 6))
    assert maintain(written.run, written.writer.manifests[16]) == merged_deltas((12, 16), (8, 12))
    assert compact(written.run).merged_deltas == []
    other = make(tmp_path / "other", 5)
    other.publish(base=2)
    for _ in range(10):
        other.publish()
    pairs = [(12, 16), (8, 12), (0, 4)]
    assert maintain(other.run, other.writer.manifests[16]) == merged_deltas(*pairs)
    for pair in pairs:
        other.check(*pair)


def test_every_kth_version_gets_an_anchor(tmp_path: Path) -> None:
    written = make(tmp_path)
    run = written.run
    for _ in range(7):
        maintain(run, written.publish(share=0.001), anchor_every=3)
    assert written.run.anchors() == [3, 6]
    # Nobody calls when 9 is published.
    for _ in range(3):
        written.publish(share=0.001)
    for _ in range(2):
        maintain(run, written.publish(share=0.001), anchor_every=3)
    assert written.run.anchors() == [3, 6, 9, 12]


def test_an_anchor_when_replaying_costs_more(tmp_path: Path) -> None:
    written = make(tmp_path)
    made: list[str] = []
    run = written.run
    for _ in range(16):
        made += maintain(run, written.publish(share=0.5), merge=False)
    sizes = [manifest.payload_bytes for manifest in written.writer.manifests]
    assert sum(sizes[1:5]) < TABLE.full_bytes < sum(sizes[1:9])
    assert made == [side.anchor_key(8), side.anchor_key(16)]
    cheap = make(tmp_path / "cheap", 15, table=TensorTable([TensorSpec("w", "BF16", (100_000,))]))
    maintain(cheap.run, cheap.publish(share=0.001))
    assert not cheap.run.anchors()


def test_what_upkeep_reads_does_not_grow_where_nothing_can_be_merged(tmp_path: Path) -> None:
    """As on sharded trainers, whose versions only `compact` merges: each call read every manifest since the anchor."""
    written = make(tmp_path, table=TensorTable([TensorSpec("w", "BF16", (100_000,))]))
    run = written.run
    read: list[int] = []
    with mock.patch.object(LocalBucket, "get", autospec=True, side_effect=LocalBucket.get) as get:
        for _ in range(24):
            manifest = written.publish(0.001, "tiled")
            before = get.call_count
            assert maintain(run, manifest) == []
            read.append(get.call_count - before)
    assert read == [0, 0, 0, 3] * 6


def test_a_milestone_gets_an_anchor(tmp_path: Path) -> None:
    written = make(tmp_path, 3)
    run = written.run

    written.writer.tag("old", 1)
    written.bucket.put(side.tag_key("broken"), b"{")
    assert maintain(run, written.publish(share=0.001)) == merged_deltas((0, 4))
    written.writer.tag("best", 2, milestone=True)
    assert maintain(run, written.publish(share=0.001)) == [side.anchor_key(2)]
    assert maintain(run, written.publish(share=0.001)) == []
    written.writer.tag("best", 3, milestone=True)
    assert maintain(run, written.writer.manifests[-1]) == [side.anchor_key(3)]
    assert written.run.anchors() == [2, 3]


def test_of_many_tags_a_few_are_read_at_a_time_and_each_once(tmp_path: Path) -> None:
    written = make(tmp_path, 3)
    for number in range(150):
        written.writer.tag(f"t{number}", 1, milestone=number == 0)
        os.utime(written.folder / side.tag_key(f"t{number}"), (number, number))
    made: list[str] = []
    reads: list[int] = []
    with mock.patch.object(run := written.run, "tag", wraps=run.tag) as tag:
        for number in range(4):
            written.writer.tag("new", number)
            made += maintain(run, written.writer.manifests[-1])
            reads.append(tag.call_count - sum(reads))
    assert reads == [64, 64, 25, 1]
    assert made == [side.anchor_key(1)]
    # One who stops is not kept waiting.
    with mock.patch.object(run := Run(written.bucket), "tag", wraps=run.tag) as tag:
        assert maintain(run, written.writer.manifests[-1], stop=lambda: tag.call_count > 0) == []
    assert tag.call_count < 32


def test_milestone_among_many_tags_of_one_moment_gets_an_anchor(tmp_path: Path) -> None:
    """In a copy of a bucket all tags have the time of the copy."""
    written = make(tmp_path, 3)
    for number in range(100):
        written.writer.tag(f"t{number:02}", 1, milestone=number == 99)
        os.utime(written.folder / side.tag_key(f"t{number:02}"), (1, 1))
    run, made = written.run, list[str]()
    for _ in range(5):
        made += maintain(run, written.publish(share=0.001), merge=False)
    assert made == [side.anchor_key(1)]


def test_what_cannot_be_made_is_said_once_the_rest_is_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = make(tmp_path, 3)
    written.lose(written.object_of(2))
    run = written.run
    for _ in range(4):
        assert maintain(run, written.publish(share=0.001), anchor_every=4) == []
    assert caplog.text.count("no merged delta of versions 0 to 4") == 1
    assert caplog.text.count("no anchor of version 4") == 1
    assert maintain(run, written.publish(share=0.001)) == merged_deltas((4, 8))

    def full(real: Callable[..., None], key: str, data: bytes | Path) -> None:
        raise StoreError("full")

    other = make(tmp_path / "other", 4)
    with pytest.raises(StoreError):
        with_put(full, lambda: maintain(other.run, other.writer.manifests[4]))


def test_compact_a_run(tmp_path: Path) -> None:
    written = make(tmp_path, 37)
    planned = compact(written.run, anchor="head", dry_run=True)
    assert (written.run.merged_deltas(), written.run.anchors()) == ([], [])
    seen: list[tuple[int, int]] = []
    report = compact(written.run, anchor="head", progress=lambda done, work, _what: seen.append((done, work)))
    assert planned.merged_deltas == report.merged_deltas == list(due_ranges(0, 37, []))
    assert (planned.anchor, report.anchor, report.anchor_present) == (37, 37, False)
    assert (seen[0], seen[-1]) == ((0, len(report.merged_deltas) + 1), (len(report.merged_deltas) + 1,) * 2)
    for pair in written.run.merged_deltas():
        written.check(*pair)
    merged_delta = sum(written.run.merged_delta(*pair).payload_bytes for pair in report.merged_deltas)
    assert report.bytes == merged_delta + written.run.anchor(37).payload_bytes
    again = compact(written.run, anchor=37)
    assert (again.merged_deltas, again.present) == ([], len(report.merged_deltas))
    assert (again.bytes, again.anchor_present) == (0, True)
    # A reader takes few steps from anywhere.
    assert len(find_steps(written.run, 0, 37)) == 4
    assert max(len(find_steps(written.run, held, 37)) for held in range(37)) <= 9


def test_compact_a_run_that_refers_to_a_base(tmp_path: Path) -> None:
    run: Run
    run, bits = reference_run(tmp_path / "run", "/nowhere")
    save_base(tmp_path / "base", bits[0])
    with pytest.raises(BaseUnavailableError, match="base="):
        compact(run, anchor=1)
    assert compact(run, tmp_path / "base", anchor=1).anchor == 1
    assert restore(run, run.manifest(1)).plan.root.anchor is not None


def test_compact_with_another_base_makes_what_does_not_need_it(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", start="checkpoint")
    written.deltas(*["tiled"] * 4, *["plain"] * 4)
    other = save_base(tmp_path / "other", written.writer.bits[1], TABLE).parent
    report = compact(written.run, other)
    assert (report.merged_deltas, report.damaged) == ([(4, 8)], False)
    assert isinstance(report.base_error, BaseUnavailableError)
    ((first, last, reason),) = report.skipped
    assert (first, last) == (0, 4)
    assert f"{str(other)!r} is not the one that the run started from" in reason
    again = compact(written.run, tmp_path / "checkpoint")
    assert (again.merged_deltas, again.base_error) == ([(0, 4)], None)

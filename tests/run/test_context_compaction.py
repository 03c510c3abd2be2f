"""Folded ranges over versions of codec ``context``, and of that codec: what the versions do, in bounded memory."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_cli import answer, delta_sync
from tests.run.test_context_chain import assert_bits, publish_by_two
from tests.support.damage import TABLE as SMALL
from tests.support.samples import changes_between, nudge, random_bits, state_of
from tests.support.written import TABLE, Written
from vllm_delta_sync.chain.plan import GapError, path
from vllm_delta_sync.chain.verify import verify_run
from vllm_delta_sync.errors import FormatError, UnsupportedError
from vllm_delta_sync.upkeep.compaction import compact, make_anchor, make_fold, upkeep
from vllm_delta_sync.upkeep.compaction_fold import Folding
from vllm_delta_sync.upkeep.compaction_weights import Weights
from vllm_delta_sync.upkeep.repair import repair
from vllm_delta_sync.upkeep.retention import Policy, collect
from vllm_delta_sync.wire import lazy as reading
from vllm_delta_sync.wire import spool as spooling
from vllm_delta_sync.wire.changes import Changes, Full
from vllm_delta_sync.wire.container import Container
from vllm_delta_sync.wire.delta import DeltaContext, encode
from vllm_delta_sync.wire.fold import fold
from vllm_delta_sync.wire.lazy import LazyDelta, Moving, fold_lazily
from vllm_delta_sync.wire.manifest import HEAD_KEY, object_key, version_key

CODECS: tuple[Folding, Folding] = ("packed", "context")


def grown(folder: Path, versions: int, codec: Folding = "context") -> Written:
    written = Written(folder, 0, table=SMALL)
    for _ in range(versions):
        written.publish(share=0.3, codec=codec)
    return written


@pytest.mark.parametrize("batch", [1, 5000, 1 << 20])
def test_folding_piece_by_piece_does_what_the_versions_do(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in full before, between and after deltas of both codecs; the weights at the start stay as they are."""
    monkeypatch.setattr(reading, "LAZY_ELEMENTS", batch)
    random = np.random.default_rng(1)
    first = bits = random_bits(TABLE, random)
    start = state_of(TABLE, first)
    moving = Moving(start.old)
    parts, lazy = [], []
    for number, (codec, full) in enumerate(
        [("context", ()), ("packed", (0,)), ("context", ()), ("context", (0, 2)), ("context", ()), ("packed", ())]
    ):
        new = nudge(bits, random, 0.05)
        before, context = state_of(TABLE, bits), DeltaContext("", number + 1, number)
        parts.append(changes_between(TABLE, bits, new, full=full))
        data = encode(parts[-1], TABLE, codec, "zstd", context, before.old)  # type: ignore[arg-type]
        lazy.append(LazyDelta(data, TABLE, context, moving))
        bits = new
    pieces = list(fold_lazily(lazy, TABLE, moving))
    assert_bits(start, first)
    carried = sum(piece.bits.size if isinstance(piece, Full) else piece.positions.size for piece in pieces)
    assert carried == fold(parts, TABLE).changed
    for piece in pieces:
        start.apply(Changes(full=[piece]) if isinstance(piece, Full) else Changes([piece]))
    assert_bits(start, bits)


@pytest.mark.parametrize("codec", CODECS)
def test_folds_do_what_their_versions_do(tmp_path: Path, codec: Folding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LAZY_ELEMENTS", 100)
    monkeypatch.setattr(spooling, "SPOOL_ELEMENTS", 20)
    written = Written(tmp_path / "run", 0, table=SMALL)
    written.publish(share=0.3)
    written.publish(share=0.3, codec="context")
    written.publish(share=0.3, codec="context", full=[1, 2])
    written.publish(share=0.3, codec="context")
    publish_by_two(written)
    publish_by_two(written)
    written.publish(share=0.3, codec="context")
    written.publish(share=0.0, codec="context")
    run = written.run
    weights = Weights(run, scratch=tmp_path)
    for first, last in [(0, 4), (4, 8), (0, 8), (3, 5)]:
        folded = make_fold(run, first, last, codec=codec, weights=weights)
        assert codec in folded.requires
        assert codec == "packed" or not folded.reversible
        written.check(first, last)
    assert run.folded(4, 8).reversible == (codec == "packed")
    report = verify_run(run)
    assert (report.folds, report.replayed, report.undecoded) == (4, True, [])
    assert_bits(run.snapshot(8), written.writer.bits[8])
    # Backwards over a range of codec packed, though its versions cannot be taken back.
    if codec == "packed":
        assert [(step.start, step.end) for step in path(run, 8, 4)] == [(8, 4)]
    else:
        with pytest.raises(GapError):
            path(run, 8, 4)


def test_a_fold_of_packed_versions_of_codec_context(tmp_path: Path) -> None:
    written = grown(tmp_path / "run", 4, "packed")
    small = make_fold(written.run, 0, 4, codec="context", weights=Weights(written.run))
    written.check(0, 4)
    large = make_fold(written.run, 0, 4, replace=True)
    assert small.changed == large.changed


def test_several_objects_of_codec_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "SPOOL_ELEMENTS", 1)
    written = Written(tmp_path / "run", 4)
    folded = make_fold(written.run, 0, 4, object_bytes=1, codec="context", weights=Weights(written.run))
    assert len(folded.objects) >= 3
    written.check(0, 4)


def test_without_weights_nothing_is_folded(tmp_path: Path) -> None:
    written = grown(tmp_path / "run", 4)
    with pytest.raises(UnsupportedError, match="`delta-sync compact` does that"):
        make_fold(written.run, 0, 4)
    upkeep(written.run, written.writer.manifests[4])
    assert not written.run.folds()


def test_weights_go_on_from_where_they_are(tmp_path: Path) -> None:
    """The next range costs what leads to it: version 0 is read once."""
    written = grown(tmp_path / "run", 9)
    weights = Weights(written.run)
    assert_bits(weights.at(written.writer.manifests[0]), written.writer.bits[0])
    root = written.writer.manifests[0].objects[0].key
    whole = (written.folder / root).read_bytes()
    written.lose(root)
    for version in (4, 8, 9):
        assert_bits(weights.at(written.writer.manifests[version]), written.writer.bits[version])
    # Older ones, and those behind something damaged, are rebuilt.
    (written.folder / root).write_bytes(whole)
    assert_bits(weights.at(written.writer.manifests[2]), written.writer.bits[2])
    make_anchor(written.run, 5)
    written.lose(written.writer.manifests[4].objects[0].key)
    assert_bits(weights.at(written.writer.manifests[7]), written.writer.bits[7])


@pytest.mark.parametrize("codec", CODECS)
def test_compact_and_then_collect(tmp_path: Path, codec: Folding) -> None:
    written = grown(tmp_path / "run", 17)
    report = compact(written.run, codec=codec)
    assert (report.folds, report.skipped) == ([(0, 4), (4, 8), (8, 12), (12, 16), (0, 16)], [])
    for pair in report.folds:
        written.check(*pair)
    collect(written.run, Policy(keep_last=1, keep_every=8, min_age=0.0), now=4e9)
    checked = verify_run(written.run)
    assert (checked.replayed, checked.gone > 0) == (True, True)
    for version in (8, 16, 17):
        assert_bits(written.run.snapshot(version), written.writer.bits[version])


def test_a_damaged_fold_is_made_again(tmp_path: Path) -> None:
    written = grown(tmp_path / "run", 4)
    folded = make_fold(written.run, 0, 4, codec="context", weights=Weights(written.run))
    written.lose(folded.objects[0].key)
    report = repair(written.run)
    assert (report.lost, report.repaired) == ([], ["folds/0000000000-0000000004.json: made again from the chain"])
    written.check(0, 4)


def test_a_damaged_version_is_skipped(tmp_path: Path) -> None:
    """A stream that ends too early, under a digest that fits: no range over it, and the others are made."""
    written = grown(tmp_path / "run", 8)
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
    assert report.folds == [(0, 4)]
    [(first, last, reason)] = report.skipped
    assert (first, last) == (4, 8)
    assert "it is damaged, or was made against other weights" in reason
    with pytest.raises(FormatError, match="other weights"):
        run.snapshot(8)


def test_the_command(tmp_path: Path) -> None:
    written = grown(tmp_path / "run", 4)
    done = delta_sync("compact", "--help")
    assert "--codec {packed,context}" in done.stdout
    document = answer("compact", "--bucket", str(written.folder), "--codec", "context")
    assert (document["folds"], document["skipped"]) == ([{"first": 0, "last": 4}], [])
    assert written.run.folded(0, 4).requires == ["context", "zstd"]
    written.check(0, 4)
    checked = answer("verify", "--bucket", str(written.folder))
    assert (checked["verdict"], checked["undecoded"], checked["folds"]) == (True, [], 1)
    shown = delta_sync("inspect", str(written.folder), "--version", "3").stdout
    assert "context, compression zstd" in shown

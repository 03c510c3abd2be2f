"""``delta-sync compact``: merged deltas and anchors, and what it prints."""

from pathlib import Path

import pytest

from tests.support.commands import answer, delta_sync, kind, shown
from tests.support.written import SMALL, Written, save_base
from vllm_delta_sync.cli.arguments import VERSION
from vllm_delta_sync.run.restore import restore


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "run", 17)


def test_folds_and_an_anchor(written: Written) -> None:
    url = str(written.folder)
    planned = answer("compact", "--bucket", url, "--anchor", "16", "--dry-run")
    assert planned["dry_run"]
    assert not written.run.merged_deltas()
    document = answer("compact", DELTA_SYNC_BUCKET=url)
    pairs = [(row["first"], row["last"]) for row in document["merged_deltas"]]
    assert pairs == [(0, 4), (4, 8), (8, 12), (12, 16), (0, 16)]
    assert planned["merged_deltas"] == document["merged_deltas"]
    assert document["bytes"] > 0
    assert (document["head"], document["skipped"], document["anchor"]) == (17, [], None)
    anchored = answer("compact", "--bucket", url, "--no-merge", "--anchor", "head")
    assert (anchored["anchor"], anchored["anchor_present"], anchored["merged_deltas"]) == (17, False, [])
    assert restore(written.run, written.run.head()).plan.root.anchor is not None


def test_codec_tiled(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", table=SMALL)
    for _ in range(4):
        written.publish(share=0.3, codec="tiled")
    document = answer("compact", "--bucket", written.folder, "--codec", "tiled")
    assert (document["merged_deltas"], document["skipped"]) == ([{"first": 0, "last": 4}], [])
    assert written.run.merged_delta(0, 4).requires == ["tiled", "zstd"]
    assert "tiled, compression zstd" in shown("inspect", "--bucket", written.folder, "--version", "3")


def test_another_base_is_named_after_what_does_not_need_it_is_made(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", table=SMALL, start="checkpoint")
    written.deltas(*["tiled"] * 4, *["plain"] * 4)
    other = save_base(tmp_path / "other", written.writer.bits[1]).parent
    compact = ("compact", "--bucket", written.folder, "--base")
    done = delta_sync(*compact, other)
    assert done.code == 3
    assert "1 made, 0 already exist" in done.out
    assert "other' is not the one that the run started from" in done.out.partition("skipped versions 0 to 4: ")[2]
    assert kind(3, *compact, other) == "base"
    assert written.run.merged_deltas() == [(4, 8)]
    assert answer(*compact, tmp_path / "checkpoint")["merged_deltas"] == [{"first": 0, "last": 4}]


def test_text(written: Written) -> None:
    compact = ("compact", "--bucket", written.folder)
    lost = written.object_of(6)
    written.lose(lost)
    text = shown(*compact, "--dry-run")
    assert "5 to make, 0 already exist" in text
    assert text.splitlines()[-1].split() == ["0", "16"]
    text = shown(*compact, "--anchor", "4", code=1)
    for part in ("merged deltas  3 made, 0 already exist", "of version 4, made", "skipped versions 0 to 16: "):
        assert part in text
    assert lost in text.partition("skipped versions 4 to 8: ")[2].splitlines()[0]
    assert written.run.merged_deltas() == [(0, 4), (8, 12), (12, 16)]
    assert "anchor         of version 4, already exists" in shown(*compact, "--anchor", "4", code=1)
    help_text = delta_sync("compact", "--help").out
    for word in ("--dry-run", f"--anchor {VERSION}", "--no-merge", "--codec {tiled,plain}"):
        assert word in help_text


def test_refused(written: Written) -> None:
    for code, error, arguments in (
        (3, "not_found", ["--anchor", "18"]),
        (3, "not_found", ["--anchor", "tag:none"]),
        (4, "store", ["--scratch", "/nowhere"]),
    ):
        assert kind(code, "compact", "--bucket", written.folder, *arguments) == error

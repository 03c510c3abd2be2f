"""``delta-sync compact``: merged deltas and anchors, and what it prints."""

from pathlib import Path

import pytest

from tests.support.commands import answer, delta_sync, kind, shown
from tests.support.written import SMALL, Written, find_steps, save_base
from vllm_delta_sync.cli.arguments import VERSION
from vllm_delta_sync.run.restore import restore


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("seventeen") / "run", 17)


@pytest.fixture
def written(template: Written, tmp_path: Path) -> Written:
    return template.copied(tmp_path / "run")


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
    for pair in pairs:
        written.check(*pair)
    assert len(find_steps(written.run, 0, 17)) == 2
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
    written.check(0, 4)
    checked = answer("verify", "--bucket", written.folder)
    assert (checked["verdict"], checked["undecoded"], checked["merged_deltas"]) == (True, [], 1)
    assert "tiled, compression zstd" in shown("inspect", "--bucket", written.folder, "--version", "3")


def test_another_base_is_named_after_what_could_be_made(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", table=SMALL, start="checkpoint")
    written.deltas(*["tiled"] * 4, *["plain"] * 4)
    other = save_base(tmp_path / "other", written.writer.bits[1]).parent
    compact = ("compact", "--bucket", written.folder, "--base", other)
    done = delta_sync(*compact)
    assert done.code == 3
    assert "1 made, 0 already exist" in done.out
    assert "other' is not the one that the run started from" in done.out.partition("skipped versions 0 to 4: ")[2]
    assert kind(3, *compact) == "base"


def test_text(written: Written) -> None:
    compact = ("compact", "--bucket", written.folder)
    written.lose(written.object_of(6))
    text = shown(*compact, "--dry-run")
    assert "5 to make, 0 already exist" in text
    assert text.splitlines()[-1].split() == ["0", "16"]
    text = shown(*compact, "--anchor", "4", code=1)
    for part in (
        "merged deltas  3 made, 0 already exist",
        "anchor         of version 4, made",
        "skipped versions 4 to 8: no",
    ):
        assert part in text
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

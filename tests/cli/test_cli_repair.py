"""``delta-sync verify`` and ``repair``: what they print, and what they return."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.golden.regenerate import DIRECTORY
from vllm_delta_sync import cli
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.errors import DigestError, NotFoundError, UsageError
from vllm_delta_sync.upkeep.compaction import make_anchor, make_fold
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire import manifest as keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The golden run with an anchor and a folded range."""
    copy = tmp_path / "run"
    shutil.copytree(DIRECTORY, copy)
    run = open_run(str(copy))
    make_anchor(run, 3)
    make_fold(run, 0, 2)
    return copy


def call(*arguments: str) -> tuple[dict[str, Any], str]:
    """The document, and what is printed for people."""
    import io
    from contextlib import redirect_stdout

    options = cli.parse(arguments)
    with options.closing, redirect_stdout(io.StringIO()) as printed:
        document, show = cli.COMMANDS[options.command](options)
        show()
    return json.loads(json.dumps(document)), printed.getvalue()


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def object_of(path: Path, version: int) -> Path:
    return path / open_run(str(path)).manifest(version).objects[0].key


def test_verify_says_what_it_looked_at(path: Path) -> None:
    document, text = call("verify", "--bucket", str(path))
    assert document["verdict"] is True
    assert (document["anchors"], document["folds"], document["gone"], document["notes"]) == (1, 1, 0, [])
    assert "findings" not in document
    assert "1 anchors and 1 folded ranges hold" in text
    assert "rebuilt, and equal to the fingerprint of every version" in text
    assert call("verify", "--bucket", str(path), "--all")[0]["findings"] == []


def test_verify_names_the_first_problem_or_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(object_of(path, 1))
    object_of(path, 5).unlink()
    with pytest.raises(DigestError, match="version 1"):
        call("verify", "--bucket", str(path))
    monkeypatch.setenv("DELTA_SYNC_BUCKET", str(path))
    document, text = call("verify", "--all")
    assert (document["verdict"], document["error"]["kind"], document["exit_code"]) == (False, "digest", 1)
    assert [(row["version"], row["kind"]) for row in document["findings"]] == [(1, "digest"), (5, "not_found")]
    assert document["findings"][0]["document"] == keys.version_key(1)
    assert document["unreadable"] == [1, 2, 5]
    assert text.splitlines()[0].startswith("digest: object objects/")
    assert "2 problems" in text
    assert "versions 1 to 2, 5" in text


def test_verify_all_of_a_run_without_any_good_version(path: Path) -> None:
    for file in (path / "versions").iterdir():
        file.write_bytes(b"{")
    document, text = call("verify", "--bucket", str(path), "--all")
    assert (document["head"], document["fingerprint"], document["exit_code"]) == (-1, None, 1)
    assert "fingerprint  none" in text


def test_which_run_has_to_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTA_SYNC_BUCKET", raising=False)
    for command in ("verify", "repair"):
        with pytest.raises(UsageError, match="DELTA_SYNC_BUCKET is not set"):
            call(command)
        with pytest.raises(NotFoundError, match="no run at"):
            call(command, "--bucket", "/nowhere/run")


def test_repair(path: Path, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    shutil.copytree(path, mirror)
    document, text = call("repair", "--bucket", str(path))
    assert (document["verdict"], document["repaired"], document["exit_code"]) == (True, [], 0)
    assert "verdict   ok" in text
    flip(object_of(path, 3))
    (path / "HEAD.json").write_bytes(b"{")
    flip(object_of(path, 5))
    damaged = {file: file.read_bytes() for file in path.rglob("*.*") if file.is_file()}
    document, text = call("repair", "--bucket", str(path), "--dry-run")
    assert document["dry_run"] is True
    assert {file: file.read_bytes() for file in path.rglob("*.*") if file.is_file()} == damaged
    assert len(document["repaired"]) == 2
    assert (document["unreadable"], document["exit_code"]) == ([[5, 5]], 1)
    assert "could be repaired: HEAD.json: points at version 5" in text
    assert "lost: versions that cannot be read: 5; a mirror" in text
    document, text = call("repair", "--bucket", str(path), "--mirror", mirror.as_uri())
    assert (document["verdict"], document["lost"], document["exit_code"]) == (True, [], 0)
    assert "ok, repaired" in text
    assert call("verify", "--bucket", str(path))[0]["verdict"] is True
    for file in mirror.rglob("*"):
        if file.is_file() and "~staging" not in file.parts:
            assert (path / file.relative_to(mirror)).read_bytes() == file.read_bytes()


def test_repair_of_a_run_that_cannot_be_opened(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "mirror")
    (path / "tensors.json").unlink()
    with pytest.raises(NotFoundError):
        call("repair", "--bucket", str(path))
    document, _ = call("repair", "--bucket", str(path), "--mirror", str(tmp_path / "mirror"))
    assert (document["repaired"], document["lost"]) == (["tensors.json: from the mirror"], [])


def test_what_a_bucket_says_cannot_move_the_cursor(path: Path) -> None:
    (path / side.tag_key("best")).parent.mkdir()
    (path / side.tag_key("best")).write_bytes(b'{"format_version":1,"x":"\x1b[2J"}')
    for command in (["verify", "--all"], ["repair"]):
        document, text = call(*command, "--bucket", str(path))
        assert document["exit_code"] == 1
        assert "\x1b" not in text

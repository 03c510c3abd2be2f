"""Exit codes: 1 for what a check found, 3 for what was asked for and is not there, 4 for a store that failed."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import delta_sync
from tests.cli.test_cli_keys import answer, shown
from tests.support.written import Written
from vllm_delta_sync.wire.manifest import HEAD_KEY, version_key


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "run", 8)


def code_of(written: Written, *arguments: str) -> tuple[int, Any]:
    """Exit code and document of a command on the run; the process and ``--json`` agree."""
    done = delta_sync(*arguments, "--bucket", str(written.folder))
    return done.returncode, answer(*arguments, "--bucket", str(written.folder), code=done.returncode)


def lose_object(written: Written, version: int) -> None:
    written.lose(written.writer.manifests[version].objects[0].key)


@pytest.mark.parametrize("flags", [(), ("--all",)], ids=["first", "all"])
@pytest.mark.parametrize(
    ("lost", "kind"),
    [("object", "not_found"), (version_key(3), "not_found"), (version_key(8), "not_found"), (HEAD_KEY, "format")],
)
def test_whatever_verify_finds_is_1(written: Written, lost: str, kind: str, flags: tuple[str, ...]) -> None:
    assert code_of(written, "verify", *flags)[0] == 0
    if lost == "object":
        lose_object(written, 3)
    elif lost == HEAD_KEY:
        (written.folder / HEAD_KEY).write_bytes(b"{")
    else:
        written.lose(lost)
    code, document = code_of(written, "verify", *flags)
    assert (code, document["error"]["kind"]) == (1, kind)


def test_verify_of_what_is_not_there_is_3(written: Written, tmp_path: Path) -> None:
    assert code_of(written, "verify", "--base", str(tmp_path / "typo"))[0] == 3
    for file in (written.folder / "versions").iterdir():
        file.unlink()
    written.lose(HEAD_KEY)
    code, document = code_of(written, "verify")
    assert (code, document["error"]["kind"]) == (3, "not_found")
    assert answer("verify", "--bucket", str(tmp_path / "nowhere"), code=3)["error"]["kind"] == "not_found"


@pytest.mark.parametrize("command", ["verify", "log", "gc --dry-run", "compact", "repair", "fleet"])
def test_a_store_that_fails_is_4(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"no directory")
    refused = answer(*command.split(), "--bucket", str(tmp_path / "file"), code=4)
    assert refused["error"]["kind"] == "store"


def test_a_broken_history_is_1_for_log_and_inspect(written: Written) -> None:
    lose_object(written, 3)
    assert answer("inspect", str(written.folder), "--version", "3", code=1)["error"]["kind"] == "not_found"
    assert answer("inspect", str(written.folder), "--version", "9", code=3)["error"]["kind"] == "not_found"
    written.lose(version_key(5))
    done = delta_sync("log", "--bucket", str(written.folder))
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 6)
    assert done.stderr.startswith("delta-sync: not_found: ")
    assert answer("log", "--bucket", str(written.folder.parent / "nowhere"), code=3)["error"]["kind"] == "not_found"


def test_a_head_that_names_what_is_gone_is_1(written: Written) -> None:
    for file in (written.folder / "versions").iterdir():
        file.unlink()
    for arguments in (("log", "--bucket"), ("inspect",), ("verify", "--bucket")):
        assert answer(*arguments, str(written.folder), code=1)["error"]["kind"] == "not_found"
    written.lose(HEAD_KEY)
    assert answer("log", "--bucket", str(written.folder), code=3)["error"]["kind"] == "not_found"
    assert answer("inspect", str(written.folder))["head"] is None


def test_versions_that_gc_cannot_keep_are_1(written: Written) -> None:
    policy = ("gc", "--keep-last", "3", "--min-age", "0s")
    assert code_of(written, *policy, "--dry-run")[0] == 0
    lose_object(written, 7)
    for flags in (("--dry-run",), ()):
        code, document = code_of(written, *policy, *flags)
        assert (code, document["exit_code"]) == (1, 1)
        assert [row["version"] for row in document["lost"]] == [7, 8]


def test_ranges_that_compact_cannot_make_are_1(written: Written) -> None:
    lose_object(written, 7)
    code, document = code_of(written, "compact")
    assert (code, document["exit_code"]) == (1, 1)
    assert [(row["first"], row["last"]) for row in document["skipped"]] == [(4, 8)]


def test_ranges_that_there_cannot_be_are_no_failure_of_compact(tmp_path: Path) -> None:
    written = Written(tmp_path / "run", 0)
    for _ in range(16):
        written.publish(codec="raw")
    code, document = code_of(written, "compact")
    assert (code, document["folds"], len(document["skipped"])) == (0, [], 5)
    lose_object(written, 6)
    assert code_of(written, "compact")[0] == 0


def test_a_repair_that_is_only_tried_is_1_where_there_is_something_to_repair(written: Written) -> None:
    (written.folder / HEAD_KEY).write_bytes(b"{")
    code, document = code_of(written, "repair", "--dry-run")
    assert (code, document["exit_code"], document["verdict"]) == (1, 1, False)
    assert (len(document["repaired"]), document["lost"]) == (1, [])
    text = shown("repair", "--dry-run", "--bucket", str(written.folder), code=1)
    assert "damaged, and all of it could be repaired" in text
    code, document = code_of(written, "repair")
    assert (code, document["verdict"]) == (0, True)
    code, document = code_of(written, "repair", "--dry-run")
    assert (code, document["verdict"], document["repaired"]) == (0, True, [])


def test_a_damaged_run_is_1_for_doctor(written: Written, tmp_path: Path) -> None:
    lose_object(written, 8)
    doctor = ("doctor", "--bytes", "0", "--read-only")
    code, document = code_of(written, *doctor)
    assert (code, document["error"]["kind"]) == (1, "not_found")
    assert answer(*doctor, "--bucket", str(tmp_path / "nowhere"), code=3)["error"]["kind"] == "not_found"


@pytest.mark.parametrize("command", ["log", "inspect", "verify", "repair", "gc", "compact", "fleet", "doctor"])
def test_help_lists_exit_codes(command: str) -> None:
    text = delta_sync(command, "--help").stdout
    assert "exit codes:" in text
    assert "\n  0 " in text
    assert "\n  1 " in text

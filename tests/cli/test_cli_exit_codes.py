"""Exit codes: 1 for what a check found, 3 for what was asked for and is not there, 4 for a store that failed.

That a process ends with the code that its command returns is shown in ``test_cli.py``, once for each class.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import answer, delta_sync, kind, shown
from tests.support.written import Written
from vllm_delta_sync.format.manifest import HEAD_KEY, version_key


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "run", 8)


def code_of(written: Written, *arguments: str) -> tuple[int, Any]:
    """Exit code and document of a command on the run; with and without ``--json`` they agree."""
    code = delta_sync(*arguments, "--bucket", written.folder).code
    return code, answer(*arguments, "--bucket", written.folder, code=code)


@pytest.mark.parametrize(
    ("lost", "found"),
    [("object", "not_found"), (version_key(3), "not_found"), (version_key(8), "not_found"), (HEAD_KEY, "format")],
)
def test_whatever_verify_finds_is_1(written: Written, lost: str, found: str) -> None:
    if lost == "object":
        written.lose(written.object_of(3))
    elif lost == HEAD_KEY:
        written.bucket.put(HEAD_KEY, b"{")
    else:
        written.lose(lost)
    for flags in ((), ("--all",)):
        code, document = code_of(written, "verify", *flags)
        assert (code, document["error"]["kind"]) == (1, found)


def test_verify_of_what_is_not_there_is_3(written: Written, tmp_path: Path) -> None:
    assert code_of(written, "verify", "--base", str(tmp_path / "typo"))[0] == 3
    assert kind(3, "verify", "--bucket", tmp_path / "nowhere") == "not_found"


@pytest.mark.parametrize(
    "command", ["verify", "log", "gc --dry-run", "compact", "repair", "fleet list", "du", "stats", "diff 0 1"]
)
def test_a_store_that_fails_is_4(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"no directory")
    assert kind(4, *command.split(), "--bucket", tmp_path / "file") == "store"


def test_a_broken_history_is_1_for_log_and_inspect(written: Written, tmp_path: Path) -> None:
    written.lose(written.object_of(3))
    assert kind(1, "inspect", "--bucket", written.folder, "--version", "3") == "not_found"
    assert kind(3, "inspect", "--bucket", written.folder, "--version", "9") == "not_found"
    written.lose(version_key(5))
    done = delta_sync("log", "--bucket", written.folder)
    assert (done.code, len(done.out.splitlines()), done.err.split(": ")[1]) == (1, 6, "not_found")
    for command in (("log", "--bucket"), ("inspect", "--bucket")):
        assert kind(3, *command, tmp_path / "nowhere") == "not_found"


def test_a_head_that_names_what_is_gone_is_1(written: Written) -> None:
    for version in range(9):
        written.lose(version_key(version))
    for arguments in (("log", "--bucket"), ("inspect", "--bucket"), ("verify", "--bucket")):
        assert kind(1, *arguments, written.folder) == "not_found"
    written.lose(HEAD_KEY)
    for command in ("log", "verify"):
        assert kind(3, command, "--bucket", written.folder) == "not_found"
    assert answer("inspect", "--bucket", written.folder)["head"] is None


def test_versions_that_gc_cannot_keep_are_1(written: Written) -> None:
    policy = ("gc", "--keep-last", "3", "--min-age", "0s")
    assert code_of(written, *policy, "--dry-run")[0] == 0
    written.lose(written.object_of(7))
    for flags in (("--dry-run",), ()):
        code, document = code_of(written, *policy, *flags)
        assert (code, document["exit_code"]) == (1, 1)
        assert [row["version"] for row in document["lost"]] == [7, 8]


def test_ranges_that_compact_cannot_make_are_1(written: Written) -> None:
    written.lose(written.object_of(7))
    code, document = code_of(written, "compact")
    assert (code, document["exit_code"]) == (1, 1)
    assert [(row["first"], row["last"]) for row in document["skipped"]] == [(4, 8)]


def test_ranges_that_there_cannot_be_are_no_failure_of_compact(tmp_path: Path) -> None:
    written = Written(tmp_path / "run")
    for _ in range(16):
        written.publish(codec="raw")
    code, document = code_of(written, "compact")
    assert (code, document["folds"], len(document["skipped"])) == (0, [], 5)
    written.lose(written.object_of(6))
    assert code_of(written, "compact")[0] == 0


def test_a_repair_that_is_only_tried_is_1_where_there_is_something_to_repair(written: Written) -> None:
    written.bucket.put(HEAD_KEY, b"{")
    code, document = code_of(written, "repair", "--dry-run")
    assert (code, document["exit_code"], document["verdict"]) == (1, 1, False)
    assert (len(document["repaired"]), document["lost"]) == (1, [])
    text = shown("repair", "--dry-run", "--bucket", written.folder, code=1)
    assert "damaged, and all of it could be repaired" in text
    assert code_of(written, "repair")[0] == 0
    code, document = code_of(written, "repair", "--dry-run")
    assert (code, document["verdict"], document["repaired"]) == (0, True, [])


def test_a_damaged_run_is_1_for_doctor(written: Written, tmp_path: Path) -> None:
    written.lose(written.object_of(8))
    doctor = ("doctor", "--bytes", "0", "--read-only")
    code, document = code_of(written, *doctor)
    assert (code, document["error"]["kind"]) == (1, "not_found")
    assert kind(3, *doctor, "--bucket", tmp_path / "nowhere") == "not_found"

"""Exit codes: 1 for what a check found, 3 for what was asked for and is not there, 4 for a store that failed.

``test_every_command_follows_the_rule`` goes over all commands.

That a process ends with the code that its command returns is shown in ``test_cli.py``, once for each class.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers import closed_port
from tests.support.commands import answer, delta_sync, envelope, kind, refusal, shown
from tests.support.samples import RunWriter
from tests.support.written import SMALL, Written
from vllm_delta_sync import cli
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import error_kinds
from vllm_delta_sync.format.manifest import HEAD_KEY, version_key
from vllm_delta_sync.trust.keys import generate


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("eight") / "run", 8)


@pytest.fixture
def written(template: Written, tmp_path: Path) -> Written:
    return template.copied(tmp_path / "run")


def code_of(written: Written, *arguments: str) -> tuple[int, Any]:
    """Exit code of a command on the run, with and without ``--json``, and its data."""
    code = delta_sync(*arguments, "--bucket", written.folder).code
    return code, answer(*arguments, "--bucket", written.folder, code=code)


ON_A_RUN = {
    **dict.fromkeys(("log", "inspect", "verify", "repair", "compact", "du", "stats", "tag list"), ""),
    **dict.fromkeys(("fleet list", "fleet wait"), ""),
    **dict.fromkeys(("branch", "export"), "--to {new}"),
    **dict.fromkeys(("tag set", "tag rm"), "best"),
    "gc": "--yes",
    "diff": "0 1",
    "follow": "--once --to {new}",
    "doctor": "--read-only",
    "publish": "--from {new}",
    "dashboard": "--port 0",
    "report": "--to {new}.html",
}
"""Arguments of the commands that read a run."""
OF_A_SERVER = {
    **dict.fromkeys(("status", "sync", "hold", "release"), ""),
    **dict.fromkeys(("rollback", "wait"), "--version 1"),
}
OTHERS = {
    "serve": [(2, "model --dry-run --bucket x --policy never")],
    "broker": [(2, "--publishers tcp://*:1"), (4, "--publishers tcp://*:70000 --subscribers tcp://*:70000")],
    "mirror": [(2, "--bucket x"), (2, ""), (2, "--bucket gopher://x")],
    "keygen": [(2, ""), (4, "{new}/no/a.key"), (5, "{file}")],
}


def failures(command: str, folder: Path) -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """Ways in which a command fails: exit code, arguments, environment."""
    names = {"new": folder / "new", "file": folder / "file"}
    if command in OTHERS:
        yield from ((code, arguments.format(**names).split(), {}) for code, arguments in OTHERS[command])
        return
    arguments = (ON_A_RUN | OF_A_SERVER)[command].format(**names).split()
    yield 2, [*arguments, "--nonsense"], {}
    if command in OF_A_SERVER:
        yield 2, [*arguments, "--server", "nowhere"], {}
        yield 4, [*arguments, "--server", f"http://127.0.0.1:{closed_port()}"], {}
        return
    yield 2, arguments, {}  # no run is named
    yield 2, arguments, {"DELTA_SYNC_BUCKET": "gopher://x"}
    yield 3, arguments, {"DELTA_SYNC_BUCKET": str(folder / "nowhere")}
    yield 4, arguments, {"DELTA_SYNC_BUCKET": str(folder / "file")}


def test_every_command_has_its_failures() -> None:
    assert {*ON_A_RUN, *OF_A_SERVER, *OTHERS} == set(cli.build_parser().commands)


@pytest.mark.parametrize("command", [*ON_A_RUN, *OF_A_SERVER, *OTHERS])
def test_every_command_follows_the_rule(command: str, tmp_path: Path) -> None:
    generate(tmp_path / "file")
    for code, arguments, environment in failures(command, tmp_path):
        done = delta_sync(*command.split(), *arguments, **environment)
        assert (done.code, done.out if command != "doctor" else "") == (code, ""), (arguments, done)
        whole = envelope(*command.split(), *arguments, code=code, **environment)
        found = whole["error"]["kind"]
        assert error_kinds()[found].exit_code == code
        if command in ON_A_RUN and code > 2:
            assert found == {3: "not_found", 4: "store"}[code]
        # The doctor prints its findings instead.
        assert done.err == (f"delta-sync: {found}: {whole['error']['message']}\n" if not done.out else "")
        assert whole["command"] in (command, None if code == 2 else command)


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
        assert kind(1, "verify", *flags, "--bucket", written.folder) == found
        assert delta_sync("verify", *flags, "--bucket", written.folder).code == 1


def test_a_head_that_names_what_is_gone_is_1(written: Written) -> None:
    written.lose(written.object_of(3))
    assert kind(1, "inspect", "--bucket", written.folder, "--version", "3") == "not_found"
    assert kind(3, "inspect", "--bucket", written.folder, "--version", "9") == "not_found"
    for command in ("export --to {}", "diff 0 3", "follow --once --to {}", "tag set x", "branch --to {}"):
        words = command.format(written.folder.with_name(command.split()[0])).split()
        assert kind(1, *words, "--bucket", written.folder) == "not_found", command
    for version in range(9):
        written.lose(version_key(version))
    for arguments in (("log", "--bucket"), ("inspect", "--bucket"), ("verify", "--bucket")):
        assert kind(1, *arguments, written.folder) == "not_found"
    written.lose(HEAD_KEY)
    for command in ("log", "verify"):
        assert kind(3, command, "--bucket", written.folder) == "not_found"
    assert answer("inspect", "--bucket", written.folder)["head"] is None


def test_a_run_without_versions_is_named_as_that(tmp_path: Path) -> None:
    writer = RunWriter(open_bucket(tmp_path / "run"), SMALL)
    for command in ("log", "stats", "compact", "gc", "branch", "export", "tag set", "follow", "diff"):
        arguments = [*command.split(), *ON_A_RUN[command].format(new=tmp_path / "new").split()]
        error = refusal(*arguments, "--bucket", writer.bucket.url, code=3)
        assert error["message"] == f"no version is published at {writer.bucket.url!r} yet", command


def test_versions_that_gc_cannot_keep_are_1(written: Written) -> None:
    policy = ("gc", "--keep-last", "3", "--min-age", "0s")
    assert code_of(written, *policy, "--dry-run")[0] == 0
    written.lose(written.object_of(7))
    for flags in (("--dry-run",), ()):
        code, document = code_of(written, *policy, *flags)
        assert (code, [row["version"] for row in document["lost"]]) == (1, [7, 8])
        assert kind(1, *policy, *flags, "--bucket", written.folder) == "incomplete"


def test_versions_that_gc_removed_are_3(written: Written) -> None:
    written.merged_deltas()
    assert code_of(written, "gc", "--keep-last", "3", "--min-age", "0s")[0] == 0
    for command in ("export --version 2 --to {}", "diff 2 head", "inspect --version 2"):
        done = delta_sync(*command.format(written.folder.with_name("new")).split(), "--bucket", written.folder)
        assert (done.code, "(delta-sync gc)" in done.err) == (3, True), done


def test_ranges_that_there_cannot_be_are_no_failure_of_compact(tmp_path: Path) -> None:
    written = Written(tmp_path / "run")
    for _ in range(16):
        written.publish(codec="raw")
    code, document = code_of(written, "compact")
    assert (code, document["merged_deltas"], len(document["skipped"])) == (0, [], 5)
    written.lose(written.object_of(6))
    assert code_of(written, "compact")[0] == 0


def test_a_repair_that_is_only_tried_is_1_where_there_is_something_to_repair(written: Written) -> None:
    written.bucket.put(HEAD_KEY, b"{")
    code, document = code_of(written, "repair", "--dry-run")
    assert (code, document["verdict"]) == (1, False)
    assert (len(document["repaired"]), document["lost"]) == (1, [])
    text = shown("repair", "--dry-run", "--bucket", written.folder, code=1)
    assert "damaged, and all of it could be repaired" in text
    assert code_of(written, "repair")[0] == 0
    code, document = code_of(written, "repair", "--dry-run")
    assert (code, document["verdict"], document["repaired"]) == (0, True, [])

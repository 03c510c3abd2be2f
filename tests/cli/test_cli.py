"""``delta-sync log``, ``inspect``, ``verify`` and ``repair`` on the golden run, and what all commands share."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.golden.regenerate import DIRECTORY
from tests.support.commands import answer, delta_sync, envelope, kind, process, shown
from tests.support.running import run_python
from tests.support.samples import flip
from tests.support.written import SMALL, reference_run, save_base
from vllm_delta_sync import __version__, cli
from vllm_delta_sync.cli.text import clean, percent, shape, size, times
from vllm_delta_sync.client import open_run
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.maintenance.anchor_writer import make_anchor
from vllm_delta_sync.maintenance.merge_writer import make_merged_delta

GOLDEN = str(DIRECTORY)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    copy = tmp_path / "run"
    shutil.copytree(DIRECTORY, copy)
    run = open_run(str(copy))
    make_anchor(run, 3)
    make_merged_delta(run, 0, 2)
    return copy


def object_of(path: Path, version: int) -> Path:
    return path / open_run(str(path)).manifest(version).objects[0].key


def test_version_and_help() -> None:
    assert delta_sync("--version").out == f"delta-sync {__version__}\n"
    text, parser = delta_sync("--help").out, cli.build_parser()
    assert all(word in text for word in (*parser.children, "exit codes:", "130 interrupted", "examples:"))
    for group in ("tag", "fleet"):
        text = delta_sync(group, "--help").out
        assert all(f"\n    {name} " in text for name in parser.children[group].children), group
        assert "examples:" in text
    for command in parser.commands:
        done = delta_sync(*command.split(), "--help")
        assert done.code == 0
        assert "examples:" in done.out, command
        if command not in ("serve", "broker", "mirror", "keygen", "branch"):
            assert all(word in done.out for word in ("--json", "exit codes:", "\n  0 ")), command
    assert "vllm serve --help" in delta_sync("serve", "--help").out


def test_help_has_no_colours_with_python_3_14() -> None:
    parser = cli.build_parser()
    assert not any(each.color for each in (parser, *parser.children.values(), *parser.commands.values()))


def test_help_fits_a_screen() -> None:
    """Of 100 columns; only serve, which lists every setting, is longer than 50 lines."""
    for command in cli.build_parser().commands:
        lines = delta_sync(*command.split(), "--help", COLUMNS="100").out.splitlines()
        assert len(lines) <= 50 or command == "serve", (command, len(lines))
        assert all(len(line) <= 100 or "delta-sync " in line for line in lines), command


def test_examples_of_the_help_can_be_pasted() -> None:
    """A narrow terminal cuts none of them, and a shell parses all."""
    for command in ("", *cli.build_parser().commands):
        narrow, wide = (
            delta_sync(*command.split(), "--help", COLUMNS=columns).out.partition("examples:\n")[2].partition("\n\n")[0]
            for columns in ("60", "200")
        )
        assert narrow == wide, command
        done = subprocess.run(["bash", "-n"], input=narrow, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), (command, narrow)


def test_log() -> None:
    lines = shown("log", "--bucket", GOLDEN).splitlines()
    assert lines[0].split() == ["version", "step", "kind", "changed", "payload", "smaller", "fingerprint", "created"]
    assert len(lines) == 7
    assert lines[3].split()[:5] == ["2", "20", "delta", "1.17", "%"]
    assert lines[1].split()[2:4] == ["anchor", "-"]
    document = answer("log", "--bucket", DIRECTORY.as_uri())
    assert document["run"] == "901de20000000000000000000000c0de"
    rows = document["versions"]
    assert [row["version"] for row in rows] == list(range(6))
    assert (rows[2]["changed"], rows[2]["codec"]) == (57, "plain")
    assert rows[2]["changed_share"] == pytest.approx(57 / 4870)
    assert answer("log", "--last", "2", DELTA_SYNC_BUCKET=GOLDEN)["versions"] == rows[-2:]


def test_log_shows_what_stands_before_the_first_flaw(path: Path) -> None:
    (path / "versions" / "0000000003.json").unlink()
    done = delta_sync("log", "--bucket", path)
    assert (done.code, len(done.out.splitlines())) == (1, 4)
    assert done.err.startswith("delta-sync: not_found: no object 'versions/0000000003.json'")
    whole = envelope("log", "--bucket", path, code=1)
    assert [row["version"] for row in whole["data"]["versions"]] == [0, 1, 2]
    assert (whole["error"]["kind"], done.err) == ("not_found", f"delta-sync: not_found: {whole['error']['message']}\n")


def test_inspect_a_run(path: Path) -> None:
    document = answer("inspect", "--bucket", GOLDEN)
    assert (document["total"], document["head"]["version"]) == (4870, 5)
    assert {row["name"]: row["shape"] for row in document["tensors"]}["model.scale"] == []
    text = shown("inspect", "--bucket", GOLDEN, "--top", "2")
    assert "model.embed.weight" in text
    assert "model.scale" not in text
    assert "… 4 more; --all lists them" in text
    assert "model.scale" in shown("inspect", "--bucket", GOLDEN, "--all")
    shutil.rmtree(path / "versions")
    (path / "HEAD.json").unlink()
    assert answer("inspect", "--bucket", path)["head"] is None
    assert "nothing published yet" in shown("inspect", "--bucket", path)


def test_inspect_a_version() -> None:
    document = answer("inspect", "--bucket", GOLDEN, "--version", "5")
    assert {row["name"]: (row["sent"], row["changed"]) for row in document["tensors"]} == {
        "model.embed.weight": ("full", 3072),
        "model.layers.0.expert.weight": ("sparse", 1024),
        "model.layers.0.norm.weight": ("sparse", 40),
        "model.layers.0.proj.weight": ("sparse", 1),
        "model.scale": ("full", 1),
    }
    assert sum(item["bytes"] for item in document["objects"]) == document["payload_bytes"]
    text = shown("inspect", "--bucket", GOLDEN, "--version", "1", "--top", "1")
    assert "by 1 ULP" in text
    assert "… 2 more" in text
    assert answer("inspect", "--bucket", GOLDEN, "--version", "0")["kind"] == "anchor"
    assert answer("inspect", "--bucket", GOLDEN, "--version", "4")["tensors"] == []
    shown("inspect", "--bucket", GOLDEN, "--version", "0", "--all")


def test_what_a_bucket_says_cannot_move_the_cursor(path: Path, tmp_path: Path) -> None:
    reference_run(tmp_path / "reference", "/nowhere/\x1bbase")
    texts = [shown("verify", "--bucket", tmp_path / "reference")]
    texts.append(shown("inspect", "--bucket", tmp_path / "reference", "--version", "0"))
    assert "\\x1bbase" in texts[1]
    (path / side.tag_key("best")).parent.mkdir()
    (path / side.tag_key("best")).write_bytes(b'{"format_version":2,"x":"\x1b[2J"}')
    texts += [shown(*command, "--bucket", path, code=1) for command in (["verify", "--all"], ["repair"])]
    assert not any("\x1b" in text or "\x9b" in text for text in texts)


def test_verify(path: Path) -> None:
    document = answer("verify", "--bucket", path)
    names = ("verdict", "versions", "head", "replayed", "notes", "anchors", "merged_deltas")
    assert [document[name] for name in names] == [True, 6, 5, True, [], 1, 1]
    assert "findings" not in document
    assert answer("verify", "--bucket", path, "--all")["findings"] == []
    text = shown("verify", "--bucket", path)
    for line in ("verdict      ok", "1 anchors and 1 merged deltas are valid", "rebuilt, and equal to the fingerprint"):
        assert line in text


def test_verify_names_the_first_problem_or_all(path: Path) -> None:
    flip(object_of(path, 1))
    object_of(path, 5).unlink()
    done = delta_sync("verify", "--bucket", path)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("delta-sync: digest: object objects/")
    assert kind(1, "verify", "--bucket", path) == "digest"
    whole = envelope("verify", "--all", code=1, DELTA_SYNC_BUCKET=str(path))
    document = whole["data"]
    assert (whole["command"], whole["error"]["kind"], document["verdict"]) == ("verify", "digest", False)
    assert [(row["version"], row["kind"]) for row in document["findings"]] == [(1, "digest"), (5, "not_found")]
    assert document["findings"][0]["document"] == keys.version_key(1)
    assert document["unreadable"] == [5]  # the versions after 1 lead back to it
    text = shown("verify", "--all", "--bucket", path, code=1)
    assert text.startswith("digest: object objects/")
    assert "2 problems" in text
    assert "version 5" in text
    for file in (path / "versions").iterdir():
        file.write_bytes(b"{")
    document = answer("verify", "--bucket", path, "--all", code=1)
    assert (document["head"], document["fingerprint"]) == (-1, None)
    assert "fingerprint  none" in shown("verify", "--bucket", path, "--all", code=1)


def test_verify_with_and_without_the_base(tmp_path: Path) -> None:
    _, bits = reference_run(tmp_path / "run", "/nowhere/base")
    verify = ("verify", "--bucket", tmp_path / "run")
    assert "not rebuilt" in shown(*verify)
    assert answer(*verify)["replayed"] is False
    save_base(tmp_path / "base", bits[0])
    assert answer(*verify, "--base", tmp_path / "base")["replayed"] is True
    bits[0][SMALL.index("w")][0] ^= np.uint16(1)
    save_base(tmp_path / "other", bits[0])
    done = delta_sync(*verify, "--base", tmp_path / "other")
    assert (done.code, done.err.split(": ")[1]) == (1, "base")
    assert str(tmp_path / "other") in done.err
    assert "pass base= with the original checkpoint (--base on the command line)" in done.err
    assert kind(3, *verify, "--base", tmp_path / "typo") == "not_found"


def test_repair(path: Path, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    shutil.copytree(path, mirror)
    document = answer("repair", "--bucket", path)
    assert (document["verdict"], document["repaired"]) == (True, [])
    assert "verdict   ok" in shown("repair", "--bucket", path)
    flip(object_of(path, 3))
    (path / "HEAD.json").write_bytes(b"{")
    flip(object_of(path, 5))
    damaged = {file: file.read_bytes() for file in path.rglob("*.*") if file.is_file()}
    document = answer("repair", "--bucket", path, "--dry-run", code=1)
    # That the object of version 3 is gone is not recorded before version 5 can be read again.
    assert (document["dry_run"], len(document["repaired"]), document["unreadable"]) == (True, 1, [[5, 5]])
    text = shown("repair", "--bucket", path, "--dry-run", code=1)
    assert "could be repaired: HEAD.json: points at version 5" in text
    assert "lost: unreadable versions: 5; a mirror" in text
    assert {file: file.read_bytes() for file in path.rglob("*.*") if file.is_file()} == damaged
    assert "ok, repaired" in shown("repair", "--bucket", path, "--mirror", mirror.as_uri())
    assert answer("verify", "--bucket", path)["verdict"] is True
    for file in mirror.rglob("*"):
        if file.is_file() and "~staging" not in file.parts:
            assert (path / file.relative_to(mirror)).read_bytes() == file.read_bytes()
    # A run that cannot even be opened.
    (path / "tensors.json").unlink()
    assert kind(3, "repair", "--bucket", path) == "not_found"
    document = answer("repair", "--bucket", path, "--mirror", mirror)
    assert (document["repaired"], document["lost"]) == (["tensors.json: from the mirror"], [])


USAGE = (
    *("", "bogus", "log", "log --bucket", "log --bucket RUN --last 0", "log --bucket RUN --last -1"),
    *("log --bucket RUN --last ٣", "log --bucket RUN --unknown", "log --buck RUN", "log --bucket gopher://x"),
    *("inspect", "inspect --bucket RUN --version -1", "inspect --bucket RUN --version two", "inspect RUN"),
    *("verify", "repair", "serve --bucket RUN", "gc", "gc --bucket x --keep-last 0", "gc --bucket x --keep-every two"),
    *("gc --bucket x --keep-for 7y", "gc --bucket x --min-age -1s", "gc --bucket x --min-age soon"),
    *("tag", "tag best", "tag set best", "tag set --bucket x", "tag rm --bucket x"),
    *("tag set best --bucket x --version two", "tag set rebase-1-3 --bucket RUN"),
    *("tag rm best --bucket x --version 3", "branch", "branch --bucket x", "branch --to y", "compact", "tag list"),
    *("compact --bucket RUN --no-merge", "compact --bucket RUN --anchor -1", "compact --bucket RUN --anchor best"),
    *("fleet", "fleet --bucket RUN", "follow --bucket RUN --to x --poll 0", "follow --bucket RUN --to x --poll soon"),
    *("fleet list --bucket RUN --replicas 2", "fleet list --bucket RUN --timeout 5"),
    *("fleet wait --bucket RUN --version x", "doctor"),
    *("doctor --bucket RUN --bytes -1", "doctor --bucket RUN --bytes 1XB"),
    *("export --bucket RUN", "export --to x", "export --bucket RUN --to x --version best"),
    *("export --bucket RUN --to x --shard-bytes 0", "rollback", "wait", "sync --version two", "rollback --version -1"),
    *("hold --timeout 0", "hold --version 1", "release --server", "status --server nowhere"),
    *("publish --bucket RUN", "publish --from x --watch y --bucket RUN", "publish --from x", "publish --watch x"),
    *("publish --watch x --step 1 --bucket RUN", "publish --from x --once --bucket RUN"),
    *("publish --from x --poll 1 --bucket RUN", "publish --watch x --poll 0 --bucket RUN"),
    *("publish --from x --step -1 --bucket RUN", "publish --from x --codec zip --bucket RUN"),
    *("follow --bucket RUN", "follow --bucket RUN --to x --keep 0", "log --bucket ~/runs/a"),
    *("report --bucket RUN --to /", "keygen /"),
    *("dashboard --bucket RUN --port 99999", "dashboard --bucket RUN --host ."),
)


@pytest.mark.parametrize("line", USAGE)
def test_usage_errors(line: str) -> None:
    arguments = line.replace("RUN", GOLDEN).split()
    done = delta_sync(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("delta-sync: usage: ")
    assert len(done.err.splitlines()) == 1
    assert kind(2, *arguments) == "usage"


# How a process ends


def test_a_process_ends_with_the_code_of_the_command(path: Path) -> None:
    """Other tests call commands in their own process, but for those of 2, 3 and 130 below."""
    file = path / "file"
    file.write_bytes(b"")
    assert process("log", "--bucket", GOLDEN).out == shown("log", "--bucket", GOLDEN)
    flip(object_of(path, 1))
    for code, error, arguments in (
        (1, "digest", ("verify", "--bucket", path)),
        (4, "store", ("log", "--bucket", file)),
        (5, "conflict", ("keygen", file)),
    ):
        done = process(*arguments)
        assert (done.code, done.out, done.err.split(": ")[:2]) == (code, "", ["delta-sync", error])


def test_interrupt_while_a_command_starts_is_130_and_silent() -> None:
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'vllm_delta_sync.cli.stats':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from vllm_delta_sync.cli import main\n"
        "print('started')\n"
    )
    done = run_python("-c", program, code=130)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupted_command_removes_what_it_has_written(number: str, code: int, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "run")
    program = (
        "import os, signal, sys, time\n"
        "from vllm_delta_sync import cli\n"
        "from vllm_delta_sync.maintenance import branch\n"
        "def slow(*arguments):\n"
        f"    os.kill(os.getpid(), signal.{number})\n"
        "    time.sleep(60)\n"
        # Inherited as ignored where the tests run in the background of a shell without job control.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "branch.confirm_created = slow\n"
        f"sys.argv[1:] = ['branch', '--bucket', {str(tmp_path / 'run')!r}, '--to', {str(tmp_path / 'branch')!r}]\n"
        "sys.exit(cli.main())\n"
    )
    done = run_python("-c", program, code=code)
    assert (done.stdout, done.stderr) == ("", "")
    assert not [path for path in (tmp_path / "branch").rglob("*") if path.is_file()]
    assert not answer("tag", "list", "--bucket", tmp_path / "run")["tags"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (("log", "--bucket", GOLDEN), 0),
        (("log", "--bucket", "/nowhere", "--json"), 3),
        (("keygen", ""), 2),
        (("follow", "--bucket", GOLDEN, "--to", "{out}"), 141),
    ],
)
def test_a_reader_that_goes_away(line: tuple[str, ...], code: int, tmp_path: Path) -> None:
    """The code says what the command found; of one that was not at its end, that."""
    command = [sys.executable, "-m", "vllm_delta_sync.cli", *(word.format(out=tmp_path / "out") for word in line)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.close()
        assert b"Traceback" not in started.stderr.read()
        assert started.wait(60) == code


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    for line, redirection, code, said in (
        (f"log --bucket {GOLDEN}", ">/dev/full", 4, "the output cannot be written"),
        ("log --help", ">/dev/full", 4, "the output cannot be written"),
        # As it goes on.
        (f"doctor --read-only --bytes 0 --bucket {GOLDEN}", ">/dev/full", 4, "the output cannot be written"),
        (f"log --bucket {GOLDEN}", ">/dev/full 2>&1", 4, ""),
        ("log --bucket /nowhere", "2>/dev/full", 3, ""),
        ("log --help", ">&-", 0, ""),
        (f"log --bucket {GOLDEN}", ">&-", 0, ""),
        ("log --bucket /nowhere", "2>&-", 3, ""),
        (f"follow --once --bucket {GOLDEN} --to {tmp_path / 'out'}", ">&-", 0, ""),
    ):
        command = f"{sys.executable} -m vllm_delta_sync.cli {line} {redirection}"
        done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60)
        assert done.returncode == code, command
        assert said in done.stderr, command
        assert "Traceback" not in done.stderr
        assert code == 0 or not done.stdout


def test_a_working_folder_that_was_removed(tmp_path: Path) -> None:
    for line in ("log --bucket relative", f"verify --bucket {GOLDEN}"):
        command = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m vllm_delta_sync.cli {line}"
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        done = subprocess.run(
            ["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
        )
        assert done.returncode == 2, done
        assert done.stderr.splitlines() == [
            "delta-sync: usage: the folder in which the command runs was removed; change to one that exists"
        ]


def test_a_terminal_that_knows_ascii_only() -> None:
    done = delta_sync("inspect", "--bucket", GOLDEN, "--top", "1", encoding="ascii")
    assert done.code == 0
    assert "\\u2026 5 more" in done.out


def test_reading_loads_neither_torch_nor_vllm() -> None:
    program = (
        "import sys\n"
        "from vllm_delta_sync import cli\n"
        f"for line in (['log', '--bucket', {GOLDEN!r}], ['inspect', '--bucket', {GOLDEN!r}, '--version', '4'],\n"
        f"             ['verify', '--bucket', {GOLDEN!r}]):\n"
        "    assert cli.run(line) == 0\n"
        "print([name for name in ('torch', 'vllm', 'zmq', 'transformers') if name in sys.modules], file=sys.stderr)\n"
    )
    assert run_python("-c", program).stderr == "[]\n"


def test_text() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1 kB", 1_234_567: "1.23 MB", 10**9: "1 GB", 10**18: "1e+03 PB"}
    assert {count: size(count) for count in sizes} == sizes
    assert (percent(1, 3), percent(0, 5), percent(1, 0)) == ("33.3 %", "0 %", "-")
    assert (times(100, 3), times(100, 0)) == ("33.3x", "-")
    assert (shape([2, 3]), shape([])) == ("2x3", "scalar")
    assert clean("a\x1b\n\u202eé") == "a\\x1b\\n\\u202eé"

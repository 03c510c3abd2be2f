"""The ``delta-sync`` command, run as a user runs it: in a process of its own, on the golden run."""

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import rfc8785
from safetensors.numpy import save_file

from tests.golden.regenerate import DIRECTORY
from tests.run.test_chain import SMALL, reference_run, save_base
from vllm_delta_sync import __version__, cli
from vllm_delta_sync.cli import split_serve
from vllm_delta_sync.cli.text import clean, percent, shape, size, times
from vllm_delta_sync.config import Settings
from vllm_delta_sync.wire.container import write_container

GOLDEN = str(DIRECTORY)


def delta_sync(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DELTA_SYNC_")}
    return subprocess.run(
        [sys.executable, "-m", "vllm_delta_sync.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**kept, **environment},
    )


def answer(*arguments: str, **environment: str) -> Any:
    """The JSON document of a command that succeeds; in this process, to be quick."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.dict(os.environ, environment), redirect_stdout(out), redirect_stderr(err):
        code = cli.run([*arguments, "--json"])
    assert (code, err.getvalue()) == (0, "")
    return json.loads(out.getvalue())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    copy = tmp_path / "run"
    shutil.copytree(DIRECTORY, copy)
    return copy


def test_version_and_help() -> None:
    assert delta_sync("--version").stdout == f"delta-sync {__version__}\n"
    text = delta_sync("--help").stdout
    for word in ("serve", "log", "inspect", "verify", "exit codes:", "130 interrupted", "examples:"):
        assert word in text
    for command in ("serve", "log", "inspect", "verify"):
        done = delta_sync(command, "--help")
        assert done.returncode == 0
        assert "examples:" in done.stdout
        assert "--json" in done.stdout
    assert "vllm serve --help" in delta_sync("serve", "--help").stdout


def test_log() -> None:
    lines = delta_sync("log", "--bucket", GOLDEN).stdout.splitlines()
    assert lines[0].split() == ["version", "step", "kind", "changed", "payload", "smaller", "fingerprint", "created"]
    assert len(lines) == 7
    assert lines[3].split()[:5] == ["2", "20", "delta", "1.17", "%"]
    assert lines[1].split()[2:4] == ["anchor", "-"]


def test_log_as_json() -> None:
    document = answer("log", "--bucket", DIRECTORY.as_uri())
    assert document["run"] == "901de20000000000000000000000c0de"
    assert [row["version"] for row in document["versions"]] == list(range(6))
    assert document["versions"][2]["changed"] == 57
    assert document["versions"][2]["changed_share"] == pytest.approx(57 / 4870)
    assert document["versions"][2]["codec"] == "packed"
    last = answer("log", "--last", "2", DELTA_SYNC_BUCKET=GOLDEN)
    assert last["versions"] == document["versions"][-2:]


def test_log_shows_what_stands_before_the_first_flaw(path: Path) -> None:
    (path / "versions" / "0000000003.json").unlink()
    done = delta_sync("log", "--bucket", str(path))
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 4
    assert done.stderr.startswith("delta-sync: not_found: no object 'versions/0000000003.json'")


def test_inspect_a_run(path: Path) -> None:
    document = answer("inspect", GOLDEN)
    assert document["total"] == 4870
    assert document["head"]["version"] == 5
    assert {row["name"]: row["shape"] for row in document["tensors"]}["model.scale"] == []
    text = delta_sync("inspect", GOLDEN, "--top", "2").stdout
    assert "model.embed.weight" in text
    assert "model.scale" not in text
    assert "… 4 more; --all lists them" in text
    assert "model.scale" in delta_sync("inspect", GOLDEN, "--all").stdout
    shutil.rmtree(path / "versions")
    (path / "HEAD.json").unlink()
    assert answer("inspect", str(path))["head"] is None
    assert "nothing published yet" in delta_sync("inspect", str(path)).stdout


def test_inspect_a_version() -> None:
    document = answer("inspect", GOLDEN, "--version", "5")
    sent = {row["name"]: (row["sent"], row["changed"]) for row in document["tensors"]}
    assert sent == {
        "model.embed.weight": ("full", 3072),
        "model.layers.0.expert.weight": ("sparse", 1024),
        "model.layers.0.norm.weight": ("sparse", 40),
        "model.layers.0.proj.weight": ("sparse", 1),
        "model.scale": ("full", 1),
    }
    assert sum(item["bytes"] for item in document["objects"]) == document["payload_bytes"]
    text = delta_sync("inspect", GOLDEN, "--version", "1", "--top", "1").stdout
    assert "by 1 ULP" in text
    assert "… 2 more" in text
    assert answer("inspect", GOLDEN, "--version", "0")["kind"] == "anchor"
    assert answer("inspect", GOLDEN, "--version", "4")["tensors"] == []
    assert delta_sync("inspect", GOLDEN, "--version", "0", "--all").returncode == 0


def test_inspect_a_file(tmp_path: Path) -> None:
    objects = sorted((DIRECTORY / "objects").iterdir())
    documents = [answer("inspect", str(file)) for file in objects]
    assert sorted(document["kind"] for document in documents) == ["delta"] * 4 + ["tensors"]
    versions = sorted(document["delta"]["version"] for document in documents if document["delta"])
    assert versions == [1, 2, 3, 5]
    assert (
        "changes of one version"
        in delta_sync("inspect", str(objects[0]), "--all").stdout + delta_sync("inspect", str(objects[1])).stdout
    )
    save_file({"w": np.zeros((2, 3), np.float32)}, tmp_path / "plain.safetensors")
    assert "whole tensors" in delta_sync("inspect", str(tmp_path / "plain.safetensors")).stdout


def test_what_a_file_says_cannot_move_the_cursor(tmp_path: Path) -> None:
    file = tmp_path / "evil.safetensors"
    file.write_bytes(write_container({"\x1b[2J": ("U8", np.zeros(1, np.uint8))}, {"\x1b]0;": "a\nb\x9b"}))
    done = delta_sync("inspect", str(file))
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "\x9b" not in done.stdout
    assert "\\x1b[2J" in done.stdout


def test_verify(path: Path) -> None:
    document = answer("verify", "--bucket", str(path))
    assert document["verdict"] is True
    assert (document["versions"], document["head"], document["replayed"], document["notes"]) == (6, 5, True, [])
    done = delta_sync("verify", "--bucket", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "verdict      ok" in done.stdout


def test_verify_of_damaged_runs(path: Path) -> None:
    victim = sorted((path / "objects").iterdir())[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    done = delta_sync("verify", "--bucket", str(path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("delta-sync: digest: object objects/")
    done = delta_sync("verify", "--bucket", str(path), "--json")
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["error"]["kind"] == "digest"
    victim.unlink()
    assert delta_sync("verify", "--bucket", str(path)).returncode == 1
    head = path / "HEAD.json"
    head.write_bytes(rfc8785.dumps({**json.loads(head.read_bytes()), "format_version": 2}))
    assert "unsupported: HEAD.json" in delta_sync("verify", "--bucket", str(path)).stderr


def test_verify_with_and_without_the_base(tmp_path: Path) -> None:
    _, bits = reference_run(tmp_path / "run", "/nowhere/\x1bbase")
    url = str(tmp_path / "run")
    text = delta_sync("verify", "--bucket", url).stdout
    assert "not rebuilt" in text
    assert "\x1b" not in text + delta_sync("inspect", url, "--version", "0").stdout
    assert answer("verify", "--bucket", url)["replayed"] is False
    save_base(tmp_path / "base", bits[0])
    assert answer("verify", "--bucket", url, "--base", str(tmp_path / "base"))["replayed"] is True
    bits[0][SMALL.index("w")][0] ^= np.uint16(1)
    save_base(tmp_path / "other", bits[0])
    done = delta_sync("verify", "--bucket", url, "--base", str(tmp_path / "other"))
    assert done.returncode == 1
    assert "fingerprint: version 0: tensor 'w'" in done.stderr
    assert f"the checkpoint in '{tmp_path / 'other'}' is not the one" in done.stderr
    assert "pass --base" in done.stderr
    done = delta_sync("verify", "--bucket", url, "--base", str(tmp_path / "typo"))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"delta-sync: not_found: base '{tmp_path / 'typo'}' is not a directory")


USAGE = [
    [],
    ["bogus"],
    ["log"],
    ["log", "--bucket"],
    ["log", "--bucket", GOLDEN, "--last", "0"],
    ["log", "--bucket", GOLDEN, "--last", "-1"],
    ["log", "--bucket", GOLDEN, "--last", "٣"],
    ["log", "--bucket", GOLDEN, "--unknown"],
    ["log", "--buck", GOLDEN],
    ["log", "--bucket", "gopher://x"],
    ["inspect"],
    ["inspect", GOLDEN, "--version", "-1"],
    ["inspect", GOLDEN, "--version", "two"],
    ["inspect", GOLDEN + "/run.json", "--version", "1"],
    ["verify"],
    ["serve", "--bucket", GOLDEN],
]


@pytest.mark.parametrize("arguments", USAGE, ids=[" ".join(case).replace(GOLDEN, "RUN") or "nothing" for case in USAGE])
def test_usage_errors(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DELTA_SYNC_BUCKET", raising=False)
    assert cli.run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("delta-sync: usage: ")
    assert len(printed.err.splitlines()) == 1
    assert cli.run([*arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "usage"


def test_usage_errors_of_the_command_itself() -> None:
    done = delta_sync("bogus")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("delta-sync: usage: argument COMMAND: invalid choice: 'bogus'")
    assert json.loads(delta_sync("log", "--json").stdout)["error"]["kind"] == "usage"


def test_not_found() -> None:
    for arguments in (
        ["verify", "--bucket", "/nowhere"],
        ["inspect", "/nowhere"],
        ["inspect", GOLDEN, "--version", "9"],
    ):
        done = delta_sync(*arguments)
        assert done.returncode == 3
        assert done.stderr.startswith("delta-sync: not_found: ")


def test_a_file_that_is_no_container(tmp_path: Path) -> None:
    for content in (b"", b"hello", b"\xff" * 100):
        (tmp_path / "file").write_bytes(content)
        assert delta_sync("inspect", str(tmp_path / "file")).returncode == 1


def test_interrupt_is_130_and_silent() -> None:
    code = (
        "import os, signal, sys, time\n"
        "from vllm_delta_sync import cli\n"
        "def slow(options):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        # Inherited as ignored where the tests run in the background of a shell without job control.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "cli.COMMANDS['log'] = slow\n"
        "sys.argv[1:] = ['log']\n"
        "sys.exit(cli.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "vllm_delta_sync.cli", "log", "--bucket", GOLDEN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0
    process.stderr.close()


def test_a_terminal_that_knows_ascii_only() -> None:
    done = delta_sync("inspect", GOLDEN, "--top", "1", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "\\u2026 5 more" in done.stdout


def test_reading_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys\n"
        "from vllm_delta_sync import cli\n"
        f"for line in (['log', '--bucket', {GOLDEN!r}], ['inspect', {GOLDEN!r}, '--version', '4'],\n"
        f"             ['verify', '--bucket', {GOLDEN!r}]):\n"
        "    assert cli.run(line) == 0\n"
        "print([name for name in ('torch', 'vllm', 'zmq', 'transformers') if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_serve_parts_our_arguments_from_those_of_vllm() -> None:
    ours, rest = split_serve(
        ["model", "--port", "8000", "--bucket", "u", "--policy=manual", "--enforce-eager", "--notice", "n", "-tp", "2"]
    )
    assert ours == ["--bucket", "u", "--policy=manual", "--notice", "n", "model"]
    assert rest == ["--port", "8000", "--enforce-eager", "-tp", "2"]
    assert split_serve(["--bucket", "u", "model", "--", "x"]) == (["--bucket", "u", "model"], ["x"])
    behind = ["--policy=strict", "--mirror", "--json", "-h", "--", "--bucket", "v"]
    assert split_serve(["model", "-tp", "2", "--bucket", "u", "--", *behind]) == (
        ["--bucket", "u", "model"],
        ["-tp", "2", *behind],
    )
    # MODEL is ours, so it is missing here.
    assert split_serve(["--bucket", "u", "--", "model"]) == (["--bucket", "u"], ["model"])
    # Without MODEL the run's own files are taken.
    assert split_serve(["--port", "1", "--bucket", "u"]) == (["--bucket", "u"], ["--port", "1"])


def test_serve_dry_run() -> None:
    arguments = ["serve", "base", "--bucket", GOLDEN, "--poll-seconds", "0.5", "--port", "8000", "--dry-run"]
    document = answer(*arguments)
    assert document["environment"]["DELTA_SYNC_BUCKET"] == GOLDEN
    assert document["environment"]["DELTA_SYNC_POLL_SECONDS"] == "0.5"
    assert "delta_sync" in document["environment"]["VLLM_PLUGINS"].split(",")
    command = document["command"]
    assert command[command.index("serve") + 1] == "base"
    assert command[-2:] == ["--port", "8000"]
    text = delta_sync(*arguments).stdout
    assert f"DELTA_SYNC_BUCKET={GOLDEN} \\\n" in text
    # What stands behind -- is vLLM's, whatever it is called.
    behind = ["--policy", "strict", "--dry-run", "--json"]
    text = delta_sync(*arguments[:4], "--dry-run", "--", *behind).stdout
    assert text.endswith(" " + " ".join(behind) + "\n")
    assert "DELTA_SYNC_POLICY" not in text
    document = json.loads(delta_sync(*arguments[:4], "--dry-run", "--json", "--", *behind).stdout)
    assert document["command"][-4:] == behind
    wrong = delta_sync("serve", "base", "--bucket", GOLDEN, "--pause-mode", "never", "--dry-run")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("delta-sync: settings: setting 'pause_mode' is 'never'")


def test_text() -> None:
    assert [size(count) for count in (0, 999, 1000, 1_234_567, 10**9, 10**18)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.23 MB",
        "1 GB",
        "1e+03 PB",
    ]
    assert (percent(1, 3), percent(0, 5), percent(1, 0)) == ("33.3 %", "0 %", "-")
    assert (times(100, 3), times(100, 0)) == ("33.3x", "-")
    assert (shape([2, 3]), shape([])) == ("2x3", "scalar")
    assert clean("a\x1b\n\u202eé") == "a\\x1b\\n\\u202eé"


def test_every_setting_is_a_flag_of_serve() -> None:
    assert {field for field, _, _ in cli.SERVE_FLAGS} == set(Settings.model_fields)

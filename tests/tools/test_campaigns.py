"""A random campaign finds what is wrong, says how to repeat it, and leaves nothing behind when it is interrupted."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.fuzz.__main__ import main

ROOT = Path(__file__).parents[2]
WRONG = """
from hypothesis import given, strategies as st

@given(st.integers(0, 10**9))
def test_wrong(number):
    assert number < 1000 or number % 97 not in range(50, 60)

@given(st.integers())
def test_right(number):
    pass

def test_another():
    assert False, "not drawn by Hypothesis"
"""
LONG = """
import os, subprocess, sys, time, pytest

@pytest.mark.hypothesis
def test_long(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["STARTED"], "w") as file:
        file.write(str(child.pid))
    time.sleep(600)
"""
FUZZ = [sys.executable, "-m", "tests.tools.fuzz", "--only", "properties", "--workers", "1", "--tests"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "properties"
    made.mkdir()
    (made / "conftest.py").write_text("from tests.conftest import *")
    return made


def falsified(output: str) -> list[str]:
    """What Hypothesis drew, once per failure: pytest's summary repeats it where the variable CI is set."""
    return re.findall(r"^E +(number=\d+),$", output, re.MULTILINE)


def test_a_failure_is_printed_with_its_seed_and_repeats_exactly(folder: Path, tmp_path: Path) -> None:
    (folder / "test_some.py").write_text(WRONG)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [*FUZZ, str(folder), "--rounds", "1", "--seed", "77"],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "properties: seed 77: 2 tests, 1 failed" in done.stdout
    assert "1 failure\n" in done.stdout
    assert list(scratch.iterdir()) == []
    again = next(line for line in done.stdout.splitlines() if line.startswith("again: "))
    repeated = subprocess.run(
        shlex.split(again.removeprefix("again: ")), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert repeated.returncode == 1
    assert falsified(repeated.stdout) == falsified(done.stdout) != []


@pytest.mark.slow
def test_ctrl_c_ends_all_and_says_what_was_done(folder: Path, tmp_path: Path) -> None:
    (folder / "test_some.py").write_text(LONG)
    started, scratch = tmp_path / "started", tmp_path / "scratch"
    scratch.mkdir()
    os.mkfifo(started)
    campaign = subprocess.Popen(
        [*FUZZ, str(folder)],
        env={**os.environ, "TMPDIR": str(scratch), "STARTED": str(started)}, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    child = int(started.read_text())
    campaign.send_signal(signal.SIGINT)
    output, _ = campaign.communicate(timeout=120)
    assert campaign.returncode == 130
    assert "fuzz: interrupted after" in output
    assert "no failures" in output
    assert list(scratch.iterdir()) == []
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
def test_objects_come_first_and_each_round_has_another_seed(folder: Path) -> None:
    """The loops that read objects are compiled anew, with checks of all bounds."""
    (folder / "test_some.py").write_text(WRONG.replace("or number % 97", "or -number"))
    done = subprocess.run(
        [*FUZZ[:3], "--inputs", "300", "--seed", "5", "--rounds", "2", "--workers", "1", "--tests", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    expected = [
        "objects: seed 5",
        "objects: 300 read or refused",
        "properties: seed 5",
        "properties: seed 5: 2 tests, 0",
    ]
    expected += ["properties: seed 6", "properties: seed 6: 2 tests, 0", "fuzz: done in"]
    lines = done.stdout.splitlines()
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected, done.stderr
    assert done.returncode == 0


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--minutes" in capsys.readouterr().out

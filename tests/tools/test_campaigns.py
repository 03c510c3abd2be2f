"""A random campaign finds what is wrong, says how to repeat it, and leaves nothing behind when it is interrupted."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.running import ROOT, run_python

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
FUZZ = ["-m", "tests.tools.fuzz", "--only", "properties", "--workers", "1", "--tests"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "properties"
    made.mkdir()
    (made / "conftest.py").write_text("from tests.conftest import *")
    return made


def falsified(output: str) -> list[str]:
    """What Hypothesis drew, once per failure: pytest's summary repeats it where the variable CI is set."""
    return re.findall(r"^E +(number=\d+),$", output, re.MULTILINE)


@pytest.mark.slow
def test_a_failure_is_printed_with_its_seed_and_repeats_exactly(folder: Path, tmp_path: Path) -> None:
    (folder / "test_some.py").write_text(WRONG)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = run_python(*FUZZ, str(folder), "--rounds", "1", "--seed", "77", environment={"TMPDIR": str(scratch)}, code=1)
    assert "properties: seed 77: 1 failed, 1 passed, 1 deselected" in done.stdout
    assert "1 failure\n" in done.stdout
    assert list(scratch.iterdir()) == []
    again = next(line for line in done.stdout.splitlines() if line.startswith("again: "))
    repeated = subprocess.run(
        shlex.split(again.removeprefix("again: ")), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert repeated.returncode == 1
    assert falsified(repeated.stdout) == falsified(done.stdout) != []

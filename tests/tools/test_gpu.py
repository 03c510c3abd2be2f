"""``make test-gpu`` without a GPU: its checks of modules on a simulated device, and what it says that it needs."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running import ROOT, eventually, run_python

LEFT_OUT = {
    "allocations in the pause",
    "staging without device memory",
    "a baseline that cannot be pinned",
    "engines, and servers on one GPU and on two",
}
SLEEP = "sleep in the middle of a scan"
"""Left out if the scan of a small module is over too soon."""
CHECKS = 17


HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
def test_checks_of_modules_pass_on_a_simulated_device(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    done = run_python("-m", "tests.tools.gpu", "--device", "cpu", "--quick", "--write", str(page), environment=HIDDEN)
    rows = dict(re.findall(r"^\| ([^|]+) \| (passed|FAILED|left out) \|", done.stdout, re.MULTILINE))
    assert len(rows) == CHECKS
    assert {name for name, outcome in rows.items() if outcome != "passed"} - {SLEEP} == LEFT_OUT
    assert page.read_text().endswith(done.stdout)


def test_without_a_gpu_it_says_what_it_needs() -> None:
    page = ROOT / "docs" / "gpu.md"
    before = page.read_text()
    done = run_python("-m", "tests.tools.gpu", environment=HIDDEN, code=2)
    assert not done.stdout
    assert re.fullmatch(r"test-gpu needs an NVIDIA GPU, .*: torch \S+ finds no GPU\n", done.stderr)
    assert page.read_text() == before


def test_what_was_checked_is_on_the_page_if_the_program_is_ended(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    command = [sys.executable, "-m", "tests.tools.gpu", "--device", "cpu", "--write", str(page)]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **HIDDEN}) as process:
        eventually(page.exists)
        process.send_signal(signal.SIGTERM)
        # By an exit and not by the signal, so that servers are ended too.
        assert process.wait(60) == 128 + signal.SIGTERM
    assert "| engines, and servers on one GPU and on two | left out |" in page.read_text()

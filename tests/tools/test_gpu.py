"""``make test-gpu`` without a GPU: its checks of modules on a simulated device, and what it says that it needs."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.servers import eventually

ROOT = Path(__file__).parents[2]
LEFT_OUT = {
    "allocations in the pause",
    "staging without device memory",
    "a baseline that cannot be pinned",
    "engines, and servers on one GPU and on two",
}
SLEEP = "sleep in the middle of a scan"
"""Left out if the scan of a small module is over too soon."""
CHECKS = 17


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.tools.gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_checks_of_modules_pass_on_a_simulated_device(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    done = run("--device", "cpu", "--quick", "--write", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = dict(re.findall(r"^\| ([^|]+) \| (passed|FAILED|left out) \|", done.stdout, re.MULTILINE))
    assert len(rows) == CHECKS
    assert {name for name, outcome in rows.items() if outcome != "passed"} - {SLEEP} == LEFT_OUT
    assert page.read_text().endswith(done.stdout)


def test_without_a_gpu_it_says_what_it_needs() -> None:
    page = ROOT / "docs" / "gpu.md"
    before = page.read_text()
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"test-gpu needs an NVIDIA GPU, .*: torch \S+ finds no GPU\n", done.stderr)
    assert page.read_text() == before


def test_what_was_checked_is_on_the_page_if_the_program_is_ended(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    command = [sys.executable, "-m", "tests.tools.gpu", "--device", "cpu", "--write", str(page)]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}) as process:
        eventually(page.exists, "a check")
        process.send_signal(signal.SIGTERM)
        # By an exit and not by the signal, so that servers are ended too.
        assert process.wait(60) == 128 + signal.SIGTERM
    assert "| engines, and servers on one GPU and on two | left out |" in page.read_text()

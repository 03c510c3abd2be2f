"""The Triton kernel under Triton's interpreter, where Triton is installed: ``make test-triton`` installs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_kernel_finds_what_plain_torch_finds() -> None:
    pytest.importorskip("triton", reason="Triton is not installed, make test-triton does that")
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.triton_interpreted"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr

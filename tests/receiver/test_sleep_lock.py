"""The background thread never touches weights of an engine that sleeps."""

import os
import subprocess
import sys
from pathlib import Path


def test_no_read_touches_weights_that_a_sleep_has_taken_away() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.guarded_weights"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # A touch would end the process with SIGSEGV.
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)

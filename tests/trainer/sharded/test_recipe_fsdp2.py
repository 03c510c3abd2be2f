"""The FSDP2 recipe as its users run it: by torchrun, as a script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.publishing import assert_holds, snapshot
from tests.support.tiny import make_model, save_checkpoint
from tests.support.trainers import SIZES
from vllm_delta_sync import open_run

ROOT = Path(__file__).parents[3]


def torchrun(base: Path, url: Path, folder: Path, steps: int) -> str:
    """Train with two ranks → what was printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / "fsdp2.py"), "--checkpoint", str(base), "--bucket", str(url)]
    settings = ["--steps", str(steps), "--lr", "1e-3", "--save", str(folder)]
    done = subprocess.run(
        [*command, *script, *settings],
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_script_trains_and_publishes_from_two_ranks(tmp_path: Path) -> None:
    base = save_checkpoint(make_model("qwen3", **SIZES), tmp_path / "base")
    said = torchrun(base, tmp_path / "run", tmp_path / "saved", steps=3)
    assert re.findall(r"^step (\d+): version (\d+), ", said, re.MULTILINE) == [("1", "1"), ("2", "2"), ("3", "3")]
    run = open_run(str(tmp_path / "run"))
    assert run.manifest(0).kind == "reference"
    assert {ref.rank for ref in run.manifest(3).objects} == {0, 1}
    assert run.verify().head == 3
    # The masters, rounded to what is served.
    masters = load_file(tmp_path / "saved" / "model.safetensors")
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert_holds(run, 3, snapshot(masters, torch.bfloat16))

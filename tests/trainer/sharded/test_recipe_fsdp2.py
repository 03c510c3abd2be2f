"""The FSDP2 recipe as its users run it: by torchrun, as a script."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.publishing import assert_holds, snapshot
from tests.support.running import ROOT, run_python
from tests.support.tiny import make_model, save_checkpoint
from tests.support.trainers import SIZES
from vllm_delta_sync import open_run


@pytest.mark.slow
def test_script_trains_and_publishes_from_two_ranks(tmp_path: Path) -> None:
    base = save_checkpoint(make_model("qwen3", **SIZES), tmp_path / "base")
    said = run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "examples" / "fsdp2.py")),
        *("--checkpoint", str(base), "--bucket", str(tmp_path / "run"), "--save", str(tmp_path / "saved")),
        *("--steps", "3", "--lr", "1e-3"),
        folder=tmp_path,
        environment={"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    ).stdout
    assert re.findall(r"^step (\d+): version (\d+), ", said, re.MULTILINE) == [("1", "1"), ("2", "2"), ("3", "3")]
    run = open_run(str(tmp_path / "run"))
    assert run.manifest(0).kind == "reference"
    assert {ref.rank for ref in run.manifest(3).objects} == {0, 1}
    assert run.verify().head == 3
    # The masters, rounded to what is served.
    masters = load_file(tmp_path / "saved" / "model.safetensors")
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert_holds(run, 3, snapshot(masters, torch.bfloat16))

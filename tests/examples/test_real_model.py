"""The example of a real model, ``real_model.py`` and ``prove_served.py``: task, loss, proof; slow: a run of a toy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples import prove_served, rl_loop
from trainer_side import Publisher

EXAMPLES = Path(__file__).parents[2] / "examples"


def toy(folder: Path) -> Path:
    """A chat model of 3 M random parameters over characters, with room for the questions of the script."""
    torch.manual_seed(0)
    rl_loop.save_checkpoint(rl_loop.make_model(0), folder)
    config = Qwen3Config.from_pretrained(folder)
    config.max_position_embeddings = 256
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages | map(attribute='content') | join }}{{ '>' if add_generation_prompt }}"
    tokenizer.save_pretrained(folder)
    return folder


def test_a_checkpoint_with_one_other_bit_is_not_the_run(tmp_path: Path, one_thread: None) -> None:
    model, run, checkpoint = rl_loop.make_model(0), str(tmp_path / "run"), tmp_path / "checkpoint"
    rl_loop.save_checkpoint(model, tmp_path / "base")
    with Publisher(model, run, base=tmp_path / "base") as publisher:
        with torch.no_grad():
            model.model.norm.weight.add_(0.5)
        publisher.publish(step=1, wait=True)
    rl_loop.save_checkpoint(model, checkpoint)
    same, fingerprint = prove_served.same_weights(run, checkpoint)
    assert same
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] *= -1
    save_file(tensors, file)
    assert prove_served.same_weights(run, checkpoint) == (False, fingerprint)


def test_a_wrong_url_is_refused_before_anything_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".delta-sync-real").touch()
    command: list[str | Path] = [sys.executable, EXAMPLES / "real_model.py", tmp_path]
    command += ["--out", tmp_path, "--bucket", "ftp://x"]
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, (tmp_path / "config.json").exists()) == (2, True), done.stderr
    assert "'ftp://x' has the unknown scheme 'ftp'" in done.stderr


@pytest.mark.slow
def test_a_run_with_a_real_server_is_proven(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command: list[str | Path] = [
        sys.executable,
        EXAMPLES / "real_model.py",
        toy(tmp_path / "toy"),
        "--steps",
        "4",
        "--out",
        out,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 4
    summary = json.loads((out / "summary.json").read_text())
    assert summary["proven"]
    assert summary["full_bytes"] > summary["payload_bytes"] > 0
    assert len(summary["answers"]) == 3
    assert {"reward", "pause_ms", "changed", "age"} <= json.loads((out / "details.json").read_text())[0].keys()
    assert (out / "real.png").read_bytes().startswith(b"\x89PNG")
    masters = load_file(out / "masters/model.safetensors")
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}

"""The example of a real model, ``real_model.py`` and ``prove_served.py``: task, loss, proof; slow: a run of a toy."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples import prove_served, rl_loop
from tests.support.running import run_python
from trainer_side import Publisher


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


def test_the_loss_is_that_of_the_weights_that_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(rl_loop.__file__).parent))
    from examples import real_model

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1, bias=False)
    master = model.weight.detach().clone()
    for fails in (False, True):
        model.zero_grad()
        with pytest.raises(ZeroDivisionError) if fails else nullcontext(), real_model.as_served(model):
            assert torch.equal(model.weight, master.bfloat16().float())
            model(torch.ones(1, 8)).square().sum().backward()
            assert 1 / (not fails)
        assert torch.equal(model.weight, master)
        assert model.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, (2 * master.bfloat16().float().sum()).expand(1, 8))
    assert not torch.equal(master, master.bfloat16().float())


@pytest.mark.slow
def test_a_run_with_a_real_server_is_proven(tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = str(toy(tmp_path / "toy"))
    done = run_python("examples/real_model.py", model, "--steps", "4", "--out", str(out), seconds=900)
    assert done.stdout.count("✓") == 4
    summary = json.loads((out / "summary.json").read_text())
    assert summary["proven"]
    assert summary["full_bytes"] > summary["payload_bytes"] > 0
    assert len(summary["answers"]) == 3
    assert {"reward", "pause_ms", "changed", "age"} <= json.loads((out / "details.json").read_text())[0].keys()
    assert (out / "real.png").read_bytes().startswith(b"\x89PNG")
    masters = load_file(out / "masters/model.safetensors")
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}

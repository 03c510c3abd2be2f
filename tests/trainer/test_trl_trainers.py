"""``DeltaSyncCallback`` in TRL's real SFT, DPO and GRPO trainers, on a tiny model on a CPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.support.publishing import Tensors, assert_holds
from tests.support.tiny import make_model, make_tokenizer
from tests.support.trainers import ARGUMENTS, FIGURES, SIZES, Logged, Settled, steps_of
from trainer_side.integrations.trl import DeltaSyncCallback
from vllm_delta_sync.client import open_run

pytestmark = pytest.mark.slow

FEW_STEPS: dict[str, Any] = {**ARGUMENTS, "bf16": False, "max_steps": 3}

WORDS = ["the quick brown fox", "jumps over the lazy dog", "the lazy fox", "over the quick dog"]


def rounded(tensors: Tensors) -> Tensors:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def check(url: str, base: Path, model: PreTrainedModel, seen: Settled, logged: Logged) -> None:
    """Each step is a version with the bits of its moment, and has its line in the log."""
    run = open_run(url)
    assert run.manifest(0).kind == "reference"
    assert steps_of(run) == [1, 2, 3]
    for step in (1, 2, 3):
        assert run.manifest(step).changed > 0
        assert_holds(run, step, rounded(seen.weights[step]), base)
    assert_holds(run, 3, rounded(dict(model.named_parameters())), base)
    assert [line["delta_sync/version"] for line in logged.published] == [1, 2, 3]
    assert all(line.keys() >= FIGURES for line in logged.published)
    own = [line for _, line in logged.lines if "loss" in line]
    assert len(own) == 3
    assert not any("delta_sync/version" in line for line in own)


def rewarded(completions: list[str], **columns: Any) -> list[float]:
    """More words are better; and never are all alike, so that there is something to learn."""
    return [len(text.split()) + number / len(completions) for number, text in enumerate(completions)]


def trained(kind: str, model: PreTrainedModel, out: str, callbacks: list[TrainerCallback]) -> Any:
    given: dict[str, Any] = {"model": model, "processing_class": make_tokenizer(), "callbacks": callbacks}
    trainer: Any
    if kind == "sft":
        data = Dataset.from_dict({"text": WORDS * 4})
        trainer = SFTTrainer(args=SFTConfig(out, max_length=16, **FEW_STEPS), train_dataset=data, **given)
    elif kind == "dpo":
        data = Dataset.from_dict({"prompt": WORDS * 4, "chosen": [" fox"] * 16, "rejected": [" dog"] * 16})
        arguments, reference = DPOConfig(out, max_length=16, **FEW_STEPS), make_model("qwen3", **SIZES)
        trainer = DPOTrainer(ref_model=reference, args=arguments, train_dataset=data, **given)
    else:
        generation = {"num_generations": 2, "max_completion_length": 8, "beta": 0.0}
        data = Dataset.from_dict({"prompt": WORDS})
        arguments = GRPOConfig(out, **generation, **FEW_STEPS)
        trainer = GRPOTrainer(reward_funcs=rewarded, args=arguments, train_dataset=data, **given)
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_each_step_is_a_version_with_the_policys_weights(
    kind: str, model: PreTrainedModel, base: Path, url: str, tmp_path: Path
) -> None:
    callback, logged = DeltaSyncCallback(bucket=url, base=base), Logged()
    seen = Settled(callback)
    trainer = trained(kind, model, str(tmp_path / "out"), [callback, seen, logged])
    check(url, base, model, seen, logged)
    if kind == "dpo":
        before = make_model("qwen3", **SIZES).state_dict()
        assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.ref_model.state_dict().items())
    if kind == "grpo":
        assert all("reward" in line for _, line in logged.lines if "loss" in line)


def test_the_documentation(model: PreTrainedModel, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "trl.md").read_text()
    lines = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "SFTTrainer(" in block)
    base.rename(tmp_path / "Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    # Fewer steps, without a GPU; and the learning rate of a model that is as small.
    few = lines.replace("max_steps=100", "max_steps=4, learning_rate=1e-2, use_cpu=True").replace("every=10", "every=2")
    exec(few.replace("/mnt/shared", str(tmp_path)))  # noqa: S102
    run = open_run(str(tmp_path / "sft"))
    assert run.manifest(0).kind == "reference"
    assert steps_of(run) == [2, 4]
    assert run.manifest(2).changed > 0

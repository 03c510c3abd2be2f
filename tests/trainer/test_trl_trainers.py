"""``DeltaSyncCallback`` in TRL's real SFT, DPO and GRPO trainers, on a tiny model on a CPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.support.publishing import Tensors, assert_holds
from tests.support.tiny import make_model, make_tokenizer, save_checkpoint
from tests.support.trainers import FIGURES, SIZES, Logged, Settled, steps_of
from trainer_side.integrations.trl import DeltaSyncCallback
from vllm_delta_sync.chain import open_run

ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "dataloader_pin_memory": False,
}
WORDS = ["the quick brown fox", "jumps over the lazy dog", "the lazy fox", "over the quick dog"]


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("qwen3", **SIZES)


@pytest.fixture
def base(model: PreTrainedModel, tmp_path: Path) -> Path:
    return save_checkpoint(model, tmp_path / "base")


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


def callbacks_for(url: str, base: Path) -> tuple[DeltaSyncCallback, Settled, Logged]:
    callback = DeltaSyncCallback(bucket=url, base=base)
    return callback, Settled(callback), Logged()


def test_sft(model: PreTrainedModel, base: Path, url: str, tmp_path: Path) -> None:
    callbacks = callbacks_for(url, base)
    SFTTrainer(
        model=model,
        args=SFTConfig(str(tmp_path / "out"), max_length=16, **ARGUMENTS),
        train_dataset=Dataset.from_dict({"text": WORDS * 4}),
        processing_class=make_tokenizer(),
        callbacks=list(callbacks),
    ).train()
    check(url, base, model, *callbacks[1:])


def test_dpo_publishes_the_policy_and_not_its_reference(
    model: PreTrainedModel, base: Path, url: str, tmp_path: Path
) -> None:
    reference = make_model("qwen3", **SIZES)
    before = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    pairs = {"prompt": WORDS * 4, "chosen": [" fox"] * 16, "rejected": [" dog"] * 16}
    callbacks = callbacks_for(url, base)
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(str(tmp_path / "out"), max_length=16, **ARGUMENTS),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=make_tokenizer(),
        callbacks=list(callbacks),
    )
    assert trainer.ref_model is not None
    trainer.train()
    check(url, base, model, *callbacks[1:])
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.ref_model.state_dict().items())


def rewarded(completions: list[str], **columns: Any) -> list[float]:
    """More words are better; and never are all alike, so that there is something to learn."""
    return [len(text.split()) + number / len(completions) for number, text in enumerate(completions)]


def test_grpo(model: PreTrainedModel, base: Path, url: str, tmp_path: Path) -> None:
    callbacks = callbacks_for(url, base)
    generation = {"num_generations": 2, "max_completion_length": 8, "beta": 0.0}
    GRPOTrainer(
        model=model,
        reward_funcs=rewarded,
        args=GRPOConfig(str(tmp_path / "out"), **generation, **ARGUMENTS),
        train_dataset=Dataset.from_dict({"prompt": WORDS}),
        processing_class=make_tokenizer(),
        callbacks=list(callbacks),
    ).train()
    check(url, base, model, *callbacks[1:])
    assert all("reward" in line for _, line in callbacks[2].lines if "loss" in line)


def test_the_lines_of_the_documentation(
    model: PreTrainedModel, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

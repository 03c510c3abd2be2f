"""``DeltaWeightTransfer`` in TRL's real ``AsyncGRPOTrainer``: what is published, and what the trainer sees of it."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from transformers import TrainerCallback

from tests.support.async_trainers import Rollouts, Watched, async_trainer, served_form
from tests.support.publishing import assert_holds
from tests.support.trainers import FIGURES, Logged, steps_of
from tests.trainer.sharded.nursery import Nursery
from trainer_side.integrations.trl import DeltaWeightTransfer
from vllm_delta_sync.client import open_run
from vllm_delta_sync.errors import ModelError

pytestmark = pytest.mark.slow

SYNC = ["pause", "send", "resume"]


class At(TrainerCallback):
    def __init__(self, step: int, what: Callable[[], None]) -> None:
        self.step, self.what = step, what

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.what()


def test_each_sync_is_a_version_with_the_rounded_weights(base: Path, url: str, tmp_path: Path) -> None:
    transfer, logged, rollouts = Watched(url, base), Logged(), Rollouts(6)
    trainer = async_trainer(base, tmp_path, transfer, [logged], rollouts)
    trainer.train()
    run = open_run(url)
    assert transfer.calls == ["init", *SYNC * 5, "destroy"]
    assert [manifest.kind for manifest in run.log()] == ["reference", *["delta"] * 5]
    assert [manifest.changed > 0 for manifest in run.log()] == [False, False, True, True, True, True]
    assert steps_of(run) == [0, 1, 2, 3, 4]
    assert {tensor.dtype for sent in transfer.sent for tensor in sent.values()} == {torch.float32}
    for version, sent in enumerate(transfer.sent, start=1):
        assert_holds(run, version, {name: tensor.bfloat16() for name, tensor in sent.items()}, base)
    assert_holds(run, 5, served_form(trainer.model), base)
    assert rollouts.versions == [1, 2, 3, 4, 5]
    assert not rollouts.running
    assert [line["delta_sync/version"] for line in logged.published] == [1, 2, 3, 4, 5]
    assert all(line.keys() >= FIGURES for line in logged.published)
    own = [line for _, line in logged.lines if "loss" in line]
    assert len(own) == 4
    assert all("perf/weight_sync_s" in line and "delta_sync/version" not in line for line in own)


def killed(rank: int, size: int, folder: str) -> None:
    """A training that is killed while its fourth version is on its way."""
    base = Path(folder) / "base"
    kill = At(3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    transfer = Watched(f"{folder}/run", base)
    async_trainer(base, Path(folder), transfer, [kill], max_steps=6, save_strategy="steps", save_steps=2).train()


def test_a_killed_training_goes_on_with_its_run(nursery: Nursery, base: Path, url: str, tmp_path: Path) -> None:
    assert nursery.statuses(1, killed, folder=str(tmp_path)) == [-signal.SIGKILL], nursery.logs()
    before = open_run(url).head().version
    assert before in (3, 4)
    transfer = Watched(url, base)
    trainer = async_trainer(base, tmp_path, transfer, max_steps=5)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    run = open_run(url)
    assert steps_of(run) == [*range(before), 2, 3, 4, 5]
    assert [manifest.kind for manifest in run.log()] == ["reference", *["delta"] * (before + 4)]
    # The checkpoint that training resumes from is what the third version had.
    assert_holds(run, before + 1, dict(run.tensors(3, base)), base)
    assert_holds(run, before + 4, served_form(trainer.model), base)


def test_a_version_is_the_base_with_the_adapter_merged(base: Path, url: str, tmp_path: Path) -> None:
    transfer = Watched(url, base)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = async_trainer(base, tmp_path, transfer, peft=adapter, learning_rate=1e-2, max_steps=2)
    trainer.train()
    run = open_run(url)
    assert [manifest.changed > 0 for manifest in run.log()] == [False, False, True, True]
    assert not any("lora" in name for name in transfer.sent[-1])
    before, now = transfer.sent[0], transfer.sent[-1]
    moved = {name.split(".")[-2] for name in now if not torch.equal(now[name].bfloat16(), before[name].bfloat16())}
    assert moved == {"q_proj", "v_proj"}
    assert_holds(run, 3, served_form(trainer.model.merge_and_unload()), base)


def test_an_adapter_alone_is_a_run_of_its_own(base: Path, url: str, tmp_path: Path) -> None:
    """TRL merges nothing meanwhile, so that the base stays what servers have, bit for bit."""
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    saved: list[dict[str, torch.Tensor]] = []

    class Saving(Watched):
        def send_weights(self, iterator: Any) -> None:
            super().send_weights(iterator)
            saved.append({name: tensor.clone() for name, tensor in get_peft_model_state_dict(trainer.model).items()})

    transfer = Saving(url, adapter=True)
    trainer = async_trainer(base, tmp_path, transfer, peft=adapter, learning_rate=1e-2, max_steps=5)
    before = {name: tensor.clone() for name, tensor in trainer.model.named_parameters() if "lora_" not in name}
    trainer.train()
    assert transfer.calls == ["init", *SYNC * 6, "destroy"]
    run = open_run(url)
    assert [manifest.kind for manifest in run.log()] == ["anchor", *["delta"] * 6]
    assert [manifest.changed > 0 for manifest in run.log()][1:] == [False, *[True] * 5]
    assert all(spec.name.startswith("base_model.model.") and "lora_" in spec.name for spec in run.table)
    for version, tensors in enumerate(saved, start=1):
        assert_holds(run, version, tensors)
    assert all(torch.equal(tensor, trainer.model.get_parameter(name)) for name, tensor in before.items())
    assert json.loads(run.file("adapter_config.json"))["r"] == 4
    # Afterwards the model merges as before.
    trainer.model.merge_adapter()
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, trainer.model.get_parameter(name))}
    assert {name.split(".")[-3] for name in moved} == {"q_proj", "v_proj"}


def test_a_model_without_that_adapter_is_refused_before_training(base: Path, url: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no adapter 'math', but none"):
        async_trainer(base, tmp_path, DeltaWeightTransfer(url, adapter="math")).train()

"""``DeltaWeightTransfer`` in TRL's real ``AsyncGRPOTrainer``: what is published, and what the trainer sees of it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.support.async_trainers import Rollouts, Watched, async_trainer, served_form
from tests.support.publishing import assert_holds
from tests.support.tiny import make_model, save_checkpoint
from tests.support.trainers import FIGURES, SIZES, HeldBucket, Logged, Settled, interrupt, steps_of
from trainer_side import DeltaSyncCallback
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.errors import PublishError

ROOT = Path(__file__).parents[2]
SYNC = ["pause", "send", "resume"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_checkpoint(make_model("qwen3", **SIZES), tmp_path / "base")


class At(TrainerCallback):
    """Does something at the beginning of a step."""

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


def test_metrics_are_in_the_log_of_the_trainer(base: Path, url: str, tmp_path: Path) -> None:
    logged = Logged()
    trainer = async_trainer(base, tmp_path, Watched(url, base), [logged])
    trainer.train()
    assert [line["delta_sync/version"] for line in logged.published] == [1, 2, 3, 4, 5]
    assert [line["delta_sync/version"] for line in trainer.state.log_history if "delta_sync/version" in line] == [
        1, 2, 3, 4, 5,
    ]  # fmt: skip
    assert all(line.keys() >= FIGURES for line in logged.published)
    own = [line for _, line in logged.lines if "loss" in line]
    assert len(own) == 4
    assert all("perf/weight_sync_s" in line and "delta_sync/version" not in line for line in own)


def test_experts_fused_in_memory_and_frozen_parameters(url: str, tmp_path: Path) -> None:
    base = save_checkpoint(make_model("qwen3_moe", **SIZES), tmp_path / "base")
    transfer = Watched(url, base)
    trainer = async_trainer(base, tmp_path, transfer, max_steps=2)
    trainer.model.model.embed_tokens.requires_grad_(False)
    trainer.train()
    assert "model.layers.0.mlp.experts.gate_up_proj" in transfer.sent[-1]
    assert "model.embed_tokens.weight" not in transfer.sent[-1]
    run = open_run(url)
    expected = load_file(save_checkpoint(trainer.model, tmp_path / "saved") / "model.safetensors")
    assert torch.equal(
        expected["model.embed_tokens.weight"], load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    )
    assert run.manifest(3).changed > 0
    assert_holds(run, 3, expected, base)


class Nothing:
    """A weight transfer that transfers nothing."""

    def _nothing(self) -> None:
        pass

    init_weight_transfer = pause = resume = destroy = _nothing

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _ in iterator:
            pass


def test_the_callback_beside_a_transfer_that_does_nothing(base: Path, url: str, tmp_path: Path) -> None:
    callback, rollouts = DeltaSyncCallback(bucket=url, base=base), Rollouts(6)
    seen, logged = Settled(callback), Logged()
    trainer = async_trainer(base, tmp_path, Nothing(), [callback, seen, logged], rollouts)
    trainer.train()
    run = open_run(url)
    assert steps_of(run) == [1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        assert_holds(run, step, {name: tensor.bfloat16() for name, tensor in seen.weights[step].items()}, base)
    assert rollouts.versions == [1, 2, 3, 4, 5]
    assert [line["delta_sync/version"] for line in logged.published] == [1, 2, 3, 4]


def killed(folder: str) -> None:
    """A training that is killed while its fourth version is on its way."""
    base = Path(folder) / "base"
    kill = At(3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    transfer = Watched(f"{folder}/run", base)
    async_trainer(base, Path(folder), transfer, [kill], max_steps=6, save_strategy="steps", save_steps=2).train()


def test_a_killed_training_goes_on_with_its_run(base: Path, url: str, tmp_path: Path) -> None:
    code = f"from tests.trainer.test_transfer_trl import killed; killed({str(tmp_path)!r})"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
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


def test_an_interrupt_in_the_middle_of_a_send(base: Path, url: str, tmp_path: Path) -> None:
    class Interrupted(Watched):
        def _noted(self, iterator: Any) -> Any:
            for number, pair in enumerate(super()._noted(iterator)):
                if len(self.sent) == 3 and number == 5:
                    interrupt()
                yield pair

    transfer = Interrupted(url, base)
    with pytest.raises(KeyboardInterrupt):
        async_trainer(base, tmp_path, transfer).train()
    assert transfer.calls == ["init", *SYNC * 2, "pause", "send", "destroy"]
    assert transfer.publisher is None
    run = open_run(url)
    assert steps_of(run) == [0, 1]
    assert_holds(run, 2, {name: tensor.bfloat16() for name, tensor in transfer.sent[1].items()}, base)


@pytest.mark.parametrize("stop_on_error", [True, False])
def test_a_store_that_is_down_for_a_while(stop_on_error: bool, base: Path, url: str, tmp_path: Path) -> None:
    with open_bucket(url) as store:
        bucket = HeldBucket(store)
        transfer, rollouts = Watched(bucket, base, stop_on_error=stop_on_error), Rollouts(8)

        def settled(down: bool) -> Callable[[], None]:
            def turn() -> None:
                if not bucket.down and transfer.publisher is not None:
                    transfer.publisher.flush()
                bucket.down = down

            return turn

        callbacks: list[TrainerCallback] = [At(2, settled(True)), At(4, settled(False))]
        trainer = async_trainer(base, tmp_path, transfer, callbacks, rollouts, max_steps=6)
        if stop_on_error:
            with pytest.raises(PublishError, match="the store is down"):
                trainer.train()
        else:
            trainer.train()
    run = open_run(url)
    assert not rollouts.running
    assert transfer.calls[-1] == "destroy"
    assert transfer.publisher is None
    if stop_on_error:
        assert steps_of(run) == [0, 1, 2]
        assert_holds(run, 3, {name: tensor.bfloat16() for name, tensor in transfer.sent[2].items()}, base)
    else:
        assert steps_of(run)[:3] == [0, 1, 2]
        assert steps_of(run)[-1] == 6
        assert_holds(run, run.head().version, served_form(trainer.model), base)

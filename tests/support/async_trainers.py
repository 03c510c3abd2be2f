"""TRL's real ``AsyncGRPOTrainer`` on a tiny model, on a CPU, without a server: rollouts are made up in this process."""

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from examples.trl_async import on_cpu
from tests.support.publishing import Tensors
from tests.support.tiny import VOCABULARY, make_tokenizer
from tests.support.trainers import ARGUMENTS
from trainer_side.integrations.trl import DeltaWeightTransfer

PROMPT, ANSWER, BATCH = 6, 5, 4


class Rollouts:
    """A rollout worker whose answers are random, and there from the beginning.

    Attributes:
        versions: what TRL has said is served, in turn.
    """

    def __init__(self, batches: int, seed: int = 3) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.versions: list[int] = []
        self.running = False
        generator = np.random.default_rng(seed)
        for group in range(batches):
            prompt = generator.integers(3, VOCABULARY, PROMPT)
            for number in range(BATCH):
                self.rollout_buffer.put(_sample(generator, prompt, group, 1.0 if number % 2 else -1.0))

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("all rollouts are used up")


def _sample(generator: np.random.Generator, prompt: np.ndarray, group: int, advantage: float) -> RolloutSample:
    answer = generator.integers(3, VOCABULARY, ANSWER)
    mask = np.array([0] * PROMPT + [1] * ANSWER)
    return RolloutSample(
        prompt=[{"role": "user", "content": "?"}],
        completion=[{"role": "assistant", "content": "!"}],
        input_ids=np.concatenate([prompt, answer]),
        completion_mask=mask,
        old_log_probs=np.where(mask, -np.log(VOCABULARY), 0.0).astype(np.float32),
        advantage=advantage,
        model_version=1,
        group_id=group,
        metrics={"reward": advantage},
    )


class Watched(DeltaWeightTransfer):
    """Keeps which calls came, and copies of the weights that each send was handed, by the names of the module."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls: list[str] = []
        self.sent: list[Tensors] = []

    def init_weight_transfer(self) -> None:
        self.calls.append("init")
        super().init_weight_transfer()

    def pause(self) -> None:
        self.calls.append("pause")
        super().pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.calls.append("send")
        self.sent.append({})
        super().send_weights(self._noted(iterator))

    def resume(self) -> None:
        self.calls.append("resume")
        super().resume()

    def destroy(self) -> None:
        self.calls.append("destroy")
        super().destroy()

    def _noted(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in iterator:
            self.sent[-1][name] = tensor.clone()
            yield name, tensor


def async_trainer(
    base: Path,
    folder: Path,
    transfer: Any,
    callbacks: list[TrainerCallback] | None = None,
    rollouts: Rollouts | None = None,
    peft: Any = None,
    **arguments: Any,
) -> AsyncGRPOTrainer:
    """A trainer that learns from made up rollouts; four optimizer steps unless ``max_steps`` says otherwise."""
    defaults: dict[str, Any] = {
        **ARGUMENTS,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": BATCH,
        "token_budget": 0,
        "max_staleness": 100,
    }
    given = AsyncGRPOConfig(str(folder / "out"), **{**defaults, **arguments})
    on_cpu()
    return AsyncGRPOTrainer(
        model=str(base),
        args=given,
        train_dataset=[{"prompt": "?"}],
        processing_class=make_tokenizer(),
        callbacks=callbacks,
        rollout_worker=rollouts or Rollouts(given.max_steps + 2),
        weight_transfer=transfer,
        peft_config=peft,
    )


def served_form(model: PreTrainedModel) -> Tensors:
    """The parameters of a model whose module has the names of its checkpoint, in the dtype that is served."""
    return {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.named_parameters()}

"""The trainer process: a supervised start, then TRL's AsyncGRPOTrainer with its weights through a bucket.

    python -m examples.trl_async.trainer SETTINGS_JSON

Writes JSON lines: one event per line on standard output. Reads one line ``{"server": URL}`` from standard input once
the server answers.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from examples.demo import policy, task
from examples.trl_async.attention import on_cpu
from examples.trl_async.rollouts import VersionedRolloutLoop
from examples.trl_async.settings import LOG_HISTORY, TrainerSettings
from examples.trl_async.words import exact_reversal, make_dataset, make_tokenizer
from trainer_side.integrations.trl import DeltaWeightTransfer
from vllm_delta_sync.errors import DeltaSyncError

SAMPLES = 8
BATCH = 128
"""Answers that an optimizer step learns from: 16 words, 8 times each."""
WORDS = 4096

Tell = Callable[..., None]


def config(settings: TrainerSettings, server: str) -> AsyncGRPOConfig:
    """Of a run that a toy can learn from in minutes; large models want smaller steps."""
    return AsyncGRPOConfig(
        output_dir=f"{settings.out}/trl",
        vllm_server_base_url=server,
        max_steps=settings.steps,
        seed=settings.seed,
        num_generations=SAMPLES,
        per_device_train_batch_size=BATCH,
        max_completion_length=task.MAX_ANSWER_TOKENS,
        # Each step learns from as many answers; otherwise TRL asks the server how long a row may be.
        token_budget=0,
        max_staleness=4,
        max_inflight_tasks=BATCH,
        queue_maxsize=BATCH,
        weight_sync_steps=1,
        learning_rate=3e-4,
        adam_epsilon=1e-2,
        max_grad_norm=10.0,
        epsilon_high=0.28,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class LogEvents(TrainerCallback):
    """Hands on what TRL logs."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        self._tell("log", step=state.global_step, logs=logs or {})


def prepare(settings: TrainerSettings, tell: Tell) -> None:
    """Make the policy, warm it up, and save the checkpoint that trainer and server start from."""
    model = policy.make_model(settings.seed)
    policy.warm_up(
        model,
        settings.seed,
        lambda step, chance: tell("warm_up", step=step, chance=chance, target=policy.WARM_UP_TARGET),
    )
    policy.save(model, make_tokenizer(), settings.base)
    parameters = list(model.parameters())
    tell("warm", parameters=sum(one.numel() for one in parameters), bytes=sum(one.nbytes for one in parameters))


def train(settings: TrainerSettings, server: str, tell: Tell) -> None:
    """TRL's part, from the checkpoint to the checkpoint of what it has learnt."""
    transfer = DeltaWeightTransfer(settings.bucket, base=settings.base, notice=settings.notice)
    with on_cpu():
        trainer = AsyncGRPOTrainer(
            model=str(settings.base),
            reward_funcs=exact_reversal,
            args=config(settings, server),
            train_dataset=make_dataset(WORDS, settings.seed + 1),
            callbacks=[LogEvents(tell)],
            weight_transfer=transfer,
        )
    trainer.rollout_worker._loop_cls = VersionedRolloutLoop
    trainer.train()
    (Path(settings.out) / LOG_HISTORY).write_text(json.dumps(trainer.state.log_history))
    policy.save(trainer.model.to(torch.bfloat16), make_tokenizer(), settings.checkpoint)
    tell("done", versions=trainer.model_version)


def main(arguments: list[str]) -> None:
    """Run the trainer as its module's docstring says."""
    # Libraries print to standard output now and then; events must not be mixed with that.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")
        events.flush()

    settings = TrainerSettings.from_dict(json.loads(arguments[0]))
    prepare(settings, tell)
    line = sys.stdin.readline()
    if not line:
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, settings.cores)
    torch.set_num_threads(len(settings.cores))
    train(settings, json.loads(line)["server"], tell)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DeltaSyncError as error:
        sys.exit(f"trainer: {error}")

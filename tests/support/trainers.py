"""Real Trainers of transformers on a tiny model, with ``DeltaSyncCallback`` and what watches it."""

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from tests.support.publishing import Tensors
from tests.support.tiny import VOCABULARY
from trainer_side import DeltaSyncCallback
from vllm_delta_sync.client import Run

SIZES = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
ARGUMENTS: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "dataloader_pin_memory": False,
}
"""Of every Trainer here, unless a test gives others."""
FIGURES = {
    f"delta_sync/{name}"
    for name in (
        "version", "step", "changed_percent", "payload_bytes", "diff_seconds", "encode_seconds", "upload_seconds",
        "skipped",
    )
}  # fmt: skip


class Settled(TrainerCallback):
    """Behind the callback: waits for each version, so that none is skipped, and keeps the weights of each step."""

    def __init__(self, callback: DeltaSyncCallback, *, wait: bool = True) -> None:
        self.callback, self.wait = callback, wait
        self.weights: dict[int, Tensors] = {}
        self.at: dict[int, Callable[[], None]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = checkpoint_of(kwargs["model"])
        if self.wait and self.callback.publisher is not None:
            self.callback.publisher.flush()
        self.at.pop(state.global_step, lambda: None)()


class Logged(TrainerCallback):
    """Keeps what is logged, as an integration would."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, Any]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.lines.append((state.global_step, dict(logs)))

    @property
    def published(self) -> list[dict[str, Any]]:
        return [line for _, line in self.lines if "delta_sync/version" in line]


def checkpoint_of(model: PreTrainedModel) -> Tensors:
    """What save_pretrained would write of the model, in the dtype it has."""
    names = dict(model.named_parameters())
    return {name: tensor.detach().clone() for name, tensor in names.items()}


def trainer_of(model: PreTrainedModel, folder: Path, callbacks: list[TrainerCallback], **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(3, VOCABULARY, (48, 8), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in rows]
    given = TrainingArguments(output_dir=str(folder / "out"), **{**ARGUMENTS, **arguments})
    return Trainer(model=model, args=given, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


def steps_of(run: Run) -> list[int | None]:
    return [manifest.step for manifest in run.log() if manifest.version]


def threads_of_ours(others: Collection[threading.Thread] = ()) -> list[threading.Thread]:
    """Publishers' threads that run, less those of ``others``: tests before may still hold a publisher."""
    running = [thread for thread in threading.enumerate() if thread.name.startswith("delta-sync-p")]
    return [thread for thread in running if thread not in others]


def interrupt() -> None:
    raise KeyboardInterrupt

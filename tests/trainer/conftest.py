"""Fixtures of the trainer's tests: a bucket that calls back, a small trainer, a world of one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import PreTrainedModel

from tests.support.publishers import Hooked, Trainer
from tests.support.tiny import make_model, save_checkpoint
from tests.support.trainers import SIZES


@pytest.fixture
def bucket(tmp_path: Path) -> Hooked:
    return Hooked(tmp_path / "run")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a trainer writes its checkpoints, or slime its deltas."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def process_group() -> Iterator[None]:
    """A world of one process."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def model() -> PreTrainedModel:
    """A tiny model with a tied head, in float32."""
    return make_model("qwen3", **SIZES)


@pytest.fixture
def base(model: PreTrainedModel, tmp_path: Path) -> Path:
    """Its checkpoint, in bfloat16."""
    return save_checkpoint(model, tmp_path / "base")

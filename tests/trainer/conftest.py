"""Fixtures of the trainer's tests: a bucket that calls back, a small trainer, a world of one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.support.publishers import Hooked, Trainer


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

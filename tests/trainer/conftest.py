"""Fixtures of the trainer's tests: a bucket that calls back, a small trainer, a process that ranks are forked from."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.support.publishers import Hooked, Trainer
from tests.trainer.sharded.nursery import Nursery


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


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with closing(Nursery(tmp_path_factory.mktemp("nursery"))) as made:
        yield made

"""Fixtures of the fault tests."""

from pathlib import Path

import pytest

from tests.trainer.faults.hooks import Hooked, Trainer


@pytest.fixture
def bucket(tmp_path: Path) -> Hooked:
    return Hooked(tmp_path / "run")


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()

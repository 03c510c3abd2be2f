"""Fixtures of the fault tests."""

from pathlib import Path

import pytest

from tests.faults.hooks import Hooked, Trainer
from tests.hub_buckets import hub as hub
from tests.hub_buckets import hub_server as hub_server


@pytest.fixture
def bucket(tmp_path: Path) -> Hooked:
    return Hooked(tmp_path / "run")


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()

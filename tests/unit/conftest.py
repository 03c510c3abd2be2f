"""Fixtures of the unit tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.hub_buckets import hub as hub
from tests.hub_buckets import hub_server as hub_server


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes in one thread: small models are trained sooner, and alike on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

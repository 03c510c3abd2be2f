"""Fixtures of the unit tests."""

from pathlib import Path

import pytest

from tests.hub_buckets import hub as hub
from tests.hub_buckets import hub_server as hub_server


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "run")

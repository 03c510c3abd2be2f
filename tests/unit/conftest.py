"""Fixtures of the unit tests."""

from pathlib import Path

import pytest


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "run")

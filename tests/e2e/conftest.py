"""What several files of these tests look at, made once."""

import json
from typing import Any

import pytest

from tests.e2e import warm


@pytest.fixture(scope="session")
def attached(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/e2e/attached.py saw of an ``AsyncLLM``, in a process of its own."""
    root = tmp_path_factory.mktemp("attached")
    done = warm.run("tests.e2e.attached", str(root), seconds=600)
    assert done.status == 0, done.said[-4000:]
    seen: dict[str, Any] = json.loads((root / "seen.json").read_text())
    return seen

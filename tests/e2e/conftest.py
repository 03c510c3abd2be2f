"""What several files of these tests look at, made once."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e import servers


@pytest.fixture(scope="session")
def attached(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/e2e/attached.py saw of an ``AsyncLLM``, in a process of its own."""
    root = tmp_path_factory.mktemp("attached")
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.attached", str(root)],
        env={**os.environ, **servers.ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()[-4000:]
    seen: dict[str, Any] = json.loads((root / "seen.json").read_text())
    return seen

"""vLLM's Model Runner V2, which it uses where there is Triton: its worker takes versions as that of V1 does."""

import json
from pathlib import Path

import pytest

from tests.e2e import warm
from tests.e2e.model_runner_v2 import VERSIONS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_worker_with_model_runner_v2_takes_versions(tmp_path: Path) -> None:
    done = warm.run("tests.e2e.model_runner_v2", str(tmp_path), seconds=400, environment={"VLLM_PLUGINS": "delta_sync"})
    assert done.status == 0, done.said[-6000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert "vllm.v1.worker.gpu.model_runner" in seen["modules"]
    assert "vllm.v1.worker.gpu_model_runner" not in seen["modules"]
    for version in range(1, VERSIONS + 1):
        assert seen[f"version {version}"] == [True, True, True]
    assert seen["rollback"]
    assert seen["forward"] == [True, True, True]
    for name in ("worker", "runner"):
        assert "changed from outside" in seen[name]
        assert "reload_weights" in seen[name]
        assert seen[f"{name}, repaired"] == [True, True]
    for version in (1, 2):
        assert seen[f"adapter {version}"] == [version, True, True]

"""vLLM's Model Runner V2, which it uses where there is Triton: its worker takes versions as that of V1 does."""

from pathlib import Path

import pytest

from tests.e2e.model_runner_v2 import VERSIONS
from tests.e2e.warm import see

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_worker_with_model_runner_v2_takes_versions(tmp_path: Path) -> None:
    seen = see("tests.e2e.model_runner_v2", tmp_path)
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

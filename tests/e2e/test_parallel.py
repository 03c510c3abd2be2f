"""Tensor parallelism: each rank's weights are a fresh load's, bit for bit, after every version and after a rollback."""

import json
from pathlib import Path

import pytest

from tests.e2e import warm
from tests.e2e.parallel import VERSIONS
from tests.support.tiny import VOCABULARY

pytestmark = pytest.mark.e2e
# Stacked experts are cut inside each; with one key and value head both ranks hold a copy of it.
FAMILIES = ["qwen3_moe", "llama_one_kv_head", "qwen3", "llama", "qwen2", "gemma3"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_follow_bit_for_bit(tmp_path: Path, family: str) -> None:
    run(tmp_path, family, "2")
    run(tmp_path, "2")
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [each["status"]["served"]["version"] for each in seen] == [*range(VERSIONS + 1), 2]
    assert all(len(each["status"]["ranks"]) == 2 for each in seen)
    for each in seen[1:]:
        assert [rank["different"] for rank in each["equal"]] == [[], []], each["status"]["served"]
        assert all(rank["compared"] > 10 for rank in each["equal"])
    assert all(each["verify"]["verdict"] for each in seen[1:-1])
    first, last = seen[0]["outputs"], seen[-2]["outputs"]
    assert last == json.loads((tmp_path / "fresh.json").read_text())
    assert last != first, "the versions do not differ enough to tell"


@pytest.mark.slow
def test_the_transformers_backend_follows_and_releases_nothing_twice(tmp_path: Path) -> None:
    """Its models keep vLLM's process group, whose shared memory must not be closed when a replica is collected."""
    log = run(tmp_path, "llama", "2", "tiled", str(VOCABULARY), 'model_impl="transformers"')
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [each["status"]["served"]["version"] for each in seen] == [*range(VERSIONS + 1), 2]
    for each in seen[1:]:
        assert [rank["different"] for rank in each["equal"]] == [[], []], each["status"]["served"]
    assert "Using Transformers modeling backend" in log
    assert not [line for line in log.splitlines() if "Exception ignored" in line or "__del__" in line]


@pytest.mark.slow
def test_fused_experts_that_a_loader_chooses_among_are_refused_by_name(tmp_path: Path) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_PLUGINS": "delta_sync"}
    arguments = ["llama4", "2", "tiled", str(VOCABULARY), "enable_expert_parallel=true"]
    done = warm.run("tests.e2e.parallel", str(tmp_path), *arguments, seconds=600, environment=environment)
    assert done.status == 1
    (error,) = [line for line in done.said.splitlines() if line.startswith("vllm_delta_sync.errors.ModelError")]
    assert "feed_forward.experts." in error
    assert "reads the data of a tensor" in error


def run(folder: Path, *arguments: str) -> str:
    """Run tests/e2e/parallel.py in a process of its own; its output."""
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_PLUGINS": "delta_sync"}
    done = warm.run("tests.e2e.parallel", str(folder), *arguments, seconds=600, environment=environment)
    assert done.status == 0, done.said[-4000:]
    return done.said

"""Tensor parallelism: each rank's weights are a fresh load's, bit for bit, after every version and after a rollback."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import warm
from tests.e2e.parallel import VERSIONS
from tests.support.tiny import VOCABULARY
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import UnsupportedError

pytestmark = pytest.mark.e2e
# Stacked experts are cut inside each; with one key and value head both ranks hold a copy of it.
FAMILIES = ["qwen3_moe", "llama_one_kv_head", "qwen3", "llama", "qwen2", "gemma3"]


def followed(folder: Path) -> list[dict[str, Any]]:
    """What was seen of two ranks that followed each version, and then went back to version 2."""
    seen: list[dict[str, Any]] = json.loads((folder / "seen.json").read_text())
    assert [each["status"]["served"]["version"] for each in seen] == [*range(VERSIONS + 1), 2]
    assert all(len(each["status"]["ranks"]) == 2 for each in seen)
    for each in seen[1:]:
        assert [rank["different"] for rank in each["equal"]] == [[], []], each["status"]["served"]
        assert all(rank["compared"] > 10 for rank in each["equal"])
    assert all(each["verify"]["verdict"] for each in seen[1:-1])
    assert seen[-2]["outputs"] != seen[0]["outputs"], "the versions do not differ enough to tell"
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_follow_bit_for_bit(tmp_path: Path, family: str) -> None:
    run(tmp_path, family, "2")
    run(tmp_path, "2")
    assert followed(tmp_path)[-2]["outputs"] == json.loads((tmp_path / "fresh.json").read_text())


# Of 4096 rows each rank holds half. 4090 are padded before they are divided.
@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["4096", "4090"])
def test_two_ranks_decode_the_tiles_that_they_hold(tmp_path: Path, vocabulary: str) -> None:
    said = run(tmp_path, "llama_wide", "2", "tiled", vocabulary)
    followed(tmp_path)
    assert "is rebuilt from the bucket" not in said
    with open_run(str(tmp_path / "run")) as published:
        for manifest in list(published.log())[1:]:
            # Not all of its tiles are plain.
            with pytest.raises(UnsupportedError, match="only with the weights of its base version"):
                published.changes(manifest)


@pytest.mark.slow
def test_the_transformers_backend_follows_and_releases_nothing_twice(tmp_path: Path) -> None:
    """Its models keep vLLM's process group, whose shared memory must not be closed when a replica is collected."""
    log = run(tmp_path, "llama", "2", "tiled", str(VOCABULARY), 'model_impl="transformers"')
    followed(tmp_path)
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

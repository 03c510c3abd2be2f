"""Tensor, pipeline, data and expert parallelism: each rank's weights are a fresh load's, bit for bit, after every
version and after a rollback.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import warm
from tests.e2e.layouts import BACK, VERSIONS
from tests.e2e.world import ranks_bound
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import UnsupportedError

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("offline")]
DENSE, EXPERTS = "llama_one_kv_head", "qwen3_moe"
TENSOR, PIPELINE, DATA = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
EXPERT = "enable_expert_parallel"
FAMILIES = ("qwen3_moe", "llama_one_kv_head", "qwen3", "qwen2", "gemma3", "gpt_oss")
"""Stacked experts are cut inside each; with one key and value head both ranks hold a copy of it. Of gpt-oss, the second
rank's loader fills the tensors of one kind of bias with zeros before it copies them."""
WIDE = "llama_wide"
"""Of 4096 rows each rank holds half; 4090 are padded before they are divided."""


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        *(pytest.param(family, {TENSOR: 2}, id=f"TP2-{family}") for family in FAMILIES),
        *(pytest.param(WIDE, {TENSOR: 2, "vocabulary": rows}, id=f"TP2-{rows}") for rows in (4096, 4090)),
        pytest.param("llama", {TENSOR: 2, "model_impl": "transformers"}, id="TP2-transformers"),
        pytest.param(DENSE, {PIPELINE: 2}, id="PP2"),
        pytest.param(DENSE, {DATA: 2}, id="DP2"),
        pytest.param(DENSE, {TENSOR: 2, PIPELINE: 2}, id="TP2-PP2"),
        pytest.param(EXPERTS, {TENSOR: 2, EXPERT: True}, id="TP2-EP"),
        pytest.param(EXPERTS, {DATA: 2, EXPERT: True}, id="DP2-EP"),
    ],
)
def test_every_rank_follows_bit_for_bit(tmp_path: Path, family: str, flags: dict[str, Any]) -> None:
    done = run(tmp_path, family, flags)
    assert done.status == 0, done.said[-4000:]
    started, *seen = json.loads((tmp_path / "seen.json").read_text())
    engines = flags.get(DATA, 1)
    ranks = ranks_of(flags)
    expected = [*range(VERSIONS + 1), BACK, BACK]
    assert [each["status"]["served"]["version"] for each in seen] == expected
    for version, each in zip(expected, seen, strict=True):
        assert [rank["different"] for rank in each["equal"]] == [[]] * ranks, version
        assert all(rank["compared"] > 10 for rank in each["equal"])
        assert each["verify"]["verdict"] is True
        assert each["label"] == [str(version)] * engines
        assert [rank["rank"] for rank in each["status"]["ranks"]] == list(range(ranks))
    proven, last, back, alone = (seen[at]["outputs"] for at in (0, VERSIONS, -2, -1))
    assert alone == back, "engines whose pause was lost do not go on with what they held"
    assert proven == started["outputs"]
    assert last == json.loads((tmp_path / "fresh.json").read_text())
    assert last != proven, "the versions do not differ enough to tell"
    if family == WIDE:
        expect_tiles(tmp_path, done.said)
    if "model_impl" in flags:
        # Its models keep vLLM's process group, whose shared memory must not be closed when a replica is collected.
        assert "Using Transformers modeling backend" in done.said
        assert not [line for line in done.said.splitlines() if "Exception ignored" in line or "__del__" in line]


def expect_tiles(folder: Path, said: str) -> None:
    """Not all tiles of a version are plain, and each rank has decoded those that it holds."""
    assert "is rebuilt from the bucket" not in said
    with open_run(str(folder / "run")) as published:
        for manifest in list(published.log())[1:]:
            with pytest.raises(UnsupportedError, match="only with the weights of its base version"):
                published.changes(manifest)


def test_fused_experts_that_a_loader_chooses_among_are_refused_by_name(tmp_path: Path) -> None:
    done = run(tmp_path, "llama4", {TENSOR: 2, EXPERT: True})
    assert done.status == 1
    (error,) = [line for line in done.said.splitlines() if line.startswith("vllm_delta_sync.errors.ModelError")]
    assert "feed_forward.experts." in error
    assert "reads the data of a tensor" in error


def run(folder: Path, family: str, flags: dict[str, Any]) -> warm.Ended:
    """Run tests/e2e/layouts.py in a process of its own."""
    environment = {**ranks_bound(ranks_of(flags)), "VLLM_PLUGINS": "delta_sync"}
    pairs = [f"{name}={json.dumps(value)}" for name, value in flags.items()]
    return warm.run("tests.e2e.layouts", str(folder), family, *pairs, seconds=600, environment=environment)


def ranks_of(flags: dict[str, Any]) -> int:
    """Over all engines."""
    return int(flags.get(DATA, 1) * flags.get(TENSOR, 1) * flags.get(PIPELINE, 1))

"""Pipeline, data and expert parallelism: each rank's weights are a fresh load's, bit for bit, after every version."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.layouts import BACK, VERSIONS
from tests.e2e.warm import see
from tests.e2e.world import ranks_bound

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("offline")]
DENSE, EXPERTS = "llama_one_kv_head", "qwen3_moe"
TENSOR, PIPELINE, DATA = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
EXPERT = "enable_expert_parallel"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        pytest.param(DENSE, {PIPELINE: 2}, id="PP2"),
        pytest.param(DENSE, {DATA: 2}, id="DP2"),
        pytest.param(DENSE, {TENSOR: 2, PIPELINE: 2}, id="TP2-PP2"),
        pytest.param(EXPERTS, {TENSOR: 2, EXPERT: True}, id="TP2-EP"),
        pytest.param(EXPERTS, {DATA: 2, EXPERT: True}, id="DP2-EP"),
    ],
)
def test_every_rank_follows_bit_for_bit(tmp_path: Path, family: str, flags: dict[str, Any]) -> None:
    pairs = [f"{name}={json.dumps(value)}" for name, value in flags.items()]
    started, *seen = see("tests.e2e.layouts", tmp_path, family, *pairs, **ranks_bound(ranks_of(flags)))
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
    assert alone == back, f"engines whose pause was lost do not go on with what they held: {apart(alone, back)}"
    assert proven == started["outputs"]
    assert last == json.loads((tmp_path / "fresh.json").read_text())
    assert last != proven, "the versions do not differ enough to tell"


def apart(some: list[list[dict[str, Any]]], others: list[list[dict[str, Any]]]) -> list[list[tuple[bool, float]]]:
    """Per engine and prompt: whether the tokens are the same, and by how much the log probabilities differ at most."""
    return [
        [
            (
                one["tokens"] == other["tokens"],
                max(abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True)),
            )
            for one, other in zip(*of_engine, strict=True)
        ]
        for of_engine in zip(some, others, strict=True)
    ]


def ranks_of(flags: dict[str, Any]) -> int:
    """Over all engines."""
    return int(flags.get(DATA, 1) * flags.get(TENSOR, 1) * flags.get(PIPELINE, 1))

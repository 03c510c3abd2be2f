"""A quantized base, real vLLM on its kernels for int8 and MXFP4: served is a fresh load of the weights, quantized."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import warm
from tests.e2e.quantized import ROLLED_BACK_TO, STACKED, VERSIONS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("quantized")]


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("qwen2", "int8 channel"),  # has biases, and a tied head
        ("llama", "int8 channel"),
        ("llama", "int8 tensor"),
        ("gpt_oss", STACKED),
    ],
)
def test_version_is_followed_and_rolled_back_bit_for_bit(tmp_path: Path, family: str, scheme: str) -> None:
    done = warm.run("tests.e2e.quantized", str(tmp_path), family, scheme, seconds=500)
    assert done.status == 0, done.said[-4000:]
    result: dict[str, Any] = json.loads((tmp_path / "seen.json").read_text())
    seen = result["seen"]
    assert [step["served"] for step in seen] == list(range(1, VERSIONS + 1))
    assert {step["kind"] for step in seen} == {"delta"}
    for step in seen:
        assert (step["equal"], step["library"], step["verdict"]) == (True, True, True)
    assert len({json.dumps(step["digests"]) for step in seen}) == VERSIONS
    assert seen[-1]["outputs"] == result["fresh"]
    then = seen[ROLLED_BACK_TO - 1]
    assert result["rolled_back"] == {key: then[key] for key in ("served", "digests", "outputs")}
    assert result["rolled_back"]["outputs"] != seen[-1]["outputs"]
    if scheme == STACKED:
        # The kernel has experts in a layout of its own.
        assert {name.split(".")[-2] for name in result["derived"]} == {"experts"}
        assert len(result["derived"]) == 12
    else:
        # Quantized weights are patched in place; vLLM holds the scales in float32, so that they are loaded again.
        assert all(name.endswith("weight_scale") for name in result["derived"])
        assert len(result["derived"]) == 14
    if not torch.cpu._is_amx_tile_supported():  # there vLLM's own kernel rounds activations in another way
        _expect_stock_says_the_same(tmp_path, [output["tokens"] for output in result["fresh"]])


def _expect_stock_says_the_same(root: Path, tokens: list[list[int]]) -> None:
    """vLLM without our code, on its packed weights, generates the same from the export."""
    out, folder = root / "stock.json", str(root / f"v{VERSIONS}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.stock", str(out), folder],
        env={**os.environ, **warm.ENVIRONMENT, "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(out.read_text())[folder] == tokens

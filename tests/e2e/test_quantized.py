"""A quantized base, real vLLM on its kernels for int8 and MXFP4: served is a fresh load of the weights, quantized."""

from pathlib import Path

import pytest
import torch

from tests.e2e.quantized import STACKED, VERSIONS, expect_quantized
from tests.e2e.stock import said_by_stock
from tests.e2e.warm import see

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
    if scheme == STACKED and not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's kernel for these experts needs a processor with AMX")
    result = see("tests.e2e.quantized", tmp_path, family, scheme)
    expect_quantized(result)
    if scheme == STACKED:
        # The kernel has experts in a layout of its own.
        assert {name.split(".")[-2] for name in result["derived"]} == {"experts"}
        assert len(result["derived"]) == 12
    else:
        # Quantized weights are patched in place; vLLM holds the scales in float32, so that they are loaded again.
        assert all(name.endswith("weight_scale") for name in result["derived"])
        assert len(result["derived"]) == 14
    # With AMX, vLLM's own kernel rounds activations in another way; without instructions for bfloat16 it cuts off what
    # it should round.
    has = torch.cpu.get_capabilities()
    if has.get("avx512_bf16") and not has.get("amx_tile"):
        # vLLM without our code, on its packed weights, generates the same from the export.
        (stock,) = said_by_stock(tmp_path, tmp_path / f"v{VERSIONS}")
        assert stock == [output["tokens"] for output in result["fresh"]]

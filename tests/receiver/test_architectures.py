"""Named families of models: patched, each is bit for bit what vLLM's own loader makes of the same version."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.e2e import warm
from tests.tools.models.reachable import differences

SECONDS = 400
REPRESENTATIVES = {
    "Qwen3ForCausalLM": "projections fused, norms copied",
    "Gemma2ForCausalLM": "head and embedding tied",
    "Qwen3MoeForCausalLM": "a tensor per expert, stacked while loading",
    "GptOssForCausalLM": "experts stacked in the checkpoint",
    "DeepseekV2ForCausalLM": "weights computed after loading",
    "Mamba2ForCausalLM": "weights computed while loading",
    "LlamaForCausalLM@pooling": "made an embedding model by vLLM, which drops the head",
    "Qwen3ForSequenceClassification@pooling": "a classifier in float32, beside weights in bfloat16",
}
OTHERS = [
    "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Gemma3ForCausalLM",
    "Phi3ForCausalLM", "OPTForCausalLM", "GPT2LMHeadModel", "DeepseekV3ForCausalLM", "JambaForCausalLM",
    "AriaForConditionalGeneration", "Qwen3Model@pooling", "LlamaForSequenceClassification@pooling", "BertModel@pooling",
    "BertForSequenceClassification@pooling", "BertForTokenClassification@pooling", "ModernBertModel@pooling",
    "RobertaForSequenceClassification@pooling", "Qwen2ForRewardModel@pooling", "GPT2ForSequenceClassification@pooling",
    "Glm4MoeForCausalLM@mtp", "DeepseekV3ForCausalLM@mtp", "Qwen3NextForCausalLM@mtp", "ExaoneMoeForCausalLM@mtp",
]  # fmt: skip
FAMILIES = [*REPRESENTATIVES, *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)]
"""One family per way in which a loader goes about it for every run, the others for ``make test-full``."""


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One process for all that are asked for, forked from the one of tests/e2e, which has imported vLLM."""
    found = tmp_path_factory.mktemp("models") / "rows.json"
    chosen = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    families = [spec.params["family"] for spec in chosen if spec is not None and "family" in spec.params]
    done = warm.run("tests.tools.models", "--only", *families, "--json", str(found), seconds=SECONDS)
    assert found.exists(), done.said[-3000:]
    return {row["architecture"]: row for row in json.loads(found.read_text())}


@pytest.mark.xdist_group("engines")
@pytest.mark.parametrize("family", [pytest.param("Qwen3ForCausalLM@reranker", marks=pytest.mark.slow)])
def test_classifier_made_of_the_head_is_refused(rows: dict[str, dict[str, Any]], family: str) -> None:
    assert rows[family]["outcome"] == "refused"
    assert "tensor 'lm_head.weight' cannot be routed" in rows[family]["reason"]


@pytest.mark.xdist_group("engines")
@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_exact(rows: dict[str, dict[str, Any]], family: str) -> None:
    row = rows[family]
    assert row["outcome"] in ("exact", "exact through the fallback"), row["reason"]
    assert row["compared"] >= row["tensors"] // 4


class Holder(nn.Module):
    """Weights in all the places where vLLM keeps some."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.ones(2))
        self.absorbed = torch.ones(3)
        self.method = SimpleNamespace(packed=[torch.ones(2, dtype=torch.bfloat16)], nothing=None)
        captured = torch.ones(2)
        self.compute = lambda x: x * captured
        with torch.no_grad():
            self.linear.weight.fill_(1.0)


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("linear.weight", lambda model: model.linear.weight.data),
        ("scale", lambda model: model.scale),
        ("absorbed", lambda model: model.absorbed),
        ("method.packed.0", lambda model: model.method.packed[0]),
        ("compute.captured", lambda model: model.compute.__closure__[0].cell_contents),
    ],
)
def test_one_bit_anywhere_is_a_difference(path: str, place: Any) -> None:
    mine, fresh = Holder(), Holder()
    assert differences(mine, fresh) == []
    bits = place(mine).view(-1)[:1].view(torch.uint8)
    bits[0] ^= 1
    size = place(mine).numel()
    assert differences(mine, fresh) == [f"{path}: 1 of {size} elements"]


def test_missing_and_other_tensors_signs_and_nans_are_differences_and_caches_of_requests_are_none() -> None:
    mine, fresh = Holder(), Holder()
    mine.absorbed[0], fresh.absorbed[0] = -0.0, 0.0
    assert differences(mine, fresh) == ["absorbed: 1 of 3 elements"]
    mine.absorbed[0] = fresh.absorbed[0] = float("nan")
    mine.kv_cache = torch.ones(2)
    assert differences(mine, fresh) == []
    mine.extra = torch.ones(1)
    del mine.absorbed
    mine.scale = mine.scale.double()
    found = differences(mine, fresh)
    assert found[:2] == ["absorbed: only in a fresh load", "extra: only in the patched model"]
    assert found[2].startswith("scale: torch.float64")

"""Options of vLLM under which patched weights say what a fresh load says, bit for bit. See docs/features.md."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.features import BACK, DRAFT, SERVED, VERSIONS, expect_followed
from tests.e2e.servers import plain_vllm_serve, refused
from tests.e2e.warm import see
from tests.support.tiny import make_model, save_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.xdist_group("offline")]

EAGER = {"enforce_eager": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
SERVED_MODEL = {"method": "draft_model", "model": SERVED, "num_speculative_tokens": 3}
DRAFT_MODEL = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3}


def follow(root: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Run tests/e2e/features.py in a process of its own and read what it saw."""
    # Code that is compiled for a test is of no use to anybody else.
    environment = {} if "enforce_eager" in options else {"VLLM_CACHE_ROOT": str(root / "cache")}
    seen: dict[str, Any] = see("tests.e2e.features", root, json.dumps(options), environment=environment)
    return seen


def follow_each(root: Path, **options: Any) -> dict[str, Any]:
    """As ``follow``; each version, and the one rolled back to, has the bits of a fresh load."""
    seen = follow(root, {**EAGER, **options, "each": True})
    assert (seen["served"], seen["verdicts"]) == (VERSIONS, [True] * VERSIONS)
    each, back = seen["each"], seen["back"]
    assert [(step["equal"], step["label"]) for step in each] == [
        (True, str(version + 1)) for version in range(VERSIONS)
    ]
    assert (back["equal"], back["label"], back["said"]) == (True, str(BACK), each[BACK - 1]["said"])
    assert seen["again"] == [
        VERSIONS,
        "engine: attach was called again for this LLM; use what the last call returned",
        BACK,
    ]
    assert each[-1]["said"] == seen["fresh"]
    assert len({json.dumps(said) for said in (seen["first"], *(step["said"] for step in each))}) == VERSIONS + 1
    return seen


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({**EAGER, "sleep": 2}, id="sleep-2"),
        pytest.param({}, id="compiled"),
        pytest.param({"compilation_config": {"mode": 3, "backend": "eager"}}, id="compiled-eager"),
        pytest.param({**EAGER, "enable_lora": True, "max_lora_rank": 8, "sleep": 2}, id="lora-sleep-2"),
        pytest.param({**EAGER, "speculative_config": DRAFT_MODEL}, id="draft-model"),
        pytest.param({**EAGER, "speculative_config": SERVED_MODEL}, id="served-model-drafts"),
        pytest.param({**EAGER, "sleep": 1}, id="sleep-1"),
        pytest.param({**EAGER, "kv_cache_dtype": "fp8"}, id="kv-cache-fp8"),
        pytest.param({**EAGER, "speculative_config": NGRAM}, id="ngram"),
        pytest.param({"enable_lora": True, "max_lora_rank": 8}, id="lora-compiled"),
    ],
)
def test_followed_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    expect_followed(follow(tmp_path, options), options)
    if options == {}:
        assert list((tmp_path / "cache").rglob("*compile*")), "nothing was compiled"


def test_experts_under_lora_hold_what_a_fresh_load_holds(tmp_path: Path) -> None:
    """vLLM gives experts under LoRA to Triton, which the CPU lacks: their weights are compared."""
    seen = follow(tmp_path, {**EAGER, "enable_lora": True, "max_lora_rank": 8, "family": "qwen3_moe", "silent": True})
    assert seen["served"] == VERSIONS
    assert seen["verdicts"] == [True] * VERSIONS
    assert any("base_layer" in name for name in seen["last"])
    assert seen["last"] == seen["fresh"]
    assert all(seen["last"][name] != digest for name, digest in seen["first"].items() if "experts" in name)


@pytest.mark.parametrize(
    ("environment", "flags", "words"),
    [
        ({}, ["--load-format", "dummy"], "--load-format is 'dummy'"),
        ({"VLLM_USE_RUST_FRONTEND": "1"}, [], "VLLM_USE_RUST_FRONTEND is '1': vLLM's Rust API server loads no plugins"),
        ({"DELTA_SYNC_LORA_NAME": "math"}, [], "'math' is to be served, and vLLM was started without --enable-lora"),
    ],
    ids=["dummy", "rust", "no lora"],
)
def test_server_is_refused_at_its_start(
    tmp_path: Path, environment: dict[str, str], flags: list[str], words: str
) -> None:
    # Stands for vLLM's Rust program, which its CPU build lacks: it is started, and is to end with the engine.
    front_end = tmp_path / "front_end"
    front_end.write_text("#!/bin/sh\nexec sleep 600\n")
    front_end.chmod(0o700)
    base = save_checkpoint(make_model("qwen3"), tmp_path / "base")
    extension = ["--worker-extension-cls", "vllm_delta_sync.engine.WorkerExtension"]
    environment = environment | {"VLLM_PLUGINS": "delta_sync", "DELTA_SYNC_BUCKET": str(tmp_path / "run")}
    if "VLLM_USE_RUST_FRONTEND" in environment:
        environment["VLLM_RUST_FRONTEND_PATH"] = str(front_end)
    status, text = refused(tmp_path / "log", plain_vllm_serve(base, *extension, *flags), environment)
    assert status != 0
    assert words in text

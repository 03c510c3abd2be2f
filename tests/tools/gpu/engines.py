"""``LLM`` objects that follow a run on a GPU: the programs of tests/e2e, with models that its kernels take.

Each is a process of its own. What it says and holds is compared there with an engine that loads the last checkpoint.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.features import VERSIONS, expect_followed
from tests.e2e.quantized import expect_quantized
from tests.tools.gpu.report import Report

SECONDS = 600
MEMORY = {"gpu_memory_utilization": 0.3}
"""Two engines live in one process, and a third model for a moment."""
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EXPERTS = {**SIZES, "moe_intermediate_size": 128}
LORA = {"enable_lora": True, "max_lora_rank": 8}
CASES: dict[str, dict[str, Any]] = {
    "compiled, with CUDA graphs": {"sizes": SIZES},
    "experts": {"family": "qwen3_moe", "sizes": EXPERTS},
    "sleep at level 1": {"sizes": SIZES, "sleep": 1, "enable_sleep_mode": True},
    "sleep at level 2": {"sizes": SIZES, "sleep": 2, "enable_sleep_mode": True},
    "an adapter beside the weights": {"sizes": SIZES, **LORA},
}


def seen_by(module: str, root: Path, *arguments: str) -> dict[str, Any]:
    """Run a program of tests/e2e to its end; what it has seen."""
    root.mkdir()
    environment = {**os.environ, "VLLM_PLUGINS": "delta_sync", "DELTA_SYNC_STATE_DIR": str(root / "state")}
    command = [sys.executable, "-m", module, str(root), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    # The page has the first line of an error, and that of vLLM's errors is the last.
    assert done.returncode == 0, "\n".join([*done.stderr.splitlines()[-1:], done.stdout[-2000:], done.stderr[-4000:]])
    seen: dict[str, Any] = json.loads((root / "seen.json").read_text())
    return seen


def follow(root: Path, options: dict[str, Any]) -> str:
    expect_followed(seen_by("tests.e2e.features", root, json.dumps({**options, **MEMORY})), options)
    return f"{VERSIONS} versions, weights, tokens and log-probs equal"


def follow_adapters(root: Path) -> str:
    seen = seen_by("tests.e2e.lora", root, "1", json.dumps({"sizes": SIZES, **MEMORY}))
    assert (seen["wrong"], seen["different"], seen["verdicts"]) == ([], True, [True, True])
    assert (seen["rolled back"], seen["other stayed"], seen["tried again"]) == (True, True, True)
    return f"{len(seen['served'])} versions of two adapters, tokens and log-probs equal"


def follow_quantized(root: Path) -> str:
    seen = seen_by("tests.e2e.quantized", root, "llama", "fp8 channel", json.dumps({"sizes": SIZES, **MEMORY}))
    expect_quantized(seen)
    return (
        f"{len(seen['seen'])} versions, weights, tokens and log-probs equal; reloaded: {len(seen['derived'])} tensors"
    )


def check_engines(report: Report, root: Path) -> None:
    root.mkdir()
    for number, (name, options) in enumerate(CASES.items()):
        report.check(f"LLM, {name}", partial(follow, root / str(number), options))
    report.check("LLM, adapters of two runs", partial(follow_adapters, root / "adapters"))
    report.check("LLM, weights in fp8", partial(follow_quantized, root / "quantized"))

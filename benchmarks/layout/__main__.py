"""What plain weights cost in generation: vLLM on the CPU with the worker extension, against vLLM as it is.

Stock vLLM packs linear weights and experts into the tile order of its kernels; with the worker extension it computes
from the plain parameters, which patches can reach. Both serve the same random weights, each in a process of its own,
with one thread pinned to the same core; the best of several runs counts. A ratio above 1 means plain is faster.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.rows import Row, best_seconds, parse, row, write
from benchmarks.common.tables import Place, pivot

BENCH = "layout"
PEER = "vLLM packed weights"
LAYOUTS = ("packed", "plain")
ROUNDS = 2
MODEL_LENGTH = 1024
_HEAD = {"eos_token_id": 1, "bos_token_id": 0, "max_position_embeddings": MODEL_LENGTH, "tie_word_embeddings": True}
DENSE: dict[str, Any] = {
    **_HEAD,
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
EXPERTS: dict[str, Any] = {
    **_HEAD,
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 384,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
TINY = {**EXPERTS, "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "moe_intermediate_size": 64}
MODELS = {"dense 0.6B": ("qwen3", DENSE), "MoE 0.3B": ("qwen3_moe", EXPERTS)}
QUICK_MODELS = {"MoE tiny": ("qwen3_moe", TINY)}


def save_model(path: Path, kind: str, sizes: dict[str, Any]) -> None:
    """A bfloat16 checkpoint with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, dtype=torch.bfloat16)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)


def run_engine(checkpoint: str, layout: str, size: str, out: Path) -> None:
    """Measure one layout in this process; writes tokens per second by phase as JSON."""
    from vllm import LLM, SamplingParams

    from vllm_delta_sync.engine import WORKER_EXTENSION

    extension = {"worker_extension_cls": WORKER_EXTENSION} if layout == "plain" else {}
    engine = LLM(
        checkpoint,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=MODEL_LENGTH,
        max_num_batched_tokens=MODEL_LENGTH,
        max_num_seqs=16,
        **extension,
    )

    def generation(batch: int, prompt: int, tokens: int) -> Callable[[], object]:
        prompts = [{"prompt_token_ids": [3 + (7 * i + 11 * j) % 500 for j in range(prompt)]} for i in range(batch)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return lambda: engine.generate(prompts, params, use_tqdm=False)

    prompt, tokens, repeats = (64, 9, 1) if size == "quick" else (512, 49, 2)
    generation(2, 16, 4)()
    found = {"prefill": prompt / best_seconds(generation(1, prompt, 1), repeats)}
    for batch in (1, 16):
        first = best_seconds(generation(batch, 16, 1), repeats)
        whole = best_seconds(generation(batch, 16, tokens), repeats)
        found[f"decode batch {batch}"] = batch * (tokens - 1) / (whole - first)
    out.write_text(json.dumps(found))


def measure(path: Path, layout: str, size: str) -> dict[str, float]:
    """Tokens per second by phase, from a process of its own."""
    out = path / f"{layout}.json"
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "benchmarks.layout", "engine", str(path), layout, size, str(out)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"the engine with {layout} weights failed:\n{done.stdout.decode()[-4000:]}")
    found: dict[str, float] = json.loads(out.read_text())
    return found


def compare(name: str, kind: str, sizes: dict[str, Any], size: str) -> list[Row]:
    """Rows of one model: both layouts in turn, so that both meet the same neighbours on the machine."""
    best: dict[str, dict[str, float]] = {layout: {} for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), kind, sizes)
        for _ in range(1 if size == "quick" else ROUNDS):
            for layout in LAYOUTS:
                for phase, speed in measure(Path(folder), layout, size).items():
                    best[layout][phase] = max(speed, best[layout].get(phase, 0.0))
    rows = []
    for phase, packed in best["packed"].items():
        plain = best["plain"][phase]
        case = f"{name} {phase}"
        rows += [
            row(BENCH, case, "packed", packed, "tokens/s"),
            row(BENCH, case, "plain", plain, "tokens/s"),
            row(BENCH, case, "ratio", plain / packed, "x", PEER),
        ]
    return rows


def tables(rows: Sequence[Row]) -> list[str]:
    """Speeds, and plain over packed."""

    def place(item: Row) -> Place:
        kind, size, work = item["case"].split(" ", 2)
        return f"{kind} {size}", f"{work}: {'plain over packed' if 'peer' in item else item['metric']} [{item['unit']}]"

    return pivot("speed", rows, place)


def main(arguments: list[str] | None = None) -> None:
    options = parse(BENCH, __doc__ or "", arguments, minutes=10)
    rows: list[Row] = []
    for name, (kind, sizes) in (QUICK_MODELS if options.quick else MODELS).items():
        rows += compare(name, kind, sizes, "quick" if options.quick else "full")
    write(options.json, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        run_engine(sys.argv[2], sys.argv[3], sys.argv[4], Path(sys.argv[5]))
    else:
        main()

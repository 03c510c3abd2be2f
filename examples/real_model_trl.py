"""real_model.py through TRL: AsyncGRPOTrainer trains a real language model against `delta-sync serve` on two CPU cores.

    python examples/real_model_trl.py CHECKPOINT           # about 15 minutes; writes real-trl-out/

Task, reward, server and learning rate are those of real_model.py, which lies beside it. Each weight sync of TRL
publishes one version. At the end prove_served.py compares the server with the trainer's checkpoint, and with a vLLM
that loads it afresh. OUT gets log_history.json, TRL's log. Exit status: 0 all is equal, 1 something differs or failed.
"""

import os

if __name__ == "__main__":  # before torch and TRL are imported: threads sleep while they wait, and no network is used
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import argparse
import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import prove_served  # type: ignore[import-not-found]
import torch
from datasets import Dataset
from real_model import CAPITAL_OF, FLAGS, MAX_TOKENS, SAMPLES, chat, reward, serving  # type: ignore[import-not-found]
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

from trainer_side.integrations.trl import DeltaWeightTransfer

BATCH, WINDOW, MARKER = 48, 10, ".delta-sync-real-trl"


def tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **tree: Any
) -> tuple[Tensor, None]:
    """Attention in a tree of samples that share prefixes: a token sees those on its path. TRL's own needs a GPU.

    Segment s has the tokens from ``tree_cu_seqlens_q[s]`` on; ``tree_kv_index`` has, from ``tree_cu_seqlens_k[s]`` on,
    the tokens from the root to its end.
    """
    lengths, path_lengths = tree["tree_cu_seqlens_q"].diff(), tree["tree_cu_seqlens_k"].diff()
    on_path = torch.zeros(len(lengths), query.shape[2], dtype=torch.bool)
    on_path[torch.arange(len(lengths)).repeat_interleave(path_lengths), tree["tree_kv_index"]] = True
    seen = on_path.repeat_interleave(lengths, dim=0).tril()
    outputs = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True)
    return outputs.transpose(1, 2), None


def capital_and_short(completions: Any, completion_ids: Any, country: list[str], **_columns: object) -> list[float]:
    """Reward of each answer, as in real_model.py. TRL calls it in its rollout process."""
    ended = ["stop" if len(ids) < MAX_TOKENS else "length" for ids in completion_ids]
    answers = zip(completions, ended, country, strict=True)
    return [reward(CAPITAL_OF[asked], {"text": one[-1]["content"], "finish_reason": end})
            for one, end, asked in answers]  # fmt: skip


def train(options: argparse.Namespace, tokenizer: Any, url: str, transfer: DeltaWeightTransfer) -> Any:
    """Train from the checkpoint to OUT/checkpoint; returns TRL's trainer once the last version is durable."""
    # Without a GPU: TRL asks CUDA for its name, and has a tree attention for GPUs only.
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    packing.tree_attention = tree_attention
    countries = [country for _ in range(100) for country in CAPITAL_OF]
    asked = [[{"role": "system", "content": ""}, {"role": "user", "content": f"What is the capital of {country}?"}]
             for country in countries]  # fmt: skip
    settings = AsyncGRPOConfig(
        output_dir=str(options.out / "trl"),
        vllm_server_base_url=url,
        max_steps=options.steps,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        epsilon_high=0.28,
        num_generations=SAMPLES,
        per_device_train_batch_size=BATCH,
        max_completion_length=MAX_TOKENS,
        token_budget=0,  # each step learns from as many answers; otherwise TRL asks the server how long a row may be
        max_inflight_tasks=BATCH,
        queue_maxsize=SAMPLES,  # training is slower than this server, so answers that wait would only grow old
        max_staleness=1,  # TRL buffers four batches nevertheless; older answers are dropped
        save_strategy="no",
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = AsyncGRPOTrainer(
        model=str(options.checkpoint),
        reward_funcs=capital_and_short,
        args=settings,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": asked, "country": countries}).shuffle(seed=options.seed),
        callbacks=[transfer.callback],  # ends training at a step when SIGTERM comes
        weight_transfer=transfer,
    )
    trainer.train()
    for part in (trainer.model.to(torch.bfloat16), tokenizer):
        part.save_pretrained(options.out / "checkpoint")
    return trainer


def main() -> int:
    """Exit status: see ``--help``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a chat model in bfloat16")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps, a version each (default: 60)")
    parser.add_argument("--lr", type=float, default=3e-6, help="learning rate (default: 3e-6)")
    parser.add_argument("--seed", type=int, default=0, help="of the questions (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("real-trl-out"), help="made anew (default: real-trl-out)")
    options = parser.parse_args()
    if options.out.exists() and not (options.out / MARKER).exists():
        parser.error(f"{options.out} was not made by this script; give another directory with --out")
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    (options.out / MARKER).touch()
    options.bucket = str(options.out / "bucket")
    with socket.socket() as probe:  # finds a free port
        probe.bind(("127.0.0.1", 0))
        notice = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    # How to parse an answer into a message; TRL knows that only for the chat templates of large models.
    parts = {"content": {"close_pattern": tokenizer.eos_token, "content": "text"}}
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": parts}
    core, *others = cores = sorted(os.sched_getaffinity(0))
    transfer = DeltaWeightTransfer(options.bucket, base=options.checkpoint, notice=notice)
    with serving(options, notice, core) as server:
        os.sched_setaffinity(0, others[:4] or cores)
        torch.set_num_threads(len(others[:4] or cores))
        trainer = train(options, tokenizer, str(server.base_url), transfer)
        os.sched_setaffinity(0, cores)
        server.get(f"/delta_sync/wait?version={trainer.model_version}&timeout=120").raise_for_status()
        (options.out / "log_history.json").write_text(json.dumps(trainer.state.log_history, indent=2) + "\n")
        prompts = [chat(tokenizer, f"What is the capital of {country}?") for country in CAPITAL_OF]
        (options.out / "prompts.json").write_text(json.dumps(prompts))
        served = ["--server", str(server.base_url), "--bucket", options.bucket, "--core", str(core)]
        files = [f"--{name}={options.out / path}" for name, path in
                 (("checkpoint", "checkpoint"), ("prompts", "prompts.json"), ("log", "fresh.log"))]  # fmt: skip
        # In this process, so that an interrupt ends the fresh vLLM too.
        proven = prove_served.prove(prove_served.parse([*served, *files, "--", *FLAGS.split()]))
    rewards = pd.DataFrame([line for line in trainer.state.log_history if "reward" in line]).reward
    print(f"reward {rewards.head(WINDOW).mean():.3f} → {rewards.tail(WINDOW).mean():.3f} in {len(rewards)} steps, "
          f"{trainer.model_version} versions")  # fmt: skip
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())

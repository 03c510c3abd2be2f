"""What the tests of examples/three_machines share: a tiny policy, and batches of games that it could have played."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.three_machines import trainer
from vllm_delta_sync.bucket import open_bucket

RUN = "0123456789abcdef" * 2


def save_policy(folder: Path) -> Path:
    """A checkpoint with the example's vocabulary and 20,000 parameters."""
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"num_hidden_layers": 2, "head_dim": 16, "vocab_size": len(trainer.CHARACTERS), "pad_token_id": 0}
    config = Qwen3Config(**shape, max_position_embeddings=trainer.POSITIONS, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def key_of(worker: str, number: int) -> str:
    return f"trajectories/{worker}/{number:010d}.json.gz"


def some_batch(number: int = 0, version: int = 0, run: str = RUN, worker: str = "w1") -> dict[str, Any]:
    """A batch with three plays of each game, log-probs drawn at random; the same for the same arguments."""
    rng = random.Random(f"{worker} {number}")
    games = []
    for group in range(2):
        for _ in range(3):
            turns = [
                {
                    "prompt": prompt,
                    "output": output,
                    "logprobs": [-rng.random() for _ in output],
                    "spans": [{"version": version, "start": 0, "end": len(output)}],
                }
                for prompt, output in trainer.example_game(rng)
            ]
            games.append({"game": group, "turns": turns, "solved": len(turns) < 4, "reward": rng.random()})
    return {"format_version": 1, "run": run, "worker": worker, "number": number, "games": games}


def packed(document: Any) -> bytes:
    """The object of a batch."""
    return gzip.compress(json.dumps(document).encode(), mtime=0)


def write_batch(url: str, batch: dict[str, Any]) -> str:
    """Put a batch where it belongs; its key."""
    key = key_of(batch["worker"], batch["number"])
    with open_bucket(url) as bucket:
        bucket.put(key, packed(batch), if_absent=True)
    return key

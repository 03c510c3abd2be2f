"""What the tests of examples/three_machines share: a tiny policy, and batches of games that it could have played."""

import random
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.demo.characters import EOS_ID, PAD_ID, VOCABULARY
from examples.three_machines import game
from examples.three_machines.policy import transcript
from examples.three_machines.trajectories import Batch, Game, Span, Turn
from vllm_delta_sync.wire.manifest import timestamp

RUN = "0123456789abcdef" * 2


def save_policy(folder: Path, layers: int = 2) -> Path:
    """A checkpoint with the example's vocabulary and 20,000 parameters."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def some_game(rng: random.Random, number: int, version: int) -> Game:
    """A game of the weak player, its log-probs drawn at random, all sampled by one version."""
    turns = [
        Turn(
            prompt=prompt,
            output=output,
            logprobs=[-rng.random() for _ in output],
            spans=[Span(version=version, start=0, end=len(output))],
        )
        for prompt, output in transcript(rng)
    ]
    return Game(game=number, turns=turns, solved=len(turns) < game.GUESSES, reward=rng.random())


def some_batch(
    number: int = 0, version: int = 0, run: str = RUN, worker: str = "w1", groups: int = 2, plays: int = 3
) -> Batch:
    """A batch; the same for the same arguments but for its time."""
    rng = random.Random(f"{worker} {number}")
    games = [some_game(rng, group, version) for group in range(groups) for _ in range(plays)]
    return Batch(
        run=run,
        worker=worker,
        number=number,
        created_at=timestamp(),
        lowest=version,
        highest=version,
        plays=plays,
        games=games,
    )

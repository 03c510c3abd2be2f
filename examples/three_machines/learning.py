"""From batches of games to one optimizer step: sequences, advantages, gradient, weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from examples.demo.characters import PAD_ID
from examples.demo.loss import group_advantages
from examples.demo.policy import Batch as Padded
from examples.demo.policy import Masters, next_token_logprobs
from examples.three_machines.loss import TRUNCATION, Loss, off_policy_loss
from examples.three_machines.trajectories import Batch, Game
from vllm_delta_sync.errors import FormatError

MAX_NORM = 10.0

Turns = Sequence[tuple[list[int], list[int]]]
"""Prompt and output token ids of each turn; a prompt begins with all of the turn before."""


def lay_out(games: Sequence[Turns]) -> Padded:
    """One right-padded sequence per game: the last turn holds all others; what the policy wrote is marked."""
    rows = [[*turns[-1][0], *turns[-1][1]] for turns in games]
    tokens = torch.full((len(rows), max(map(len, rows))), PAD_ID, dtype=torch.int64)
    answers = torch.zeros((len(rows), tokens.shape[1] - 1), dtype=torch.bool)
    for number, (row, turns) in enumerate(zip(rows, games, strict=True)):
        tokens[number, : len(row)] = torch.tensor(row)
        for prompt, output in turns:
            answers[number, len(prompt) - 1 : len(prompt) + len(output) - 1] = True
    return Padded(tokens, answers)


def turns_of(game: Game) -> Turns:
    """Prompts and outputs of a game."""
    return [(turn.prompt, turn.output) for turn in game.turns]


def per_token(games: Sequence[Game], answers: torch.Tensor, version: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs when sampled (float32) and ages in versions (int64) of all marked tokens, both as ``answers``."""
    sampled = torch.zeros(answers.shape)
    ages = torch.zeros(answers.shape, dtype=torch.int64)
    for number, game in enumerate(games):
        sampled[number, answers[number]] = torch.tensor([value for turn in game.turns for value in turn.logprobs])
        spans = [span for turn in game.turns for span in turn.spans]
        ages[number, answers[number]] = torch.tensor(
            [version - span.version for span in spans for _ in range(span.end - span.start)]
        )
    return sampled, ages


@dataclass(frozen=True)
class Step:
    """What a gradient was made of. ``tokens``: age in versions → how many the policy wrote at that age."""

    loss: Loss
    games: int
    reward: float
    solved: float
    tokens: dict[int, int]

    @property
    def figures(self) -> dict[str, Any]:
        """For the events."""
        return {
            "games": self.games,
            "reward": self.reward,
            "solved": self.solved,
            "truncated": self.loss.truncated,
            "drift": self.loss.drift,
            "ages": self.tokens,
        }


class Learner:
    """A policy and its optimizer.

    Attributes:
        model: bf16, what is published. masters: fp32, what is trained.
    """

    def __init__(self, model: Qwen3ForCausalLM, rate: float, eps: float) -> None:
        self.model = model
        self.masters = Masters(model, rate, eps)

    def check(self, batch: Batch) -> None:
        """Refuse what this policy cannot have written.

        Raises:
            FormatError: a token id or a length is beyond the model's.
        """
        config = self.model.config
        for number, game in enumerate(batch.games):
            last = game.turns[-1]
            row = last.prompt + last.output
            if max(row) >= config.vocab_size or len(row) > config.max_position_embeddings:
                raise FormatError(
                    f"{batch.key}: game {number} has {len(row)} tokens up to id {max(row)}; the policy knows "
                    f"{config.vocab_size} ids and {config.max_position_embeddings} positions"
                )
            if not all(turn.prompt for turn in game.turns):
                raise FormatError(f"{batch.key}: game {number} has a turn without a prompt")

    def gradient(self, batches: Sequence[Batch], version: int) -> Step:
        """Add the gradient of these batches to the model's; ``version`` is that of its weights."""
        games = [game for batch in batches for game in batch.games]
        rewards = [torch.tensor([game.reward for game in batch.games]) for batch in batches]
        advantages = torch.cat(
            [group_advantages(one, batch.plays) for one, batch in zip(rewards, batches, strict=True)]
        )
        padded = lay_out([turns_of(game) for game in games])
        sampled, ages = per_token(games, padded.answers, version)
        logprobs = next_token_logprobs(self.model, padded)
        loss = off_policy_loss(logprobs, sampled, advantages, padded.answers, ages, TRUNCATION)
        loss.value.backward()
        found, counts = ages[padded.answers].unique(return_counts=True)
        return Step(
            loss,
            len(games),
            float(torch.cat(rewards).mean()),
            sum(game.solved for game in games) / len(games),
            dict(zip(found.tolist(), counts.tolist(), strict=True)),
        )

    def step(self) -> float:
        """Move the weights along the gradient; returns its norm before clipping."""
        return self.masters.step(MAX_NORM)

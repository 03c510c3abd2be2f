"""Train the demo's policy here, and keep versions of it: what ``training_data`` caches.

Policy, task and loss are those of ``examples/rl_loop.py``: weights in float32, of which a version has the bfloat16
roundings. The policy samples its answers itself, and each letter in its place is rewarded, so that there is some signal
from the first step.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common.training_data import (
    QUICK_STEPS,
    SEQUENCE_SHARE,
    SEQUENCE_STEPS,
    SHARES,
    Bits,
    Weights,
    changed_share,
)
from examples import rl_loop
from vllm_delta_sync.tensors.torch_views import bits_of

PROMPTS, SAMPLES, MAX_NORM = 8, 8, 1.0


@torch.no_grad()
def sample(
    model: torch.nn.Module, prompts: Sequence[list[int]], generator: torch.Generator
) -> tuple[list[list[int]], list[list[float]]]:
    """An answer to each prompt, at temperature 1, and the log-probabilities of its tokens."""
    rows = [list(prompt) for prompt in prompts]
    logprobs: list[list[float]] = [[] for _ in rows]
    going = list(range(len(rows)))
    for _ in range(rl_loop.MAX_ANSWER_TOKENS):
        width = max(len(rows[number]) for number in going)
        tokens = torch.full((len(going), width), rl_loop.IDS[rl_loop.PAD])
        for line, number in enumerate(going):
            tokens[line, : len(rows[number])] = torch.tensor(rows[number])
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        ends = torch.tensor([len(rows[number]) - 1 for number in going])
        chances = torch.log_softmax(logits[torch.arange(len(going)), ends], dim=-1)
        chosen = torch.multinomial(chances.exp(), 1, generator=generator).squeeze(1).tolist()
        for line, (number, token) in enumerate(zip(going, chosen, strict=True)):
            rows[number].append(token)
            logprobs[number].append(float(chances[line, token]))
        going = [number for number in going if rows[number][-1] != rl_loop.IDS[rl_loop.EOS]]
        if not going:
            break
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)], logprobs


class Training:
    """The toy policy and its optimizer; ``step`` moves it once."""

    def __init__(self, supervised: int, seed: int = 0) -> None:
        """Learn from right answers first, for at most so many steps."""
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._model = rl_loop.make_model(seed)
        with mock.patch.object(rl_loop, "WARM_UP_LIMIT", supervised):
            rl_loop.warm_up(self._model, seed)
        self._optimizer = torch.optim.Adam(self._model.parameters())

    def step(self, lr: float) -> None:
        """One step of policy gradient on fresh answers."""
        words = [word for word in rl_loop.random_words(self._rng, PROMPTS) for _ in range(SAMPLES)]
        prompts = [rl_loop.prompt_ids(word) for word in words]
        answers, sampled = sample(self._model, prompts, self._generator)
        rewards = torch.tensor([_letters_right(word, tokens) for word, tokens in zip(words, answers, strict=True)])
        ages = rl_loop.align(prompts, [[0.0] * len(tokens) for tokens in answers], fill=math.inf)
        logprobs = rl_loop.next_token_logprobs(self._model, prompts, answers)
        advantages = rl_loop.group_advantages(rewards.view(-1, SAMPLES)).view(-1, 1)
        rl_loop.policy_loss(logprobs, rl_loop.align(prompts, sampled), ages, advantages).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> Weights:
        """A copy of the served bits, in the order of the names."""
        parameters = sorted(dict(self._model.named_parameters()).items())
        return {
            name: bits_of(parameter.detach().bfloat16()).reshape(tuple(parameter.shape))
            for name, parameter in parameters
        }


def _letters_right(word: str, tokens: list[int]) -> float:
    """Share of the right answer's tokens, end included, that stand in their places."""
    right = rl_loop.right_answer(word)
    return sum(one == other for one, other in zip(right, tokens, strict=False)) / max(len(right), len(tokens))


class Steering:
    """Steps whose learning rate follows the changed share that is asked for."""

    def __init__(self, training: Training, lr: float) -> None:
        self._training, self.lr = training, lr

    def run(self, share: float, steps: int, steered: bool = True) -> tuple[Weights, Weights, Weights]:
        """Take so many steps; returns the last three versions."""
        before = old = new = self._training.weights()
        for _ in range(steps):
            self._training.step(self.lr)
            before, old, new = old, new, self._training.weights()
            if steered:
                self.lr *= (share / max(changed_share(old, new), share / 8)) ** 0.5
        return before, old, new


@dataclass(frozen=True)
class Schedule:
    """Steps of each phase: supervised (at most), to settle the moments, steered and at a fixed rate for each share."""

    shares: tuple[float, ...]
    supervised: int
    settle: int
    steered: int
    fixed: int
    sequence: int


FULL = Schedule(SHARES, supervised=150, settle=60, steered=10, fixed=3, sequence=SEQUENCE_STEPS)
QUICK = Schedule((SEQUENCE_SHARE,), supervised=4, settle=2, steered=3, fixed=1, sequence=QUICK_STEPS)


def make(folder: Path, schedule: Schedule, say: Callable[[str], None]) -> None:
    """Train and fill the folder. The sequence is written last: where it is, all is."""
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(schedule.supervised)
    steering = Steering(training, 1e-6)
    steering.run(schedule.shares[0], schedule.settle)
    sequence: dict[str, Any] = {}
    for share in schedule.shares:
        steering.run(share, schedule.steered)
        before, old, new = steering.run(share, schedule.fixed + 1, steered=False)
        say(f"share {share:.1%} asked for, {changed_share(old, new):.2%} found, lr {steering.lr:.2g}")
        arrays: dict[str, Any] = {"lr": np.float64(steering.lr)}
        for part, weights in (("bef", before), ("old", old), ("new", new)):
            arrays |= {f"{part}:{name}": bits for name, bits in weights.items()}
        np.savez(folder / f"pair_{share:.3f}.npz", **arrays)
        if share == SEQUENCE_SHARE:
            sequence |= {f"base:{name}": bits for name, bits in new.items()}
            for step, (positions, values) in enumerate(_record(training, steering, schedule.sequence, new)):
                sequence |= {f"positions:{step}": positions, f"values:{step}": values}
    np.savez(folder / "sequence.npz", steps=np.int64(schedule.sequence), **sequence)


def _record(
    training: Training, steering: Steering, length: int, base: Weights
) -> list[tuple[npt.NDArray[np.uint32], Bits]]:
    last, steps = np.concatenate([bits.reshape(-1) for bits in base.values()]), []
    for _ in range(length):
        training.step(steering.lr)
        flat = np.concatenate([bits.reshape(-1) for bits in training.weights().values()])
        positions = np.flatnonzero(flat != last)
        steps.append((positions.astype(np.uint32), flat[positions]))
        last = flat
    return steps

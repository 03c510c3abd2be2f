"""Train the demo's policy here, and keep versions of it: what ``training_data`` caches.

The model computes with masters rounded to bfloat16, in float32 arithmetic, because many processors are slow at the
other. A step of policy gradient is as in the demo, on answers that the model samples itself, with a reward for each
letter in its place, so that there is some signal from the first step.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import policy
from benchmarks.common.policy import EOS_ID, encode, group_advantages, policy_loss
from benchmarks.common.training_data import (
    QUICK_STEPS,
    SEQUENCE_SHARE,
    SEQUENCE_STEPS,
    SHARES,
    Bits,
    Weights,
    changed_share,
)
from vllm_delta_sync.tensors.torch_views import bits_of

PROMPTS, SAMPLES, MAX_NORM = 8, 8, 1.0
BETAS, EPS = (0.9, 0.999), 1e-8


class Masters:
    """Adam on float32 masters of a model's parameters; the model itself holds them rounded to bfloat16."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._masters = [parameter.detach().clone().requires_grad_() for parameter in self._parameters]
        self.restart()

    def restart(self) -> None:
        """Forget the moments; the masters stay where they are."""
        self._optimizer = torch.optim.Adam(self._masters, betas=BETAS, eps=EPS)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Use up the parameters' gradients."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad, parameter.grad = parameter.grad, None
        torch.nn.utils.clip_grad_norm_(self._masters, MAX_NORM)
        self._optimizer.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.copy_(master.bfloat16())


class Training:
    """The toy policy and its optimizer; ``step`` moves it once."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._model = policy.make_model(seed).float()
        self._masters = Masters(self._model)

    def supervised(self, limit: int) -> float:
        """Learn from right answers until the demo's target or ``limit`` steps; returns the last chance of one."""
        chance = 0.0
        for _ in range(limit):
            batch = policy.right_answers(self._rng, policy.WARM_UP_BATCH)
            logprobs = policy.next_token_logprobs(self._model, batch)
            chance = float((logprobs.detach() * batch.answers).sum(dim=1).exp().mean())
            if chance >= policy.WARM_UP_TARGET:
                break
            (-(logprobs * batch.answers).sum() / batch.answers.sum()).backward()
            self._masters.step(policy.WARM_UP_RATE)
        self._masters.restart()
        return chance

    def step(self, lr: float) -> float:
        """One step of policy gradient on fresh answers; returns the mean reward."""
        length = self._rng.randint(policy.MIN_LETTERS, policy.MAX_LETTERS)
        words = ["".join(self._rng.choices(policy.ALPHABET, k=length)) for _ in range(PROMPTS)]
        prompts = [encode(word + policy.SEPARATOR) for word in words for _ in range(SAMPLES)]
        completions, sampled = self._sample(prompts)
        rewards = torch.tensor(
            [_letters_right(words[index // SAMPLES], tokens) for index, tokens in enumerate(completions)]
        )
        batch = policy.make_batch(prompts, completions)
        before = torch.zeros(batch.answers.shape)
        for index, chances in enumerate(sampled):
            before[index, batch.answers[index]] = torch.tensor(chances)
        advantages = group_advantages(rewards, SAMPLES)
        logprobs = policy.next_token_logprobs(self._model, batch)
        policy_loss(logprobs, before, advantages, batch.answers).backward()
        self._masters.step(lr)
        return float(rewards.mean())

    def weights(self) -> Weights:
        """A copy of the served bits, in the order of the names."""
        parameters = sorted(dict(self._model.named_parameters()).items())
        return {
            name: bits_of(parameter.detach().bfloat16()).reshape(tuple(parameter.shape))
            for name, parameter in parameters
        }

    @torch.no_grad()
    def _sample(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """One answer to each prompt, all of one length, at temperature 1; and the log-probabilities of its tokens."""
        tokens, cache = torch.tensor(prompts), None
        steps: list[tuple[list[int], list[float]]] = []
        for _ in range(policy.MAX_ANSWER_TOKENS):
            output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logprobs = torch.log_softmax(output.logits[:, -1], dim=-1)
            tokens = torch.multinomial(logprobs.exp(), 1, generator=self._generator)
            steps.append((tokens.flatten().tolist(), logprobs.gather(1, tokens).flatten().tolist()))
        completions, chances = [], []
        for index in range(len(prompts)):
            answer = [chosen[index] for chosen, _ in steps]
            end = answer.index(EOS_ID) + 1 if EOS_ID in answer else len(answer)
            completions.append(answer[:end])
            chances.append([chance[index] for _, chance in steps[:end]])
        return completions, chances


def _letters_right(word: str, tokens: list[int]) -> float:
    """Share of the right answer's tokens, end included, that stand in their places: some signal from the first step."""
    right = [*encode(word[::-1]), EOS_ID]
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
    training = Training()
    say(f"supervised: chance of a right answer {training.supervised(schedule.supervised):.2f}")
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

"""How far an optimizer step moves float32 masters, and what of it their bf16 roundings show: ``observed``."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vllm_delta_sync.tensors.torch_views import bits_of

MANTISSA_BITS, EXPONENT_BIAS, EXPONENTS = 7, 127, 256
POWERS = np.arange(EXPONENTS) - EXPONENT_BIAS
ROUNDING_STEPS = 2.0 ** (np.maximum(POWERS, 1 - EXPONENT_BIAS) - MANTISSA_BITS)
"""Distance between neighbouring bf16 numbers with each stored exponent."""

Sums = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Movement:
    """One optimizer step: sums over the weights that had each stored exponent in bf16 before it.

    Attributes:
        weights, changed: how many there are, and whose bf16 bits changed.
        update: sum of the updates' sizes. expected: sum of min(1, update's size / rounding step).
        outright: how many updates are larger than half a rounding step.
    """

    lr: float
    weights: Sums
    changed: Sums
    update: Sums
    expected: Sums
    outright: Sums

    @property
    def mean_update(self) -> float:
        """Over all weights."""
        return float(self.update.sum() / self.weights.sum())

    def share(self, counts: Sums) -> float:
        """A sum over all exponents, in percent of the weights."""
        return 100 * float(counts.sum() / self.weights.sum())

    def predict(self, update: float, finer: float = 1.0) -> float:
        """Percent of the weights that change if each moves this far, with rounding steps ``finer`` times as small."""
        return self.share(self.weights * np.minimum(1, finer * update / ROUNDING_STEPS))


def movement(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], lr: float) -> Movement:
    """Count one step, given each master before and after it."""
    sums = np.zeros((5, EXPONENTS))
    for before, after in pairs:
        old, new = (bits_of(master.to(torch.bfloat16)).reshape(-1) for master in (before, after))
        exponents = ((old >> MANTISSA_BITS) & 0xFF).astype(np.int64)
        update = (after - before).abs().reshape(-1).numpy()
        steps = update / ROUNDING_STEPS.astype(np.float32)[exponents]
        each = (None, old != new, update, np.minimum(1, steps), steps > 0.5)
        sums += [np.bincount(exponents, values, EXPONENTS) for values in each]
    return Movement(lr, *sums)


@contextmanager
def observed() -> Iterator[list[Movement]]:
    """Collect a ``Movement`` for each step that any optimizer of torch takes in the block."""
    found: list[Movement] = []
    before: list[torch.Tensor] = []

    def masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [master.detach() for group in optimizer.param_groups for master in group["params"]]

    def remember(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        before[:] = [master.clone() for master in masters(optimizer)]

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        pairs = zip(before, masters(optimizer), strict=True)
        found.append(movement(pairs, float(optimizer.param_groups[0]["lr"])))

    handles = [register_optimizer_step_pre_hook(remember), register_optimizer_step_post_hook(count)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()

"""Weights as training leaves them: consecutive versions of a small transformer that is really trained, cached.

It is *policy*, the demo's, a Qwen3 of 3.2 M parameters over characters: supervised until it answers some words
right, then moved by clipped policy gradients on answers that it samples itself, with Adam on float32 masters. The
learning rate is steered to the changed share that is asked for. Masters stay the same through both phases, so they lie
anywhere between two bfloat16 numbers, as they do well into a run, and not on the numbers themselves, as right after
loading a checkpoint.

    python -m benchmarks.common.training_data [--quick]      makes the cache, and says what is in it
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.torch_views import tensor_from_bits

CACHE = Path("bench-out/training-data")
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1)
SEQUENCE_SHARE, SEQUENCE_STEPS, QUICK_STEPS = 0.01, 64, 4

Bits = npt.NDArray[np.uint16]
Weights = dict[str, Bits]
"""Name → bfloat16 bits in the tensor's shape."""


@dataclass(frozen=True)
class Pair:
    """Two consecutive versions of a model, and the one before them where it is known.

    Attributes:
        share: elements that differ between ``old`` and ``new``, as a share of all. lr: learning rate of the step.
    """

    share: float
    lr: float
    old: Weights
    new: Weights
    before: Weights = field(default_factory=dict)

    @property
    def asked(self) -> float:
        """The one of ``SHARES`` that was aimed at."""
        return min(SHARES, key=lambda share: abs(math.log(self.share / share)))


@dataclass(frozen=True)
class Sequence:
    """Consecutive versions of a model: ``base`` and, for each further one, what changed in all tensors laid end to end.

    Attributes:
        steps: (positions (n,) uint32 ascending, new bits (n,) uint16) of each version.
    """

    base: Weights
    steps: list[tuple[npt.NDArray[np.uint32], Bits]]

    def versions(self) -> Iterator[Weights]:
        """Each version after the base; the arrays are the caller's."""
        flat = np.concatenate([bits.reshape(-1) for bits in self.base.values()])
        bounds = np.cumsum([bits.size for bits in self.base.values()])[:-1]
        for positions, values in self.steps:
            flat[positions] = values
            parts = np.split(flat.copy(), bounds)
            yield {name: part.reshape(bits.shape) for (name, bits), part in zip(self.base.items(), parts, strict=True)}


def elements(pair: Pair) -> tuple[int, int]:
    """(all, changed)."""
    total = sum(bits.size for bits in pair.old.values())
    return total, round(pair.share * total)


def tensors_of(weights: Weights) -> dict[str, torch.Tensor]:
    """Bfloat16 tensors that share the memory of a version's bits."""
    return {name: tensor_from_bits(bits, TensorSpec(name, "BF16", bits.shape)) for name, bits in weights.items()}


def changed_share(old: Weights, new: Weights) -> float:
    """Elements that differ, as a share of all."""
    differ = sum(int(np.count_nonzero(old[name] != new[name])) for name in old)
    return differ / sum(bits.size for bits in old.values())


def policy_pairs(quick: bool = False, say: Callable[[str], None] = lambda text: None) -> list[Pair]:
    """Pairs of the policy at about ``SHARES``, from the cache or after some minutes of training.

    Args:
        quick: only the pair at ``SEQUENCE_SHARE``, after a few steps of training if there is no cache.
    """
    _make(quick, say)
    pairs = []
    for path in sorted(_folder(quick).glob(f"pair_{SEQUENCE_SHARE:.3f}.npz" if quick else "pair_*.npz")):
        with np.load(path) as data:
            old, new, before = (
                {name[4:]: data[name] for name in data if name.startswith(f"{part}:")} for part in ("old", "new", "bef")
            )
            pairs.append(Pair(changed_share(old, new), float(data["lr"]), old, new, before))
    return pairs


def policy_sequence(quick: bool = False, say: Callable[[str], None] = lambda text: None) -> Sequence:
    """Consecutive versions of the policy at about ``SEQUENCE_SHARE`` each; see ``policy_pairs``."""
    _make(quick, say)
    with np.load(_folder(quick) / "sequence.npz") as data:
        base = {name.removeprefix("base:"): data[name] for name in data if name.startswith("base:")}
        count = min(int(data["steps"]), QUICK_STEPS) if quick else int(data["steps"])
        steps = [(data[f"positions:{step}"], data[f"values:{step}"]) for step in range(count)]
    return Sequence(base, steps)


def _folder(quick: bool) -> Path:
    """Where the data lie; the long run's serve the quick one too."""
    return CACHE / "quick" if quick and not (CACHE / "full" / "sequence.npz").exists() else CACHE / "full"


def _make(quick: bool, say: Callable[[str], None]) -> None:
    folder = _folder(quick)
    if not (folder / "sequence.npz").exists():
        # Only now: importing what trains takes longer than reading what was trained.
        from benchmarks.common import training

        training.make(folder, training.QUICK if quick else training.FULL, say)


def main() -> None:
    quick = "--quick" in sys.argv[1:]
    began = time.perf_counter()
    for pair in policy_pairs(quick, say=print):
        print(f"{pair.share:.3%} changed at lr {pair.lr:.2g}, {sum(bits.size for bits in pair.old.values())} elements")
    print(f"{len(policy_sequence(quick).steps)} consecutive versions; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

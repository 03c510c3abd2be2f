"""Consecutive versions of the real model, cached: ``python -m benchmarks.common.real_steps``.

AdamW moves float32 masters at three learning rates (``benchmarks.common.real_training``); a version is the masters
rounded to bfloat16. Where the masters start decides what changes:

- *fresh*: on the bfloat16 numbers of the checkpoint, as when a run begins.
- *settled*: anywhere within the cells that round to those numbers, as after hundreds of steps.
- *trained*: where the reinforcement learning of ``make example-real`` left them.

The cache holds what each step changed, and no weights: those come from the checkpoint that the steps began at.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import real_model
from benchmarks.common.real_training import SETTLING_STEPS, RealTraining
from benchmarks.common.training_data import CACHE, Bits, Pair, Sequence, Weights, changed_share
from vllm_delta_sync.tensors.torch_views import bits_of

FOLDER = CACHE / "real"
MASTERS = Path("real-out/masters")
"""Float32 weights that ``make example-real`` leaves."""
KINDS = ("fresh", "settled", "trained")
RATES = (1e-6, 3e-6, 1e-5)
STEPS = SETTLING_STEPS + 1
"""A pair is what the last of so many steps changed."""
SEQUENCE_RATE, SEQUENCE_VERSIONS = 1e-6, 100

Step = tuple[npt.NDArray[np.uint32], Bits]
Say = Callable[[str], None]


def is_there(kind: str) -> bool:
    """Whether the weights that this kind begins at can be had; those of *trained* come from an example."""
    return kind != "trained" or (MASTERS / "model.safetensors").exists()


def pairs(kind: str, rates: tuple[float, ...] = RATES, say: Say = lambda text: None) -> list[Pair]:
    """One pair for each rate: ``before``, ``old`` and ``new`` are the versions after steps 6, 7 and 8.

    Raises:
        SystemExit: a package or the weights of *trained* are missing; the message says what to run.
    """
    found = []
    for rate in rates:
        versions = Sequence(_base(kind), _steps(kind, rate, STEPS, say)).versions()
        before, old, new = deque(versions, maxlen=3)
        found.append(Pair(changed_share(old, new), rate, old, new, before))
    return found


def sequence(versions: int = SEQUENCE_VERSIONS, say: Say = lambda text: None) -> Sequence:
    """Consecutive versions of *settled* at 1e-6; the first is ``new`` of that pair, the base its ``old``."""
    steps = _steps("settled", SEQUENCE_RATE, STEPS - 1 + versions, say)
    [base] = deque(Sequence(_base("settled"), steps[: STEPS - 1]).versions(), maxlen=1)
    return Sequence(base, steps[STEPS - 1 :])


def _base(kind: str) -> Weights:
    """The version that a kind's steps begin at."""
    from safetensors.torch import load_file

    tensors = load_file(_checkpoint(kind) / "model.safetensors")
    return {name: bits_of(tensor.bfloat16()).reshape(tuple(tensor.shape)) for name, tensor in sorted(tensors.items())}


def _checkpoint(kind: str) -> Path:
    if kind != "trained":
        return real_model.checkpoint()
    if not is_there(kind):
        raise SystemExit(f"the trained weights are not in {MASTERS}: run make example-real first")
    return MASTERS


def _steps(kind: str, rate: float, count: int, say: Say) -> list[Step]:
    """What each of the first so many steps changed, from the cache or after some seconds for each."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    file, weights = FOLDER / f"{kind}_{rate:.0e}.npz", _checkpoint(kind) / "model.safetensors"
    # Training again leaves other weights for *trained*.
    if not file.exists() or file.stat().st_mtime < weights.stat().st_mtime or _length(file) < count:
        say(f"{kind}, lr {rate:g}: {count} training steps, some seconds each")
        arrays: dict[str, Any] = {}
        for step, (positions, values) in enumerate(train(kind, rate, count)):
            arrays |= {f"positions:{step}": positions, f"values:{step}": values}
        FOLDER.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial.npz")
        np.savez(partial, steps=np.int64(count), **arrays)
        partial.rename(file)
    with np.load(file) as data:
        return [(data[f"positions:{step}"], data[f"values:{step}"]) for step in range(count)]


def _length(file: Path) -> int:
    with np.load(file) as data:
        return int(data["steps"])


def train(kind: str, rate: float, count: int) -> Iterator[Step]:
    """Train, and say after each step what it changed in all tensors laid end to end, in the order of their names."""
    from tqdm import trange

    training = RealTraining(_checkpoint(kind), real_model.checkpoint(), rate, settled=kind == "settled")

    def rounded() -> Bits:
        masters = training.masters.values()
        return np.concatenate([bits_of(master.detach().bfloat16()).reshape(-1) for master in masters])

    last = rounded()
    for _ in trange(count, desc=f"{kind}, lr {rate:g}", unit=" steps"):
        training.step()
        now = rounded()
        positions = np.flatnonzero(now != last)
        yield positions.astype(np.uint32), now[positions]
        last = now


def main() -> None:
    began = time.perf_counter()
    for kind in KINDS:
        if not is_there(kind):
            print(f"{kind}: left out, because {MASTERS} is missing: run make example-real first")
            continue
        for rate in RATES:
            [pair] = pairs(kind, (rate,), say=print)
            print(f"{kind}, lr {rate:g}: {pair.share:.3%} of {sum(bits.size for bits in pair.old.values())} changed")
    found = sequence(say=print)
    shares = [100 * values.size / sum(bits.size for bits in found.base.values()) for _, values in found.steps]
    print(f"settled, lr {SEQUENCE_RATE:g}: {len(shares)} versions, {min(shares):.3f} to {max(shares):.3f} % changed")
    print(f"SmolLM2-135M, {real_model.ORIGIN}; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()

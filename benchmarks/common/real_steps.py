"""Consecutive versions of the real model, cached: ``python -m benchmarks.common.real_steps``.

AdamW (weight decay 0, gradients clipped to norm 1) moves float32 masters of SmolLM2-135M on English text that comes
with Python, 256 tokens a step, at three learning rates; a version is the masters rounded to bfloat16. Where the masters
start decides what changes:

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
import torch

from benchmarks.common import real_model
from benchmarks.common.training_data import CACHE, Bits, Pair, Sequence, Weights, changed_share
from vllm_delta_sync.tensors.torch_views import bits_of

FOLDER = CACHE / "real"
MASTERS = Path("real-out/masters")
"""Float32 weights that ``make example-real`` leaves."""
KINDS = ("fresh", "settled", "trained")
RATES = (1e-6, 3e-6, 1e-5)
STEPS = 8
"""A pair is what the last of so many steps changed."""
SEQUENCE_RATE, SEQUENCE_VERSIONS = 1e-6, 100
TOKENS, STRIDE = 256, 1000
"""Tokens of a step, and how many characters further the next one begins."""
MAX_NORM = 1.0
SEED = 0
MANTISSA = 0x007F
HALF_CELL = 0x8000
"""A bfloat16 number's rounding cell reaches so many float32 numbers up and down."""

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


def spread(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Float32 masters, uniform within the cells that round to these bfloat16 weights, ends left out; zeros stay."""
    bits = weights.to(torch.bfloat16).float().view(torch.int32)
    # Below a power of two a cell is half as wide, with as many float32 numbers, which lie twice as close there.
    is_power = (bits >> 16) & MANTISSA == 0
    least = torch.where(is_power, -HALF_CELL // 2, -HALF_CELL) + 1
    drawn = torch.rand(bits.shape, generator=generator, dtype=torch.float64)
    offset = (least + (drawn * (HALF_CELL - least))).floor().int()
    offset = torch.where(is_power & (offset < 0), 2 * offset, offset)
    return torch.where(bits & 0x7FFFFFFF == 0, bits, bits + offset).view(torch.float32)


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
    from pydoc_data.topics import topics

    from tqdm import trange
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(_checkpoint(kind), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(real_model.checkpoint())
    masters = [parameter for _, parameter in sorted(model.named_parameters())]
    if kind == "settled":
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            for master in masters:
                master.copy_(spread(master, generator))
    optimizer = torch.optim.AdamW(masters, lr=rate, weight_decay=0.0)
    text = "\n\n".join(topic for _, topic in sorted(topics.items()))

    def rounded() -> Bits:
        return np.concatenate([bits_of(master.detach().bfloat16()).reshape(-1) for master in masters])

    last = rounded()
    for step in trange(1, count + 1, desc=f"{kind}, lr {rate:g}", unit=" steps"):
        start = STRIDE * step % (len(text) - 2 * STRIDE)
        tokens = tokenizer(text[start : start + 2 * STRIDE], return_tensors="pt").input_ids[:, :TOKENS]
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
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

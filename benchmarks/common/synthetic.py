"""Large weights moved by one step of Adam, in bfloat16: many tensors, each at a scale that trained ones have.

Masters are float32, normal, with a scale of their own for each tensor (about 1 / √inputs) and for each row. The moments
are drawn as Adam leaves them on noisy gradients, m ~ N(0, (1 − β₁) / (1 + β₁)) and v ~ 1, and one true step follows:
that is what decides which elements cross a rounding boundary. Norms are near 1 and hardly ever change.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.common.training_data import Pair, Weights, changed_share
from vllm_delta_sync.tensors.torch_views import bits_of

BETA_1, BETA_2 = 0.9, 0.999
ROW_SPREAD = 0.25
SAMPLE = 2_000_000
PIECE = 1 << 24

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Moved:
    """One tensor: (numel,) float32 masters and Adam's direction m̂ / √v̂."""

    shape: tuple[int, ...]
    master: torch.Tensor
    direction: torch.Tensor

    def rounded(self, lr: float) -> np.ndarray:
        """bfloat16 bits after a step at this rate, (*shape) uint16; rate 0 gives the old ones."""
        bits = np.empty(self.master.numel(), np.uint16)
        for start in range(0, bits.size, PIECE):
            piece = slice(start, start + PIECE)
            bits[piece] = bits_of(torch.add(self.master[piece], self.direction[piece], alpha=-lr).bfloat16())
        return bits.reshape(self.shape)


def move(shape: tuple[int, ...], generator: torch.Generator) -> Moved:
    """Draw a tensor's masters and the direction of its step."""
    rows, columns = (shape[0], int(np.prod(shape[1:]))) if len(shape) > 1 else (1, shape[0])
    master = torch.randn((rows, columns), generator=generator)
    if len(shape) == 1:
        master.mul_(0.1).add_(1)
    else:
        spread = torch.exp(ROW_SPREAD * torch.randn((rows, 1), generator=generator))
        master.mul_(spread * min(0.02, columns**-0.5))
    gradient = torch.randn(rows * columns, generator=generator)
    direction = torch.randn(rows * columns, generator=generator).mul_(((1 - BETA_1) / (1 + BETA_1)) ** 0.5)
    direction.mul_(BETA_1).add_(gradient, alpha=1 - BETA_1)
    # The second moment averages a thousand squares: its own noise is a few percent, this step's gradient included.
    direction.div_(gradient.square_().mul_(1 - BETA_2).add_(BETA_2).sqrt_())
    return Moved(shape, master.reshape(-1), direction)


def transformer_shapes(layers: int, hidden: int, inner: int, vocabulary: int) -> Shapes:
    """Names and shapes of a small dense transformer, norms included."""
    shapes: Shapes = {"embed.weight": (vocabulary, hidden)}
    for layer in range(layers):
        name = f"layers.{layer:02}"
        shapes |= {f"{name}.{part}_proj.weight": (hidden, hidden) for part in "qo"}
        shapes |= {f"{name}.{part}_proj.weight": (hidden // 2, hidden) for part in "kv"}
        shapes |= {f"{name}.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"{name}.down_proj.weight": (hidden, inner), f"{name}.norm.weight": (hidden,)}
    return dict(sorted(shapes.items()))


SHAPES = transformer_shapes(layers=6, hidden=1024, inner=4096, vocabulary=16_384)
"""106 M elements."""
QUICK_SHAPES = transformer_shapes(layers=2, hidden=256, inner=1024, vocabulary=4096)


def learning_rate(shapes: Shapes, share: float) -> float:
    """The rate at which about this share changes: bisection on a sample of every tensor."""
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    generator = torch.Generator().manual_seed(1)
    sample = []
    for shape in shapes.values():
        rows = max(1, shape[0] * min(SAMPLE, total) // total) if len(shape) > 1 else shape[0]
        sample.append(move((rows, *shape[1:]), generator))
    old = [moved.rounded(0.0) for moved in sample]
    low, high = 1e-9, 1e-2
    for _ in range(20):
        lr = (low * high) ** 0.5
        names = [str(index) for index in range(len(old))]
        new = [moved.rounded(lr) for moved in sample]
        found = changed_share(dict(zip(names, old, strict=True)), dict(zip(names, new, strict=True)))
        low, high = (lr, high) if found < share else (low, lr)
    return lr


def pairs(shapes: Shapes, shares: Sequence[float], seed: int = 0) -> list[Pair]:
    """One pair for each share, all with the same ``old``. Made tensor by tensor: memory is that of the result."""
    rates = [learning_rate(shapes, share) for share in shares]
    generator = torch.Generator().manual_seed(seed)
    old: Weights = {}
    new: list[Weights] = [{} for _ in shares]
    for name, shape in shapes.items():
        moved = move(shape, generator)
        old[name] = moved.rounded(0.0)
        for weights, lr in zip(new, rates, strict=True):
            weights[name] = moved.rounded(lr)
    return [Pair(changed_share(old, weights), lr, old, weights) for weights, lr in zip(new, rates, strict=True)]

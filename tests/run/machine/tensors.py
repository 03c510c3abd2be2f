"""A tiny model: what its trainer does to it, how servers hold it, whole or in shards, and what bits that must be."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.tensors.changes import Bits

WIDTH = 32
SHAPES = {
    "down.weight": (20, WIDTH),
    "embedding.weight": (24, WIDTH),
    "norm.weight": (WIDTH,),
    "up.weight": (20, WIDTH),
}
TRAININGS = ["none", "one", "sparse", "sparse", "sparse", "half", "dense", "odd"]


def first_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Weights to begin with, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return {name: (0.02 * torch.randn(shape, generator=generator)).bfloat16() for name, shape in SHAPES.items()}


def train(tensors: dict[str, torch.Tensor], how: str, seed: int) -> None:
    """Change the weights in place; how: one of TRAININGS."""
    random = np.random.default_rng(seed)
    for tensor in tensors.values():
        bits = tensor.view(torch.int16).numpy().reshape(-1)
        share = {"none": 0.0, "one": 0.0, "sparse": 0.03, "half": 0.5, "dense": 1.0, "odd": 0.01}[how]
        chosen = random.random(bits.size) < share
        if how == "one":
            chosen[seed % bits.size] = True
        count = int(chosen.sum())
        if how in ("dense", "odd"):
            # Any bit patterns: infinities, NaNs with payloads, both zeros.
            bits[chosen] = random.integers(-(2**15), 2**15, count, dtype=np.int16)
        else:
            bits[chosen] += random.choice(np.array([-2, -1, 1, 3], np.int16), count)
        if how == "one":
            return


def copy_bits(tensors: dict[str, torch.Tensor]) -> list[Bits]:
    """Bits per tensor, in the order of the run's table: by name."""
    return [tensors[name].view(torch.int16).numpy().reshape(-1).view(np.uint16).copy() for name in SHAPES]


def fingerprint(bits: list[Bits]) -> Fingerprint:
    """Of a whole model."""
    return sum((fingerprint_tensor(name, part) for name, part in zip(SHAPES, bits, strict=True)), Fingerprint())


def tensors_of(bits: list[Bits]) -> dict[str, torch.Tensor]:
    """Tensors with these bits, in memory of their own."""
    return {
        name: torch.from_numpy(part.view(np.int16).copy()).view(torch.bfloat16).reshape(SHAPES[name])
        for name, part in zip(SHAPES, bits, strict=True)
    }


def equal(left: list[Bits], right: list[Bits]) -> bool:
    """Bit for bit."""
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


class ServedModel(nn.Module):
    """One rank of the model as a server holds it: up and down fused, matrices cut by rows, norm copied."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)

        self.fused = parameter(2 * 20 // ranks, WIDTH)
        self.embedding = parameter(24 // ranks, WIDTH)
        self.norm = parameter(WIDTH)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        rows = 20 // self.ranks
        for name, tensor in weights:
            if name == "norm.weight":
                self.norm.data.copy_(tensor)
            elif name == "embedding.weight":
                part = 24 // self.ranks
                self.embedding.data.copy_(tensor[self.rank * part : (self.rank + 1) * part])
            else:
                place = self.fused.data.narrow(0, rows * (name == "down.weight"), rows)
                place.copy_(tensor[self.rank * rows : (self.rank + 1) * rows])
            loaded.add(name)
        return loaded

    @property
    def whole(self) -> list[torch.Tensor]:
        """Views of what it holds of each tensor, in the order of SHAPES."""
        rows = 20 // self.ranks
        fused = self.fused.data
        return [fused[rows:], self.embedding.data, self.norm.data, fused[:rows]]


def gather(models: list[ServedModel]) -> list[Bits]:
    """Bits per tensor that all ranks hold together."""
    parts = [model.whole for model in models]
    tensors = {
        name: parts[0][i] if name == "norm.weight" else torch.cat([of[i] for of in parts])
        for i, name in enumerate(SHAPES)
    }
    for of in parts[1:]:
        if not torch.equal(of[2].view(torch.int16), parts[0][2].view(torch.int16)):
            raise AssertionError("ranks hold other copies of norm.weight")
    return copy_bits({name: tensor.contiguous() for name, tensor in tensors.items()})


def save_checkpoint(folder: Path, bits: list[Bits]) -> Path:
    """A checkpoint directory with these weights."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors_of(bits), folder / "model.safetensors")
    return folder

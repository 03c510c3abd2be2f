"""A new version of a checkpoint, in the form that each way of applying it wants."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.differences import diff
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Changes, Sparse, apply_distances

ELEMENT = DTYPES["BF16"]
FARTHEST = 7
NEXT_SHARE = 0.9
"""Of the distances, 90 % are ±1 and the rest up to ±FARTHEST, as reinforcement learning at small rates makes them."""


@dataclass
class NewVersion:
    """One version after another, some elements changed.

    Attributes:
        changes: what a decoder hands over.
        patches: the same for vLLM's ``load_checkpoint_weight_patches``.
        tensors: the whole new checkpoint, in memory.
        folder: the whole new checkpoint, on disk and in the page cache.
    """

    changes: Changes
    patches: list[Any]
    tensors: dict[str, torch.Tensor]
    folder: Path

    @property
    def changed(self) -> int:
        return self.changes.changed

    @property
    def files(self) -> list[str]:
        return [str(path) for path in sorted(self.folder.glob("*.safetensors"))]


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, copied to memory, by name."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name).clone() for name in file.keys()})  # noqa: SIM118
    return found


def table_of(tensors: dict[str, torch.Tensor]) -> TensorTable:
    """The run's tensor table."""
    return TensorTable(TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in tensors.items())


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """(numel,) uint16 view of a bfloat16 tensor."""
    return tensor.view(-1).view(torch.int16).numpy().view(np.uint16)


def make_version(table: TensorTable, old: Path, new: dict[str, torch.Tensor], folder: Path) -> NewVersion:
    """Find what differs between a checkpoint and the new tensors, and write those as a checkpoint to ``folder``."""
    before = read_checkpoint(old)
    ids, positions, distances, patches = [], [], [], []
    fingerprints: dict[int, Fingerprint] = {}
    for tensor, spec in enumerate(table):
        bits = bits_of(new[spec.name])
        where, steps, fingerprint = diff(spec.name, ELEMENT, bits_of(before.pop(spec.name)), bits)
        if not where.size:
            continue
        fingerprints[tensor] = fingerprint
        ids.append(tensor)
        positions.append(where)
        distances.append(steps)
        patches.append(_peer_patch(spec, where, bits[where]))
    counts = np.array([where.size for where in positions], np.int64)
    sparse = Sparse(
        "BF16", np.array(ids, np.uint32), counts, np.concatenate(positions), np.concatenate(distances), relative=True
    )
    save_tensors(new, old, folder)
    return NewVersion(Changes([sparse], [], fingerprints), patches, new, folder)


def save_tensors(tensors: dict[str, torch.Tensor], like: Path, folder: Path) -> None:
    """Write tensors as a checkpoint with the configuration of another."""
    folder.mkdir(parents=True)
    shutil.copy(like / "config.json", folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def randomly_changed(old: Path, density: float) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors with each element changed with probability ``density``."""
    random = np.random.default_rng(0)
    tensors = read_checkpoint(old)
    for tensor in tensors.values():
        where = _draw_positions(random, tensor.numel(), density)
        apply_distances(ELEMENT, bits_of(tensor), where, _draw_distances(random, where.size))
    return tensors


def _draw_positions(random: np.random.Generator, numel: int, density: float) -> np.ndarray:
    room = int(numel * density + 10 * (numel * density) ** 0.5 + 10)
    found = np.cumsum(random.geometric(density, room)) - 1
    return found[found < numel]


def _draw_distances(random: np.random.Generator, count: int) -> np.ndarray:
    size = np.where(random.random(count) < NEXT_SHARE, 1, random.integers(2, FARTHEST + 1, count))
    return (size * random.choice([-1, 1], count)).astype(np.int16).view(np.uint16)


def _peer_patch(spec: TensorSpec, positions: np.ndarray, bits: np.ndarray) -> Any:
    from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch

    return CheckpointWeightPatch(
        name=spec.name,
        shape=spec.shape,
        dtype=torch.bfloat16,
        values=torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16),
        indices=torch.from_numpy(positions.astype(np.int32)),
    )

"""What the publisher tests share: comparing a run with the trainer's own tensors."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from tests.support.architectures import same_bits
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import Run

Tensors = dict[str, torch.Tensor]


def assert_same(held: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert held.keys() == expected.keys()
    assert [name for name in expected if not same_bits(held[name], expected[name])] == []


def assert_holds(run: Run, version: int | None, expected: Tensors, base: Path | None = None) -> None:
    assert_same(dict(run.tensors(version, base)), expected)


def snapshot(tensors: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """A copy that later training leaves alone; floating-point tensors rounded to ``dtype``."""
    return {
        name: tensor.detach().to(dtype if dtype and tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in tensors.items()
    }


def digest(tensors: Tensors) -> str:
    """SHA-256 over names, dtypes and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def published(model: nn.Module) -> Tensors:
    """What ``Plain`` and modules like it publish: the state of the moment, without tied duplicates."""
    seen: set[int] = set()
    kept: Tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            kept[name] = tensor
        seen.add(id(tensor))
    return snapshot(kept)


def assert_versions(url: str, history: list[Tensors]) -> Run:
    run = open_run(url)
    report = run.verify()
    assert (report.versions, report.replayed) == (len(history), True)
    for version, expected in enumerate(history):
        assert_holds(run, version, expected)
    return run


def keys(url: str) -> set[str]:
    """All keys, but those of upkeep, which comes when it comes."""
    with open_bucket(url) as bucket:
        return {info.key for info in bucket.list() if not info.key.startswith(("anchors/", "merged/"))}


def damage(url: str, key: str) -> None:
    """Change one byte of an object in the bucket, in its middle."""
    with open_bucket(url) as bucket:
        data = bytearray(bucket.get(key))
        data[len(data) // 2] ^= 0x55
        bucket.put(key, bytes(data))

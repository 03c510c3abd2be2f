"""Which loops a rank compiles when: ``python -m tests.support.compiled write|follow FOLDER DTYPE...``.

``write`` makes a run with versions of every kind; ``follow`` follows it on two ranks, in a process that has compiled
nothing, and writes ``FOLDER/compiled.json``: per step, the loops that numba compiled or loaded from its cache. Two
programs, since writing a run compiles loops too.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.support.modules import ModulePort
from tests.support.samples import RunWriter, nudge, random_bits
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import open_run
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.settings import Settings
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES

RANKS = 2
PATTERNS = {
    "plain": (96, 64),
    "transposed": (96, 64),
    "rows": (1024, 512),
    "columns": (1024, 512),
    "vector": (64,),
    "scalar": (),
}
"""How a module holds a tensor, and the tensor's shape; codec ``tiled`` cuts the large ones where ranks do."""


def table_of(dtypes: list[str]) -> TensorTable:
    return TensorTable(
        TensorSpec(f"{dtype.lower()}.{pattern}", dtype, shape)
        for dtype in dtypes
        for pattern, shape in PATTERNS.items()
        # A weight of a model, and beside it small ones such as scales.
        if dtype == dtypes[0] or pattern in ("vector", "scalar")
    )


class Sharded(nn.Module):
    """One of two ranks of a module with those tensors: ``rows`` and ``columns`` are cut, the others are copied."""

    def __init__(self, table: TensorTable, rank: int) -> None:
        super().__init__()
        self.rank = rank
        for spec in table:
            shape = list(spec.shape)
            if spec.name.endswith(".transposed"):
                shape.reverse()
            elif spec.name.endswith((".rows", ".columns")):
                shape[spec.name.endswith(".columns")] //= RANKS
            memory = torch.zeros(shape, dtype=TORCH_DTYPES[spec.dtype])
            self.register_parameter(spec.name.replace(".", "_"), nn.Parameter(memory, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            live = self.get_parameter(name.replace(".", "_")).data
            if name.endswith(".transposed"):
                live.copy_(tensor.t())
            elif name.endswith((".rows", ".columns")):
                dim = int(name.endswith(".columns"))
                live.copy_(tensor.narrow(dim, self.rank * live.shape[dim], live.shape[dim]))
            else:
                live.copy_(tensor)
            loaded.add(name)
        return loaded


def write(root: Path, dtypes: list[str]) -> None:
    """Versions of every codec, few and many changes, compressed and not, and tensors in full."""
    table, random = table_of(dtypes), np.random.default_rng(0)
    first = random_bits(table, random)
    for bits in first:
        # Only small weights: classes of codec ``tiled`` differ in them.
        bits >>= bits.dtype.type(2)
    writer = RunWriter(open_bucket(str(root / "run")), table)
    writer.anchor(first)
    for codec, compression in (("plain", "zstd"), ("plain", "none"), ("tiled", "zstd"), ("raw", "none")):
        for share in (0.02, 0.6):
            writer.delta(nudge(writer.bits[-1], random, share), codec, compression)  # type: ignore[arg-type]
    writer.delta(nudge(writer.bits[-1], random, 0.3), full=range(len(PATTERNS)))
    # To be merged: with distances after new bits, and after tensors in full.
    for codec, full in (("plain", ()), ("raw", ()), ("plain", (0, 1)), ("plain", ()), ("tiled", ()), ("raw", ())):
        writer.delta(nudge(writer.bits[-1], random, 0.05), codec, full=full)  # type: ignore[arg-type]
    last = nudge(writer.bits[-1], random, 0.5)
    writer.anchor(last)
    writer.delta(nudge(last, random, 0.01))


FIRST_MERGED, LAST_MERGED = 10, 15
IDENTIFY = "identify"
"""The first step."""


def follow(root: Path) -> None:
    run = open_run(str(root / "run"))
    table, head = run.table, run.head().version
    base = dict(run.tensors(version=0))
    models = [Sharded(table, rank) for rank in range(RANKS)]
    for model in models:
        model.load_weights(base.items())
    port: Any = ModulePort(*models)
    receiver = Receiver(port, Settings(bucket=str(root / "run"), undo_bytes=10**9))
    seen = Loops()
    seen.step(IDENTIFY, lambda: receiver.advance(0))
    for version in range(1, FIRST_MERGED):
        seen.step(f"version {version}", lambda version=version: receiver.advance(version))  # type: ignore[misc]
    seen.step("undo", lambda: receiver.rollback(FIRST_MERGED - 3))
    receiver.release()
    seen.step("merged", lambda: receiver.advance(LAST_MERGED))
    seen.step("verify", lambda: receiver.verify())
    seen.step("rollback", lambda: receiver.rollback(1))
    receiver.release()
    models[0].get_parameter(f"{table[0].name.replace('.', '_')}").data.zero_()
    receiver.verify()
    seen.step("repair", lambda: receiver.repair())
    for version in range(LAST_MERGED + 1, head + 1):
        seen.step(f"version {version}", lambda version=version: receiver.advance(version))  # type: ignore[misc]
    for model, fresh in zip(models, [Sharded(table, rank) for rank in range(RANKS)], strict=True):
        fresh.load_weights(run.tensors(version=head))
        for (name, one), other in zip(model.named_parameters(), fresh.parameters(), strict=True):
            assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)), name
    (root / "compiled.json").write_text(json.dumps(seen.steps))


class Loops:
    """The loops that are ready for use, watched step by step."""

    def __init__(self) -> None:
        self.steps: dict[str, list[str]] = {}
        self._known: set[str] = set()

    def step(self, name: str, action: Callable[[], object]) -> None:
        action()
        loops = ready_loops()
        self.steps[name] = sorted(loops - self._known)
        self._known = loops


def ready_loops() -> set[str]:
    """Every loop of ours with the types of its arguments, once it is compiled or loaded."""
    found = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm_delta_sync."):
            for attribute, value in list(vars(module).items()):
                if hasattr(value, "nopython_signatures") and value.py_func.__module__ == name:
                    found |= {f"{name}.{attribute}{signature}" for signature in value.signatures}
    return found


if __name__ == "__main__":
    root = Path(sys.argv[2])
    if sys.argv[1] == "write":
        write(root, sys.argv[3:])
    else:
        follow(root)

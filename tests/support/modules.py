"""Plain torch modules with vLLM-style loaders, whole and sharded, and an engine that patches them in this process."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from vllm_delta_sync.engine.protocol import (
    A,
    BackgroundRequest,
    RankFailure,
    RankRequest,
    decode_answers,
    encode_request,
    serve,
)
from vllm_delta_sync.engine.worker.rank_worker import RankWorker
from vllm_delta_sync.format.table import DRAFT_PREFIX

WIDTH = 128
SHAPES = {
    "q.weight": (16, WIDTH),
    "k.weight": (16, WIDTH),
    "v.weight": (16, WIDTH),
    "embedding.weight": (50, WIDTH),
    "out.weight": (24, WIDTH),
    "model.norm.weight": (WIDTH,),
}
"""Of the tensors that FusedModel loads, by checkpoint name."""


def checkpoint_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors that FusedModel loads, by checkpoint name, as a trainer would hold them (float32)."""
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def save_base(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a bfloat16 checkpoint directory, with the tensors of a draft in a subfolder."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    served = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items() if not name.startswith(DRAFT_PREFIX)}
    save_file(served, path / "model.safetensors")
    if draft := {name.removeprefix(DRAFT_PREFIX): tensors[name] for name in tensors.keys() - served.keys()}:
        save_base(path / "draft", draft)
    return path


class ShardedModel(nn.Module):
    """A model or a tensor-parallel rank of it, in bfloat16: fused projections, a padded vocabulary, a transposed weight
    and a tied head. q and embedding are cut in rows, out in columns; k, v and norm are copied."""

    def __init__(self, rank: int, ranks: int = 2) -> None:
        super().__init__()
        self.rank = rank
        self.ranks = ranks

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)

        self.qkv = parameter(16 // ranks + 2 * 16, WIDTH)
        self.embedding = parameter(64 // ranks, WIDTH)
        self.transposed = parameter(WIDTH // ranks, 24)
        self.norm = parameter(WIDTH)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        rows = 16 // self.ranks
        loaded = set()
        for name, tensor in weights:
            if name == "q.weight":
                self.qkv.data[:rows].copy_(tensor[self.rank * rows : (self.rank + 1) * rows])
            elif name in ("k.weight", "v.weight"):
                self.qkv.data.narrow(0, rows + 16 * "kv".index(name[0]), 16).copy_(tensor)
            elif name == "embedding.weight":
                part = tensor[self.rank * 64 // self.ranks : (self.rank + 1) * 64 // self.ranks]
                self.embedding.data[: part.shape[0]].copy_(part)
                self.embedding.data[part.shape[0] :].fill_(0)
            elif name == "out.weight":
                columns = WIDTH // self.ranks
                self.transposed.data.copy_(tensor.narrow(1, self.rank * columns, columns).t())
            elif name == "model.norm.weight":
                self.norm.data.copy_(tensor)
            elif name == "head.weight":
                continue
            loaded.add(name)
        return loaded


class FusedModel(ShardedModel):
    """The whole model."""

    def __init__(self) -> None:
        super().__init__(0, 1)


def named(request: RankRequest[Any]) -> tuple[str, dict[str, Any]]:
    """A call's name and arguments. Whatever runs in the background is a ``start``."""
    if isinstance(request, BackgroundRequest):
        return "start", {"operation": request.operation, "request": request}
    return request.operation, msgspec.structs.asdict(request)


class ModulePort:
    """An engine in this process, one rank per module: the real receiver on real modules, and a log of what was done."""

    def __init__(self, *models: Any) -> None:
        self.ranks = [RankWorker(model, index) for index, model in enumerate(models)]
        self.log: list[str] = []
        self.ended: list[str] = []

    def call(self, request: RankRequest[A]) -> list[A | RankFailure]:
        method, _ = named(request)
        if method not in ("start", "poll", "outcome", "set_version", "describe"):
            self.log.append(method)
        return [self.call_rank(rank, request) for rank in self.ranks]

    def call_rank(self, rank: RankWorker, request: RankRequest[A]) -> A | RankFailure:
        (answer,) = decode_answers(request, [self.serve(rank, encode_request(request))])
        return answer

    def serve(self, rank: RankWorker, request: bytes) -> bytes:
        """As delta_sync_call does."""
        return serve(request, rank.answer)

    def pause(self) -> None:
        self.log.append("pause")

    def resume(self) -> bool:
        self.log.append("resume")
        return False

    def label(self, version: int | None, run: str | None) -> None:
        self.log.append(f"label {version}")

    def label_paused(self, version: int | None, run: str | None) -> None:
        self.label(version, run)

    def end(self, reason: str) -> None:
        self.ended.append(reason)

"""A plain torch module with a vLLM-style loader, and an engine port that patches it in this process."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_delta_sync.engine.rank import RankReceiver
from vllm_delta_sync.errors import DeltaSyncError

WIDTH = 128


class FusedModel(nn.Module):
    """Fused projections, a padded vocabulary, a transposed weight and a tied head, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)

        self.qkv = parameter(3 * 16, WIDTH)
        self.embedding = parameter(64, WIDTH)
        self.transposed = parameter(WIDTH, 24)
        self.norm = parameter(WIDTH)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            if name in ("q.weight", "k.weight", "v.weight"):
                self.qkv.data.narrow(0, 16 * "qkv".index(name[0]), 16).copy_(tensor)
            elif name == "embedding.weight":
                self.embedding.data[: tensor.shape[0]].copy_(tensor)
                self.embedding.data[tensor.shape[0] :].fill_(0)
            elif name == "out.weight":
                self.transposed.data.copy_(tensor.t())
            elif name == "model.norm.weight":
                self.norm.data.copy_(tensor)
            elif name == "head.weight":
                continue
            loaded.add(name)
        return loaded


def checkpoint_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors that FusedModel loads, by checkpoint name, as a trainer would hold them (float32)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q.weight": (16, WIDTH),
        "k.weight": (16, WIDTH),
        "v.weight": (16, WIDTH),
        "embedding.weight": (50, WIDTH),
        "out.weight": (24, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    return {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def save_base(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a bfloat16 checkpoint directory."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


class ModulePort:
    """An engine of one rank in this process: the real receiver on a real module, and a log of what was done."""

    def __init__(self, model: Any) -> None:
        self.rank = RankReceiver(model)
        self.log: list[str] = []

    def call(self, method: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            return [self._call(method, arguments)]
        except DeltaSyncError as error:
            return [{"error": {"kind": error.kind, "message": error.message}}]

    def _call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if method == "start":
            self.rank.start(arguments["operation"], arguments["arguments"])
            return {}
        if method != "poll":
            self.log.append(method)
        return getattr(self.rank, method)(**arguments)

    def pause(self) -> None:
        self.log.append("pause")

    def resume(self) -> None:
        self.log.append("resume")

    def label(self, version: int | None) -> None:
        self.log.append(f"label {version}")

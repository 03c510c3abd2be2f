"""Models by their public configurations, in bfloat16, and what one rank of tensor and expert parallelism holds of them.

A model is some slices, each with the number of times that it occurs. ``RankSlice`` loads one as vLLM's layers do, so
that the product's own tracer finds the routes: q, k and v in one parameter, gate and up in one, column-parallel layers
cut by rows of the checkpoint, row-parallel ones by columns, and the whole experts of a rank one behind the other. Left
out are the norm after the last layer, and DeepSeek's layer for speculation.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import nn

EXPERTS = 32
"""Experts in a measured slice: a part of a layer that has the layer's ratio of own to foreign experts."""

Cut = Literal["whole", "rows", "columns", "elsewhere"]
"""What a rank holds of a tensor: all of it, its part of the rows or of the columns, or nothing."""


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor; a rank's part lies in ``parameter``, behind those of earlier pieces."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    cut: Cut

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        """Shape of a rank's part."""
        rows, *columns = self.shape
        match self.cut:
            case "whole":
                return self.shape
            case "rows":
                return (rows // ranks, *columns)
            case "columns":
                return (rows, columns[0] // ranks)
            case "elsewhere":
                return (0, *columns)


@dataclass(frozen=True)
class Slice:
    """A part of a model, and how often the model has it."""

    name: str
    count: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements on all ranks, each counted once."""
        return sum(prod(piece.shape) for piece in self.pieces)

    def held(self, ranks: int) -> int:
        """Elements on one rank."""
        return sum(prod(piece.local_shape(ranks)) for piece in self.pieces)


@dataclass(frozen=True)
class ScaledModel:
    """A model on ``ranks`` ranks. ``known``: its parameters, in billions, as published."""

    name: str
    known: str
    ranks: int
    slices: tuple[Slice, ...]

    @property
    def numel(self) -> int:
        return sum(part.count * part.numel for part in self.slices)

    @property
    def held(self) -> int:
        """Elements on one rank."""
        return sum(part.count * part.held(self.ranks) for part in self.slices)


class RankSlice(nn.Module):
    """A slice as a rank in the middle has it; its loader narrows and copies, as vLLM's weight loaders do."""

    def __init__(self, part: Slice, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self._places: dict[str, tuple[Piece, int]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for piece in part.pieces:
            if piece.cut != "elsewhere":
                rows, *columns = piece.local_shape(ranks)
                start = shapes.get(piece.parameter, (0,))[0]
                self._places[piece.name] = piece, start
                shapes[piece.parameter] = (start + rows, *columns)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name not in self._places:
                continue
            piece, start = self._places[name]
            for dimension, cut in enumerate(("rows", "columns")):
                if piece.cut == cut:
                    size = tensor.shape[dimension] // self._ranks
                    tensor = tensor.narrow(dimension, self._ranks // 2 * size, size)
            self.get_parameter(piece.parameter).data.narrow(0, start, tensor.shape[0]).copy_(tensor)


def _linear(rows: int, columns: int, names: Iterable[str], parameter: str, cut: Cut = "rows") -> list[Piece]:
    return [Piece(name, (rows, columns), parameter, cut) for name in names]


def _mlp(hidden: int, inner: int, cuts: tuple[Cut, Cut] = ("rows", "columns"), prefix: str = "mlp") -> list[Piece]:
    up = _linear(inner, hidden, (f"{prefix}.gate_proj", f"{prefix}.up_proj"), "gate_up_proj", cuts[0])
    return [*up, Piece(f"{prefix}.down_proj", (hidden, inner), "down_proj", cuts[1])]


def _norms(hidden: int) -> list[Piece]:
    return [Piece(name, (hidden,), name, "whole") for name in ("input_layernorm", "post_attention_layernorm")]


def _vocabulary(rows: int, hidden: int) -> Slice:
    """The embedding; the head has the same shape, and is cut the same way."""
    return Slice("embedding, or head", 2, (Piece("embed_tokens", (rows, hidden), "embed_tokens", "rows"),))


def llama(
    name: str, known: str, ranks: int, hidden: int, inner: int, layers: int, heads: int, shrink: int
) -> ScaledModel:
    """A Llama 3.1: heads of 128, 8 of keys and values, a vocabulary of 128,256."""
    hidden, inner, layers = hidden // shrink, inner // shrink, max(1, layers // shrink)
    width, narrow = 128 * heads // shrink, 128 * 8 // shrink
    layer = [
        *_linear(width, hidden, ["q_proj"], "qkv_proj"),
        *_linear(narrow, hidden, ["k_proj", "v_proj"], "qkv_proj"),
        Piece("o_proj", (hidden, width), "o_proj", "columns"),
        *_mlp(hidden, inner),
        *_norms(hidden),
    ]
    slices = Slice("decoder layer", layers, tuple(layer)), _vocabulary(128_256 // shrink, hidden)
    return ScaledModel(f"{name}, TP {ranks}", known, ranks, slices)


def deepseek_v3(ranks: int, shrink: int) -> ScaledModel:
    """DeepSeek-V3 with as many expert parallel ranks as tensor parallel ones: vLLM spreads experts over the same."""
    hidden, query, latent, heads = 7168 // shrink, 1536 // shrink, 512 // shrink, 128 // shrink
    attention = [
        *_linear(query, hidden, ["q_a_proj"], "fused_qkv_a_proj", "whole"),
        *_linear(latent + 64, hidden, ["kv_a_proj_with_mqa"], "fused_qkv_a_proj", "whole"),
        Piece("q_a_layernorm", (query,), "q_a_layernorm", "whole"),
        Piece("kv_a_layernorm", (latent,), "kv_a_layernorm", "whole"),
        *_linear(heads * (128 + 64), query, ["q_b_proj"], "q_b_proj"),
        *_linear(heads * (128 + 128), latent, ["kv_b_proj"], "kv_b_proj"),
        Piece("o_proj", (hidden, heads * 128), "o_proj", "columns"),
        *_norms(hidden),
    ]
    router = [
        *_linear(256, hidden, ["mlp.gate"], "gate", "whole"),
        Piece("e_score_correction_bias", (256,), "e_score_correction_bias", "whole"),
        *_mlp(hidden, 2048 // shrink, prefix="mlp.shared_experts"),
    ]
    own = range(ranks // 2 * EXPERTS // ranks, (ranks // 2 + 1) * EXPERTS // ranks)
    experts = []
    for number in range(EXPERTS):
        cut: Cut = "whole" if number in own else "elsewhere"
        experts += _mlp(hidden, 2048 // shrink, (cut, cut), f"mlp.experts.{number:03}")
    slices = (
        Slice("dense layer", 3, (*attention, *_mlp(hidden, 18432 // shrink))),
        Slice("layer of experts, without these", 58, (*attention, *router)),
        Slice(f"{EXPERTS} experts, {len(own)} of the rank", 58 * 256 // EXPERTS, tuple(experts)),
        _vocabulary(129_280 // shrink, hidden),
    )
    return ScaledModel(f"DeepSeek-V3, TP {ranks} × EP {ranks}", "671", ranks, slices)


def scaled_models(shrink: int = 1) -> list[ScaledModel]:
    """The models; with ``shrink`` their sizes are divided by it, for quick runs.

    Raises:
        ValueError: a model does not have the number of parameters that is known of it.
    """
    eight, seventy = ("Llama-3.1-8B", "8.03"), ("Llama-3.1-70B", "70.55")
    models = [
        *(llama(*eight, ranks, 4096, 14336, 32, 32, shrink) for ranks in (1, 2)),
        llama(*seventy, 8, 8192, 28672, 80, 64, shrink),
        deepseek_v3(8, shrink),
    ]
    for model in models:
        if shrink == 1 and f"{model.numel / 1e9:.4g}" != model.known:
            raise ValueError(f"{model.name} has {model.numel / 1e9:.4g} B parameters here, {model.known} B are known")
    return models

"""Architectures drawn by chance whose weights are computed, or worked on after loading: patched as a fresh load would
have them, bit for bit, numbers and hidden tensors included, or refused by name; no third outcome."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.receiver.test_trace_random import DTYPES, Layer, checkpoint, layers, moved
from tests.support.samples import changes_between
from vllm_delta_sync.engine import load_watch
from vllm_delta_sync.engine.commit import commit
from vllm_delta_sync.engine.compiling import trace_routes
from vllm_delta_sync.engine.patch import StagedPatch, stage
from vllm_delta_sync.engine.replica import walk, walk_numbers
from vllm_delta_sync.engine.routes import RouteMap
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.torch_bits import tensor_from_bits
from vllm_delta_sync.wire.bits import Bits
from vllm_delta_sync.wire.fingerprint import fingerprint_tensor
from vllm_delta_sync.wire.table import TensorSpec, TensorTable


class Helper:
    """What a layer may hang its tensors on."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.more = {"halves": [weight / 2]}


class Piece(nn.Module):
    """One drawn layer, and what is done to it after loading."""

    def __init__(self, layer: Layer, finish: "Finish", dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.finish = layer, finish
        self.weight = nn.Parameter(torch.ones(layer.memory).to(dtype), requires_grad=False)

    def load(self, part: int, tensor: torch.Tensor) -> None:
        self.layer.write(self.weight.data, part, tensor)


Finish = Callable[[Piece], Any]


def replace(piece: Piece, tensor: torch.Tensor) -> None:
    piece.weight = nn.Parameter(tensor.contiguous(), requires_grad=False)


def transpose(piece: Piece) -> None:
    rows = piece.weight.shape[0] if piece.weight.dim() else 1
    replace(piece, piece.weight.data.reshape(rows, -1).t())


def quantize(piece: Piece) -> None:
    values = piece.weight.float().nan_to_num(0, 1, -1).clamp(-100, 100)
    scale = values.abs().amax().reshape(1) / 127 + 1
    piece.register_buffer("scale", scale)
    piece.packed = nn.Parameter((values / scale).round().to(torch.int8), requires_grad=False)
    del piece.weight


FINISHES: dict[str, Finish] = {
    "left alone": lambda piece: None,
    "replaced by its transpose": transpose,
    "flipped in place": lambda piece: piece.weight.data.reshape(-1).copy_(piece.weight.data.reshape(-1).flip(0)),
    "replaced by itself": lambda piece: replace(piece, piece.weight.data.clone()),
    "quantized": quantize,
    "absorbed": lambda piece: setattr(piece, "absorbed", piece.weight.float().sum()),
    "kept in a list": lambda piece: setattr(piece, "kept", [piece.weight.data.clone(), 7]),
    "kept by an object": lambda piece: setattr(piece, "helper", Helper(piece.weight.float())),
    "seen through a view": lambda piece: setattr(piece, "view", piece.weight.data.reshape(-1)),
    "given a workspace": lambda piece: setattr(piece, "work", torch.zeros(3)),
    "reduced to a number": lambda piece: setattr(piece, "largest", float(piece.weight.float().nan_to_num().max())),
    "given a constant": lambda piece: setattr(piece, "block", 64),
    "cast": lambda piece: setattr(piece.weight, "data", piece.weight.data.float()),
}  # fmt: skip


class Both(nn.Module):
    """Makes something of two pieces, which are its children or not."""

    def __init__(self, pieces: list[Piece], way: str) -> None:
        super().__init__()
        if way == "children":
            self.first, self.second = pieces[0], pieces[-1]
        self.pieces = [pieces[0], pieces[-1]]

    def finish(self, _: Any = None) -> None:
        weights = [tensor for piece in self.pieces for tensor in piece.parameters()]
        self.product = torch.stack([weight.float().sum() for weight in weights]).prod()


class Finished(nn.Module):
    """A model that is loaded like any, and worked on afterwards."""

    def __init__(self, drawn: list[tuple[Layer, str]], dtype: torch.dtype, both: str = "") -> None:
        super().__init__()
        self.pieces = [Piece(layer, FINISHES[finish], dtype) for layer, finish in drawn]
        self.parts = nn.ModuleList(self.pieces)
        if both:
            self.both = Both(self.pieces, both)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            number, part = (int(text) for text in name.split("."))
            self.pieces[number].load(part, tensor)

    def everything(self) -> dict[str, Any]:
        found: dict[str, Any] = {f"{path} {name}": _bytes(tensor) for path, name, tensor in walk(self)}
        return found | {f"{path} {name}": str(value) for path, name, value in walk_numbers(self)}


def _bytes(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return (
        str(tensor.dtype),
        tuple(tensor.shape),
        tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(),
    )


def finish(model: Finished, paths: Iterable[str] | None) -> None:
    for path, module in model.named_modules():
        if isinstance(module, Piece | Both) and (paths is None or path in set(paths)):
            finished: Any = module.finish
            finished(module)


def fresh(drawn: list[tuple[Layer, str]], dtype: str, both: str, version: "Version") -> Finished:
    table, bits = version.table, version.bits
    model = Finished(drawn, DTYPES[dtype], both)
    model.load_weights((spec.name, tensor_from_bits(one.copy(), spec)) for spec, one in zip(table, bits, strict=True))
    load_watch.watched(model, finish)
    return model


@dataclass(frozen=True)
class Version:
    """A version's bits, by tensor id, and their fingerprints."""

    table: TensorTable
    bits: list[Bits]

    @property
    def fingerprints(self) -> list[Any]:
        return [fingerprint_tensor(spec.name, bits) for spec, bits in zip(self.table, self.bits, strict=True)]

    def shadows(self, tensors: list[int]) -> dict[int, Bits]:
        return {tensor: self.bits[tensor].copy() for tensor in tensors}


@st.composite
def models(draw: st.DrawFn) -> tuple[list[tuple[Layer, str]], str, str, int]:
    drawn = draw(st.lists(st.tuples(layers(), st.sampled_from(sorted(FINISHES))), min_size=1, max_size=3))
    both = draw(st.sampled_from(["", "children", "strangers"]))
    return drawn, draw(st.sampled_from(list(DTYPES))), both, draw(st.integers(0, 2**32))


def staged(routes: RouteMap, old: Version, new: Version) -> StagedPatch:
    patch = stage(1, changes_between(old.table, old.bits, new.bits), routes, old.fingerprints)
    if routes.derived is not None:
        routes.derived.add_to(patch, routes)
    return patch


def traced(model: Finished, loaded: Version) -> RouteMap | str:
    """The model's routes, or why it is refused."""
    try:
        return trace_routes(model, loaded.table, loaded.shadows)
    except ModelError as error:
        return error.message


@settings(max_examples=400, deadline=None)
@given(models())
def test_exact_or_refused(case: tuple[list[tuple[Layer, str]], str, str, int]) -> None:
    drawn, dtype, both, seed = case
    names = [
        (f"{number}.{part}", shape)
        for number, (layer, _) in enumerate(drawn)
        for part, shape in enumerate(layer.tensors)
    ]
    table = TensorTable(TensorSpec(name, dtype, shape) for name, shape in sorted(names))
    chance = np.random.default_rng(seed)
    first = Version(table, checkpoint(table, chance))
    second = Version(table, moved(first.bits, chance))
    try:
        model = fresh(drawn, dtype, both, first)
        right = fresh(drawn, dtype, both, second).everything()
    except (RuntimeError, NotImplementedError):
        event("not loadable")
        return
    held = model.everything()
    routes = traced(model, first)
    assert model.everything() == held, "tracing writes nothing"
    if isinstance(routes, str):
        assert "parts." in routes or any(name in routes for name, _ in names)
        event("refused at start")
        return
    gathered = [routes.fingerprints(tensor)[:1] for tensor in range(len(table))]
    try:
        patch = staged(routes, first, second)
    except ModelError:
        assert model.everything() == held, "staging writes nothing"
        event("refused when it changes")
        return
    assert model.everything() == held, "staging writes nothing"
    commit(patch, routes)
    now = model.everything()
    assert now == right, next(name for name in right if now.get(name) != right[name])
    event("exact" if routes.derived is None else "exact, loaded again")
    if routes.derived is not None:
        assert routes.derived.held(routes.derived.tensors, routes) == set(routes.derived.tensors)
    commit(patch, routes, backwards=True)
    assert model.everything() == held
    assert [routes.fingerprints(tensor)[:1] for tensor in range(len(table))] == gathered

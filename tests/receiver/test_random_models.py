"""Architectures drawn by chance, whose weights are copied, computed, or worked on after loading: patched bit for bit as
a fresh load would have them, or refused by name; no third outcome."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn

from tests.support.routing import route_changes
from tests.support.samples import changes_between
from vllm_delta_sync.engine.commit.apply import apply_patch
from vllm_delta_sync.engine.model import load_record
from vllm_delta_sync.engine.model.model_replica import walk_numbers, walk_tensors
from vllm_delta_sync.engine.model.patch import StagedPatch
from vllm_delta_sync.engine.model.route_compiler import trace_routes
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.fingerprint import fingerprint_tensor
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.tensors.torch_views import tensor_from_bits

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
Shape = tuple[int, ...]
Write = Callable[[torch.Tensor, int, torch.Tensor], object]
"""(memory of the layer, number of the tensor among the layer's, tensor)."""


@dataclass(frozen=True)
class Layer:
    """One piece of a model: shapes of its checkpoint tensors and of its memory, and how one gets into the other."""

    way: str
    tensors: list[Shape]
    memory: Shape
    write: Write
    is_exact: bool = True
    """Whether its author would call it patchable; a loader that computes must be refused."""


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """A layer of some rows and columns, loaded in one of many ways."""
    a, b, parts = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    pad = draw(st.integers(1, 3))
    at = draw(st.integers(0, parts - 1))
    order = draw(st.permutations(range(parts)))
    ways = [
        Layer("plain", [(a, b)], (a, b), lambda m, n, t: m.copy_(t)),
        Layer("vector", [(a,)], (a,), lambda m, n, t: m.copy_(t)),
        Layer("scalar", [()], (), lambda m, n, t: m.copy_(t)),
        Layer("transposed", [(a, b)], (b, a), lambda m, n, t: m.copy_(t.t())),
        Layer("transposed memory", [(a, b)], (b, a), lambda m, n, t: m.t().copy_(t)),
        Layer("fused", [(a, b)] * parts, (parts * a, b), lambda m, n, t: m.narrow(0, order[n] * a, a).copy_(t)),
        Layer("side by side", [(a, b)] * parts, (a, parts * b), lambda m, n, t: m.narrow(1, n * b, b).copy_(t)),
        Layer("experts", [(a, b)] * parts, (parts, a, b), lambda m, n, t: m[order[n]].copy_(t)),
        Layer("experts, transposed", [(a, b)] * parts, (parts, b, a), lambda m, n, t: m[n].copy_(t.t())),
        Layer("interleaved", [(a, b)] * parts, (parts * a, b), lambda m, n, t: m[n::parts].copy_(t)),
        Layer("interleaved view", [(a, b)] * 2, (a, 2, b), lambda m, n, t: m[:, n].copy_(t)),
        Layer("slice of a rank", [(parts * a, b)], (a, b), lambda m, n, t: m.copy_(t.narrow(0, at * a, a))),
        Layer("columns of a rank", [(a, parts * b)], (a, b), lambda m, n, t: m.copy_(t[:, at * b : (at + 1) * b])),
        Layer("packed in the checkpoint", [(parts, a, b)], (parts * a, b),
              lambda m, n, t: [m.narrow(0, i * a, a).copy_(t[i]) for i in range(parts)]),
        Layer("permuted", [(a, b, parts)], (parts, a, b), lambda m, n, t: m.copy_(t.permute(2, 0, 1))),
        Layer("viewed otherwise", [(a, b)], (a * b,), lambda m, n, t: m.view(a, b).copy_(t)),
        Layer("flattened", [(a, b)], (a * b,), lambda m, n, t: m.copy_(t.reshape(-1))),
        Layer("unflattened", [(a * b,)], (a, b), lambda m, n, t: m.copy_(t.view(a, b))),
        Layer("element by element", [(a, b)], (a, b),
              lambda m, n, t: [m[i, j].copy_(t[i, j]) for i in range(a) for j in range(b)]),
        Layer("padded", [(a, b)], (a + pad, b), lambda m, n, t: (m[a:].zero_(), m[:a].copy_(t))),
        Layer("padded in front", [(a, b)], (a + pad, b), lambda m, n, t: (m[pad:].copy_(t), m[:pad].fill_(1))),
        Layer("set", [(a, b)], (a, b), lambda m, n, t: m.set_(t.untyped_storage()), False),
        Layer("index_copy_", [(a, b)], (a, b), lambda m, n, t: m.index_copy_(0, torch.arange(a), t), False),
        Layer("assigned by mask", [(a, b)], (a, b), lambda m, n, t: m.masked_scatter_(m == m, t), False),
        Layer("computed", [(a, b)], (a, b), lambda m, n, t: m.copy_(-torch.exp(t.float()).to(t.dtype)), False),
        Layer("negated", [(a, b)], (a, b), lambda m, n, t: m.copy_(torch.neg(t.float()).to(t.dtype)), False),
        Layer("through float", [(a, b)], (a, b), lambda m, n, t: m.copy_(t.double().to(t.dtype)), False),
        Layer("flipped", [(a, b)], (a, b), lambda m, n, t: m.copy_(t.flip(0)), False),
        Layer("changed, then copied", [(a, b)], (a, b), lambda m, n, t: m.copy_(t.zero_()), False),
        Layer("added", [(a, b)], (a, b), lambda m, n, t: (m.zero_(), m.add_(t)), False),
        Layer("by out=", [(a, b)], (a, b), lambda m, n, t: torch.cat([t], out=m), False),
        Layer("concatenated first", [(a, b)], (2 * a, b), lambda m, n, t: m.copy_(torch.cat([t, t])), False),
        Layer("twice", [(a, b)], (2 * a, b), lambda m, n, t: (m[:a].copy_(t), m[a:].copy_(t)), False),
        Layer("over itself", [(a, b)] * 2, (a, b), lambda m, n, t: m.copy_(t), False),
        Layer("in part", [(a, b)], (a + pad, b), lambda m, n, t: m[:a].copy_(t), False),
        Layer("one row for all", [(1, b)], (a + 1, b), lambda m, n, t: m.copy_(t), False),
        Layer("expanded", [(1, b)], (a + 1, b), lambda m, n, t: m.copy_(t.expand(a + 1, b)), False),
        Layer("by value", [(a, b)], (a, b), lambda m, n, t: m.copy_(t) if t.float().sum() > 0 else None, False),
        Layer("as list", [(a,)], (a,), lambda m, n, t: m.copy_(torch.tensor(t.tolist(), dtype=t.dtype)), False),
        Layer("as other bits", [(a, b)], (a, b), lambda m, n, t: m.view(torch.uint8).copy_(t.view(torch.uint8)), False),
        Layer("by numpy", [(a, b)], (a, b), lambda m, n, t: m.copy_(torch.from_numpy(t.float().numpy())), False),
    ]  # fmt: skip
    return draw(st.sampled_from(ways))


def checkpoint(table: TensorTable, chance: np.random.Generator) -> list[np.ndarray]:
    """Any bits at all."""
    return [
        chance.integers(0, 1 << (8 * spec.element.itemsize), spec.numel, np.uint64).astype(spec.element.uint)
        for spec in table
    ]


def moved(bits: list[np.ndarray], chance: np.random.Generator) -> list[np.ndarray]:
    return [np.where(chance.random(old.size) < 0.3, old + old.dtype.type(1), old) for old in bits]


def routed(model: Any, table: TensorTable, *shadows: Any) -> RouteMap | str:
    """The model's routes, or why it is refused."""
    try:
        return trace_routes(model, table, *shadows)
    except ModelError as error:
        return error.message


class Helper:
    """What a layer may hang its tensors on."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.more = {"halves": [weight / 2]}


class Piece(nn.Module):
    """One drawn layer, in a parameter or a buffer, and what is done to it after loading."""

    weight: torch.Tensor

    def __init__(self, layer: Layer, finish: "Finish", dtype: torch.dtype, is_buffer: bool) -> None:
        super().__init__()
        self.layer, self.finish = layer, finish
        memory = torch.ones(layer.memory).to(dtype)
        if is_buffer:
            self.register_buffer("weight", memory)
        else:
            self.weight = nn.Parameter(memory, requires_grad=False)

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


class Drawn(nn.Module):
    """A model of drawn layers, which may be worked on after loading.

    Args:
        tied: whether layers are registered under two names. buffers: whether every second one is no parameter.
    """

    def __init__(
        self, drawn: list[tuple[Layer, str]], dtype: str, both: str = "", tied: bool = False, buffers: bool = False
    ) -> None:
        super().__init__()
        self.pieces = [
            Piece(layer, FINISHES[finish], DTYPES[dtype], buffers and number % 2 == 1)
            for number, (layer, finish) in enumerate(drawn)
        ]
        self.parts = nn.ModuleList(self.pieces)
        if both:
            self.both = Both(self.pieces, both)
        if tied:
            for number, piece in enumerate(self.pieces):
                setattr(self, f"alias_{number}", piece.weight)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            number, part = (int(text) for text in name.split("."))
            self.pieces[number].load(part, tensor)

    def load(self, version: "Version") -> None:
        bits = zip(version.table, version.bits, strict=True)
        self.load_weights((spec.name, tensor_from_bits(one.copy(), spec)) for spec, one in bits)

    def everything(self) -> dict[str, Any]:
        found: dict[str, Any] = {f"{path} {name}": _bytes(tensor) for path, name, tensor in walk_tensors(self)}
        return found | {f"{path} {name}": str(value) for path, name, value in walk_numbers(self)}


def _bytes(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return (
        str(tensor.dtype),
        tuple(tensor.shape),
        tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes(),
    )


def finish(model: Drawn, paths: Iterable[str] | None) -> None:
    for path, module in model.named_modules():
        if isinstance(module, Piece | Both) and (paths is None or path in set(paths)):
            finished: Any = module.finish
            finished(module)


def made(drawn: list[tuple[Layer, str]], dtype: str, both: str, version: "Version") -> Drawn:
    model = Drawn(drawn, dtype, both)
    model.load(version)
    load_record.record_load(model, finish)
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


def names_of(drawn: list[tuple[Layer, str]]) -> dict[str, Shape]:
    """Names of the checkpoint's tensors, with their shapes."""
    return {
        f"{number}.{part}": shape for number, (layer, _) in enumerate(drawn) for part, shape in enumerate(layer.tensors)
    }


def two_versions(drawn: list[tuple[Layer, str]], dtype: str, seed: int) -> tuple[Version, Version]:
    table = TensorTable(TensorSpec(name, dtype, shape) for name, shape in sorted(names_of(drawn).items()))
    chance = np.random.default_rng(seed)
    first = Version(table, checkpoint(table, chance))
    return first, Version(table, moved(first.bits, chance))


def staged(routes: RouteMap, old: Version, new: Version) -> StagedPatch:
    patch = route_changes(1, changes_between(old.table, old.bits, new.bits), routes, old.fingerprints)
    if routes.reload_units is not None:
        patch.dense += routes.reload_units.outputs_after(patch.sparse, patch.dense)
    return patch


def is_named(refusal: str, drawn: list[tuple[Layer, str]], model: nn.Module) -> bool:
    """Whether a refusal says of which weight it is, by its name in the checkpoint or one of those in the model."""
    inside = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return "parts." in refusal or any(name in refusal for name in (*names_of(drawn), *inside))


SEEDS, DRAWN_DTYPES = st.integers(0, 2**32), st.sampled_from(list(DTYPES))


@given(st.lists(layers(), min_size=1, max_size=4), DRAWN_DTYPES, st.booleans(), st.booleans(), SEEDS)
def test_loaders_are_followed_exactly_or_refused(
    loaded: list[Layer], dtype: str, tied: bool, buffers: bool, seed: int
) -> None:
    drawn = [(layer, "left alone") for layer in loaded]
    first, second = two_versions(drawn, dtype, seed)
    model, right = (Drawn(drawn, dtype, tied=tied, buffers=buffers) for _ in range(2))
    before = model.everything()
    routes = routed(model, first.table)
    assert model.everything() == before, "tracing writes nothing"
    if isinstance(routes, str):
        event("refused")
        assert not all(layer.is_exact for layer in loaded), routes
        assert is_named(routes, drawn, model)
        return
    event("exact")
    model.load(first)
    right.load(second)
    held = model.everything()
    patch = staged(routes, first, second)
    apply_patch(patch, routes)
    assert model.everything() == right.everything()
    apply_patch(patch, routes, reverse=True)
    assert model.everything() == held


WORKED_ON = st.lists(st.tuples(layers(), st.sampled_from(sorted(FINISHES))), min_size=1, max_size=3)


@given(WORKED_ON, DRAWN_DTYPES, st.sampled_from(["", "children", "strangers"]), SEEDS)
def test_models_worked_on_after_loading_are_followed_exactly_or_refused(
    drawn: list[tuple[Layer, str]], dtype: str, both: str, seed: int
) -> None:
    first, second = two_versions(drawn, dtype, seed)
    try:
        model = made(drawn, dtype, both, first)
        right = made(drawn, dtype, both, second).everything()
    except (RuntimeError, NotImplementedError):
        event("not loadable")
        return
    held = model.everything()
    routes = routed(model, first.table, first.shadows)
    assert model.everything() == held, "tracing writes nothing"
    if isinstance(routes, str):
        event("refused at start")
        assert is_named(routes, drawn, model)
        return
    tensors = range(len(first.table))
    gathered = [found[:1] for found in routes.fingerprint_routes(tensors)]
    try:
        patch = staged(routes, first, second)
    except ModelError:
        assert model.everything() == held, "staging writes nothing"
        event("refused when it changes")
        return
    assert model.everything() == held, "staging writes nothing"
    apply_patch(patch, routes)
    now = model.everything()
    assert now == right, next(name for name in right if now.get(name) != right[name])
    event("exact" if routes.reload_units is None else "exact, loaded again")
    if routes.reload_units is not None:
        assert not routes.reload_units.stale(routes.reload_units.tensors)
    apply_patch(patch, routes, reverse=True)
    assert model.everything() == held
    assert [found[:1] for found in routes.fingerprint_routes(tensors)] == gathered

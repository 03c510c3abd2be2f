"""Architectures that nobody has seen, drawn by chance: patched bit for bit as a fresh load, or refused by name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.samples import changes_between
from vllm_delta_sync.engine.commit import commit
from vllm_delta_sync.engine.compiling import trace_routes
from vllm_delta_sync.engine.patch import stage
from vllm_delta_sync.engine.routes import RouteMap
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.torch_bits import bits_of, tensor_from_bits
from vllm_delta_sync.wire.fingerprint import fingerprint_tensor
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

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


def rows(start: int, count: int) -> Write:
    return lambda memory, number, tensor: memory.narrow(0, start + number * count, count).copy_(tensor)


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


class Drawn(nn.Module):
    """A model of drawn layers; ``tied`` layers are registered under two names."""

    def __init__(self, drawn: list[Layer], dtype: torch.dtype, tied: bool, buffers: bool) -> None:
        super().__init__()
        self.drawn = drawn
        for number, layer in enumerate(drawn):
            memory = torch.ones(layer.memory).to(dtype)
            if buffers and number % 2:
                self.register_buffer(f"held_{number}", memory)
            else:
                self.register_parameter(f"held_{number}", nn.Parameter(memory, requires_grad=False))
            if tied:
                setattr(self, f"alias_{number}", getattr(self, f"held_{number}"))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            number, part = (int(text) for text in name.split("."))
            self.drawn[number].write(getattr(self, f"held_{number}").data, part, tensor)

    def bits(self) -> list[np.ndarray]:
        return [bits_of(getattr(self, f"held_{number}").data.reshape(-1)) for number in range(len(self.drawn))]


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Layer], str, bool, bool, int]:
    drawn = draw(st.lists(layers(), min_size=1, max_size=4))
    seed = draw(st.integers(0, 2**32))
    return drawn, draw(st.sampled_from(list(DTYPES))), draw(st.booleans()), draw(st.booleans()), seed


def checkpoint(table: TensorTable, chance: np.random.Generator) -> list[np.ndarray]:
    """Any bits at all."""
    return [
        chance.integers(0, 1 << (8 * spec.element.itemsize), spec.numel, np.uint64).astype(spec.element.uint)
        for spec in table
    ]


def moved(bits: list[np.ndarray], chance: np.random.Generator) -> list[np.ndarray]:
    return [np.where(chance.random(old.size) < 0.3, old + old.dtype.type(1), old) for old in bits]


@settings(max_examples=300, deadline=None)
@given(models())
def test_exact_or_refused(case: tuple[list[Layer], str, bool, bool, int]) -> None:
    drawn, dtype, tied, buffers, seed = case
    names = [
        (f"{number}.{part}", shape) for number, layer in enumerate(drawn) for part, shape in enumerate(layer.tensors)
    ]
    table = TensorTable(TensorSpec(name, dtype, shape) for name, shape in sorted(names))
    chance = np.random.default_rng(seed)
    first = checkpoint(table, chance)
    second = moved(first, chance)
    model = Drawn(drawn, DTYPES[dtype], tied, buffers)
    before = model.bits()
    routes = traced(model, table)
    assert all(np.array_equal(old, now) for old, now in zip(before, model.bits(), strict=True)), (
        "tracing writes nothing"
    )
    if isinstance(routes, str):
        event("refused")
        assert not all(layer.is_exact for layer in drawn), routes
        assert "held_" in routes or any(name in routes for name, _ in names)
        return
    event("exact")
    assert all(np.array_equal(old, now) for old, now in zip(before, model.bits(), strict=True)), (
        "tracing writes nothing"
    )
    load(model, table, first)
    held = model.bits()
    fresh = Drawn(drawn, DTYPES[dtype], tied, buffers)
    load(fresh, table, second)
    fingerprints = [fingerprint_tensor(spec.name, bits) for spec, bits in zip(table, first, strict=True)]
    patch = stage(1, changes_between(table, first, second), routes, fingerprints)
    commit(patch, routes)
    assert all(np.array_equal(right, now) for right, now in zip(fresh.bits(), model.bits(), strict=True))
    commit(patch, routes, backwards=True)
    assert all(np.array_equal(old, now) for old, now in zip(held, model.bits(), strict=True))


def traced(model: Drawn, table: TensorTable) -> RouteMap | str:
    """The model's routes, or why it is refused."""
    try:
        return trace_routes(model, table)
    except ModelError as error:
        return error.message


def load(model: Drawn, table: TensorTable, bits: list[np.ndarray]) -> None:
    model.load_weights((spec.name, tensor_from_bits(one.copy(), spec)) for spec, one in zip(table, bits, strict=True))

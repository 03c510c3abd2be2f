"""Tracing a loader: what is a plain copy is routed exactly, anything else is refused with tensor and reason."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from tests.support.modules import FusedModel, checkpoint_tensors
from vllm_delta_sync.engine import routes as engine_routes
from vllm_delta_sync.engine.compiling import trace_routes
from vllm_delta_sync.engine.routes import fingerprint_copied
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.torch_bits import bits_of, dtype_name
from vllm_delta_sync.wire.fingerprint import fingerprint_tensor
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

Load = Callable[["Toy", str, torch.Tensor], object]


class Toy(nn.Module):
    """One 4 × 6 parameter and a loader given by the test."""

    def __init__(self, load: Load, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6).to(dtype), requires_grad=False)
        self.load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load(self, name, tensor)


def table(*shapes: tuple[int, ...], dtype: str = "BF16") -> TensorTable:
    return TensorTable(TensorSpec(f"t{i}", dtype, shape) for i, shape in enumerate(shapes))


def test_routes_gather_what_was_loaded() -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in checkpoint_tensors().items()}
    model = FusedModel()
    model.load_weights(tensors.items())
    specs = TensorTable(TensorSpec(n, dtype_name(t.dtype, n), tuple(t.shape)) for n, t in tensors.items())
    before = [parameter.clone() for parameter in model.parameters()]
    routes = trace_routes(model, specs)
    assert routes.unloaded == []
    for position, spec in enumerate(specs):
        assert routes.fingerprints(position) == [fingerprint_tensor(spec.name, bits_of(tensors[spec.name]))]
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old), "tracing must not write"


def _column_slices(model: Toy, name: str, tensor: torch.Tensor) -> None:
    model.weight.data[:, 2 * int(name[1]) : 2 * int(name[1]) + 2].copy_(tensor)


def test_column_slices_are_routed() -> None:
    routes = trace_routes(Toy(_column_slices), table((4, 2), (4, 2), (4, 2)))
    assert [len(each) for each in routes.routes] == [1, 1, 1]


@pytest.mark.parametrize("limit", [1, 3, 5, 1000])
def test_copies_of_weights_are_hashed_as_the_weights(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """As weights on a device are, some elements at a time."""
    monkeypatch.setattr(engine_routes, "READ_ELEMENTS", limit)
    for model, shapes in ((Toy(_column_slices), [(4, 2)] * 3), (Toy(_transposed), [(6, 4)])):
        routes = trace_routes(model, table(*shapes))
        for tensor, of_tensor in enumerate(routes.routes):
            name = routes.table[tensor].name
            for route, held in zip(of_tensor, routes.fingerprints(tensor), strict=True):
                flat = routes.destinations[route.destination].flat
                assert fingerprint_copied(name, flat, route.source, route.target) == held


def _transposed(model: Toy, name: str, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor.t())


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda m, n, t: m.weight.data.copy_(-torch.exp(t)), "computed values"),
        (lambda m, n, t: m.weight.data.copy_(t + 1), "computed values"),
        (lambda m, n, t: m.weight.data.add_(t), "not a copy"),
        (lambda m, n, t: m.weight.data.copy_(t[:1].expand(4, 6)), "repeated elements"),
        (lambda m, n, t: m.weight.data.copy_(t[:1]), "broadcasting"),
        (lambda m, n, t: (m.weight.data.copy_(t), m.weight.data[:1].copy_(t[:1])), "loaded to two places"),
        (lambda m, n, t: m.weight.data.view(torch.int16).copy_(t.view(torch.int16)), "another dtype"),
        (lambda m, n, t: torch.add(t, 1, out=m.weight.data), "not a copy"),
        (lambda m, n, t: m.weight.data.fill_(t.flatten()[0].item()), "raised"),
        (lambda m, n, t: {}[n], "raised KeyError"),
    ],
)
def test_what_is_no_plain_copy_is_refused(load: Load, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        trace_routes(Toy(load), table((4, 6)))
    assert "t0" in caught.value.message


def test_cast_is_refused_with_the_mend() -> None:
    with pytest.raises(ModelError, match=r"casts t0 from torch\.float32 .* base="):
        trace_routes(Toy(lambda m, n, t: m.weight.data.copy_(t)), table((4, 6), dtype="F32"))


def test_two_tensors_in_one_place_are_refused() -> None:
    with pytest.raises(ModelError, match="'t0' and 't1' are loaded to the same memory"):
        trace_routes(Toy(lambda m, n, t: m.weight.data.copy_(t)), table((4, 6), (4, 6)))


def test_padding_over_a_tensor_is_refused() -> None:
    def load(model: Toy, name: str, tensor: torch.Tensor) -> None:
        model.weight.data.copy_(tensor)
        model.weight.data[3:].fill_(0)

    with pytest.raises(ModelError, match="padding"):
        trace_routes(Toy(load), table((4, 6)))


def test_tied_parameters_share_one_destination() -> None:
    model = Toy(lambda m, n, t: m.weight.data.copy_(t))
    model.head = nn.Linear(6, 4, bias=False)
    model.head.weight = model.weight
    routes = trace_routes(model, table((4, 6)))
    assert len(routes.destinations) == 1


def test_parameter_filled_in_part_is_refused() -> None:
    with pytest.raises(ModelError, match="'weight' gets 12 of its 24"):
        trace_routes(Toy(lambda m, n, t: m.weight.data[:2].copy_(t[:2])), table((4, 6)))

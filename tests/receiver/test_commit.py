"""Commit, forwards and back: in host memory and on a (simulated) device, the same for every dtype and bit pattern."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.receiver.test_ownership import injective_regions
from tests.support.device import SimulatedDevice, for_host, staged_on_device
from tests.support.routing import all_indices, densely, route_changes
from vllm_delta_sync.engine.commit.apply import apply_patch
from vllm_delta_sync.engine.model import accelerator
from vllm_delta_sync.engine.model.patch import StagedPatch
from vllm_delta_sync.engine.model.route import Destination, Region, Route, RoutePatch, SparsePatch
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Changes, Full
from vllm_delta_sync.tensors.torch_views import SIGNED, TORCH_DTYPES


def destination_of(bits: np.ndarray, dtype: str) -> Destination:
    flat = torch.from_numpy(bits.copy().view(f"<i{bits.itemsize}"))
    return Destination("weight", TORCH_DTYPES[dtype], flat.view(SIGNED[bits.itemsize]))


@st.composite
def patches(draw: st.DrawFn) -> tuple[str, np.ndarray, RoutePatch]:
    """A dtype, random bits, and a random patch over them."""
    dtype = draw(st.sampled_from(["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I64", "I8", "U8"]))
    element = DTYPES[dtype]
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    source = draw(injective_regions())
    order = draw(st.permutations(range(len(source.sizes))))
    route = Route(0, source, densely(source, draw(st.integers(0, 9)), list(order)))
    size = route.target.last + draw(st.integers(1, 5))
    bits = random.integers(0, 1 << (8 * element.itemsize), size, dtype=np.uint64, endpoint=False).astype(element.uint)
    count = draw(st.integers(1, source.numel))
    near = np.array(all_indices(source)) - source.offset
    positions = np.sort(random.choice(near, count, replace=False)).astype(np.int64)
    data = random.integers(0, 1 << (8 * element.itemsize), count, dtype=np.uint64).astype(element.uint)
    narrow = positions.astype(draw(st.sampled_from([np.int32, np.int64])))
    return (
        dtype,
        bits,
        RoutePatch(route, draw(st.integers(0, 2**64 - 1)), 3, element, draw(st.booleans()), narrow, data),
    )


@given(patches(), st.booleans())
def test_device_path_equals_compiled_path_and_both_go_back(
    case: tuple[str, np.ndarray, RoutePatch], uploaded: bool
) -> None:
    dtype, bits, other = case
    patch = for_host(other)
    table = TensorTable([TensorSpec("weight", dtype, bits.shape)])
    compiled, plain = destination_of(bits, dtype), destination_of(bits, dtype)
    new = patch.data.copy()
    staged = StagedPatch(1, [patch], Fingerprint(), [], [Fingerprint()])
    routes = RouteMap(table, [compiled], [[]])
    on_device, device_routes = staged_on_device([other], [plain], uploaded)
    measured = apply_patch(staged, routes)
    assert measured == {3: apply_patch(on_device, device_routes)[3]}
    assert torch.equal(compiled.flat, plain.flat)
    if not patch.relative:
        assert np.array_equal(compiled.bits[patch.positions], new)
        assert np.array_equal(patch.data, bits[patch.positions])
        assert np.array_equal(for_host(other).data, patch.data)
    back = apply_patch(staged, routes, reverse=True)
    assert back == apply_patch(on_device, device_routes, reverse=True) == {3: Fingerprint() - measured[3]}
    assert np.array_equal(compiled.bits, bits)
    assert np.array_equal(plain.bits, bits)
    assert np.array_equal(for_host(other).data, patch.data)


class Failing(Exception):
    """Raised by a destination in the middle of a commit."""


class FailingDestination(Destination):
    """Does not give its address: a real error between two batches of one commit."""

    @property
    def address(self) -> int:
        raise Failing


def test_failure_midway_leaves_every_bit_as_it_was() -> None:
    element = DTYPES["BF16"]
    bits = np.arange(64, dtype=element.uint)
    good = destination_of(bits, "BF16")
    bad = FailingDestination("other", torch.bfloat16, good.flat.clone())
    nothing = np.zeros(3, np.uint64)
    data = np.array([7, 8, 9], element.uint)
    where = np.array([1, 5, 9])
    sparse = [
        SparsePatch(i, 0, element, relative, where, data.copy(), nothing)
        for i, relative in ((0, True), (0, False), (1, True))
    ]
    routes = RouteMap(TensorTable([]), [good, bad], [])
    with pytest.raises(Failing):
        apply_patch(StagedPatch(1, sparse, Fingerprint(), [], []), routes)
    assert np.array_equal(good.flat.numpy().view(element.uint), bits)


class CountingTensor(torch.Tensor):
    """A flat tensor that notes how much of it is ever copied at once."""

    largest = 0

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        CountingTensor.largest = max(CountingTensor.largest, self.numel())
        return super().clone(*args, **kwargs).as_subclass(torch.Tensor)


@pytest.mark.parametrize("shape", [(), (300,), (3, 100), (2, 3, 50), (1, 300), (150, 2)], ids=str)
@pytest.mark.parametrize("on_device", [False, True], ids=["in host memory", "on a device"])
def test_exchange_takes_little_memory_whatever_the_shape(
    shape: tuple[int, ...], on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device: in parts of its workspace, half of which is for either side."""
    monkeypatch.setattr("vllm_delta_sync.engine.commit.apply.EXCHANGE_ELEMENTS", 16)
    monkeypatch.setattr(accelerator, "WORKSPACE_BYTES", 2 * 16 * 2)
    monkeypatch.setattr(CountingTensor, "largest", 0)
    element = DTYPES["BF16"]
    numel = int(np.prod(shape))
    whole = destination_of(np.zeros(2 * numel, element.uint), "BF16")
    destination = Destination("weight", torch.bfloat16, whole.flat.as_subclass(CountingTensor))
    strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    # Every second element: no copy can be avoided by looking at the memory as it lies.
    route = Route(0, Region(0, shape, strides), Region(0, shape, tuple(2 * stride for stride in strides)))
    memory = WeightMemory(SimulatedDevice() if on_device else None)
    routes = RouteMap(TensorTable([TensorSpec("weight", "BF16", shape)]), [destination], [[route]], memory=memory)
    new = np.arange(1, numel + 1, dtype=element.uint)
    held = fingerprint_tensor("weight", np.zeros(numel, element.uint))
    changes = Changes([], [Full(0, new)], {0: fingerprint_tensor("weight", new) - held})
    staged = route_changes(1, changes, routes, [held])
    apply_patch(staged, routes)
    bits = whole.flat.numpy().view(element.uint)
    assert np.array_equal(bits[::2], new)
    assert not bits[1::2].any()
    assert on_device or 0 < CountingTensor.largest <= 16
    apply_patch(staged, routes, reverse=True)
    assert not bits.any()

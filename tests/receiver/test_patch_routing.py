"""Routing of changed elements: addresses, data and hashes of a patch, against indexing by hand."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.receiver.test_ownership import injective_regions
from tests.support.device import SimulatedDevice, for_host
from tests.support.routing import all_indices, densely
from vllm_delta_sync.engine.model import patch as patching
from vllm_delta_sync.engine.model import route as route_module
from vllm_delta_sync.engine.model.patch import PatchBuilder, StagedPatch
from vllm_delta_sync.engine.model.route import Destination, Region, Route, SparsePatch
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_change
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Bits, Full, Positions, Sparse

SIZE = 5_000


def staged(
    routes: list[Route], positions: Positions, data: Bits, relative: bool = True, device: SimulatedDevice | None = None
) -> StagedPatch:
    """The patch of one tensor of SIZE elements, loaded by these routes to one destination each."""
    table = TensorTable([TensorSpec("w", "BF16", (SIZE,))])
    flat = [torch.zeros(SIZE + 100, dtype=torch.int16) for _ in routes]
    places = [Destination(f"d{number}", torch.bfloat16, bits) for number, bits in enumerate(flat)]
    builder = PatchBuilder(1, RouteMap(table, places, [routes], memory=WeightMemory(device)), [Fingerprint()], {})
    builder.add(Sparse("BF16", np.array([0], np.uint32), np.array([positions.size]), positions, data, relative))
    return builder.finish()


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Route], Positions, Bits]:
    routes = []
    for number in range(draw(st.integers(1, 3))):
        source = draw(injective_regions().filter(lambda region: region.last < SIZE))
        order = draw(st.permutations(range(len(source.sizes))))
        routes.append(Route(number, source, densely(source, draw(st.integers(0, 50)), list(order))))
    near = sorted({index for route in routes for index in all_indices(route.source)})
    chosen = draw(st.sets(st.sampled_from(near), max_size=40)) | draw(st.sets(st.integers(0, SIZE - 1), max_size=20))
    positions = np.array(sorted(chosen | {0}), np.int64)
    return routes, positions, np.arange(1, positions.size + 1, dtype=np.uint16)


@given(cases(), st.booleans())
def test_each_element_goes_where_its_route_leads(case: tuple[list[Route], Positions, Bits], wide: bool) -> None:
    """The same changes go to a device."""
    routes, positions, data = case
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr(patching, "NARROW_ELEMENTS", 0)
            patch.setattr(route_module, "NARROW_ELEMENTS", 0)
        found = {patch.destination: patch for patch in staged(routes, positions, data).sparse}
        on_device = staged(routes, positions, data, device=SimulatedDevice())
    zeros = np.zeros(SIZE, np.uint16)
    for number, route in enumerate(routes):
        leads = dict(zip(all_indices(route.source), all_indices(route.target), strict=True))
        wanted = sorted((leads[p], d, p) for p, d in zip(positions.tolist(), data.tolist(), strict=True) if p in leads)
        if not wanted:
            assert number not in found
            continue
        sparse = found[number]
        assert sparse.positions.dtype == (np.int64 if wide else np.int32)
        assert sparse.positions.tolist() == [address for address, _, _ in wanted]
        assert sparse.data.tolist() == [each for _, each, _ in wanted]
        # From zeros, what a commit measures is the change of fingerprint at the positions in the tensor.
        before = np.array([position for _, _, position in sorted(wanted, key=lambda row: row[2])], np.int64)
        after = np.array([each for _, each, _ in sorted(wanted, key=lambda row: row[2])], np.uint16)
        expected = fingerprint_change("w", before, zeros[before], after)
        assert measured(sparse) == expected
    assert on_device.sparse == []
    assert {patch.route.destination for patch in on_device.routed} == found.keys()
    for routed in on_device.routed:
        assert routed.positions.dtype == (np.int64 if wide else np.int32)
        there, here = for_host(routed), found[routed.route.destination]
        for name in ("positions", "data", "premix"):
            assert getattr(there, name).tolist() == getattr(here, name).tolist()


def test_read_only_bits_of_a_tensor_are_copied_once_for_all_its_routes() -> None:
    """As of stacked experts, one route each: a copy of the whole tensor for each of them takes minutes."""
    size = 100
    rows = [Region(start, (10,), (1,)) for start in range(0, size, 10)]
    places = [Destination("d", torch.bfloat16, torch.zeros(size, dtype=torch.int16))]
    routes = RouteMap(TensorTable([TensorSpec("w", "BF16", (size,))]), places, [[Route(0, row, row) for row in rows]])
    builder = PatchBuilder(1, routes, [Fingerprint()], {})
    bits = np.frombuffer(np.arange(size, dtype=np.uint16).tobytes(), np.uint16)
    with mock.patch.object(patching, "signed_view", wraps=route_module.signed_view) as views:
        builder.add(Full(0, bits))
    assert views.call_count == 1
    assert [patch.data.tolist() for patch in builder.finish().dense] == bits.reshape(10, 10).tolist()


def measured(sparse: SparsePatch) -> Fingerprint:
    from vllm_delta_sync.format import kernels

    live = np.zeros(SIZE + 100, np.uint16)
    sums = kernels.commit_relative(
        live, sparse.positions.astype(np.int64), sparse.data, sparse.premix, np.uint64(0), np.uint64(0xFFFF), False
    )
    return Fingerprint(*(int(number) for number in sums))


def test_patches_of_a_batch_share_memory_of_their_size_only() -> None:
    """Of a rank with half of the columns, nothing is kept for the other half."""
    half = Route(0, Region(0, (50, 50), (100, 1)), Region(0, (50, 50), (50, 1)))
    positions = np.arange(SIZE, dtype=np.int64)
    [sparse] = staged([half], positions, np.ones(SIZE, np.uint16)).sparse
    [routed] = staged([half], positions, np.ones(SIZE, np.uint16), device=SimulatedDevice()).routed
    assert sparse.positions.size == routed.positions.size == 2500
    for array in (sparse.positions, sparse.data, sparse.premix, routed.positions, routed.data):
        owner = array
        while owner.base is not None:
            owner = owner.base
        assert owner.size == 2500

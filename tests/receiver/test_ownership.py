"""Strided boxes against brute force, and who holds what: any cut of a tensor over ranks is proven whole, summed once,
and copies are compared."""

import itertools
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.routing import all_indices
from tests.support.running import counted
from vllm_delta_sync.engine.follow.rank_group import prove_ownership
from vllm_delta_sync.engine.model.route import Region, coalesce, find_overlap, split_regions
from vllm_delta_sync.engine.model.route_map import fingerprint_in_place, fingerprint_via_copy
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_strided, fingerprint_tensor
from vllm_delta_sync.format.table import TensorSpec, TensorTable


@st.composite
def injective_regions(draw: st.DrawFn) -> Region:
    """A box as views give it: nested strides in any order of dimensions, with holes."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=0, max_size=3))
    strides, reach = [], 1
    for size in sizes:
        stride = reach * draw(st.integers(1, 2))
        strides.append(stride)
        reach = stride * size
    order = draw(st.permutations(range(len(sizes))))
    return Region(draw(st.integers(0, 9)), tuple(sizes[i] for i in order), tuple(strides[i] for i in order))


@st.composite
def lattice_regions(draw: st.DrawFn) -> list[Region]:
    """Boxes as tensor parallelism cuts them: of the same strides, in any part of the lattice."""
    strides = (60, 12, 1)
    cut = []
    for _ in range(draw(st.integers(2, 5))):
        offsets = [draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.integers(0, 11))]
        sizes = [draw(st.integers(1, end - at)) for at, end in zip(offsets, (5, 5, 12), strict=True)]
        region = Region(sum(a * s for a, s in zip(offsets, strides, strict=True)), tuple(sizes), strides)
        cut.append(coalesce(region.sizes, (region.offset, strides), (0, strides))[0])
    return cut


@given(st.one_of(st.lists(injective_regions(), min_size=2, max_size=4), lattice_regions()))
def test_overlap_is_found(regions: list[Region]) -> None:
    indices = [set(all_indices(region)) for region in regions]
    expected = any(a & b for a, b in itertools.combinations(indices, 2))
    found = find_overlap(regions)
    assert (found is not None) == expected
    if found is not None:
        assert indices[found[0]] & indices[found[1]]


def test_overlap_is_found_without_memory_for_what_lies_between() -> None:
    """Stacked experts: each a transposed or cut box in a parameter of a tebi of elements."""
    inner, hidden = 1 << 15, 1 << 15
    experts = [
        Region(expert * inner * hidden + half * hidden // 2, (inner, hidden // 2), (hidden, 1))
        for expert in range(1024)
        for half in (0, 1)
    ]
    with counted() as most:
        assert find_overlap(experts) is None
        one_more = Region(777 * inner * hidden + hidden * 5 + 3, (2,), (hidden // 2,))
        assert find_overlap([*experts, one_more]) == (1554, len(experts))
    assert most[0] < 1 << 24


@given(injective_regions(), st.integers(1, 20))
def test_pieces_are_the_region_in_order(region: Region, limit: int) -> None:
    second = Region(5, region.sizes, tuple(3 * stride for stride in region.strides))
    cut = list(split_regions(region, second, limit))
    assert all(one.numel == other.numel <= limit for one, other in cut)
    assert [index for one, _ in cut for index in all_indices(one)] == all_indices(region)
    assert [index for _, other in cut for index in all_indices(other)] == all_indices(second)


@given(injective_regions(), st.integers(0, 5))
def test_coalescing_keeps_the_map(region: Region, offset: int) -> None:
    strides = tuple(int(np.prod(region.sizes[i + 1 :])) for i in range(len(region.sizes)))
    first, second = coalesce(region.sizes, (region.offset, region.strides), (offset, strides))
    plain = Region(offset, region.sizes, strides)
    pairs = dict(zip(all_indices(region), all_indices(plain), strict=True))
    assert dict(zip(all_indices(first), all_indices(second), strict=True)) == pairs
    assert len(first.sizes) <= len(region.sizes)


@given(injective_regions())
def test_weights_have_one_fingerprint_in_place_and_through_a_copy(region: Region) -> None:
    """As weights on a device without kernels are measured."""
    random = np.random.default_rng(len(region.sizes))
    flat = torch.from_numpy(random.integers(-(1 << 15), 1 << 15, max(all_indices(region)) + 1, dtype=np.int16))
    source = Region(5, region.sizes, tuple(3 * stride for stride in region.strides))
    assert fingerprint_via_copy("a", flat, source, region) == fingerprint_in_place("a", flat, source, region)


# Who holds what


ROWS, COLUMNS = 12, 8
TABLE = TensorTable([TensorSpec("a", "BF16", (ROWS, COLUMNS)), TensorSpec("b", "BF16", (4,))])
WHOLE = Region(0, (ROWS * COLUMNS,), (1,))


def rows(first: int, last: int) -> Region:
    return Region(first * COLUMNS, ((last - first) * COLUMNS,), (1,))


def columns(first: int, last: int) -> Region:
    return Region(first, (ROWS, last - first), (COLUMNS, 1))


@st.composite
def cuts(draw: st.DrawFn) -> list[list[Region]]:
    """Regions per rank: cut by rows or by columns, each part held by one rank or copied to several."""
    by_rows = draw(st.booleans())
    extent = ROWS if by_rows else COLUMNS
    edges = sorted(draw(st.sets(st.integers(1, extent - 1), max_size=3)) | {0, extent})
    ranks = draw(st.integers(1, 4))
    held: list[list[Region]] = [[] for _ in range(ranks)]
    for first, last in pairwise(edges):
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(rows(first, last) if by_rows else columns(first, last))
    return held


def measure(region: Region, bits: np.ndarray) -> Fingerprint:
    where = (region.offset, region.strides)
    return fingerprint_strided("a", bits, region.sizes, where, where)


@given(cuts(), st.integers(0, 2**32 - 1))
def test_sum_over_ranks_is_the_whole_tensor(held: list[list[Region]], seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 1 << 16, ROWS * COLUMNS, dtype=np.uint16)
    ownership = prove_ownership(TABLE, [[regions, []] for regions in held])
    assert (ownership.is_loaded(0), ownership.is_loaded(1)) == (True, False)
    whole = fingerprint_tensor("a", bits)
    measured = [[measure(region, bits) for region in regions] for regions in held]
    assert ownership.combine(0, measured) == whole
    by_group: list[dict[int, Fingerprint]] = []
    for rank, values in enumerate(measured):
        sums: dict[int, Fingerprint] = {}
        for group, value in zip(ownership.groups(rank)[0], values, strict=True):
            sums[group] = sums.get(group, Fingerprint()) + value
        by_group.append(sums)
    assert ownership.combine_groups(by_group) == whole


@given(cuts(), st.data())
def test_copies_that_differ_are_noticed(held: list[list[Region]], data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([rank for rank, regions in enumerate(held) if regions]))
    ownership = prove_ownership(TABLE, [[regions, []] for regions in held])
    position = data.draw(st.integers(0, len(held[rank]) - 1))
    copied = sum(held[rank][position] in regions for regions in held) > 1
    zero = np.zeros(ROWS * COLUMNS, np.uint16)
    measured = [[measure(region, zero) for region in regions] for regions in held]
    measured[rank][position] += Fingerprint(1, 1)
    assert (ownership.combine(0, measured) is None) == copied


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        ([[rows(0, 6)], [rows(7, 12)]], "only 88 of 96"),
        ([[rows(0, 6)], [rows(5, 12)]], "overlap"),
        ([[columns(0, 5)], [columns(4, 8)]], "overlap"),
        ([[WHOLE], [rows(0, 6)]], "overlap"),
        ([[rows(0, 6)], []], "only 48 of 96"),
    ],
)
def test_parts_that_are_not_the_whole_are_refused(held: list[list[Region]], reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        prove_ownership(TABLE, [[regions, []] for regions in held])
    assert "'a'" in caught.value.message

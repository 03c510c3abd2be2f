"""Strided boxes: inversion and overlap, against brute force."""

import itertools
import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_delta_sync.engine.regions import Region, coalesce, find_overlap, pieces


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


def all_indices(region: Region) -> list[int]:
    return [
        region.offset + sum(c * s for c, s in zip(point, region.strides, strict=True))
        for point in itertools.product(*(range(size) for size in region.sizes))
    ]


@given(injective_regions())
def test_coordinates_invert_indices(region: Region) -> None:
    assert region.is_injective
    everything = np.arange(0, max(all_indices(region)) + 5)
    coordinates, inside = region.coordinates(everything)
    assert everything[inside].tolist() == sorted(all_indices(region))
    assert np.array_equal(region.indices(coordinates[:, inside]), everything[inside])


@given(st.lists(injective_regions(), min_size=2, max_size=4))
def test_overlap_is_found(regions: list[Region]) -> None:
    indices = [set(all_indices(region)) for region in regions]
    expected = any(a & b for a, b in itertools.combinations(indices, 2))
    found = find_overlap(regions)
    assert (found is not None) == expected
    if found is not None:
        assert indices[found[0]] & indices[found[1]]


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


@given(lattice_regions())
def test_overlap_of_slices_is_found(regions: list[Region]) -> None:
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
    tracemalloc.start()
    assert find_overlap(experts) is None
    one_more = Region(777 * inner * hidden + hidden * 5 + 3, (2,), (hidden // 2,))
    assert find_overlap([*experts, one_more]) == (1554, len(experts))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


@given(injective_regions(), st.integers(1, 20))
def test_pieces_are_the_region_in_order(region: Region, limit: int) -> None:
    second = Region(5, region.sizes, tuple(3 * stride for stride in region.strides))
    cut = list(pieces(region, second, limit))
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


def test_repeated_elements_are_not_injective() -> None:
    assert not Region(0, (3, 2), (0, 1)).is_injective
    assert not Region(0, (2, 3), (1, 1)).is_injective

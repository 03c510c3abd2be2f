"""Strided boxes: inversion and overlap, against brute force."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_delta_sync.engine.regions import Region, coalesce, find_overlap


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
    found = find_overlap(regions, max(max(each) for each in indices) + 1)
    assert (found is not None) == expected
    if found is not None:
        assert indices[found[0]] & indices[found[1]]


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

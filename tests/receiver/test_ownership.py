"""Who holds what: any cut of a tensor over ranks is proven whole, summed once, and copies are compared."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_delta_sync.engine.ownership import assign, region_from_plain, region_to_plain
from vllm_delta_sync.engine.regions import Region
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.wire.fingerprint import Fingerprint, fingerprint_strided, fingerprint_tensor
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

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


@settings(deadline=None)  # the first example compiles
@given(cuts(), st.integers(0, 2**32 - 1))
def test_sum_over_ranks_is_the_whole_tensor(held: list[list[Region]], seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 1 << 16, ROWS * COLUMNS, dtype=np.uint16)
    ownership = assign(TABLE, [[regions, []] for regions in held])
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


@settings(deadline=None)
@given(cuts(), st.data())
def test_copies_that_differ_are_noticed(held: list[list[Region]], data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([rank for rank, regions in enumerate(held) if regions]))
    ownership = assign(TABLE, [[regions, []] for regions in held])
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
        assign(TABLE, [[regions, []] for regions in held])
    assert "'a'" in caught.value.message


def test_region_as_plain_data() -> None:
    for region in (WHOLE, columns(2, 5), Region(7, (), ())):
        assert region_from_plain(region_to_plain(region)) == region

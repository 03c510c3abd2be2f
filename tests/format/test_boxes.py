"""Boxes: what is found in the parts of a tensor is what looking at the whole finds."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_delta_sync.errors import TensorMismatchError
from vllm_delta_sync.tensors.boxes import Box, boxes_of_range

WHOLE = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    whole = draw(WHOLE)
    offsets = [draw(st.integers(0, size)) for size in whole]
    shape = [draw(st.integers(0, size - offset)) for size, offset in zip(whole, offsets, strict=True)]
    return Box(tuple(offsets), tuple(shape), whole)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...]]:
    whole = draw(WHOLE)
    start = draw(st.integers(0, math.prod(whole)))
    return start, draw(st.integers(start, math.prod(whole))), whole


def cut(box: Box) -> np.ndarray:
    found: np.ndarray = np.arange(math.prod(box.whole)).reshape(box.whole)
    for axis, (start, size) in enumerate(zip(box.offsets, box.shape, strict=True)):
        found = np.take(found, range(start, start + size), axis)
    return found


@given(boxes())
def test_positions_are_those_of_the_box(box: Box) -> None:
    own = cut(box).reshape(-1)
    assert box.numel == own.size
    assert box.positions(np.arange(own.size)).tolist() == own.tolist()
    assert box.positions(np.arange(own.size)[::2]).tolist() == own[::2].tolist()
    if own.size:
        assert (box.start, box.stop) == (own[0], own[-1] + 1)
        assert box.is_range == (own.size == own[-1] + 1 - own[0])


@given(boxes(), st.integers(1, 3))
def test_global_positions_are_found_in_the_box(box: Box, step: int) -> None:
    given = np.arange(math.prod(box.whole))[::step]
    chosen, local = box.inside(given)
    own = set(cut(box).reshape(-1).tolist())
    assert given[chosen].tolist() == [position for position in given.tolist() if position in own]
    assert box.positions(local).tolist() == given[chosen].tolist()


@given(boxes())
def test_view_of_a_flat_array_is_the_box(box: Box) -> None:
    flat = np.arange(math.prod(box.whole), dtype=np.uint16)
    view = box.view(flat)
    assert view.shape == box.shape
    assert np.array_equal(view, cut(box))
    view[...] = 9_999
    assert (flat == 9_999).sum() == box.numel


@given(ranges())
def test_boxes_of_a_range_are_the_range(case: tuple[int, int, tuple[int, ...]]) -> None:
    start, stop, whole = case
    found = boxes_of_range(start, stop, whole)
    assert [position for box in found for position in cut(box).reshape(-1).tolist()] == list(range(start, stop))
    assert all(box.is_range and box.whole == whole and box.numel for box in found)
    assert len(found) <= max(1, 2 * len(whole) - 1)


def test_a_whole_tensor_is_one_box() -> None:
    for whole in ((), (5,), (2, 3, 4)):
        assert boxes_of_range(0, math.prod(whole), whole) == [Box.all_of(whole)]
        assert Box.all_of(whole).is_whole
    assert not Box((0, 0), (2, 3), (2, 4)).is_whole
    assert boxes_of_range(0, 0, (0, 4)) == []


def test_more_elements_than_32_bits_count() -> None:
    """Index arithmetic alone: nothing of that size is allocated."""
    whole = (80_000, 70_000)
    box = Box((70_000, 5), (2, 3), whole)
    assert box.positions(np.array([0, 5], np.int32)).tolist() == [70_000 * 70_000 + 5, 70_001 * 70_000 + 7]
    chosen, local = box.inside(np.array([4, 70_000 * 70_000 + 5, 70_000 * 70_000 + 8, 70_001 * 70_000 + 7]))
    assert np.arange(4)[chosen].tolist() == [1, 3]
    assert local.tolist() == [0, 5]
    rows = Box((40_000, 0), (40_000, 70_000), whole)
    assert rows.numel == 2_800_000_000
    assert rows.positions(np.array([2_799_999_999])).tolist() == [80_000 * 70_000 - 1]
    kept, inner = rows.inside(np.array([2_800_000_000 - 1, 2_800_000_000, 5_599_999_999]))
    assert (kept, inner.tolist()) == (slice(1, 3), [0, 2_799_999_999])
    start, stop = 3_000_000_001, 5_500_000_003
    found = boxes_of_range(start, stop, whole)
    assert (found[0].start, found[-1].stop) == (start, stop)
    assert [after.start for after in found[1:]] == [before.stop for before in found[:-1]]


OUTSIDE: list[tuple[Callable[[], object], str]] = [
    (lambda: Box((0,), (3,), (2,)), "is not inside a tensor"),
    (lambda: Box((1,), (2,), (2,)), "is not inside a tensor"),
    (lambda: Box((-1,), (1,), (2,)), "is not inside a tensor"),
    (lambda: Box((0, 0), (1,), (2,)), "is not inside a tensor"),
    (lambda: Box((0,), (-1,), (2,)), "is not inside a tensor"),
    (lambda: Box((1, 1), (2, 3), (4, 4)).positions(np.array([-1])), "not inside 6 elements"),
    (lambda: Box((1, 1), (2, 3), (4, 4)).positions(np.array([6])), "not inside 6 elements"),
    (lambda: boxes_of_range(-1, 2, (2, 3)), r"are not inside a tensor \[2, 3\]"),
    (lambda: boxes_of_range(3, 2, (2, 3)), r"are not inside a tensor \[2, 3\]"),
    (lambda: boxes_of_range(0, 7, (2, 3)), r"are not inside a tensor \[2, 3\]"),
    (lambda: Box.all_of((2, 3)).view(np.zeros(5, np.uint16)), r"5 elements are not those of a tensor \[2, 3\]"),
]


@pytest.mark.parametrize(("make", "message"), OUTSIDE)
def test_what_lies_outside_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TensorMismatchError, match=message):
        make()

"""Boxes of ranks that are every element of a tensor once, and such that are not."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_side.sharded.cover import boxes_document, check_cover
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.wire.boxes import Box
from vllm_delta_sync.wire.table import TensorSpec, TensorTable


def refusal(shape: tuple[int, ...], boxes: list[list[Box]]) -> str:
    """What is said of the boxes that each rank has of a tensor; empty if nothing is."""
    table = TensorTable([TensorSpec("other", "F32", (2,)), TensorSpec("x", "F32", shape)])
    told = [boxes_document([(1, box) for box in theirs]) for theirs in boxes]
    told[0] += boxes_document([(0, Box.all_of((2,)))])
    try:
        check_cover(table, told)
    except ModelError as error:
        return error.message
    return ""


@st.composite
def cuts(draw: Any) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut along one dimension after another, as boxes in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    found = [Box.all_of(shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        axis = draw(st.integers(0, len(shape) - 1)) if shape else 0
        at = draw(st.integers(0, box.shape[axis])) if shape else 0
        found += [part for part in _halves(box, axis, at) if part.numel] if shape else [box]
    return shape, draw(st.permutations(found))


def _halves(box: Box, axis: int, at: int) -> list[Box]:
    def part(offset: int, size: int) -> Box:
        offsets, shape = list(box.offsets), list(box.shape)
        offsets[axis], shape[axis] = offset, size
        return Box(tuple(offsets), tuple(shape), box.whole)

    return [part(box.offsets[axis], at), part(box.offsets[axis] + at, box.shape[axis] - at)]


@given(cuts(), st.integers(1, 4))
def test_cuts_of_a_tensor_are_right_and_no_other_boxes(cut: tuple[tuple[int, ...], list[Box]], ranks: int) -> None:
    shape, boxes = cut
    assert refusal(shape, [boxes[rank::ranks] for rank in range(ranks)]) == ""
    lost, twice = [boxes[1:], []], [boxes, boxes[-1:]]
    assert f"the ranks hold {int(np.prod(shape)) - boxes[0].numel} of the " in refusal(shape, lost)
    assert "share elements of tensor 'x'" in refusal(shape, twice)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=5))
def test_boxes_are_judged_as_elements_that_are_counted(drawn: list[tuple[int, int, int, int]]) -> None:
    times = np.zeros((4, 4), int)
    boxes = []
    for first, second, rows, columns in drawn:
        box = Box((first, second), (min(rows, 4 - first), min(columns, 4 - second)), (4, 4))
        times[box.index] += 1
        boxes.append([box])
    assert (refusal((4, 4), [[], *boxes]) == "") == bool((times == 1).all())


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_tensors_without_elements_need_no_rank(shape: tuple[int, ...]) -> None:
    assert refusal(shape, [[]]) == refusal(shape, [[Box.all_of(shape)], [Box.all_of(shape)]]) == ""


def test_a_scalar_is_held_once() -> None:
    scalar = Box.all_of(())
    assert refusal((), [[], [scalar]]) == ""
    assert "rank 0: x, rank 1: x share elements of tensor 'x', of whose 1 the ranks hold 2" in refusal(
        (), [[scalar], [scalar]]
    )
    assert "the ranks hold 0 of the 1 elements of tensor 'x' (no rank has any)" in refusal((), [[]])

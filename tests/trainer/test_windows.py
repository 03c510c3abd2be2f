"""Windows of a checkpoint tensor in a box of its source, held against looking at every element."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_side.sharded.windows import windows
from trainer_side.tracing import View
from vllm_delta_sync.wire.boxes import Box, boxes_of_range


@st.composite
def views(draw: st.DrawFn) -> tuple[View, tuple[int, ...]]:
    """A view by a few operations such as conversions use, of a source of up to four dimensions."""
    whole = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    tensor = torch.arange(math.prod(whole)).reshape(whole)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["permute", "select", "slice", "reshape"]))
        if kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif kind == "select" and tensor.dim():
            axis = draw(st.integers(0, tensor.dim() - 1))
            tensor = tensor.select(axis, draw(st.integers(0, tensor.shape[axis] - 1)))
        elif kind == "slice" and tensor.dim():
            axis = draw(st.integers(0, tensor.dim() - 1))
            start = draw(st.integers(0, tensor.shape[axis] - 1))
            step = draw(st.integers(1, 2))
            index: list[slice] = [slice(None)] * tensor.dim()
            index[axis] = slice(start, draw(st.integers(start + 1, tensor.shape[axis])), step)
            tensor = tensor[tuple(index)]
        elif kind == "reshape":
            factors = draw(st.permutations(tensor.shape))
            if tensor.is_contiguous():
                tensor = tensor.reshape((*factors[:-2], math.prod(factors[-2:])))
    return View("source", tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())), whole


@st.composite
def boxes_in(draw: st.DrawFn, whole: tuple[int, ...]) -> Box:
    if draw(st.booleans()):
        start = draw(st.integers(0, math.prod(whole) - 1))
        return draw(st.sampled_from(boxes_of_range(start, draw(st.integers(start + 1, math.prod(whole))), whole)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in whole)
    shape = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(whole, offsets, strict=True))
    return Box(offsets, shape, whole)


def values(view: View, whole: tuple[int, ...]) -> np.ndarray:
    return view.read({"source": torch.arange(math.prod(whole))}).numpy()


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_windows_are_what_the_view_has_in_the_box(data: st.DataObject) -> None:
    view, whole = data.draw(views())
    box = data.draw(boxes_in(whole))
    found = windows(view, box)
    if found is None:
        # A range of the flat source never needs more than boxes.
        assert not box.is_range
        return
    local = torch.from_numpy(box.view(np.arange(math.prod(whole), dtype=np.uint64)).astype(np.int64)).contiguous()
    expected, inside = values(view, whole), set(local.flatten().tolist())
    times = np.zeros(view.shape, int)
    for window in found:
        assert window.box.numel
        piece = local.as_strided(window.box.shape, window.strides, window.offset)
        assert np.array_equal(piece.numpy(), expected[window.box.index])
        times[window.box.index] += 1
    assert times.tolist() == np.vectorize(inside.__contains__, otypes=[int])(expected).tolist()


@pytest.mark.parametrize("sharded", [0, 1, 2])
def test_one_expert_of_a_stack_is_one_window(sharded: int) -> None:
    """The up projection, transposed, of expert 2 of 4, where the source is cut in half in one dimension."""
    whole = (4, 6, 8)
    view = View("experts", (6, 4), (8, 1), 2 * 48 + 4)
    half = tuple(size // (2 if axis == sharded else 1) for axis, size in enumerate(whole))
    second = tuple(size if axis == sharded else 0 for axis, size in enumerate(half))
    counts = [len(windows(view, Box(at, half, whole)) or []) for at in ((0, 0, 0), second)]
    assert counts == {0: [0, 1], 1: [1, 1], 2: [0, 1]}[sharded]


def test_views_that_no_boxes_describe_are_refused() -> None:
    rows = Box((0, 1), (4, 2), (4, 4))
    assert windows(View("w", (16,), (1,), 0), rows) is None
    assert windows(View("w", (3, 4), (0, 1), 0), rows) is None
    assert windows(View("w", (3, 3), (1, 1), 0), Box.all_of((4, 4))) is None

"""Boxes of sharded tensors: each rank owns its part, all together own every element once, and others are refused."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.trainer.sharded.nursery import Nursery
from trainer_side.model.conversion_trace import View
from trainer_side.ranks.shard_parts import boxes_document, check_coverage, shard_views
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.boxes import Box, boxes_of_range
from vllm_delta_sync.tensors.torch_sharding import is_sharded, layout, local_boxes, owns, whole_shape

Pieces = list[tuple[Box, torch.Tensor]]


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def described(pieces: Pieces) -> list[Any]:
    return [[box.offsets, box.shape, box.whole, tensor.tolist()] for box, tensor in pieces]


def told(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: [
            list(whole_shape(tensor)),
            described(local_boxes(tensor)),
            described(local_boxes(tensor) if owns(tensor) else []),
        ]
        for name, tensor in tensors.items()
    }


def placed_tensors(mesh: DeviceMesh, placements: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
    shapes = {"even": (8, 4), "odd": (5, 3), "few": (1, 3), "deep": (3, 5, 2), "none": (0, 4)}
    return {
        f"{name} {way}": distribute_tensor(counted(*shape), mesh, places)
        for name, shape in shapes.items()
        for way, places in placements.items()
    }


def placed(rank: int, size: int) -> dict[str, Any]:
    flat = init_device_mesh("cpu", (size,))
    tensors = placed_tensors(flat, {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]})
    if size == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ways: dict[str, list[Any]] = {
            "block": [Shard(0), Shard(1)],
            "rows twice": [Shard(0), Shard(0)],
            "copied rows": [Replicate(), Shard(0)],
            "rows copied": [Shard(1), Replicate()],
        }
        tensors |= {f"square {name}": tensor for name, tensor in placed_tensors(square, ways).items()}
        # A replica of its own for each half of the world, as tensor parallelism under DDP has it.
        tensors |= {f"slice {name}": t for name, t in placed_tensors(square["tp"], {"rows": [Shard(0)]}).items()}
    scalar = distribute_tensor(torch.tensor(0.0), flat, [Replicate()])
    return told(tensors | {"scalar": scalar, "plain": counted(2, 3)})


def check(ranks: list[dict[str, Any]]) -> None:
    for name in ranks[0]:
        shape = tuple(ranks[0][name][0])
        whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        times = np.zeros(shape, int)
        for answer in ranks:
            held = np.zeros(shape, int)
            for column, count in ((1, held), (2, times)):
                for offsets, size, every, values in answer[name][column]:
                    assert tuple(every) == shape, name
                    index = Box(tuple(offsets), tuple(size), shape).index
                    assert np.array_equal(whole[index], np.array(values, np.float32)), name
                    count[index] += 1
            assert held.max(initial=0) <= 1, name
        assert (times == 1).all(), f"{name}: {times}"


def written(rank: int, size: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (size,))
    tensor = distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0)])
    before = layout(tensor)
    for _, view in local_boxes(tensor):
        view.fill_(rank + 1)
    column = distribute_tensor(torch.zeros(5, 4), mesh, [Shard(1)])
    same = layout(tensor) == before
    refused = ""
    try:
        local_boxes(DTensor.from_local(torch.zeros(2), mesh, [Partial()]), "sum")
    except ModelError as error:
        refused = error.message
    shared = [is_sharded(tensor), is_sharded(tensor.to_local())]
    return [tensor.full_tensor().tolist(), same, layout(column) == before, refused, shared]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_the_ranks_own_is_the_whole_once(size: int, nursery: Nursery) -> None:
    ranks = nursery.run(size, placed)
    check(ranks)
    assert all(len(local) == len(owned) == 1 for _, local, owned in (answer["even rows"] for answer in ranks))
    assert [len(answer["even copies"][1]) for answer in ranks] == [1] * size
    assert [len(answer["few rows"][1]) for answer in ranks] == [1] + [0] * (size - 1)
    for whole, same, other, refused, shared in nursery.run(size, written):
        # Pieces are views: what each rank wrote into its own is what the whole tensor has.
        assert whole == [[float(row // -(-5 // size)) + 1] * 4 for row in range(5)]
        assert (same, other) == (True, False)
        assert "tensor 'sum' is a DTensor placed as P" in refused
        assert "redistribute it to shards or replicas" in refused
        assert shared == [True, False]


def test_a_plain_tensor_is_held_whole() -> None:
    tensor = counted(2, 3).t()
    ((box, view),) = local_boxes(tensor)
    assert box == Box.all_of((3, 2))
    assert view.data_ptr() == tensor.data_ptr()
    assert owns(tensor)
    assert local_boxes(torch.zeros(0, 3)) == []
    assert local_boxes(torch.tensor(1.0))[0][0].shape == ()


def refusal(shape: tuple[int, ...], boxes: list[list[Box]]) -> str:
    """What is said of the boxes that each rank has of a tensor; empty if nothing is."""
    table = TensorTable([TensorSpec("other", "F32", (2,)), TensorSpec("x", "F32", shape)])
    told = [boxes_document([(1, box) for box in theirs]) for theirs in boxes]
    told[0] += boxes_document([(0, Box.all_of((2,)))])
    try:
        check_coverage(table, told, "remedy")
    except ModelError as error:
        return error.message
    return ""


@given(st.integers(1, 3), st.data())
def test_boxes_are_judged_as_elements_that_are_counted(dimensions: int, data: st.DataObject) -> None:
    """A cut in two along each dimension or some, of which a part may be missing or there twice; and any boxes."""
    shape, times, boxes = (4,) * dimensions, np.zeros((4,) * dimensions, int), list[list[Box]]()
    cut, any_box = data.draw(st.integers(1, 3)), st.tuples(st.integers(0, 4), st.integers(0, 4))
    for halves in product(*[((0, cut), (cut, 4 - cut))] * dimensions):
        for _ in range(data.draw(st.sampled_from([1, 1, 1, 1, 0, 2]))):
            boxes.append([Box(tuple(at for at, _ in halves), tuple(size for _, size in halves), shape)])
    for drawn in data.draw(st.lists(st.tuples(*[any_box] * dimensions), max_size=1)):
        boxes.append([Box(tuple(at for at, _ in drawn), tuple(min(size, 4 - at) for at, size in drawn), shape)])
    for [box] in boxes:
        times[box.index] += 1
    message = refusal(shape, [[], *boxes])
    assert (message == "") == bool((times == 1).all())
    assert not message or "share elements of tensor 'x'" in message or f"the ranks hold {times.sum()} of the" in message


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_tensors_without_elements_need_no_rank(shape: tuple[int, ...]) -> None:
    assert refusal(shape, [[]]) == refusal(shape, [[Box.all_of(shape)], [Box.all_of(shape)]]) == ""


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
def test_windows_are_what_the_view_has_in_the_box(data: st.DataObject) -> None:
    view, whole = data.draw(views())
    box = data.draw(boxes_in(whole))
    found = shard_views(view, box)
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


def test_views_that_no_boxes_describe_are_refused() -> None:
    rows = Box((0, 1), (4, 2), (4, 4))
    assert shard_views(View("w", (16,), (1,), 0), rows) is None
    assert shard_views(View("w", (3, 4), (0, 1), 0), rows) is None
    assert shard_views(View("w", (3, 3), (1, 1), 0), Box.all_of((4, 4))) is None

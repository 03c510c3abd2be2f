"""Boxes of sharded tensors: all ranks together publish every element once, in any layout, and others are refused."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.support.architectures import VOCABULARY
from tests.trainer.sharded.models import built, fsdp
from tests.trainer.sharded.nursery import Nursery
from trainer_side import Publisher
from trainer_side.model.conversion_trace import View
from trainer_side.ranks.shard_parts import ModuleParts, boxes_document, check_coverage, needs_ranks, shard_views
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import ModelError, TensorMismatchError
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.boxes import Box, boxes_of_range


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


class Placed(nn.Module):
    """Tensors as parameters of a module, whatever shards them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


SHAPES = {"even": (8, 4), "odd": (5, 3), "few": (1, 3), "deep": (3, 5, 2), "none": (0, 4)}


def placed_tensors(mesh: DeviceMesh, placements: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
    return {
        f"{name} {way}": distribute_tensor(counted(*shape), mesh, places)
        for name, shape in SHAPES.items()
        for way, places in placements.items()
    }


def publish_placed(rank: int, size: int, url: str) -> None:
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
        tensors |= placed_tensors(square, ways)
        # A replica of its own for each half of the world, as tensor parallelism under DDP has it.
        tensors |= placed_tensors(square["tp"], {"slice": [Shard(0)]})
    scalar = distribute_tensor(torch.tensor(0.0), flat, [Replicate()])
    model = Placed(tensors | {"scalar": scalar, "turned plain": counted(3, 2).t()})
    with Publisher(model, url) as publisher:
        for parameter in model.parameters():
            parameter.add_(1)
        publisher.publish(1)
    partial = Placed({"sum": DTensor.from_local(torch.zeros(2), flat, [Partial()])})
    with pytest.raises(ModelError, match=r"'sum' is a DTensor placed as P.*redistribute it to shards or replicas"):
        Publisher(partial, f"{url}-partial")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_way_to_place_a_tensor_is_published_whole(size: int, nursery: Nursery, url: str) -> None:
    nursery.run(size, publish_placed, url=url)
    run = open_run(url)
    for version in (0, 1):
        for name, tensor in run.tensors(version):
            whole = counted(3, 2).t() if name == "turned plain" else counted(*SHAPES.get(name.split()[0], ()))
            assert torch.equal(tensor, whole + version), name
    assert len(run.table) == (15 if size == 2 else 40) + 2
    assert {ref.rank for ref in run.manifest(1).objects} == set(range(size))
    assert run.verify().head == 1


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(6, 2))
        self.bias = nn.Parameter(torch.zeros(1))
        self.register_buffer("count", torch.tensor(3))


def edges(rank: int, size: int) -> list[Any]:
    """Asserts, and returns the parts of a small module and how many elements this rank holds of a larger one."""
    mesh, plain = init_device_mesh("cpu", (size,)), Small()
    assert not any(map(needs_ranks, (plain, dict(plain.state_dict()), plain.parameters)))
    # Between a forward pass and the next one FSDP2 may leave plain tensors in the module.
    model: Any = fsdp(built("qwen3"), mesh=mesh)
    with torch.no_grad():
        model(torch.randint(3, VOCABULARY, (1, 4)))
    assert not any(hasattr(parameter, "placements") for parameter in model.lm_head.parameters())
    assert needs_ranks(model)
    held = sum(tensor.numel() for _, tensor in ModuleParts(model).read())

    def refused(live: Callable[[], Any], match: str) -> None:
        with pytest.raises((TensorMismatchError, ModelError), match=match):
            live()

    small: Any = fully_shard(Small(), mesh=mesh)
    live = ModuleParts(small)
    small.extra = nn.Parameter(torch.zeros(2))
    refused(lambda: dict(live.read()), "'extra' appeared since the publisher was made")
    del small.extra
    dict(live.read())
    small.weight = nn.Parameter(distribute_tensor(torch.zeros(7, 2), mesh))
    refused(lambda: dict(live.read()), r"'weight' is now torch.float32 \[7, 2\], but was torch.float32 \[6, 2\]")
    small.weight = nn.Parameter(distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh))
    refused(lambda: dict(live.read()), "'weight' is sharded in another way than when the publisher was made")
    split: Any = built("split")
    fully_shard(split.model.H_module.layers[0].mlp.gate_proj, mesh=mesh)
    cannot = (
        "mlp.gate_up_proj.weight' is composed of .*cannot be traced shard by shard; leave these parameters unsharded"
    )
    refused(lambda: ModuleParts(split), cannot)
    meta: Any = fully_shard(nn.Linear(4, 4, device="meta"), mesh=mesh)
    refused(lambda: ModuleParts(meta), "is on the meta device and has no data")
    return [list(live.parts), held]


def test_edges_of_a_sharded_model(nursery: Nursery) -> None:
    (first, one), (second, other) = nursery.run(2, edges)
    assert (first, second) == (["weight[0:3,0:2]", "bias", "count"], ["weight[3:6,0:2]"])
    assert one + other == sum(tensor.numel() for tensor in built("qwen3").parameters())


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

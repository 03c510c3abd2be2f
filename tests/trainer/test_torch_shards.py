"""What each process of a real gloo world holds and owns of its tensors, held against the whole tensors."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.trainer.sharded.world import run_world
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.torch_shards import is_sharded, layout, local_boxes, owned_boxes, whole_shape
from vllm_delta_sync.wire.boxes import Box

Pieces = list[tuple[Box, torch.Tensor]]


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


class Tower(nn.Module):
    """Sizes that divide badly, a scalar's neighbour of one element, and stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 7)
        self.single = nn.Parameter(torch.zeros(1))
        self.experts = nn.Parameter(torch.zeros(3, 5, 2))
        for parameter in self.parameters():
            parameter.data = counted(*parameter.shape)


def described(pieces: Pieces) -> list[Any]:
    return [[box.offsets, box.shape, box.whole, tensor.tolist()] for box, tensor in pieces]


def told(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: [list(whole_shape(tensor)), described(local_boxes(tensor)), described(owned_boxes(tensor))]
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


def trained(rank: int, size: int) -> dict[str, Any]:
    """Modules as users shard them."""
    tensors: dict[str, torch.Tensor] = {}

    def add(way: str, model: Any) -> None:
        tensors.update({f"{way} {name}": tensor for name, tensor in model.state_dict(keep_vars=True).items()})

    flat = init_device_mesh("cpu", (size,))
    add("fsdp", fully_shard(Tower(), mesh=flat))
    add("mixed", fully_shard(Tower(), mesh=flat, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    if size == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        add("hsdp", fully_shard(Tower(), mesh=square))
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallel = parallelize_module(Tower(), square["tp"], plan)
        add("tp", parallel)
        parallel = parallelize_module(Tower(), square["tp"], plan)
        add("fsdp tp", fully_shard(parallel, mesh=square["dp"]))
    add(
        "columns",
        fully_shard(Experts(), mesh=flat, shard_placement_fn=lambda tensor: Shard(1) if tensor.dim() == 3 else None),
    )
    return told(tensors)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(counted(3, 8, 2))
        self.router = nn.Parameter(counted(3, 2))


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


def views(rank: int, size: int) -> list[Any]:
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


def everything(rank: int, size: int) -> dict[str, Any]:
    return {"placed": placed(rank, size), "trained": trained(rank, size), "views": views(rank, size)}


@pytest.mark.parametrize("size", [2, 4])
def test_what_the_ranks_own_is_the_whole_once(size: int) -> None:
    ranks = run_world(size, everything)
    for way, name in (("placed", "even rows"), ("trained", "fsdp up.weight")):
        answers = [answer[way] for answer in ranks]
        check(answers)
        assert all(len(local) == len(owned) == 1 for _, local, owned in (answer[name] for answer in answers))
    assert [len(answer["placed"]["even copies"][1]) for answer in ranks] == [1] * size
    assert [len(answer["placed"]["few rows"][1]) for answer in ranks] == [1] + [0] * (size - 1)
    for whole, same, other, refused, shared in (answer["views"] for answer in ranks):
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
    assert owned_boxes(tensor)[0][0] == box
    assert local_boxes(torch.zeros(0, 3)) == []
    assert local_boxes(torch.tensor(1.0))[0][0].shape == ()

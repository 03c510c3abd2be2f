"""What the ranks publish is each element once, or they are all told of the tensor."""

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.trainer.sharded.nursery import Nursery
from tests.trainer.sharded.test_agreement import refused
from trainer_side import Publisher
from vllm_delta_sync.errors import ModelError


class Pair(nn.Module):
    """One parameter that all ranks share, and one that is put on a mesh of its own."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        self.first = nn.Parameter(distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)]))
        self.mesh = mesh

    def put(self, tensor: DTensor) -> nn.Module:
        self.second = nn.Parameter(tensor)
        return self


def holes_and_overlaps(rank: int, size: int, folder: str) -> None:
    values = torch.arange(8.0).reshape(4, 2)
    pair = Pair()
    # A mesh without rank 0: nobody answers for it.
    hole = pair.put(distribute_tensor(values, DeviceMesh("cpu", list(range(1, size))), [Shard(0)]))
    message = "the ranks hold 0 of the 8 elements of tensor 'second' (no rank has any); shard each"
    refused(lambda: Publisher(hole, folder), ModelError, message)
    # Rank 0 takes it for replicated, the others for sharded.
    local, place = (values, Replicate()) if rank == 0 else (values[2 * rank :][:2], Shard(0))
    given: Any = {"run_check": False, "shape": values.shape, "stride": values.stride()}
    twice = pair.put(DTensor.from_local(local, pair.mesh, [place], **given))
    message = "rank 0: second, rank 1: second[2:4,0:2] share elements of tensor 'second', of whose 8 the ranks hold 12"
    refused(lambda: Publisher(twice, folder), ModelError, message)
    assert not Path(folder, "run.json").exists()
    whole = pair.put(distribute_tensor(values, pair.mesh, [Shard(0)]))
    Publisher(whole, folder).close()
    # A run that is there is not taken over either.
    hole = pair.put(distribute_tensor(values, DeviceMesh("cpu", list(range(1, size))), [Shard(0)]))
    refused(lambda: Publisher(hole, folder), ModelError, "the ranks hold 0 of the 8 elements of tensor 'second'")
    Publisher(pair.put(distribute_tensor(values, pair.mesh, [Shard(0)])), folder).close()


def test_tensors_that_are_not_held_once_are_refused(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, holes_and_overlaps, folder=str(tmp_path / "run"))

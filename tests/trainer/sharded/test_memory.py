"""What making a publisher takes beside its baseline: a whole tensor where a snapshot is written, elsewhere nothing."""

import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.common.timing import peak_extra_bytes
from tests.trainer.sharded.nursery import Nursery
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import LimitError, StoreError

LARGEST = 64 << 20


class Large(nn.Module):
    """Two tensors of ``LARGEST`` bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(LARGEST >> 13, 1 << 12, dtype=torch.bfloat16))
        self.second = nn.Parameter(torch.ones(LARGEST >> 13, 1 << 12, dtype=torch.bfloat16))


def opened(rank: int, size: int, folder: str) -> float:
    """The most memory that was taken for a moment, in largest tensors."""
    # What is loaded and compiled when something is published first.
    small: Any = fully_shard(nn.Linear(8, 8, dtype=torch.bfloat16))
    Publisher(small, f"{folder}/before").close()
    model: Any = fully_shard(Large())
    made: list[Publisher] = []
    peak = peak_extra_bytes(lambda: made.append(Publisher(model, f"{folder}/run")))
    made[0].close()
    return (peak - 2 * LARGEST / size) / LARGEST


def starved(rank: int, size: int, folder: str) -> None:
    model: Any = fully_shard(Large())
    with Publisher(model, f"{folder}/run", shard_bytes=1) as publisher:
        assert publisher.anchor() == 0
        unlimited = resource.getrlimit(resource.RLIMIT_AS)
        if rank == 1:
            # Too little for the second tensor, which this rank writes.
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + LARGEST - (4 << 20), unlimited[1]))
        with pytest.raises(LimitError, match=rf"tensor 'second' has {LARGEST} bytes, for which rank 1 has no memory"):
            publisher.anchor()
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        # Or without a place for its file.
        if rank == 1:
            tempfile.tempdir = f"{folder}/nowhere"
        with pytest.raises(StoreError, match=r"no temporary folder can be made: .*nowhere"):
            publisher.anchor()
        tempfile.tempdir = None
        # The ranks are in step, and nothing of it stays.
        assert publisher.anchor() == 0
        with torch.no_grad():
            model.first.mul_(2)
        assert publisher.publish(1, wait=True).version == 1


def test_a_rank_without_room_for_a_tensor_leaves_the_ranks_in_step(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, starved, folder=str(tmp_path))
    assert open_run(str(tmp_path / "run")).verify().head == 1


def test_a_snapshot_takes_one_whole_tensor_on_the_rank_that_writes_it(nursery: Nursery, tmp_path: Path) -> None:
    writer, other = nursery.run(2, opened, folder=str(tmp_path))
    # Shards that are received into buffers of their own take another half or more, and so do those that are packed to
    # be sent; a tensor that is kept until the next one is there takes another whole.
    assert writer < 1.25
    assert other < 0.25

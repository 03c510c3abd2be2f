"""What making a publisher takes beside its baseline: a whole tensor where a snapshot is written, elsewhere nothing."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.apply_measure import peak_extra_bytes
from tests.sharded.nursery import Nursery
from trainer_side import Publisher

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


def test_a_snapshot_takes_one_whole_tensor_on_the_rank_that_writes_it(nursery: Nursery, tmp_path: Path) -> None:
    writer, other = nursery.run(2, opened, folder=str(tmp_path))
    # Shards that are received into buffers of their own take another half or more, and so do those that are packed to
    # be sent; a tensor that is kept until the next one is there takes another whole.
    assert writer < 1.25
    assert other < 0.25

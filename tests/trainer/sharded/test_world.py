"""The worlds that the other tests here run in."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import distributed

from tests.trainer.sharded.world import World, run_world


def add(rank: int, size: int, start: int) -> list[int]:
    total = torch.tensor([start + rank])
    distributed.all_reduce(total)
    return [rank, size, int(total)]


def fail(rank: int, size: int) -> None:
    if rank == 1:
        raise RuntimeError("rank one has had enough")
    time.sleep(300)


def sleep(rank: int, size: int) -> None:
    time.sleep(300)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_work_together_and_answer(size: int) -> None:
    expected = 10 * size + size * (size - 1) // 2
    assert run_world(size, add, start=10) == [[rank, size, expected] for rank in range(size)]


def test_a_failure_ends_the_others_and_is_told() -> None:
    with World(2, fail) as world, pytest.raises(AssertionError, match="rank one has had enough"):
        world.results()
    assert [process.poll() is None for process in world.processes] == [False, False]


def test_a_killed_rank_is_seen() -> None:
    with World(2, sleep) as world:
        world.kill(1)
        codes: list[Any] = [process.poll() for process in world.processes]
    assert codes == [None, -signal.SIGKILL]
    with pytest.raises(ProcessLookupError):
        os.kill(world.processes[0].pid, 0)

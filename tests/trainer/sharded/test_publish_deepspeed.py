"""What real DeepSpeed engines publish from all ranks, on the CPU: ZeRO-1, ZeRO-2 and ZeRO-3."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from tests.support.architectures import same_bits
from tests.trainer.sharded.test_deepspeed import ENVIRONMENT, engine_of, reference, train
from tests.trainer.sharded.world import World
from trainer_side import Publisher
from vllm_delta_sync import open_run

CASES = [[1, "llama tied", "bf16"], [2, "qwen3 moe", "fp32"], [3, "qwen3 moe", "bf16"]]


def wrong(url: str, expected: dict[str, torch.Tensor]) -> list[str]:
    """Tensors of the newest version that are not those expected."""
    held = dict(open_run(url).tensors())
    assert held.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not same_bits(held[name], tensor.to(held[name].dtype))]


def publish(rank: int, size: int, folder: str, cases: list[list[Any]]) -> None:
    for stage, name, precision in cases:
        url = f"{folder}/{stage}"
        engine = engine_of(stage, name, precision)
        for life in range(2):
            with Publisher(engine, url) as publisher:
                for step in (1, 2):
                    train(engine, rank)
                    expected = reference(name, engine)
                    publisher.publish(step, wait=True)
                    publisher.flush()
                    if rank == 0:
                        assert wrong(url, expected) == []
                    distributed.barrier()
                assert publisher.version == 2 * life + 2
        engine.destroy()


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_engines_publish_their_partitions(size: int, tmp_path: Path) -> None:
    with World(size, publish, ENVIRONMENT, folder=str(tmp_path), cases=CASES) as world:
        world.results(timeout=600)
    for stage, writers in ((1, {0}), (2, {0}), (3, set(range(size)))):
        run = open_run(str(tmp_path / str(stage)))
        assert run.verify().head == 4
        assert {ref.rank for ref in run.manifest(4).objects} == writers

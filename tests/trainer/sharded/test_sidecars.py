"""Sidecars of a version that ranks publish together are those that rank 0 gives."""

from pathlib import Path

import torch

from tests.trainer.sharded.training import make, sharded, train
from tests.trainer.sharded.world import run_world
from trainer_side import Publisher
from vllm_delta_sync import open_run


def publish_with_state(rank: int, size: int, url: str) -> int | None:
    model = sharded(make("mixed"), "fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Publisher(model, url) as publisher:
        train(model, optimizer, "mixed", 1)
        given = {"state": b"of rank %d" % rank, **({"alone": b""} if rank else {})}
        result = publisher.publish(1, wait=True, sidecars=given)
        publisher.flush()
        return result.version


def test_rank_0_gives_them(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    assert run_world(2, publish_with_state, url=url) == [1, 1]
    run = open_run(url)
    assert [item.name for item in run.manifest(1).sidecars] == ["state"]
    assert run.sidecar(1, "state") == b"of rank 0"
    assert run.verify().sidecars == 1

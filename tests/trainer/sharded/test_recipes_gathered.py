"""Recipes of frameworks that gather, on models that two ranks share by FSDP2: rank 0 publishes, all take part."""

import asyncio
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.publishing import assert_holds, snapshot
from tests.support.tiny import make_model, save_checkpoint
from tests.support.trainers import SIZES
from tests.trainer.sharded.models import fsdp, gathered, move
from tests.trainer.sharded.nursery import Nursery
from vllm_delta_sync import open_run


def exported(model: torch.nn.Module, read: list[str]) -> Generator[tuple[str, torch.Tensor], None, None]:
    """What verl's FSDP engine yields of an FSDP2 model: each tensor gathered when its turn comes."""
    for name, parameter in model.state_dict().items():
        read.append(name)
        yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def send_by_verl(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Two weight syncs of an actor with two ranks."""
    from tests.support.frameworks import imported

    registry: Any = imported("verl").CheckpointEngineRegistry
    model = fsdp(make_model("qwen3", **SIZES))
    options = {"bucket": f"{folder}/run", "base": f"{folder}/base"}
    engine = registry.new("delta_sync", is_master=rank == 0, bucket_size=1 << 20, **options)
    read: list[str] = []
    told = []
    for step in (1, 2):
        move(model)
        told.append(asyncio.run(engine.send_weights(exported(model, read), global_steps=step)))
    trained = gathered(model)
    del trained["lm_head.weight"]  # tied, and so no part of the checkpoint
    if rank == 0:
        engine.publisher.close()
        save_file(trained, f"{folder}/trained.safetensors")
    return {"read": len(read), "told": [metrics.get("delta_sync/version") for metrics in told]}


def broadcast_by_prime_rl(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Two broadcasts of a model in prime-rl's layout, whose stacked experts are sharded too."""
    from safetensors.torch import load_file

    from tests.support.frameworks import Experts, imported

    recipe: Any = imported("prime_rl")
    recipe.WeightSender.master = rank == 0
    model: Any = Experts(load_file(f"{folder}/base/model.safetensors")).float()
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    config = SimpleNamespace(bucket=f"{folder}/run", base=f"{folder}/base", timeout=60)
    sender = recipe.DeltaSyncWeightSender(Path(folder), config)
    for step in (1, 2):
        move(model)
        sender._broadcast(model, step, Path(folder))
    trained = {name: tensor.contiguous() for name, tensor in model.convert_to_hf(gathered(model)).items()}
    if rank == 0:
        sender.publisher.close()
        save_file(trained, f"{folder}/trained.safetensors")
    return {"publishes": sender.publisher is not None}


def check(nursery: Nursery, folder: Path, family: str, function: Callable[..., Any]) -> list[Any]:
    """Run it, and compare the newest version with what was trained → what the ranks told."""
    from safetensors.torch import load_file

    save_checkpoint(make_model(family, **SIZES), folder / "base")
    told = nursery.run(2, function, folder=str(folder))
    run = open_run(str(folder / "run"))
    assert [manifest.step for manifest in run.log() if manifest.version] == [1, 2]
    assert run.manifest(0).kind == "reference"
    assert_holds(run, 2, snapshot(load_file(folder / "trained.safetensors"), torch.bfloat16))
    return told


def test_verl_gathers_on_both_ranks_and_publishes_once(nursery: Nursery, tmp_path: Path) -> None:
    first, second = check(nursery, tmp_path, "qwen3", send_by_verl)
    assert (first["told"], second["told"]) == ([1, 2], [None, None])
    assert first["read"] == second["read"] > 0


def test_prime_rl_converts_layers_of_shards(nursery: Nursery, tmp_path: Path) -> None:
    told = check(nursery, tmp_path, "qwen3_moe", broadcast_by_prime_rl)
    assert [rank["publishes"] for rank in told] == [True, False]

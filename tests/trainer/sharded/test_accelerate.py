"""``DeltaSyncCallback`` in a Trainer that shards its model by Accelerate's plugins: FSDP2, DeepSpeed ZeRO-3 and ZeRO-2.

Accelerate offers its plugins on accelerators only. All that is replaced here is what it finds when it looks for one.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.publishing import assert_holds
from tests.trainer.sharded.test_deepspeed import ENVIRONMENT, compile_nothing
from tests.trainer.sharded.world import World
from vllm_delta_sync.chain import open_run

SETTINGS: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}},
    "fsdp2 from rank 0": {
        "fsdp": True,
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"], "cpu_ram_efficient_loading": True},
    },
    "zero 3": {"deepspeed": {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}},
    "zero 2": {"deepspeed": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}},
}


def offer_plugins(rank: int, size: int) -> None:
    """Have Accelerate take this process for one with an accelerator, and compute on the CPU all the same."""
    from accelerate.state import DistributedType, PartialState

    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), ACCELERATE_TORCH_DEVICE="cpu")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def train(rank: int, size: int, folder: str, kind: str) -> dict[str, Any]:
    """Three steps; the weights of each, gathered."""
    offer_plugins(rank, size)
    if "deepspeed" in SETTINGS[kind]:
        compile_nothing()
    from safetensors.torch import save_file
    from transformers import TrainerCallback

    from tests.support.tiny import make_model
    from tests.support.trainers import SIZES, Logged, trainer_of
    from trainer_side import DeltaSyncCallback
    from vllm_delta_sync.torch_shards import is_sharded

    callback, logged = DeltaSyncCallback(bucket=f"{folder}/run", shard_bytes=2000), Logged()
    sharded: set[bool] = set()

    class Gathered(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            weights = gathered(model)
            if rank == 0:
                save_file(weights, f"{folder}/{state.global_step}.safetensors")
            if callback.publisher is not None:
                callback.publisher.flush()
            sharded.update(map(is_sharded, model.parameters()))

    model = make_model("qwen3", **SIZES)
    given = {"use_cpu": False, "ddp_backend": "gloo", "max_steps": 3, **SETTINGS[kind]}
    trainer = trainer_of(model, Path(folder), [callback, Gathered(), logged], **given)
    trainer.train()
    return {
        "versions": [line["delta_sync/version"] for line in logged.published],
        "wrapped": type(trainer.model_wrapped).__name__,
        "sharded": list(sharded),
    }


def gathered(model: Any) -> dict[str, Any]:
    """All weights whole; every rank calls it."""
    import torch
    from torch.distributed.tensor import DTensor

    named = dict(model.named_parameters())
    if any(hasattr(parameter, "ds_id") for parameter in named.values()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: torch.clone(parameter.detach()) for name, parameter in named.items()}
    return {
        name: torch.clone((parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach())
        for name, parameter in named.items()
    }


def published(kind: str, folder: Path) -> list[Any]:
    """Train in two processes → what each told, once every version was found to be the weights of its step."""
    from safetensors.torch import load_file

    with World(2, train, ENVIRONMENT, folder=str(folder), kind=kind) as world:
        told = world.results(timeout=600)
    run = open_run(str(folder / "run"))
    assert [manifest.step for manifest in run.log() if manifest.version] == [1, 2, 3]
    for version in (1, 2, 3):
        assert_holds(run, version, load_file(folder / f"{version}.safetensors"))
    assert [rank["versions"] for rank in told] == [[1, 2, 3], []]
    return told


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("fsdp2 from rank 0", marks=pytest.mark.slow)])
def test_accelerate_shards_by_fsdp2(kind: str, tmp_path: Path) -> None:
    told = published(kind, tmp_path)
    assert [rank["sharded"] for rank in told] == [[True]] * 2
    run = open_run(str(tmp_path / "run"))
    assert {ref.rank for ref in run.manifest(3).objects} == {0, 1}
    assert {ref.rank for ref in run.manifest(0).objects} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "writers"), [("zero 3", {0, 1}), ("zero 2", {0})])
def test_accelerate_hands_over_to_deepspeed(kind: str, writers: set[int], tmp_path: Path) -> None:
    told = published(kind, tmp_path)
    assert [rank["wrapped"] for rank in told] == ["DeepSpeedEngine"] * 2
    assert [rank["sharded"] for rank in told] == [[kind == "zero 3"]] * 2
    assert {ref.rank for ref in open_run(str(tmp_path / "run")).manifest(3).objects} == writers

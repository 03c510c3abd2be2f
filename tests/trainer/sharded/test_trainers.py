"""``DeltaSyncCallback`` in Trainers of several processes: replicas, FSDP2, Accelerate's plugins for FSDP2 and ZeRO."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.publishing import assert_holds
from tests.trainer.sharded.nursery import Nursery
from tests.trainer.sharded.test_deepspeed import deepspeed_on_cpu
from tests.trainer.sharded.test_load_into import whole
from trainer_side import DeltaSyncCallback
from vllm_delta_sync.client import open_run

LAYERS = {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp": True, "fsdp_config": LAYERS},
    "fsdp2 from rank 0": {"fsdp": True, "fsdp_config": {**LAYERS, "cpu_ram_efficient_loading": True}},
    "zero 3": {"deepspeed": {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}},
    "zero 2": {"deepspeed": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}},
}


def offer_plugins() -> None:
    """Have Accelerate take this process for one with an accelerator: it offers its plugins nowhere else."""
    from accelerate.state import DistributedType, PartialState

    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def train_by_plugin(rank: int, size: int, folder: str, kind: str, adapter: bool = False) -> dict[str, Any]:
    """Three steps; the weights of each, or those of a LoRA adapter, gathered."""
    offer_plugins()
    if "deepspeed" in SETTINGS[kind]:
        deepspeed_on_cpu()
    from transformers import TrainerCallback

    from tests.support.adapters import adapted
    from tests.support.tiny import make_model
    from tests.support.trainers import SIZES, Logged, trainer_of
    from vllm_delta_sync.tensors.torch_sharding import is_sharded

    callback, logged = DeltaSyncCallback(bucket=f"{folder}/run", shard_bytes=2000, adapter=adapter), Logged()
    sharded: set[bool] = set()

    class Gathered(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            weights = gathered(model)
            if adapter:
                weights = {name.replace(".default", ""): weights[name] for name in weights if "lora_" in name}
            if rank == 0:
                save_file(weights, f"{folder}/{state.global_step}.safetensors")
            if callback.publisher is not None:
                callback.publisher.flush()
            sharded.update(map(is_sharded, model.parameters()))

    model: Any = make_model("qwen3", **SIZES)
    if adapter:
        model = adapted(model)
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
    named = dict(model.named_parameters())
    if any(hasattr(parameter, "ds_id") for parameter in named.values()):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: torch.clone(parameter.detach()) for name, parameter in named.items()}
    return {name: whole(parameter).clone() for name, parameter in named.items()}


def published(kind: str, nursery: Nursery, folder: Path, adapter: bool = False) -> list[Any]:
    """Train in two processes → what each told, once every version was found to be the weights of its step."""
    told = nursery.run(2, train_by_plugin, folder=str(folder), kind=kind, adapter=adapter)
    run = open_run(str(folder / "run"))
    assert [manifest.step for manifest in run.log() if manifest.version] == [1, 2, 3]
    for version in (1, 2, 3):
        assert_holds(run, version, load_file(folder / f"{version}.safetensors"))
    assert [rank["versions"] for rank in told] == [[1, 2, 3], []]
    return told


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("fsdp2 from rank 0", marks=pytest.mark.slow)])
def test_accelerate_shards_by_fsdp2(kind: str, nursery: Nursery, tmp_path: Path) -> None:
    told = published(kind, nursery, tmp_path)
    assert [rank["sharded"] for rank in told] == [[True]] * 2
    run = open_run(str(tmp_path / "run"))
    assert {ref.rank for ref in run.manifest(3).objects} == {0, 1}
    assert {ref.rank for ref in run.manifest(0).objects} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "writers"), [("zero 3", {0, 1}), ("zero 2", {0})])
def test_accelerate_hands_over_to_deepspeed(kind: str, writers: set[int], nursery: Nursery, tmp_path: Path) -> None:
    told = published(kind, nursery, tmp_path)
    assert [rank["wrapped"] for rank in told] == ["DeepSpeedEngine"] * 2
    assert [rank["sharded"] for rank in told] == [[kind == "zero 3"]] * 2
    assert {ref.rank for ref in open_run(str(tmp_path / "run")).manifest(3).objects} == writers


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sharded"), [("fsdp2", True), ("zero 3", True), ("zero 2", False)])
def test_an_adapter_alone_is_published_by_those_that_hold_it(
    kind: str, sharded: bool, nursery: Nursery, tmp_path: Path
) -> None:
    published(kind, nursery, tmp_path, adapter=True)
    run = open_run(str(tmp_path / "run"))
    assert all("lora_" in spec.name for spec in run.table)
    assert {ref.rank for ref in run.manifest(3).objects} == ({0, 1} if sharded else {0})
    assert run.file("adapter_config.json")

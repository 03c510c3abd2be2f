"""``DeltaSyncCallback`` in Trainers of several processes."""

import os
from pathlib import Path
from typing import Any

from tests.support.publishing import assert_holds
from tests.trainer.sharded.world import run_world
from vllm_delta_sync.chain import open_run


def train(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Three steps of a Trainer that finds itself in a world of several processes."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    from safetensors.torch import save_file

    from tests.support.tiny import make_model
    from tests.support.trainers import SIZES, Logged, Settled, checkpoint_of, trainer_of
    from trainer_side import DeltaSyncCallback

    model = make_model("qwen3", **SIZES)
    callback = DeltaSyncCallback(bucket=f"{folder}/run", every=2)
    seen, logged = Settled(callback), Logged()
    trainer = trainer_of(model, Path(folder), [callback, seen, logged], max_steps=3)
    trainer.train()
    if rank == 0:
        save_file(checkpoint_of(model), f"{folder}/trained.safetensors")
    return {
        "wrapped": type(trainer.model_wrapped).__name__,
        "versions": [line["delta_sync/version"] for line in logged.published],
    }


def train_shards(rank: int, size: int, folder: str) -> dict[str, Any]:
    """The events of three steps on a model sharded by FSDP2, as Accelerate does on accelerators only."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    import torch
    from safetensors.torch import save_file
    from torch.distributed.fsdp import fully_shard
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    from tests.support.tiny import make_model, train_steps
    from tests.support.trainers import SIZES
    from trainer_side import DeltaSyncCallback

    model = make_model("qwen3", **SIZES)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    callback = DeltaSyncCallback(bucket=f"{folder}/run", every=2)
    given = TrainingArguments(output_dir=f"{folder}/out", use_cpu=True, report_to="none")
    state, control = TrainerState(max_steps=3, is_world_process_zero=rank == 0), TrainerControl()
    handler = CallbackHandler([DefaultFlowCallback(), callback], model, None, None, None)
    handler.on_train_begin(given, state, control)
    took_part = callback.publisher is not None
    steps = train_steps(model, lr=1e-3)
    for state.global_step in (1, 2, 3):
        next(steps)
        handler.on_step_end(given, state, control)
    handler.on_train_end(given, state, control)
    trained = {name: tensor.full_tensor().detach() for name, tensor in model.named_parameters()}
    if rank == 0:
        save_file({name: torch.clone(tensor) for name, tensor in trained.items()}, f"{folder}/trained.safetensors")
    return {"took_part": took_part, "closed": callback.publisher is None}


def test_what_is_sharded_is_published_by_all(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    told = run_world(2, train_shards, folder=str(tmp_path), timeout=300)
    assert told == [{"took_part": True, "closed": True}] * 2
    run = open_run(str(tmp_path / "run"))
    assert [manifest.step for manifest in run.log() if manifest.version] == [2, 3]
    assert {ref.rank for ref in run.manifest(2).objects} == {0, 1}
    assert_holds(run, 2, load_file(tmp_path / "trained.safetensors"))


def test_of_replicas_the_first_publishes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    told = run_world(2, train, folder=str(tmp_path), timeout=300)
    assert [rank["wrapped"] for rank in told] == ["DistributedDataParallel"] * 2
    assert [rank["versions"] for rank in told] == [[1, 2], []]
    run = open_run(str(tmp_path / "run"))
    assert [manifest.step for manifest in run.log() if manifest.version] == [2, 3]
    assert_holds(run, 2, load_file(tmp_path / "trained.safetensors"))

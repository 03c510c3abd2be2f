"""``DeltaWeightTransfer`` where FSDP2 shards the model: TRL gathers each parameter on all ranks, rank 0 publishes.

Accelerate sets FSDP2 up on accelerators only, so a whole ``AsyncGRPOTrainer`` cannot be made of these processes; what
hands the weights over is its own method, on a model sharded by ``fully_shard``.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from safetensors.torch import load_file
from trl.experimental.async_grpo import AsyncGRPOTrainer

from tests.support.publishers import Down, Hooked
from tests.support.publishing import assert_holds
from tests.support.tiny import make_model, save_checkpoint, train_steps
from tests.support.trainers import SIZES
from tests.trainer.sharded.models import fsdp
from tests.trainer.sharded.nursery import Nursery
from trainer_side.integrations.trl import DeltaWeightTransfer
from vllm_delta_sync.client import open_run
from vllm_delta_sync.errors import DeltaSyncError


def streamed(trainer: Any) -> Iterator[tuple[str, Any]]:
    stream: Iterator[tuple[str, Any]] = AsyncGRPOTrainer._streaming_iter(trainer)
    return stream


def sync(rank: int, trainer: Any, transfer: Any) -> str | None:
    """One weight sync as TRL does it; the error that rank 0 met, once all ranks are through."""
    failure = None
    trainer.accelerator.wait_for_everyone()
    if rank == 0:
        try:
            transfer.send_weights(streamed(trainer))
        except DeltaSyncError as error:
            failure = error.kind
    else:
        for _ in streamed(trainer):
            pass
    trainer.accelerator.wait_for_everyone()
    return failure


def train(rank: int, size: int, folder: str, family: str) -> list[str | None]:
    """Three syncs between steps, the second of which finds the store down."""
    model: Any = fsdp(make_model(family, **SIZES))
    # What TRL's trainer is of it here: an object whose weights TRL's own method streams.
    trainer = SimpleNamespace(accelerator=Accelerator(cpu=True), model=model)
    bucket = Hooked(Path(folder) / "run")
    store = bucket.before = Down("")
    store.down = False
    transfer = DeltaWeightTransfer(bucket, f"{folder}/base") if rank == 0 else None
    if transfer is not None:
        save_checkpoint(make_model(family, **SIZES), Path(folder) / "base")
        transfer.init_weight_transfer()
    failures, steps = [sync(rank, trainer, transfer)], train_steps(model, lr=1e-3)
    if transfer is not None and transfer.publisher is not None:
        transfer.publisher.flush()
    for down in (True, True, False):
        store.down = down
        next(steps)
        failures.append(sync(rank, trainer, transfer))
    trained = {name: tensor.full_tensor().detach() for name, tensor in model.named_parameters()}
    if transfer is not None:
        transfer.destroy()
        whole = make_model(family, **SIZES)
        whole.load_state_dict(trained, strict=False)
        whole.tie_weights()
        save_checkpoint(whole, Path(folder) / "saved")
    return failures


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_gathered_parameters_are_published_by_rank_0(family: str, nursery: Nursery, tmp_path: Path) -> None:
    """A failure on rank 0 leaves the others waiting for nobody, and its changes go out with the next version."""
    told = nursery.run(2, train, folder=str(tmp_path), family=family)
    # What fails in the background is told at the send after it.
    assert told == [[None, None, "publish", None], [None] * 4]
    run = open_run(str(tmp_path / "run"))
    assert [manifest.kind for manifest in run.log()] == ["reference", "delta", "delta"]
    assert [manifest.changed > 0 for manifest in run.log()] == [False, False, True]
    assert_holds(run, 2, load_file(tmp_path / "saved" / "model.safetensors"), tmp_path / "base")

"""Ranks wait together for a slow store, and end together, so that no collective call of a training times out."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from tests.support.publishers import Hooked, Once, nothing
from tests.support.publishing import assert_holds
from tests.support.tiny import make_model, save_checkpoint, train_steps
from tests.support.trainers import SIZES, Settled, checkpoint_of, trainer_of
from tests.trainer.sharded.nursery import Nursery
from trainer_side import DeltaSyncCallback, Publisher
from trainer_side.integrations.gathered import gathered_publisher, publish_gathered
from trainer_side.integrations.trl import DeltaWeightTransfer
from vllm_delta_sync.client import open_run
from vllm_delta_sync.errors import NotFoundError, UsageError

GROUP_SECONDS = 2.5
"""The limit of the training's own collective calls."""


def delay(store: Hooked) -> None:
    """The next put takes long."""
    store.before = Once("", lambda: time.sleep(2 * GROUP_SECONDS))


def slow_store(folder: str) -> Hooked:
    made = Hooked(Path(folder) / "run")
    delay(made)
    return made


def train_replicas(rank: int, size: int, folder: str) -> None:
    model, store = make_model("qwen3", **SIZES), slow_store(folder)
    callback = DeltaSyncCallback(bucket=store)
    seen = Settled(callback, wait=False)
    seen.at[3] = lambda: delay(store)
    trainer = trainer_of(model, Path(folder), [callback, seen], max_steps=3)
    trainer.train()
    distributed.all_reduce(torch.zeros(1))
    if rank == 0:
        save_file(checkpoint_of(model), f"{folder}/trained.safetensors")


def train_shards(rank: int, size: int, folder: str) -> None:
    model, store = make_model("qwen3", **SIZES), slow_store(folder)
    fully_shard(model)
    store.before = store.before if rank == 0 else nothing
    with Publisher(model, store) as publisher:
        steps = train_steps(model, lr=1e-3)
        for step in (1, 2, 3):
            next(steps)
            if step == 3 and rank == 0:
                delay(store)
            publisher.publish(step)
    trained = {name: tensor.full_tensor().detach() for name, tensor in model.named_parameters()}
    if rank == 0:
        save_file({name: torch.clone(tensor) for name, tensor in trained.items()}, f"{folder}/trained.safetensors")


@pytest.mark.parametrize("work", [train_replicas, pytest.param(train_shards, marks=pytest.mark.slow)])
def test_a_store_that_takes_twice_the_limit(work: Any, nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, work, group_seconds=GROUP_SECONDS, folder=str(tmp_path))
    run = open_run(str(tmp_path / "run"))
    assert run.head().step == 3
    assert_holds(run, run.head().version, load_file(tmp_path / "trained.safetensors"))


def gather(rank: int, size: int, folder: str) -> list[int | None]:
    """Weights that all ranks gather and one publishes."""
    model = make_model("qwen3", **SIZES)
    base = Path(folder) / f"base{rank}"
    save_checkpoint(model, base)
    store = slow_store(folder)
    publisher = gathered_publisher(store, base, leads=rank == 0, all_wait=True)
    done = []
    for step in (1, 2):
        distributed.all_reduce(torch.zeros(1))
        if step == 2:
            delay(store)
        result = publish_gathered(publisher, step, model.named_parameters())
        done.append(None if result is None else result.version)
    distributed.all_reduce(torch.zeros(1))
    if publisher is not None:
        publisher.close()
    return done


@pytest.mark.slow
def test_ranks_that_gather_for_one_wait_for_it(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.run(2, gather, group_seconds=GROUP_SECONDS, folder=str(tmp_path)) == [[1, 2], [None, None]]


def gather_for_two(rank: int, size: int, folder: str, all_wait: bool) -> None:
    """Of two publishers only one is made for ranks that wait; the first one goes on as it was made."""
    model = make_model("qwen3", **SIZES)
    base = save_checkpoint(model, Path(folder) / f"base{rank}")
    first = None
    if all_wait or rank == 0:
        first = gathered_publisher(f"{folder}/first", base, leads=rank == 0, all_wait=all_wait)
    with pytest.raises(UsageError, match=f"all_wait is {not all_wait}, and the other ranks .*wait for an earlier"):
        gathered_publisher(f"{folder}/second", base, leads=rank == 0, all_wait=not all_wait)
    if all_wait or rank == 0:
        publish_gathered(first, 1, model.named_parameters())
        assert open_run(f"{folder}/first").head().version == 1
    if first is not None:
        first.close()


@pytest.mark.parametrize("all_wait", [True, False])
def test_publishers_of_one_process_wait_alike(all_wait: bool, nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, gather_for_two, folder=str(tmp_path), all_wait=all_wait)
    assert not (tmp_path / "second").exists()


def gather_amiss(rank: int, size: int, folder: str) -> None:
    """Not exactly one rank leads; a rank that does not publish knows another step."""
    model = make_model("qwen3", **SIZES)
    base = save_checkpoint(model, Path(folder) / f"base{rank}")
    for leads, found in ((True, "rank 0, 1"), (False, "no rank")):
        with pytest.raises(UsageError, match=f"leads is true on {found}; give it on one rank"):
            gathered_publisher(f"{folder}/run", base, leads=leads, all_wait=True)
    publisher = gathered_publisher(f"{folder}/run", base, leads=rank == 0, all_wait=True)
    for step in (1, 2):
        publish_gathered(publisher, step * (rank == 0), model.named_parameters())
    if publisher is not None:
        publisher.close()


def test_one_rank_leads_and_says_the_step(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, gather_amiss, folder=str(tmp_path))
    assert [open_run(str(tmp_path / "run")).manifest(version).step for version in range(3)] == [0, 1, 2]


def transfer_weights(rank: int, size: int, folder: str) -> list[str]:
    """The calls that TRL makes, on the first process alone, with the collective calls between them."""
    model = make_model("qwen3", **SIZES)
    base = save_checkpoint(model, Path(folder) / f"base{rank}")
    store = slow_store(folder)
    transfer = DeltaWeightTransfer(store, base)
    given = TrainingArguments(output_dir=f"{folder}/out", use_cpu=True, report_to="none")
    state, control = TrainerState(is_world_process_zero=rank == 0), TrainerControl()
    handler = CallbackHandler([transfer.callback], model, None, None, None)
    handler.on_train_begin(given, state, control)
    for step in (1, 2):
        distributed.all_reduce(torch.zeros(1))
        state.global_step = step
        if rank == 0:
            if step == 1:
                opened = transfer.publisher
                transfer.init_weight_transfer()
                assert transfer.publisher is opened, "the callback has opened it"
            assert transfer.publisher is not None
            if step == 2:
                transfer.publisher.flush()
                delay(store)
            transfer.send_weights(iter((name, tensor + step) for name, tensor in model.named_parameters()))
            transfer.resume()
        distributed.all_reduce(torch.zeros(1))
        handler.on_step_end(given, state, control)
        assert not control.should_training_stop
    handler.on_train_end(given, state, control)
    distributed.all_reduce(torch.zeros(1))
    closed = transfer.publisher is None
    transfer.destroy()
    return ["closed"] if closed else []


@pytest.mark.slow
def test_processes_wait_for_the_one_that_trl_calls(nursery: Nursery, tmp_path: Path) -> None:
    told = nursery.run(2, transfer_weights, group_seconds=GROUP_SECONDS, folder=str(tmp_path))
    assert told == [["closed"], ["closed"]]
    run = open_run(str(tmp_path / "run"))
    assert run.manifest(0).kind == "reference"
    assert run.head().version == 2


def begin_without_base(rank: int, size: int, folder: str) -> str:
    before = signal.getsignal(signal.SIGTERM)
    transfer = DeltaWeightTransfer(f"{folder}/run", f"{folder}/base")
    with pytest.raises(NotFoundError) as caught:
        transfer.callback.on_train_begin(None, None, None, model=None)
    assert signal.getsignal(signal.SIGTERM) == before
    return caught.value.message


def test_a_beginning_that_fails_is_raised_in_all_processes(nursery: Nursery, tmp_path: Path) -> None:
    own, other = nursery.run(2, begin_without_base, folder=str(tmp_path))
    assert other == f"rank 0: {own}"


def stop_one(rank: int, size: int, folder: str) -> int:
    """SIGTERM reaches one rank only, in the middle of training."""
    before = signal.getsignal(signal.SIGTERM)
    callback = DeltaSyncCallback(bucket=f"{folder}/run", every=100)
    seen = Settled(callback, wait=False)
    if rank == 1:
        seen.at[2] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    trainer = trainer_of(make_model("qwen3", **SIZES), Path(folder), [callback, seen], max_steps=10)
    trainer.train()
    distributed.barrier()
    assert signal.getsignal(signal.SIGTERM) == before
    return trainer.state.global_step


def test_sigterm_of_one_rank_ends_all_at_one_step(nursery: Nursery, tmp_path: Path) -> None:
    steps = nursery.run(2, stop_one, folder=str(tmp_path))
    # One rank answers what the others knew at the step before.
    assert steps == [4, 4]
    assert open_run(str(tmp_path / "run")).head().step == 4


def stop_afterwards(rank: int, size: int, folder: str) -> None:
    """SIGTERM reaches a process after a training with two callbacks; there was no handler before."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    callbacks = [DeltaSyncCallback(bucket=f"{folder}/{number}", every=100) for number in range(2)]
    trainer_of(make_model("qwen3", **SIZES), Path(folder), [*callbacks], max_steps=1).train()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def test_sigterm_after_a_training_ends_the_process(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.statuses(1, stop_afterwards, folder=str(tmp_path)) == [-signal.SIGTERM]

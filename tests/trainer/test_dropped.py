"""A publisher that its user drops without ``close``: memory and threads go with it, and the log says so."""

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.notices import LOOPBACK
from tests.support.publishers import Gated, Hooked
from tests.support.publishing import assert_holds, snapshot
from tests.support.signed import Keys
from tests.support.tiny import make_model, save_checkpoint
from tests.support.trainers import SIZES, trainer_of
from tests.trainer.sharded.models import move
from tests.trainer.sharded.nursery import Nursery
from trainer_side import DeltaSyncCallback, Publisher
from trainer_side.background_thread import BackgroundJob, BackgroundThread
from trainer_side.diff import engine
from trainer_side.integrations.trl import DeltaWeightTransfer
from vllm_delta_sync import open_run

SECONDS = 60
"""How long a thread may take to end on a busy machine; nothing waits that long otherwise."""


def threads_of_ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("delta-sync")}


@pytest.fixture
def earlier() -> set[threading.Thread]:
    """Threads that tests before have left in this process."""
    return threads_of_ours()


def assert_gone(*kept: weakref.ref[Any], earlier: set[threading.Thread]) -> None:
    """Nothing holds the objects any more, and every thread that was started for them ends."""
    started = threads_of_ours() - earlier
    until = time.monotonic() + SECONDS
    # What a thread was doing at that moment, such as an upload, it finishes first; only then there is garbage.
    while (alive := [thread for thread in started if thread.is_alive()]) and time.monotonic() < until:
        gc.collect()
        alive[0].join(0.05)
    assert [thread.name for thread in started if thread.is_alive()] == []
    gc.collect()
    assert [found for reference in kept if (found := reference()) is not None] == []


def references(*objects: Any) -> list[weakref.ref[Any]]:
    return list(map(weakref.ref, objects))


def plain() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))


def test_publisher_and_model_are_freed_and_every_thread_ends(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: set[threading.Thread],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(engine, "PARALLEL_ELEMENTS", 1)  # so that the detector's threads have had a tensor
    model = plain()
    publisher = Publisher(model, url, notice=LOOPBACK, signing_key=Keys(tmp_path / "keys").private("a"))
    publisher.publish(step=1, wait=True)
    move(model)
    publisher.publish(step=2, wait=True)
    publisher.flush()
    names = {thread.name for thread in threads_of_ours() - earlier}
    assert names >= {
        "delta-sync-publisher", "delta-sync-maintenance", "delta-sync-head", "delta-sync-notices", "delta-sync-diff-1",
    }  # fmt: skip
    baseline, run = publisher._committer.baseline, publisher.run
    kept = references(publisher, model, baseline)
    del publisher, model, baseline
    assert_gone(*kept, earlier=earlier)
    said = [record.getMessage() for record in caplog.records if "without close()" in record.getMessage()]
    assert len(said) == 1
    assert run in said[0]
    assert "version 2" in said[0]


def test_version_under_way_is_finished_first(
    bucket: Hooked, earlier: set[threading.Thread], caplog: pytest.LogCaptureFixture
) -> None:
    model = plain()
    publisher = Publisher(model, bucket)
    gate = bucket.before = Gated("")
    move(model)
    expected = snapshot(model.state_dict())
    result = publisher.publish(step=1)
    kept = references(publisher, model)
    del publisher, model
    gc.collect()
    assert not result.done
    assert "without close()" not in caplog.text
    gate.open.set()
    assert_gone(*kept, earlier=earlier)
    assert result.payload_bytes
    assert_holds(open_run(bucket.url), 1, expected)
    assert "ends at version 1" in caplog.text


def test_closed_publisher_is_dropped_in_silence(
    url: str, earlier: set[threading.Thread], caplog: pytest.LogCaptureFixture
) -> None:
    model = plain()
    with Publisher(model, url) as publisher:
        publisher.publish(step=1, wait=True)
    kept = references(publisher, model)
    del publisher, model
    assert_gone(*kept, earlier=earlier)
    assert "without close()" not in caplog.text


def test_idle_thread_keeps_nothing_of_its_last_call() -> None:
    class Weights:
        pass

    held = Weights()
    seen = weakref.ref(held)
    thread = BackgroundThread("delta-sync-test")

    def fail(of: Weights = held) -> None:
        raise ZeroDivisionError

    job = BackgroundJob()
    thread.submit(job, fail)
    job.join()
    del job, fail, held
    until = time.monotonic() + SECONDS
    while seen() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert seen() is None
    thread.close()


def test_weight_transfer(
    url: str, tmp_path: Path, earlier: set[threading.Thread], caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("qwen3", **SIZES)
    transfer = DeltaWeightTransfer(url, save_checkpoint(model, tmp_path / "base"))
    transfer.init_weight_transfer()
    move(model)
    transfer.send_weights(iter([(name, parameter.detach()) for name, parameter in model.named_parameters()]))
    transfer.resume()
    kept = references(transfer, transfer.publisher, model)
    del transfer, model
    assert_gone(*kept, earlier=earlier)
    assert caplog.text.count("without close()") == 1


class Stop(Exception):
    """Ends a training from within."""


def test_callback_of_a_training_that_failed(
    url: str, tmp_path: Path, earlier: set[threading.Thread], caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> list[weakref.ref[Any]]:
        model = make_model("qwen3", **SIZES)
        callback = DeltaSyncCallback(bucket=url)
        trainer = trainer_of(model, tmp_path, [callback], max_steps=3)

        def fail(*_: Any, **__: Any) -> None:
            raise Stop

        trainer.training_step = fail  # type: ignore[method-assign]
        with pytest.raises(Stop):
            trainer.train()
        assert callback.publisher is not None
        return references(callback, callback.publisher, model)

    kept = train()
    assert_gone(*kept, earlier=earlier)
    assert caplog.text.count("without close()") == 1


def drop_on_every_rank(rank: int, size: int, url: str) -> Any:
    model = DistributedDataParallel(plain())
    publisher = Publisher(model, url)
    publisher.publish(step=1, wait=True)
    publisher.flush()
    kept = references(publisher)
    del publisher
    assert_gone(*kept, earlier=set())
    with Publisher(model, url) as again:
        move(model)
        again.publish(step=2, wait=True)
    return again.version


def test_publisher_of_several_ranks(url: str, nursery: Nursery) -> None:
    assert nursery.run(2, drop_on_every_rank, url=url) == [2, 2]

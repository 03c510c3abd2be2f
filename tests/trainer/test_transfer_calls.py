"""``DeltaWeightTransfer`` call by call: order, waiting for servers, failures, interrupts."""

import logging
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.publishers import Down, Hooked, nothing
from tests.support.publishing import assert_holds
from tests.support.trainers import steps_of, threads_of_ours
from trainer_side import Publisher
from trainer_side.integrations.training import StopSignal
from trainer_side.integrations.trl import DeltaWeightTransfer
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.errors import ConflictError, DeltaSyncError, NotFoundError, PublishError, StoreError, UsageError
from vllm_delta_sync.fleet.fleet import FleetLateError
from vllm_delta_sync.fleet.heartbeats import write_heartbeat

Pairs = Iterator[tuple[str, torch.Tensor]]


class Stream:
    """Parameters, handed over one by one; raises ``error`` once, in the place of one of them, and could go on."""

    def __init__(self, model: PreTrainedModel, failing_at: int | None, error: BaseException | None) -> None:
        self.left = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
        self.failing_at, self.error = failing_at, error
        self.reads = 0

    def __iter__(self) -> Pairs:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        if not self.left:
            raise StopIteration
        if self.reads == self.failing_at and self.error is not None:
            error, self.error = self.error, None
            raise error
        self.reads += 1
        return self.left.pop(0)


class Weights:
    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.5)

    def stream(self, failing_at: int | None = None, error: BaseException | None = None) -> Stream:
        return Stream(self.model, failing_at, error)

    @property
    def served(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().bfloat16() for name, tensor in self.model.named_parameters()}


@pytest.fixture
def weights(model: PreTrainedModel) -> Weights:
    return Weights(model)


@pytest.fixture
def transfer(url: str, base: Path) -> Iterator[DeltaWeightTransfer]:
    made = DeltaWeightTransfer(url, base)
    yield made
    made.destroy()


def test_calls_before_the_beginning_and_after_the_end(transfer: DeltaWeightTransfer, weights: Weights) -> None:
    transfer.pause()
    transfer.resume()
    transfer.destroy()
    stream = weights.stream()
    with pytest.raises(UsageError, match="init_weight_transfer was not called"):
        transfer.send_weights(stream)
    assert not stream.left
    transfer.init_weight_transfer()
    assert transfer.publisher is not None
    transfer.destroy()
    transfer.destroy()
    transfer.resume()
    with pytest.raises(UsageError, match="destroy was called since"):
        transfer.send_weights(weights.stream())


def test_without_a_trainer_sends_are_counted_and_a_run_is_gone_on_with(
    transfer: DeltaWeightTransfer, url: str, base: Path, weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trainer_side.integrations.training"):
        transfer.init_weight_transfer()
        for _ in range(3):
            weights.change()
            transfer.pause()
            transfer.send_weights(weights.stream())
            transfer.resume()
        transfer.destroy()
    assert steps_of(open_run(url)) == [1, 2, 3]
    assert_holds(open_run(url), 3, weights.served, base)
    told = [line.split(", delta_sync/changed")[0] for line in caplog.messages if line.startswith("delta_sync/")]
    assert told == [f"delta_sync/version {number}, delta_sync/step {number}" for number in (1, 2, 3)]
    others = threads_of_ours()
    for _ in range(2):
        transfer.init_weight_transfer()
        weights.change()
        transfer.send_weights(weights.stream())
    transfer.destroy()
    assert steps_of(open_run(url)) == [1, 2, 3, 1, 1], "a second beginning goes on with the run"
    assert_holds(open_run(url), 5, weights.served, base)
    assert threads_of_ours(others) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 2}, "weight_sync_steps"),
        ({"codecs": "raw"}, "codecs is 'raw': Unexpected keyword argument"),
        ({"wait_served": 0}, "wait_served is 0"),
        ({"wait_served": "30"}, "wait_served is '30'"),
        ({"wait_served": float("inf")}, "wait_served is inf"),
        ({"replicas": 0}, "replicas is 0"),
        ({"send_seconds": "300"}, "send_seconds is '300'; give a number of seconds"),
        ({"base": None}, "base is missing"),
        ({"adapter": True}, "base= is given with adapter=True"),
        ({"base": None, "adapter": "math", "rename": {"a.": ""}}, "rename= is given with adapter='math'"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DeltaWeightTransfer("memory://run", **{"base": "base", **arguments})


@pytest.mark.parametrize("missing", ["base", "store"])
def test_what_is_missing_ends_the_beginning(missing: str, bucket: Hooked, base: Path, tmp_path: Path) -> None:
    store = bucket.before = Down("")
    store.down = missing == "store"
    transfer = DeltaWeightTransfer(bucket, base if store.down else tmp_path / "none", stop_on_error=False)
    with pytest.raises(StoreError if store.down else NotFoundError, match=r"is away|does not exist"):
        transfer.init_weight_transfer()
    assert transfer.publisher is None
    transfer.destroy()


def test_resume_waits_until_the_version_is_served(url: str, base: Path, weights: Weights) -> None:
    transfer = DeltaWeightTransfer(url, base, wait_served=60, replicas=2)
    transfer.init_weight_transfer()
    weights.change()
    transfer.send_weights(weights.stream())
    returned = threading.Event()

    def serve(name: str, version: int) -> None:
        write_heartbeat(Run(open_bucket(url)), name, version, seconds=600)

    def resume() -> None:
        transfer.resume()
        returned.set()

    waiting = threading.Thread(target=resume)
    serve("a", 0)
    waiting.start()
    serve("b", 1)
    assert not returned.wait(0.3)
    serve("a", 1)
    assert returned.wait(60)
    waiting.join()
    transfer.destroy()


def test_resume_says_who_is_late(url: str, base: Path, weights: Weights, caplog: pytest.LogCaptureFixture) -> None:
    strict, lenient = (DeltaWeightTransfer(url, base, wait_served=1.0, stop_on_error=stop) for stop in (True, False))
    strict.init_weight_transfer()
    strict.resume()
    write_heartbeat(Run(open_bucket(url)), "slow", 0, seconds=600)
    strict.send_weights(weights.stream())
    with pytest.raises(FleetLateError, match="slow"):
        strict.resume()
    strict.destroy()
    lenient.init_weight_transfer()
    lenient.send_weights(weights.stream())
    with caplog.at_level(logging.ERROR, "trainer_side.integrations.training"):
        lenient.resume()
    assert "slow" in caplog.text
    lenient.destroy()


def test_a_failure_is_raised_and_made_up_for(bucket: Hooked, url: str, base: Path, weights: Weights) -> None:
    transfer = DeltaWeightTransfer(bucket, base)
    transfer.init_weight_transfer()
    weights.change()
    store = bucket.before = Down("")
    transfer.send_weights(weights.stream())
    stream = weights.stream()
    with pytest.raises(PublishError, match="the store is away"):
        transfer.send_weights(stream)
    assert not stream.left
    assert open_run(url).head().version == 0
    store.down = False
    weights.change()
    transfer.send_weights(weights.stream())
    transfer.destroy()
    assert [manifest.version for manifest in open_run(url).log()] == [0, 1]
    assert_holds(open_run(url), 1, weights.served, base)


@pytest.mark.parametrize("stop_on_error", [True, False])
def test_another_writer_always_ends_it(stop_on_error: bool, url: str, base: Path, weights: Weights) -> None:
    transfer = DeltaWeightTransfer(url, base, stop_on_error=stop_on_error)
    transfer.init_weight_transfer()
    with Publisher(weights.model, bucket=url, base=base) as other:
        weights.change()
        other.publish(1, wait=True)
        other.flush()
        transfer.send_weights(weights.stream())
        with pytest.raises(ConflictError):
            transfer.send_weights(weights.stream())
    with pytest.raises(ConflictError):
        transfer.destroy()
    assert transfer.publisher is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), RuntimeError("a rank is gone")])
def test_a_send_that_breaks_off_leaves_nothing_behind(
    error: BaseException, transfer: DeltaWeightTransfer, url: str, base: Path, weights: Weights
) -> None:
    """It is read on for other ranks that gather, unless they are interrupted as well: that would wait for ever."""
    transfer.init_weight_transfer()
    weights.change()
    stream = weights.stream(5, error)
    with pytest.raises(type(error)):
        transfer.send_weights(stream)
    assert (stream.reads == 5) == (not isinstance(error, Exception))
    assert bool(stream.left) == (not isinstance(error, Exception))
    weights.change()
    transfer.send_weights(weights.stream())
    transfer.destroy()
    assert steps_of(open_run(url)) == [2]
    assert_holds(open_run(url), 1, weights.served, base)


def test_the_end_hides_no_error(bucket: Hooked, base: Path, weights: Weights, caplog: pytest.LogCaptureFixture) -> None:
    transfer = DeltaWeightTransfer(bucket, base, close_seconds=0.3)

    def training() -> None:
        try:
            transfer.init_weight_transfer()
            weights.change()
            bucket.before = Down("")
            transfer.send_weights(weights.stream())
            raise RuntimeError("training has failed")
        finally:
            transfer.destroy()

    with pytest.raises(RuntimeError, match="training has failed"):
        training()
    assert transfer.publisher is None
    assert "closing the publisher: version 1 (step 1) could not be made durable" in caplog.text

    def again() -> None:
        bucket.before = nothing
        transfer.init_weight_transfer()
        bucket.before = Down("")
        transfer.send_weights(weights.stream())
        with pytest.raises(DeltaSyncError, match="the store is away"):
            transfer.destroy()
        assert transfer.publisher is None

    again()
    try:
        raise RuntimeError("of a training before")
    except RuntimeError:
        again()


def test_a_training_that_fails_leaves_no_handler_of_sigterm(transfer: DeltaWeightTransfer, weights: Weights) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def training() -> None:
        try:
            transfer.callback.on_train_begin(None, None, None, model=weights.model)
            transfer.init_weight_transfer()
            assert signal.getsignal(signal.SIGTERM) != before
            raise RuntimeError("training has failed")
        finally:
            transfer.destroy()

    with pytest.raises(RuntimeError, match="training has failed"):
        training()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_that_a_training_forks_ends_at_sigterm() -> None:
    """As a reward that runs code in a process of its own, and ends it when it takes too long."""
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stop = StopSignal()
    try:
        fork = multiprocessing.get_context("fork")
        begun = fork.Event()

        def run() -> None:
            begun.set()
            signal.pause()

        forked = fork.Process(target=run)
        forked.start()
        assert begun.wait(20)
        forked.terminate()
        forked.join(20)
        found = forked.exitcode
        forked.kill()
        assert (found, stop.came()) == (-signal.SIGTERM, False)
        signal.raise_signal(signal.SIGTERM)
        assert stop.came()
    finally:
        stop.close()
        signal.signal(signal.SIGTERM, before)


def test_beginning_that_fails_before_trl_calls_leaves_the_next_one_to_open(
    transfer: DeltaWeightTransfer, url: str, weights: Weights
) -> None:
    """A callback behind this one has failed, and the training is begun again, as in a notebook."""
    for fails in (True, False):
        transfer.callback.on_train_begin(None, None, None, model=weights.model)
        if not fails:
            transfer.init_weight_transfer()
            transfer.send_weights(weights.stream())
        transfer.destroy()
    assert steps_of(open_run(url)) == [1]

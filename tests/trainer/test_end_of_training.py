"""The end of training: the run is left at the weights of the last call, or an error says at which it is left."""

import math
import pickle
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.support.publishers import Down, FailAt, Gated, Hooked, Trainer, assert_holds, publish
from trainer_side import Budget, Gate, Publisher, PublishResult, session
from trainer_side.integrations.training import TrainingPublisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import ConflictError, GateError, PublishError, PublishTimeoutError, StoreError, UsageError


def steps_of(bucket: Hooked) -> list[int | None]:
    return [manifest.step for manifest in open_run(bucket.url).log()]


@pytest.mark.parametrize("at", ["objects/", "versions/"])
def test_a_store_that_comes_back_in_time(at: str, bucket: Hooked, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, bucket)
    away = bucket.before = bucket.reading = Down(at)
    trainer.step()
    publisher.publish(1)
    closing = threading.Thread(target=publisher.close)
    closing.start()
    while away.tries < 2:
        assert closing.is_alive()
    away.down = False
    closing.join()
    assert steps_of(bucket) == [0, 1]
    assert_holds(bucket, 1, trainer.live)


def test_a_store_that_stays_away(bucket: Hooked, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, bucket)
    publish(publisher, trainer, times=2)
    bucket.before = Down("objects/")
    trainer.step()
    result = publisher.publish(7)
    expected = r"step 7, the last one, is not published: .*the store is away.*last version .* is 2 \(step 2\)"
    with pytest.raises(PublishError, match=expected) as caught:
        publisher.close(timeout=0.6)
    assert isinstance(caught.value.__cause__, StoreError)
    publisher.close()
    assert steps_of(bucket) == [0, 1, 2]
    failed = pickle.loads(pickle.dumps(result))  # noqa: S301 (its own bytes)
    assert failed.failed
    with pytest.raises(PublishError, match="the store is away"):
        failed.metrics()


def test_a_store_that_does_not_answer(bucket: Hooked, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, bucket)
    gate = bucket.before = Gated()
    trainer.step()
    publisher.publish(7)
    threading.Timer(0.4, gate.open.set).start()
    with pytest.raises(PublishError, match=r"step 7, the last one, .* not answered within 0.2 s.* is 0 \(step 0\)"):
        publisher.close(timeout=0.2)


def test_weights_that_came_with_the_last_call_are_named_if_they_are_lost(bucket: Hooked, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, bucket)
    gate = bucket.before = Gated()
    trainer.step()
    publisher.publish(1, weights=trainer.copy().items())
    assert gate.reached.wait(60)
    assert publisher.publish(2, weights=trainer.copy().items()).kind == "skipped"
    gate.open.set()
    with pytest.raises(PublishError, match=r"step 2, the last one, is not published: its call was skipped.* gone"):
        publisher.close()
    assert steps_of(bucket) == [0, 1]


def test_handed_weights_of_a_version_that_was_written_after_all(bucket: Hooked, trainer: Trainer) -> None:
    """The store fails after it has written the manifest, and then does not answer whether it did."""
    with Publisher(trainer.live, bucket) as publisher:
        bucket.after, bucket.reading = FailAt("versions/"), FailAt("versions/")
        trainer.step()
        publisher.publish(1, weights=trainer.copy().items())
    assert steps_of(bucket) == [0, 1]
    assert_holds(bucket, 1, trainer.live)


def test_after_an_exception_nothing_new_is_published(
    bucket: Hooked, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    gate, expected = Gated(), dict[str, torch.Tensor]()

    def training() -> None:
        with Publisher(trainer.live, bucket) as publisher:
            bucket.before = gate
            trainer.step()
            expected.update(trainer.copy())
            publisher.publish(1)
            assert gate.reached.wait(60)
            publisher.publish(2)
            trainer.step()
            gate.open.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training()
    assert steps_of(bucket) == [0, 1]
    assert_holds(bucket, 1, expected)
    assert "step 2, of the last call, is not published" in caplog.text


@pytest.mark.parametrize("how", ["finally", "except"])
def test_a_close_while_an_exception_is_handled_publishes_nothing_new(
    how: str, bucket: Hooked, trainer: Trainer
) -> None:
    def training() -> None:
        publisher = Publisher(trainer.live, bucket)
        bucket.before = FailAt("objects/")
        trainer.step()
        try:
            publisher.publish(1)
            raise ZeroDivisionError
        except ZeroDivisionError:
            if how == "except":
                publisher.close()
            raise
        finally:
            publisher.close()

    with pytest.raises(ZeroDivisionError):
        training()
    assert steps_of(bucket) == [0]


def test_an_exception_from_before_the_publisher_is_not_one_of_training(bucket: Hooked, trainer: Trainer) -> None:
    """A training may be started while another exception is handled, such as by a larger batch that did not fit."""
    try:
        raise MemoryError
    except MemoryError:
        publisher = Publisher(trainer.live, bucket, every=2)
        trainer.step()
        publisher.publish(1)
        publisher.close()
    assert_holds(bucket, 1, trainer.live)


def test_a_fenced_publisher_publishes_nothing_and_says_so(bucket: Hooked, trainer: Trainer) -> None:
    former = Publisher(trainer.live, bucket)
    with Publisher(trainer.copy(), Hooked(bucket.folder)):
        pass
    trainer.step()
    former.publish(1)
    with pytest.raises(ConflictError, match=r"step 1, the last one, is not published: another publisher has taken"):
        former.close()
    assert steps_of(bucket) == [0]


def test_what_the_gate_refuses_stays_refused(bucket: Hooked, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, bucket, gate=Gate())
    trainer.live["a"][1] = torch.inf
    publisher.publish(1)
    with pytest.raises(GateError, match=r"step 1, the last one, is not published"):
        publisher.close()
    assert steps_of(bucket) == [0]


def test_a_model_that_cannot_be_compared_any_more_is_named(
    bucket: Hooked, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_ATTEMPTS", 1)
    publisher = Publisher(lambda: trainer.live.items(), bucket, every=2)
    publisher.publish(1)
    del trainer.live["a"]
    with pytest.raises(PublishError, match=r"step 1, the last one, is not published: .*'a' is no longer yielded"):
        publisher.close()


def test_finish_does_the_same_and_stays_open(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket, every=2, budget=Budget(max_share=0.01)) as publisher:
        trainer.step()
        publisher.publish(1)
        publisher.finish()
        assert steps_of(bucket) == [0, 1]
        assert_holds(bucket, 1, trainer.live)
        publisher.finish()
        trainer.step()
        publisher.publish(2)
    assert steps_of(bucket) == [0, 1, 2, 2]
    assert_holds(bucket, 3, trainer.live)


WAITS: dict[str, Callable[[Publisher], object]] = {
    "publish": lambda publisher: publisher.publish(2, wait=True, timeout=0.02),
    "flush": lambda publisher: publisher.flush(timeout=0.02),
    "rebase": lambda publisher: publisher.rebase(0, timeout=0.02),
    "rescan": lambda publisher: publisher.rescan(timeout=0.02),
    "anchor": lambda publisher: publisher.anchor(timeout=0.02),
    "tag": lambda publisher: publisher.tag("best", timeout=0.02),
    "wait_served": lambda publisher: publisher.wait_served(timeout=0.02),
}


@pytest.mark.parametrize("call", WAITS)
def test_calls_that_wait_have_a_limit_and_nothing_is_lost(call: str, bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        gate = bucket.before = Gated()
        trainer.step()
        result = publisher.publish(1)
        with pytest.raises(PublishTimeoutError, match=r"within 0.02 s"):
            WAITS[call](publisher)
        with pytest.raises(PublishTimeoutError, match=r"within 0.02 s"):
            result.wait(timeout=0.02)
        gate.open.set()
        result.wait(timeout=60)
        assert publisher.version == 1
        if call == "anchor":
            gate = bucket.before = Gated("anchors/")
            with pytest.raises(PublishTimeoutError, match=r"this call is not done within 0.02 s"):
                publisher.anchor(timeout=0.02)
            gate.open.set()
        trainer.step()
        publisher.publish(2, wait=True)
    assert open_run(bucket.url).verify().replayed
    assert_holds(bucket, 2, trainer.live)


@pytest.mark.parametrize("limit", [None, math.inf, 1e12])
def test_limit_may_be_none(limit: float, bucket: Hooked, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, bucket)
    trainer.step()
    publisher.publish(1, wait=True, timeout=limit).wait(limit)
    publisher.flush(limit)
    training = TrainingPublisher(bucket, {}, True, close_seconds=limit, grace_seconds=25)
    assert training.deadline.left == math.inf
    publisher.close(training.deadline)
    assert steps_of(bucket) == [0, 1]


@pytest.mark.parametrize("limit", ["5", math.nan])
def test_limit_that_is_no_number_is_refused_and_closes_nothing(limit: float, bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        for call in (publisher.flush, publisher.close):
            with pytest.raises(UsageError, match=r"timeout is .*; give a number of seconds"):
                call(limit)
        trainer.step()
        publisher.publish(1)
    assert steps_of(bucket) == [0, 1]


def test_on_version_is_refused_calls_that_would_wait_for_itself(bucket: Hooked, trainer: Trainer) -> None:
    """``close`` holds the lock that such a call waits for, and waits until ``on_version`` has returned."""
    refused: list[int | None] = []

    def hear(result: PublishResult) -> None:
        with pytest.raises(UsageError, match="made in on_version"):
            publisher.tag("best")
        refused.append(result.version)

    with Publisher(trainer.live, bucket, on_version=hear) as publisher:
        trainer.step()
        publisher.publish(1)
    assert refused == [1]


def test_status_and_results_of_all_versions(bucket: Hooked, trainer: Trainer) -> None:
    heard: list[PublishResult] = []

    def hear(result: PublishResult) -> None:
        assert result.done
        heard.append(result)
        raise RuntimeError("of the user")

    with Publisher(trainer.live, bucket, on_version=hear) as publisher:
        began = publisher.status()
        assert (began.version, began.step, began.skipped, began.failed, began.error) == (0, 0, 0, 0, None)
        gate = bucket.before = Gated()
        trainer.step()
        first = publisher.publish(1)
        assert publisher.publish(2).metrics() == {"delta_sync/skipped": 1}
        skipped = publisher.publish(3)
        assert [first.done, skipped.done, skipped.failed, publisher.status().skipped] == [False, True, False, 2]
        gate.open.set()
        metrics = first.metrics()
        assert (first.done, first.failed) == (True, False)
        assert (metrics["delta_sync/version"], metrics["delta_sync/step"]) == (1, 1)
        assert metrics["delta_sync/payload_bytes"] == first.payload_bytes
        publisher.flush()
        now = publisher.status()
        assert (now.version, now.step, now.skipped) == (1, 1, 2)
        assert now.payload_bytes == now.total_payload_bytes == first.payload_bytes > 0
        bucket.before = Down("objects/")
        for count in (1, 2):
            trainer.step()
            publisher.publish(3 + count)
            with pytest.raises(PublishError):
                publisher.flush()
            now = publisher.status()
            assert (now.version, now.failed, now.skipped) == (1, count, 0)
        assert str(now.error).startswith("publish: version 2 (step 5) could not be made durable")
        bucket.before = lambda key: None
        publisher.finish()
        now = publisher.status()
        assert (now.version, now.step, now.failed, now.error) == (2, 5, 0, None)
        assert now.total_payload_bytes > now.payload_bytes > 0
        assert 0 <= now.seconds < 60
    assert [(result.step, result.failed) for result in heard] == [(1, False), (4, True), (5, True), (5, False)]


def test_without_a_limit_a_store_that_is_away_is_not_asked_all_the_time(bucket: Hooked, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, bucket)
    down = bucket.before = Down("objects/")
    trainer.step()
    publisher.publish(1)
    ending = threading.Thread(target=publisher.finish, args=(None,))
    ending.start()
    time.sleep(1.2)
    assert down.tries < 8
    down.down = False
    ending.join(60)
    assert not ending.is_alive()
    publisher.close()
    assert_holds(bucket, 1, trainer.live)


def test_weights_that_came_with_a_call_that_every_skips_are_missed_with_a_remedy_that_helps(
    bucket: Hooked, trainer: Trainer
) -> None:
    publisher = Publisher(trainer.live, bucket, every=2)
    publisher.publish(1, wait=True, weights=trainer.live.items())
    with pytest.raises(PublishError, match=r"every is 2, and skipped its call\. .* are gone: leave every out"):
        publisher.close()


def test_weights_that_the_gate_refused_are_not_missed_at_the_end(bucket: Hooked, trainer: Trainer) -> None:
    """They came with the call, and the caller knows."""
    with Publisher(trainer.live, bucket, gate=Gate()) as publisher:
        bad = {name: torch.full_like(tensor, float("nan")) for name, tensor in trainer.live.items()}
        publisher.publish(1, weights=bad.items())
        with pytest.raises(GateError):
            publisher.flush()
    assert steps_of(bucket) == [0]

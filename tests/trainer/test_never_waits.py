"""Training never waits for the store, whatever fails at whatever moment, and an error of ours loses nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest
import torch

from tests.support.publishers import FailAt, Gated, Hooked, Trainer, assert_holds
from trainer_side import Publisher
from trainer_side.diff import reader
from vllm_delta_sync.bucket import Bucket, ObjectInfo
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, Call
from vllm_delta_sync.client import open_run
from vllm_delta_sync.errors import PublishError, PublishTimeoutError, StoreError

_Result = TypeVar("_Result")
AWAY = ["objects/", "versions/", "HEAD.json", "notices", "tags/"]
"""What of a version fails: an object, its manifest, the head, a notice, a listing."""


class OffTheTrainingThread(BucketMiddleware):
    """Refuses every call on one thread, and fails at keys that begin as given while it is away."""

    def __init__(self, inner: Bucket, at: str) -> None:
        super().__init__(inner)
        self._at = at
        self.away = False
        self.failures = 0
        self.training: threading.Thread | None = None

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        assert threading.current_thread() is not self.training, f"{call.key} is asked for on the training thread"
        if self.away and call.key.startswith(self._at):
            self.failures += 1
            raise StoreError("the store is away")
        return run()

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._list_pages(prefix)


def train(publisher: Publisher, trainer: Trainer, steps: range) -> list[str]:
    """Train and publish, as fast as it goes → what the publisher raised."""
    raised = []
    for step in steps:
        trainer.step()
        try:
            publisher.publish(step)
        except PublishError as error:
            raised.append(error.message)
    return raised


@pytest.mark.parametrize("at", AWAY)
def test_a_store_that_is_away_in_the_middle_of_training(at: str, bucket: Hooked, trainer: Trainer) -> None:
    Publisher(trainer.live, bucket, resume=True).close()
    store = OffTheTrainingThread(bucket, at)
    # No process listens there, so no notice is delivered.
    with Publisher(trainer.live, store, notice="connect:tcp://127.0.0.1:9") as publisher:
        store.training = threading.current_thread()
        train(publisher, trainer, range(1, 30))
        store.away = True
        raised: list[str] = []
        step = 30
        while (store.failures < 3 and at in ("objects/", "versions/")) or step < 60:
            raised += train(publisher, trainer, range(step, step + 1))
            step += 1
        store.away = False
        # Either the version is durable after all, or the error has been raised, or it is still to come.
        train(publisher, trainer, range(step, step + 30))
        store.training = None
    run = open_run(bucket.url)
    assert run.verify().replayed
    assert run.head().step == step + 29
    assert_holds(bucket, run.head().version, trainer.live)
    assert bool(raised) == (at in ("objects/", "versions/"))


def test_a_repair_of_the_baseline_is_not_waited_for(bucket: Hooked, trainer: Trainer) -> None:
    """The outcome of a manifest is unknown, and the store does not answer whether it is there."""
    with Publisher(trainer.live, bucket) as publisher:
        bucket.after = FailAt("versions/")
        asked, answered = threading.Event(), threading.Event()

        def slow(key: str) -> None:
            if key.startswith("versions/"):
                asked.set()
                assert answered.wait(120)
                raise StoreError("no answer")

        bucket.reading = slow
        trainer.step()
        publisher.publish(1)
        assert asked.wait(60)
        asked.clear()
        assert publisher.publish(2).kind == "skipped"
        answered.set()
        with pytest.raises(PublishError, match="is not known"):
            publisher.flush()
        answered.clear()
        assert publisher.publish(3).kind == "skipped"
        # It is asked for again in the background, and waits there.
        assert asked.wait(60)
        assert publisher.publish(4).kind == "skipped"
        bucket.reading = lambda key: None
        answered.set()
        trainer.step()
    assert [manifest.step for manifest in open_run(bucket.url).log()] == [0, 1, 4]
    assert_holds(bucket, 2, trainer.live)


# Errors that training tolerates


ERRORS = [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("host"), RuntimeError("an illegal access")]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("error", ERRORS)
def test_a_comparison_that_fails_is_reverted_and_made_up_for(
    error: BaseException, last: bool, bucket: Hooked, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.live = {name: tensor.t() for name, tensor in trainer.live.items()}
    read, outcomes = reader.Reader.read, iter([None, error])

    def second_fails(*arguments: Any) -> Any:
        failure = next(outcomes, None)
        if failure is not None:
            raise failure
        return read(*arguments)

    with Publisher(trainer.live, bucket) as publisher:
        trainer.live["a"] += 1
        trainer.live["b"] += 1
        with monkeypatch.context() as patch:
            patch.setattr(reader.Reader, "read", second_fails)
            with pytest.raises(PublishError, match=r"step 1 is not published, because the comparison failed") as caught:
                publisher.publish(1)
        assert caught.value.__cause__ is error
        assert publisher.rescan() == []
        if not last:  # else closing makes up for it
            publisher.publish(2)
    assert open_run(bucket.url).verify().replayed
    assert_holds(bucket, 1, trainer.live)


def test_a_call_beside_one_that_waits_ends_within_its_timeout(bucket: Hooked, trainer: Trainer) -> None:
    publisher = Publisher(trainer.live, bucket)
    gate = bucket.before = Gated("")
    trainer.step()
    publisher.publish(1)
    assert gate.reached.wait(60)
    waiting = threading.Thread(target=publisher.flush)
    waiting.start()
    while publisher._lock.acquire(blocking=False):
        publisher._lock.release()
        time.sleep(0.01)
    for call in (publisher.flush, publisher.anchor, partial(publisher.publish, 2), partial(publisher.rebase, 0)):
        with pytest.raises(PublishTimeoutError):
            call(timeout=0.05)
    gate.open.set()
    waiting.join()
    publisher.close()

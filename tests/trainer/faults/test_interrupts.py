"""A publisher that is interrupted, or raced by its own trainer."""

import random
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from tests.support.publishers import Hooked, Trainer, assert_holds, logs, publish
from trainer_side import Publisher
from trainer_side.diff import reader as detection_live
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import UsageError


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("moved", ["more", "fewer", "others"])
def test_weights_that_move_while_they_are_compared_make_whole_versions(
    moved: str, given: torch.dtype, bucket: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transposed, so that it is read box by box, and moves in between."""
    weight = torch.zeros(100, 100, dtype=given)
    reads = detection_live.Reader.read
    boxes: list[int] = []

    def train_meanwhile(reader: detection_live.Reader, box: torch.Tensor, dtype: str) -> Any:
        boxes.append(box.numel())
        if len(boxes) % 10 == 5:
            if moved != "more":
                weight[:50] = 0
            if moved != "fewer":
                weight[50:] += 1
        return reads(reader, box, dtype)

    with Publisher({"w": weight.t()}, bucket) as publisher:
        for step in range(1, 4):
            weight[:60] += 1
            with monkeypatch.context() as patch:
                patch.setattr(detection_live, "GATHER_ELEMENTS", 1000)
                patch.setattr(detection_live.Reader, "read", train_meanwhile)
                publisher.publish(step=step, wait=True)
            # What moved behind the comparison is part of the next version.
            expected = weight.t().clone()
            publisher.publish(step=step, wait=True)
            publisher.flush()
            assert_holds(bucket, 2 * step, {"w": expected})
    assert boxes
    assert max(boxes) <= 1000
    assert open_run(bucket.url).verify().replayed


class Alarms:
    """SIGALRM stands for Ctrl-C: while it is armed, its handler raises KeyboardInterrupt wherever the main thread is.

    Attributes:
        hit: how often it interrupted something.
    """

    def __init__(self) -> None:
        # Not an Event: an interrupt in its code would leave its lock held, and the next call would wait for ever.
        self._armed: list[bool] = []
        self.hit = 0

    def __enter__(self) -> "Alarms":
        self._previous = signal.signal(signal.SIGALRM, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGALRM, self._previous)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._armed and not logs(frame):
            raise KeyboardInterrupt

    def disarm(self) -> None:
        self._armed.clear()

    def attempt(self, seconds: float, work: Callable[[], object]) -> None:
        try:
            try:
                self._armed.append(True)
                signal.setitimer(signal.ITIMER_REAL, seconds)
                work()
            finally:
                self.disarm()
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            self.hit += 1


def test_interrupts_at_any_moment_lose_nothing(bucket: Hooked, trainer: Trainer) -> None:
    chance = random.Random(5)
    with Publisher(trainer.live, bucket) as publisher:
        with Alarms() as alarms:
            for step in range(1, 200):
                trainer.step()
                wait = chance.random() < 0.5
                alarms.attempt(chance.uniform(1e-5, 3e-3), partial(publisher.publish, step=step, wait=wait))
        assert alarms.hit > 20
        trainer.step()
        publisher.publish(step=1000, wait=True)
    report = open_run(bucket.url).verify()
    assert (report.head, report.replayed) == (publisher.version, True)
    assert open_run(bucket.url).head().step == 1000
    assert_holds(bucket, report.head, trainer.live)


class InterruptedLock:
    """The lock of a publisher, whose first call is interrupted right after it has taken the lock."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._left = lock, 1

    def acquire(self, **options: Any) -> bool:
        taken: bool = self._lock.acquire(**options)
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def test_interrupt_at_the_lock_leaves_it_to_the_next_call(
    bucket: Hooked, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        monkeypatch.setattr(publisher, "_lock", InterruptedLock(publisher._lock))
        trainer.step()
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(1)
        # Of another thread, which would wait for one that kept the lock.
        other = threading.Thread(target=publisher.publish, args=(1,), kwargs={"timeout": 30})
        other.start()
        other.join()
        publisher.flush()
        assert publisher.version == 1
    assert_holds(bucket, 1, trainer.live)


def test_call_within_a_call_of_the_same_thread_is_refused(bucket: Hooked, trainer: Trainer) -> None:
    """As a signal handler may make one; it waited for itself."""
    with Publisher(trainer.live, bucket) as publisher:
        trainer.step()
        publisher.publish(1, wait=True)

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for call in (publisher.flush, publisher.close, partial(publisher.publish, 3)):
                with pytest.raises(UsageError, match="during another call"):
                    call()
            yield from trainer.live.items()

        trainer.step()
        publisher.publish(2, weights=weights(), wait=True)
    assert_holds(bucket, 2, trainer.live)


def test_interrupts_at_any_moment_of_a_life_lose_nothing(bucket: Hooked, trainer: Trainer) -> None:
    """Publishers begin, resume, rebase, scan and end."""
    chance = random.Random(11)
    with Publisher(trainer.live, bucket) as first:
        publish(first, trainer, 4)

    def live() -> None:
        publisher = Publisher(trainer.live, bucket)
        try:
            for step in range(6):
                trainer.step()
                publisher.publish(step=step, wait=True)
                acts: list[Callable[[], object]] = [
                    lambda: publisher.rebase(chance.randrange(publisher.version + 1)), publisher.rescan,
                    publisher.flush, publisher.anchor,
                ]  # fmt: skip
                chance.choice(acts)()
        finally:
            alarms.disarm()
            publisher.close()

    with Alarms() as alarms:
        for _ in range(40):
            alarms.attempt(chance.uniform(1e-3, 0.25), live)
    assert alarms.hit > 10
    trainer.step()
    with Publisher(trainer.live, bucket) as publisher:
        publisher.publish(step=1000, wait=True)
    head = open_run(bucket.url).head()
    assert (head.step, head.version) == (1000, publisher.version)
    assert all(manifest.kind == "delta" for manifest in open_run(bucket.url).log() if manifest.version)
    assert_holds(bucket, head.version, trainer.live)

"""The world of a publisher: a small trainer, a real bucket that calls back at every step, and what a run must hold."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
import torch

from tests.support import publishing
from trainer_side import Publisher
from trainer_side.diff.buffers import BaselineBuffer, DeviceBuffer
from trainer_side.maintenance import THREAD_NAME
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware, Call
from vllm_delta_sync.errors import ConflictError, PublishError, StoreError

Hook = Callable[[str], None]
_Result = TypeVar("_Result")
Weights = Mapping[str, torch.Tensor]


def nothing(key: str) -> None:
    return None


def left_to_the_test(key: str) -> None:
    """For ``Hooked.upkeep``: the publisher makes no anchor and no merged delta of its own."""
    raise StoreError("left to the test")


def logs(frame: FrameType | None) -> bool:
    """Whether Python's logging is at work there.

    Nothing is to be raised in it: between taking a handler's lock and the ``try`` that gives it back, that would stop
    every other thread that logs, for ever.
    """
    while frame is not None and frame.f_code.co_filename != logging.__file__:
        frame = frame.f_back
    return frame is not None


class Hooked(BucketMiddleware):
    """A real local bucket that calls back around each put and before each read, except those of upkeep.

    ``reading`` comes before each get, ``looking`` before each stat, ``maintain`` before each put of upkeep.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(open_bucket(str(folder)))
        self.folder = folder
        self.before: Hook = nothing
        self.after: Hook = nothing
        self.reading: Hook = nothing
        self.looking: Hook = nothing
        self.upkeep: Hook = nothing

    def _around(self, call: Call, run: Callable[[], _Result]) -> _Result:
        if threading.current_thread().name == THREAD_NAME:
            if call.method == "put":
                self.upkeep(call.key)
            return run()
        before = {"put": self.before, "get": self.reading, "get_range": self.reading, "stat": self.looking}
        before.get(call.method, nothing)(call.key)
        result = run()
        if call.method == "put":
            self.after(call.key)
        return result


class Late(Hooked):
    """A bucket that takes one manifest long after it has said that it failed."""

    late: tuple[str, bytes | Path] | None = None
    holds_back = False

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        if self.holds_back and key.startswith("versions/"):
            self.late, self.holds_back = (key, data), False
            raise StoreError("injected: late")
        super().put(key, data, if_absent=if_absent)

    def arrive(self) -> None:
        assert self.late is not None
        self.put(*self.late, if_absent=True)


# Hooks


class FailAt:
    """Raises once, for the first key that begins as given."""

    def __init__(self, prefix: str, error: BaseException | None = None) -> None:
        self._prefix = prefix
        self._error = error or StoreError(f"injected at {prefix}")
        self.fired = False

    def __call__(self, key: str) -> None:
        if not self.fired and key.startswith(self._prefix):
            self.fired = True
            raise self._error


class Once:
    """Does something once, for the first key that begins as given."""

    def __init__(self, prefix: str, do: Callable[[], object]) -> None:
        self._prefix, self._do = prefix, do
        self.done = False

    def __call__(self, key: str) -> None:
        if not self.done and key.startswith(self._prefix):
            self.done = True
            self._do()


class Gated:
    """Lets nothing pass, for keys that begin as given, until it is opened; then it may fail."""

    def __init__(self, prefix: str = "objects/", error: BaseException | None = None) -> None:
        self._prefix, self._error = prefix, error
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, key: str) -> None:
        if key.startswith(self._prefix):
            self.reached.set()
            assert self.open.wait(120)
            if self._error is not None:
                raise self._error


class Down:
    """Fails as long as it is down, for keys that begin as given."""

    def __init__(self, *prefixes: str) -> None:
        self._prefixes = prefixes
        self.down, self.tries = True, 0

    def __call__(self, key: str) -> None:
        if self.down and key.startswith(self._prefixes):
            self.tries += 1
            raise StoreError("the store is away")


class Trainer:
    """Weights that change a little at each step, dense and sparse, and a record of what they were."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.live = {"a": torch.randn(3000).bfloat16(), "b": torch.randn(50, 40), "c": torch.randn(2000).half()}
        self._steps = 0

    def step(self) -> None:
        """Sparse in ``a``, a few in ``b``, and all of ``c`` at random, which is sent in full."""
        self._steps += 1
        self.live["a"].view(torch.int16)[torch.randperm(3000)[:100]] += 1
        self.live["b"][self._steps % 50, self._steps % 40] += 0.5
        self.live["c"].view(torch.int16).random_().bitwise_and_(0x3FFF)

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.live.items()}


def small_trainer() -> Trainer:
    """Without the tensor that is sent in full each time, which would call for an anchor at once."""
    made = Trainer()
    made.live["c"] = made.live["c"][:2].clone()
    return made


def publish(publisher: Publisher, trainer: Trainer, times: int = 1) -> list[dict[str, torch.Tensor]]:
    """Train and publish so many versions, all durable → the weights before, and those of each version."""
    history = [trainer.copy()]
    for step in range(1, times + 1):
        trainer.step()
        publisher.publish(step=step, wait=True)
        history.append(trainer.copy())
    publisher.flush()
    return history


def expect_failure(publisher: Publisher, match: str) -> PublishError:
    """The version under way has failed, and the publisher says why."""
    with pytest.raises(PublishError, match=match) as caught:
        publisher.flush()
    return caught.value


@contextmanager
def left_unfinished(publisher: Publisher) -> Iterator[Publisher]:
    """A publisher whose last call has failed, which is meant: closing it raises nothing and publishes nothing more."""
    try:
        yield publisher
    finally:
        publisher.close(finish=False)


def assert_stopped(publisher: Publisher, match: str) -> None:
    """Another writer has the run: every call says so, and the publisher can still be closed."""
    calls: list[Callable[[], object]] = [
        publisher.flush, lambda: publisher.publish(step=99), lambda: publisher.rebase(0), publisher.rescan,
        publisher.anchor, lambda: publisher.tag("x"), publisher.close,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ConflictError, match=match):
            call()
    publisher.close()


def as_if_on_a_device(held: BaselineBuffer, *_: object) -> BaselineBuffer:
    """What ``move_buffer`` returns of a baseline on a device: host memory of its own stands for that of the device."""
    bits = held.read()
    if isinstance(held, DeviceBuffer):
        return held
    return DeviceBuffer(torch.from_numpy(bits.view(f"<i{bits.itemsize}").copy()))


def flip(publisher: Publisher, tensor: str | int, element: int = 5) -> None:
    """One bit of the baseline changes, as in a bad memory cell; no public door leads there."""
    baseline = publisher._committer.baseline
    number = baseline.table.index(tensor) if isinstance(tensor, str) else tensor
    held = baseline.buffer(number)
    stored: Any = held.flat if isinstance(held, DeviceBuffer) else held.read()
    stored[element] ^= 1


def assert_holds(bucket: Bucket, version: int, expected: Weights) -> None:
    publishing.assert_holds(open_run(bucket.url), version, dict(expected))


def assert_history(bucket: Bucket, history: Sequence[Weights]) -> None:
    """The run verifies, and its versions are these, bit for bit."""
    publishing.assert_versions(bucket.url, [dict(expected) for expected in history])

"""Ctrl-C and failures at the worst moment of a commit: all of a version or nothing, and the rank knows which."""

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hooks import watch_commits
from tests.support.world import World
from vllm_delta_sync.engine import commit as commits
from vllm_delta_sync.engine.interrupts import postponed
from vllm_delta_sync.errors import EngineError, WeightsLostError


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    world = World(tmp_path, ranks=request.param)
    world.receiver.advance()
    world.train(1)
    world.receiver.advance()
    world.train(2)
    return world


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Whatever runs these tests gets its own handler back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def expect_before(world: World, bits: list[torch.Tensor]) -> None:
    """Version 1 is served and held, generation goes on, and the next look takes version 2."""
    for now, old in zip(world.bits(), bits, strict=True):
        assert torch.equal(now, old)
    assert world.port.log[-2:] == ["label 1", "resume"]
    assert [rank.version for rank in world.port.ranks] == [1] * world.ranks
    assert world.receiver.verify()["verdict"]
    world.receiver.advance()
    assert world.receiver.served_version == 2
    world.expect_exact()


def at_passes(monkeypatch: pytest.MonkeyPatch, when: set[int], do: Callable[[], None]) -> list[int]:
    """Do something right after the loop of those passes has written weights, before anybody has noted that."""
    apply, passes = commits.apply_sparse, [0]

    def wrapped(*arguments: Any) -> Any:
        change = apply(*arguments)
        passes[0] += 1
        if passes[0] in when:
            do()
        return change

    monkeypatch.setattr(commits, "apply_sparse", wrapped)
    return passes


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("when", [{1}, {2}, {4}, {1, 2, 3, 4, 5, 6}], ids=str)
def test_interrupt_while_weights_are_written(world: World, when: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    before = world.bits()
    passes = at_passes(monkeypatch, when, interrupt)
    with pytest.raises(KeyboardInterrupt):
        world.receiver.advance()
    assert passes[0] >= max(when)
    monkeypatch.undo()
    expect_before(world, before)


def test_interrupt_while_an_interrupted_commit_is_taken_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An impatient Ctrl-C, twice: the second comes in the way back."""
    before = world.bits()
    call = world.port.call

    def revert(method: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        if method == "revert":
            interrupt()
        return call(method, arguments)

    monkeypatch.setattr(world.port, "call", revert)
    at_passes(monkeypatch, {1}, interrupt)
    with pytest.raises(KeyboardInterrupt):
        world.receiver.advance()
    monkeypatch.undo()
    expect_before(world, before)


def test_failure_after_some_passes_is_taken_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = world.bits()

    def fail() -> None:
        raise RuntimeError("the device is gone")

    watch_commits(world.port.ranks[-1], "norm", Once(fail).take)
    with pytest.raises(EngineError, match="the device is gone"):
        world.receiver.advance()
    expect_before(world, before)


class Once:
    """Does something the first time."""

    def __init__(self, do: Callable[[], None]) -> None:
        self.do = do
        self.done = False

    def take(self) -> None:
        if not self.done:
            self.done = True
            self.do()


@pytest.mark.parametrize("method", ["advance", "rollback"])
def test_failure_right_after_the_scatter(world: World, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are written and the call fails all the same: the rank must know what it holds, and go back."""
    before = world.bits()
    real, left = commits.commit, [1]

    def failing(*arguments: Any) -> Any:
        measured = real(*arguments)
        if left:
            left.pop()
            raise RuntimeError("failed after the scatter")
        return measured

    monkeypatch.setattr(commits, "commit", failing)
    with pytest.raises(EngineError, match="failed after the scatter"):
        world.receiver.advance() if method == "advance" else world.receiver.rollback(0)
    expect_before(world, before)


def test_way_back_that_fails_too_is_lost_and_not_served(world: World) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    rank = world.port.ranks[0]
    watch_commits(rank, "transposed", fail)
    watch_commits(rank, "embedding", AfterFirst(fail).take)
    watch_commits(rank, "qkv", AfterFirst(fail).take)
    watch_commits(rank, "norm", AfterFirst(fail).take)
    with pytest.raises(WeightsLostError):
        world.receiver.advance()
    assert not rank.intact
    assert world.receiver.status()["state"] == "lost"
    assert len(world.port.ended) == 1


class AfterFirst(Once):
    """Does something every time but the first."""

    def take(self) -> None:
        if self.done:
            self.do()
        self.done = True


def test_postponed_interrupts_come_once_at_the_end() -> None:
    reached = []

    def interrupted() -> None:
        with postponed():
            interrupt()
            reached.append("inside")
            with postponed():
                interrupt()
            interrupt()
            reached.append("still inside")
        reached.append("after")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == ["inside", "still inside"]


def test_other_threads_are_left_alone() -> None:
    seen: list[Any] = []

    def look() -> None:
        with postponed():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]

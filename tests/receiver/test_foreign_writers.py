"""Somebody else writes weights, at awkward moments: never overlooked, and never believed without a look."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hooks import hooked, nothing
from tests.support.world import World
from vllm_delta_sync.engine import commit as commits
from vllm_delta_sync.errors import BusyError, FingerprintError


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    world = World(tmp_path, ranks=request.param)
    # Nothing but the touch itself leads to a look.
    world.follow(rescan_bytes=0)
    return world


def expect_found(world: World) -> None:
    with pytest.raises(FingerprintError, match=r"changed from outside \(update_weights\)"):
        world.receiver.advance()
    assert world.receiver.status()["served"] is None
    assert world.port.log[-1] == "label None"


@pytest.mark.parametrize("moment", ["scan", "poll", "trust"])
def test_touch_while_the_one_before_is_checked(tmp_path: Path, moment: str) -> None:
    """Trust is given for touches that were known before the look; who comes later is looked at again."""
    world = World(tmp_path)
    port = hooked(world)
    world.follow(rescan_bytes=0)
    world.follow_each(1)
    port.ranks[0].touch("start_weight_update")
    seen: list[str] = []

    def interfere(method: str, arguments: dict[str, Any]) -> None:
        name = arguments["operation"] if method == "start" else method
        if name == moment and not seen:
            seen.append(name)
            if moment == "trust":
                # Every tensor was looked at by now.
                world.model.norm.data.view(torch.int16)[0] ^= 1
            port.ranks[0].touch("update_weights")

    port.before = interfere
    world.receiver.check()
    port.before = nothing
    assert seen == [moment]
    assert [rank.touched for rank in port.ranks] == ["update_weights"]
    world.train(2)
    if moment == "trust":
        expect_found(world)
    else:
        world.receiver.advance()
        assert port.ranks[0].touched is None
        world.expect_exact()


def test_touch_while_weights_are_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are hashed one after another: what is written behind the hashing must not count as proven."""
    world = World(tmp_path)
    world.follow(rescan_bytes=0)
    warm_up = commits.warm_up

    def after_hashing(elements: Any) -> None:
        world.model.norm.data.view(torch.int16)[0] ^= 1
        world.port.ranks[0].touch("update_weights")
        monkeypatch.setattr(commits, "warm_up", warm_up)
        warm_up(elements)

    monkeypatch.setattr(commits, "warm_up", after_hashing)
    world.receiver.advance()
    world.train(1)
    expect_found(world)


def test_touched_weights_are_checked_before_a_rollback(world: World) -> None:
    world.follow_each(2)
    world.models[-1].norm.data.view(torch.int16)[0] ^= 1
    world.port.ranks[-1].touch("update_weights")
    before = world.bits()
    pauses = world.port.log.count("pause")
    with pytest.raises(FingerprintError, match=r"changed from outside \(update_weights\)"):
        world.receiver.rollback(1)
    status = world.receiver.status()
    assert (status["served"], status["state"], status["holding"]) == (None, "refused", False)
    assert world.port.log.count("pause") == pauses
    world.expect_bits(before)


def test_touch_that_changed_nothing_does_not_stop_a_rollback(world: World) -> None:
    seen = world.follow_each(2)
    world.port.ranks[-1].touch("reload_weights")
    world.receiver.rollback(1)
    assert all(rank.touched is None for rank in world.port.ranks)
    world.expect_bits(seen[1])


def test_held_server_is_looked_after(world: World) -> None:
    world.follow_each(2)
    world.receiver.hold()
    world.receiver.check()
    assert world.receiver.status()["state"] == "held"
    world.models[0].norm.data.mul_(2.0)
    world.port.ranks[0].touch("update_weights")
    with pytest.raises(FingerprintError):
        world.receiver.check()
    assert (world.receiver.status()["served"], world.receiver.status()["state"]) == (None, "refused")
    world.receiver.mend()
    assert (world.receiver.served_version, world.receiver.status()["state"]) == (2, "held")
    world.expect_exact()


def test_sleeping_server_is_no_error_to_whoever_looks_after_it(world: World) -> None:
    world.follow_each(1)
    world.receiver.hold()
    for rank in world.port.ranks:
        rank.memory.asleep = True
    world.receiver.check()
    assert (world.receiver.status()["state"], world.receiver.status()["last_error"]) == ("held", None)
    with pytest.raises(BusyError):
        world.receiver.rollback(0)
    world.receiver.release()
    world.train(2)
    world.expect_fails("busy")
    world.receiver.hold()
    for rank in world.port.ranks:
        rank.memory.asleep = False
        rank.touch("wake_up")
    world.receiver.check()
    assert all(rank.touched is None for rank in world.port.ranks)
    world.receiver.release()
    world.receiver.advance()
    world.expect_exact()


def test_whoever_touched_the_weights_is_checked(world: World) -> None:
    world.follow_each(1)
    for rank in world.port.ranks:
        rank.touch("update_weights")
    world.train(2)
    world.receiver.advance()
    world.expect_exact()
    assert all(rank.touched is None for rank in world.port.ranks)
    world.models[0].norm.data.view(torch.int16)[0] ^= 1
    world.port.ranks[0].touch("update_weights")
    expect_found(world)


def test_touch_between_staging_and_commit_is_not_overlooked(world: World) -> None:
    port = hooked(world)
    world.receiver.advance()
    world.train(1)

    def touch(method: str, arguments: dict[str, Any]) -> None:
        if method == "pause":
            port.ranks[-1].touch("update_weights")

    port.after = touch
    world.expect_fails("engine")
    port.after = nothing
    world.receiver.advance()
    world.expect_exact()

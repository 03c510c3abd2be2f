"""Merging, the undo log, hold and release."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.world import World
from vllm_delta_sync.engine.commit.apply import FINGERPRINT_BYTES
from vllm_delta_sync.engine.commit.transaction import common_version
from vllm_delta_sync.engine.protocol import A, Commit, Describe, RankFailure, RankRequest, Revert, unwrap
from vllm_delta_sync.errors import ChainError, FingerprintError, NotFoundError


@pytest.fixture(params=[("plain", 1), ("raw", 2)], ids=str)
def world(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    codec, ranks = request.param
    return World(tmp_path, codec=codec, ranks=ranks)


def test_any_version_of_the_log_can_be_gone_back_to(world: World) -> None:
    seen = world.follow_each(5)
    assert world.receiver.status()["undo"] == [4, 3, 2, 1, 0]
    shutil.rmtree(world.url)  # without the network
    for version in (4, 2, 0):
        pauses = world.port.log.count("pause")
        world.receiver.rollback(version)
        assert world.port.log.count("pause") == pauses + 1
        assert world.receiver.served_version == version
        assert world.port.log[-3:] == [f"label {version}", "resume", "confirm"]
        world.expect_bits(seen[version])
        assert world.receiver.verify()["verdict"]
    assert world.receiver.status()["undo"] == []


def test_versions_that_cannot_be_gone_back_to_are_refused_by_name(world: World) -> None:
    seen = world.follow_each(2)
    world.train(3)
    with pytest.raises(NotFoundError, match="version 9 is not published; the head is 3"):
        world.receiver.rollback(9)
    with pytest.raises(ChainError, match="version 3 is newer than the served version 2"):
        world.receiver.rollback(3)
    world.expect_bits(seen[2])
    assert (world.receiver.status()["holding"], world.receiver.status()["last_error"]) == (False, None)


@pytest.mark.parametrize("undo_bytes", [0, 10**9])
def test_version_outside_the_log_is_gone_back_to_through_the_chain(world: World, undo_bytes: int) -> None:
    seen = world.follow_each(5)
    world.follow(undo_bytes=undo_bytes)
    world.receiver.advance()
    for version in (3, 1, 0):
        pauses = world.port.log.count("pause")
        world.receiver.rollback(version)
        assert world.port.log.count("pause") == pauses + 1
        status = world.receiver.status()
        assert (status["served"]["version"], status["state"], status["undo"]) == (version, "held", [])
        world.expect_bits(seen[version])
        assert world.receiver.verify()["verdict"]
    world.receiver.release()
    world.receiver.advance()
    world.expect_bits(seen[5])
    # The log begins anew, with the way forward.
    assert world.receiver.status()["undo"] == ([] if undo_bytes == 0 else [0])


def test_version_of_a_run_that_replaced_the_served_one_is_not_rolled_back_to(tmp_path: Path) -> None:
    """It has the number that was asked for, and weights that were never meant."""
    world = World(tmp_path)
    world.follow(undo_bytes=0)
    seen = world.follow_each(3)
    shutil.rmtree(world.url)
    World(tmp_path / "other", with_base=False, url=world.url).train(4, 5, 6)
    with pytest.raises(ChainError, match="nothing was rolled back"):
        world.receiver.rollback(2)
    world.expect_bits(seen[3])
    assert not world.receiver.status()["holding"]
    world.receiver.advance()
    assert world.receiver.served_version == 3


def test_pause_that_runs_out_on_the_way_back_through_the_chain(world: World) -> None:
    """What is taken back then is what was just left, not what the log holds of before."""
    world.follow(undo_bytes=10**9)
    seen = world.follow_each(3)
    world.receiver.rollback(2)
    world.train(4, 5)
    world.receiver.release()
    world.receiver.advance()
    original = world.port.call
    at: list[int | None] = []

    def call(request: RankRequest[A]) -> list[A | RankFailure]:
        answers = original(request)
        if isinstance(request, Commit):
            at.append(common_version(original(Describe())))
        return answers

    world.port.call = call  # type: ignore[method-assign]
    world.receiver.rollback(4)
    assert at == [5]
    world.receiver.rollback(3)
    assert at == [5, 4]
    world.expect_bits(seen[3])


def test_log_keeps_within_its_memory(world: World) -> None:
    world.follow_each(1)
    one = max(rank.undo_bytes for rank in unwrap(world.port.call(Describe())))
    world.follow(undo_bytes=int(2.5 * one))
    world.follow_each(6)
    assert 1 <= len(world.receiver.status()["undo"]) <= 3
    assert all(rank.undo_bytes <= 2.5 * one for rank in unwrap(world.port.call(Describe())))
    world.follow(undo_bytes=0)
    world.receiver.advance()
    world.train_and_follow(7)
    assert world.receiver.status()["undo"] == []


def test_commits_that_change_nothing_take_room_too(world: World) -> None:
    """Each keeps the fingerprint of every tensor."""
    world.follow(undo_bytes=1000)
    world.receiver.advance()
    for step in range(1, 4):
        world.train(step, scale=0.0)
        world.receiver.advance()
    assert world.receiver.status()["undo"] == []
    assert world.receiver.history.undo_manifests == {}
    world.follow(undo_bytes=3 * FINGERPRINT_BYTES * len(world.tensors))
    world.receiver.advance()
    for step in range(4, 9):
        world.train(step, scale=0.0)
        world.receiver.advance()
    assert world.receiver.status()["undo"] == [7, 6, 5]


def test_a_pause_that_waits_for_requests_is_shown(world: World) -> None:
    """Both a commit and a rollback from the undo log: draining until generation has stopped, then committing."""
    world.follow(pause_mode="wait", undo_bytes=10**9)
    call, states = world.port.call, []

    def shown(request: RankRequest[A]) -> list[A | RankFailure]:
        if isinstance(request, Commit | Revert):
            states.append((request.operation, world.receiver.status()["state"]))
        return call(request)

    world.port.call = shown  # type: ignore[method-assign]
    seen = world.follow_each(2)
    world.receiver.rollback(1)
    assert all(map(torch.equal, world.bits(), seen[1]))
    assert states == [("commit", "committing"), ("commit", "committing"), ("revert", "committing")]


def test_weights_changed_from_outside_are_not_gone_back_from(world: World) -> None:
    world.follow_each(2)
    world.models[0].qkv.data.mul_(3.0)
    before = world.bits()
    with pytest.raises(FingerprintError):
        world.receiver.rollback(1)
    world.expect_bits(before)
    assert world.receiver.status()["served"] is None
    assert world.receiver.status()["state"] == "refused"


def test_changed_weights_are_repaired_from_the_bucket(world: World) -> None:
    world.follow_each(3)
    for model in world.models:
        model.norm.data.mul_(2.0)
        model.qkv.data[3:5].fill_(7.0)
    world.train(4)
    with pytest.raises(FingerprintError):
        world.receiver.advance()
    assert (world.receiver.status()["served"], world.receiver.status()["state"]) == (None, "refused")
    world.receiver.advance()
    status = world.receiver.status()
    assert (status["served"]["version"], status["state"], status["last_error"]) == (4, "idle", None)
    world.expect_exact()
    assert world.receiver.verify()["verdict"]
    assert status["undo"] == [3]
    world.receiver.rollback(3)
    world.train(5)
    world.receiver.release()
    world.receiver.advance()
    world.expect_exact()

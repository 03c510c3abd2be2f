"""A version is applied on all ranks or on none, whatever fails when; the receiver serves a version and says so, or
says that it does not."""

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.device import SimulatedDevice
from tests.support.forge import BAD_VERSIONS
from tests.support.hooks import HookedPort, failing, hooked, nothing, watch_commits
from tests.support.modules import ModulePort, named
from tests.support.seeds import seeds
from tests.support.world import World
from trainer_side import Publisher
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.engine import protocol
from vllm_delta_sync.engine.api.embedded import OfflineSync
from vllm_delta_sync.engine.commit import apply as commits
from vllm_delta_sync.engine.commit import transaction
from vllm_delta_sync.engine.commit.transaction import all_hold, common_version
from vllm_delta_sync.engine.follow import identify
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.follow.updater import MAX_REPAIRS
from vllm_delta_sync.engine.model import device_patch
from vllm_delta_sync.engine.model.patch import HostBatch
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.engine.protocol import A, Commit, Describe, RankFailure, RankRequest, Revert
from vllm_delta_sync.errors import (
    DeltaSyncError,
    EngineError,
    FingerprintError,
    MemoryLimitError,
    StoreError,
    WeightsLostError,
)
from vllm_delta_sync.settings import Settings

PATHS = [
    pytest.param((None, 2), id="in host memory, two ranks"),
    pytest.param((SimulatedDevice, 1), id="on a device, one rank"),
    pytest.param((None, 1), id="in host memory, one rank", marks=pytest.mark.slow),
    pytest.param((SimulatedDevice, 2), id="on a device, two ranks", marks=pytest.mark.slow),
]


@pytest.fixture(params=PATHS, autouse=True)
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many there are. Every test of this file runs on both paths of a commit."""
    device, count = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transaction, "WAIT_S", 0.0)
        if device is not None:
            patch.setattr(WeightMemory, "for_model", lambda model: WeightMemory(device()))
        yield count


@pytest.fixture
def world(tmp_path: Path, ranks: int) -> World:
    return World(tmp_path, ranks=ranks)


def expect_serves(world: World, version: int, bits: list[torch.Tensor], state: str = "idle") -> None:
    status = world.receiver.status()
    assert (status["served"]["version"], status["state"]) == (version, state)
    world.expect_bits(bits)
    assert [rank.version for rank in world.port.ranks] == [version] * world.ranks
    assert world.receiver.verify()["verdict"]
    assert world.port.ended == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_rank_that_fails_is_taken_back_on_all(
    tmp_path: Path, rank: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, ranks=2)
    world.follow_each(1)
    world.train(2)
    answer = world.port.ranks[rank].answer

    def fail(request: RankRequest[Any]) -> Any:
        if not isinstance(request, Commit):
            return answer(request)
        if when == "after":
            answer(request)
        raise EngineError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(world.port.ranks[rank], "answer", fail)
        world.expect_fails("engine")
    assert world.receiver.status()["state"] == "idle"
    assert world.port.ended == []
    world.receiver.advance()
    world.expect_exact()
    assert world.receiver.verify()["verdict"]


def test_drift_found_beside_several_staged_versions_stops_them_all(world: World) -> None:
    """The weights are wrong, not the versions: fewer of them at once would not be looked at again, and be served."""
    world.follow(rescan_bytes=1)
    world.receiver.advance()
    first = world.receiver.history.run.table[0].name
    assert first == "embedding.weight"
    world.models[0].embedding.data.view(torch.int16)[0, 0] ^= 1
    world.train(1, 2, 3, 4)
    with pytest.raises(FingerprintError, match=r"embedding\.weight"):
        world.receiver.advance()
    assert "pause" not in world.port.log
    assert world.port.log[-1] == "label None"
    status = world.receiver.status()
    assert (status["served"], status["state"]) == (None, "refused")
    world.receiver.advance()
    assert world.receiver.served_version == 4
    world.expect_exact()


class Memory:
    """Runs out, with torch's own error, at the chosen passes of a commit."""

    def __init__(self, *full_at: int) -> None:
        self.passes = 0
        self.full_at = full_at

    def take(self) -> None:
        self.passes += 1
        if self.passes in self.full_at:
            torch.empty(1 << 60, dtype=torch.int16)


@pytest.mark.parametrize("full_at", [(1,), (2,), (3,), (2, 3)])
def test_rollback_that_fails_midway_keeps_the_version(world: World, full_at: tuple[int, ...]) -> None:
    seen = world.follow_each(4)
    watch_commits(world.port.ranks[-1], "norm", Memory(*full_at).take)
    with pytest.raises(MemoryLimitError, match="out of memory"):
        world.receiver.rollback(1)
    expect_serves(world, 4, seen[4])
    assert world.receiver.status()["undo"] == [3, 2, 1, 0]
    assert world.receiver.status()["last_error"]["kind"] == "memory"
    world.receiver.rollback(1)
    expect_serves(world, 1, seen[1], "held")


def test_rank_that_cannot_undo_a_wrong_step_back_says_so(world: World) -> None:
    """Changed from outside, found midway, and no memory to return: neither version is held."""
    world.follow_each(3)
    world.models[-1].norm.data.mul_(3.0)
    watch_commits(world.port.ranks[-1], "norm", Memory(2, 3, 4, 5, 6).take)
    with pytest.raises(MemoryLimitError):
        world.port.ranks[-1].revert(Revert(1))
    assert not world.port.ranks[-1].intact


def expire(port: HookedPort, version: int) -> None:
    """What the watchdog in the engine core does once the pause of a commit has expired."""
    for rank in port.ranks:
        rank.revert(Revert(version))
    port.log.append(f"label {version}")


@pytest.mark.parametrize("lost", ["describe", "resume"])
def test_expired_pause_is_understood_though_a_call_fails(world: World, lost: str) -> None:
    port = hooked(world)
    seen = world.follow_each(1)
    world.train(2)
    calls = [0]

    def resume() -> bool:
        calls[0] += 1
        if calls[0] > 1:
            return False  # the outcome is handed out once
        # Nobody may be told of a version that the engine then turns out to have left.
        assert world.receiver.served_version == 1
        expire(port, 1)
        if lost == "resume":
            raise EngineError("the engine did not answer in time")
        port.before = failing("describe")
        return True

    port.on_resume = resume
    with pytest.raises(EngineError) as caught:
        world.receiver.advance()
    assert caught.value.kind == "pause_expired"
    expect_serves(world, 1, seen[1])
    world.receiver.advance()
    assert world.receiver.served_version == 2
    world.expect_exact()


def test_repair_gives_no_label_before_it_is_proven_and_ends(world: World) -> None:
    port = hooked(world)
    world.follow_each(2)
    world.models[0].norm.data.mul_(2.0)
    assert not world.receiver.verify()["verdict"]
    port.log.clear()

    def write_on(method: str, arguments: dict[str, Any]) -> None:
        if method == "start" and arguments["operation"] == "scan":
            world.models[0].qkv.data[0].fill_(3.0)

    port.before = write_on
    for attempt in range(MAX_REPAIRS):
        assert world.receiver.can_repair, attempt
        with pytest.raises(FingerprintError):
            world.receiver.advance()
        status = world.receiver.status()
        assert (status["served"], status["state"]) == (None, "refused")
    assert not world.receiver.can_repair
    assert {entry for entry in port.log if entry.startswith("label")} == {"label None"}
    assert port.log.count("pause") == port.log.count("resume") == MAX_REPAIRS


def test_label_that_fails_when_the_run_was_replaced(world: World, tmp_path: Path) -> None:
    port = hooked(world)
    world.follow_each(3)
    old = world.receiver.run_id
    world.publisher.close()
    shutil.rmtree(world.url)
    world.publisher = Publisher(world.pairs, bucket=world.url, base=tmp_path / "base")
    world.train(1)
    port.before = failing("label")
    with pytest.raises(EngineError):
        world.receiver.advance()
    status = world.receiver.status()
    assert status["run"] == world.receiver.history.run.info.run != old
    assert (status["served"], status["head"], status["lag"], status["undo"]) == (None, None, None, [])
    world.receiver.advance()
    assert world.receiver.served_version == 1
    world.expect_exact()


@pytest.mark.parametrize("times", [1, 3])
def test_a_label_that_could_not_be_set_is_set_at_a_later_poll(world: World, times: int) -> None:
    """Outputs must not carry the version that was served before for longer than the engine refuses to be labelled."""
    port = hooked(world)
    world.follow_each(2)
    world.models[0].norm.data.mul_(2.0)
    port.before = failing("label", times)
    port.log.clear()
    assert not world.receiver.verify()["verdict"]
    assert world.receiver.status()["served"] is None
    assert port.log == []
    for _ in range(times - 1):
        with pytest.raises(EngineError, match="did not answer"):
            world.receiver.advance()
        assert world.receiver.status()["served"] is None
    world.receiver.advance()
    labels = [entry for entry in port.log if entry.startswith("label")]
    assert (labels[0], labels[-1]) == ("label None", "label 2")
    expect_serves(world, 2, world.bits())
    port.log.clear()
    world.receiver.check_served()
    assert port.log == []


def test_a_lost_pause_before_the_commit_of_a_repair_leaves_something_to_settle_on(world: World) -> None:
    """Even where the commit before was never confirmed: what is held is no version, and the watchdog must know that."""
    port = hooked(world)
    world.follow_each(1)
    port.before = failing("confirm", times=2)
    world.train_and_follow(2)
    assert not any(rank.confirmed for rank in port.ranks)
    world.models[0].norm.data.mul_(2.0)
    assert not world.receiver.verify()["verdict"]
    settled: list[int | None] = []

    def lost(method: str, arguments: dict[str, Any]) -> None:
        if method == "commit":
            # As the watchdog settles the engine when it finds the pause expired.
            version = common_version([rank.describe() for rank in port.ranks])
            assert all_hold([rank.describe() for rank in port.ranks], version, confirmed=True)
            settled.append(version)
            raise EngineError("the pause expired before commit")

    port.before = lost
    with pytest.raises(EngineError, match="the pause expired"):
        world.receiver.advance()
    assert settled == [None]
    port.before = nothing
    world.receiver.advance()
    assert world.receiver.served_version == 2
    world.expect_exact()
    assert port.ended == []


def test_commit_whose_trim_fails_is_confirmed_at_the_next_look(world: World) -> None:
    port = hooked(world)
    seen = world.follow_each(1)
    port.before = failing("confirm")
    world.train_and_follow(2)
    assert world.receiver.served_version == 2
    assert not any(rank.confirmed for rank in port.ranks)
    world.receiver.advance()
    answers = port.call(Describe())
    assert all_hold(answers, 2, confirmed=True)
    assert common_version(answers) == 2
    assert world.receiver.status()["undo"] == [1, 0]
    world.receiver.rollback(1)
    expect_serves(world, 1, seen[1], "held")


def test_no_version_follows_one_that_is_not_confirmed(world: World) -> None:
    """A pause that is lost would take the commit before it back too, and nobody would know."""
    port = hooked(world)
    seen = world.follow_each(1)
    world.follow(stage_bytes=0)
    world.receiver.advance()
    world.train(2, 3)
    port.before = failing("confirm", times=2)
    with pytest.raises(EngineError, match="version 2 is served, but could not be confirmed"):
        world.receiver.advance()
    status = world.receiver.status()
    assert (status["served"]["version"], status["state"], port.log.count("pause")) == (2, "idle", 2)
    world.receiver.advance()
    world.receiver.rollback(1)
    expect_serves(world, 1, seen[1], "held")


@pytest.mark.parametrize("went_back", [False, True])
def test_pause_that_expires_while_a_failed_one_is_ended(world: World, went_back: bool) -> None:
    port = hooked(world)
    seen = world.follow_each(2)
    world.train(3)
    port.before = failing("commit")

    def resume() -> bool:
        port.on_resume = lambda: False
        if went_back:
            expire(port, 1)
        return True

    port.on_resume = resume
    with pytest.raises(DeltaSyncError) as caught:
        world.receiver.advance()
    if went_back:
        assert caught.value.kind == "weights_lost"
        assert world.receiver.status()["state"] == "lost"
        return
    expect_serves(world, 2, seen[2])
    world.receiver.advance()
    world.expect_exact()


def test_pause_that_expires_after_all_ranks_went_back(world: World) -> None:
    """The watchdog finds them agreed on a proven version, and keeps it; so does the controller."""
    port = hooked(world)
    seen = world.follow_each(3)

    ended: list[str] = []

    def expired(method: str, arguments: dict[str, Any]) -> None:
        if (method == "label" and not ended) or (method in ("commit", "revert") and ended):
            ended.append(method)
            raise EngineError(f"the pause expired before {method}, so nothing was done")

    port.before = expired
    world.receiver.rollback(1)
    assert all_hold(port.call(Describe()), 1, confirmed=True)
    port.before = nothing
    assert port.log[-4:] == ["label 1", "resume", "resume", "confirm"]
    expect_serves(world, 1, seen[1], "held")


def test_store_that_fails_while_weights_are_recognized_loses_no_note(world: World) -> None:
    """Between asking the ranks and telling them what they hold, nothing they know may be forgotten."""
    world.follow_each(3)
    second = Receiver(world.port, Settings(bucket=world.url))
    gone = StoreError("the network is gone")
    with mock.patch.object(identify, "version_0_of", side_effect=gone), pytest.raises(StoreError):
        second.advance()
    world.receiver = second
    second.advance()
    assert (second.served_version, second.status()["state"], second.status()["commits"]) == (3, "idle", 0)
    world.expect_exact()


def test_store_that_fails_while_versions_are_staged_is_asked_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer versions at once would take as long to fail. Afterwards all of them are one commit, as if it had not."""
    world.receiver.advance()
    world.train(*range(1, 9))
    get, asked = LocalBucket.get, list[str]()

    def read(bucket: LocalBucket, key: str, **limit: Any) -> bytes:
        if not key.startswith("objects/"):
            return get(bucket, key, **limit)
        asked.append(key)
        raise StoreError("the network is gone")

    with monkeypatch.context() as down:
        down.setattr(LocalBucket, "get", read)
        with pytest.raises(StoreError, match="the network is gone"):
            world.receiver.advance()
    assert len(asked) == world.ranks
    world.receiver.advance()
    assert (world.receiver.served_version, world.receiver.status()["commits"]) == (8, 1)
    world.expect_exact()


def test_damaged_manifest_of_the_served_version_only_shows(world: World) -> None:
    seen = world.follow_each(3)
    manifest = Path(world.url) / "versions" / "0000000003.json"
    good = manifest.read_bytes()
    manifest.write_bytes(b"{}")
    world.receiver.advance()
    outcome = world.receiver.verify()
    assert (outcome["verdict"], outcome["chain"]) == (True, False)
    assert "0000000003.json" in outcome["reason"]
    expect_serves(world, 3, seen[3])
    manifest.write_bytes(good)
    assert world.receiver.verify()["chain"] is True
    world.train_and_follow(4)


def test_one_bad_version_behind_many_good_ones_costs_few_pauses(world: World) -> None:
    world.receiver.advance()
    world.train(*range(1, 17))
    next(bad for bad in BAD_VERSIONS if bad.name == "made against other weights").write(Path(world.url))
    with pytest.raises(FingerprintError, match="other weights than version 16"):
        world.receiver.advance()
    assert world.receiver.served_version == 16
    world.expect_exact()
    # Logarithmic; one by one it would be a pause and a rescan per version.
    assert world.port.log.count("pause") <= 6
    assert world.port.log.count("revert") <= 2


# Ctrl-C and failures while weights are written


@pytest.fixture
def moved(world: World) -> World:
    """Version 1 is served, and version 2 is there."""
    world.follow_each(1)
    world.train(2)
    return world


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Whatever runs these tests gets its own handler back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def expect_before(moved: World, bits: list[torch.Tensor]) -> None:
    """Version 1 is served and held, generation goes on, and the next look takes version 2."""
    moved.expect_bits(bits)
    assert moved.port.log[-2:] == ["label 1", "resume"]
    assert [rank.version for rank in moved.port.ranks] == [1] * moved.ranks
    assert moved.receiver.verify()["verdict"]
    moved.receiver.advance()
    assert moved.receiver.served_version == 2
    moved.expect_exact()


def at_passes(monkeypatch: pytest.MonkeyPatch, when: set[int], do: Callable[[], None]) -> list[int]:
    """Do something right after the loop of those passes has written weights, before anything has noted that."""
    passes = [0]

    def wrap(module: Any, name: str) -> None:
        write = getattr(module, name)

        def wrapped(*arguments: Any) -> Any:
            change = write(*arguments)
            passes[0] += 1
            if passes[0] in when:
                do()
            return change

        monkeypatch.setattr(module, name, wrapped)

    wrap(HostBatch, "apply")
    wrap(device_patch, "_commit_piece")
    return passes


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("when", [{1}, {2}, {4}, {1, 2, 3, 4, 5, 6}], ids=str)
def test_interrupt_while_weights_are_written(moved: World, when: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    before = moved.bits()
    passes = at_passes(monkeypatch, when, interrupt)
    with pytest.raises(KeyboardInterrupt):
        moved.receiver.advance()
    assert passes[0] >= max(when)
    monkeypatch.undo()
    expect_before(moved, before)


def test_interrupt_while_an_interrupted_commit_is_taken_back(moved: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An impatient Ctrl-C, twice: the second comes in the way back."""
    before = moved.bits()
    call = moved.port.call

    def revert(request: RankRequest[A]) -> list[A | RankFailure]:
        if isinstance(request, protocol.Revert):
            interrupt()
        return call(request)

    monkeypatch.setattr(moved.port, "call", revert)
    at_passes(monkeypatch, {1}, interrupt)
    with pytest.raises(KeyboardInterrupt):
        moved.receiver.advance()
    monkeypatch.undo()
    expect_before(moved, before)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("move", ["advance", "rollback"])
def test_interrupt_while_generation_resumes(
    moved: World, move: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on, with the new version, which is shown as served."""
    resume, log = moved.port.resume, moved.port.log

    def interrupted() -> bool:
        if when == "before":
            interrupt()
        expired = resume()
        if when == "after":
            interrupt()
        return expired

    monkeypatch.setattr(moved.port, "resume", interrupted)
    target = 2 if move == "advance" else 0
    with pytest.raises(KeyboardInterrupt):
        moved.receiver.advance() if move == "advance" else moved.receiver.rollback(target)
    monkeypatch.undo()
    assert (moved.receiver.served_version, log[-2:]) == (target, [f"label {target}", "resume"])
    moved.receiver.release()
    moved.receiver.advance()
    assert moved.receiver.served_version == 2
    moved.expect_exact()


def test_interrupt_right_after_a_rollback_of_an_llm(moved: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves no hold, which only a server's operator could end."""
    sync, call = OfflineSync(moved.receiver), moved.port.call

    def confirm(request: RankRequest[A]) -> list[A | RankFailure]:
        if isinstance(request, protocol.Confirm):
            interrupt()
        return call(request)

    monkeypatch.setattr(moved.port, "call", confirm)
    with pytest.raises(KeyboardInterrupt):
        sync.rollback(0)
    monkeypatch.undo()
    assert (sync.status()["served"]["version"], sync.status()["state"]) == (0, "idle")
    assert sync.to()["served"]["version"] == 2
    moved.expect_exact()


@pytest.mark.parametrize("method", ["advance", "rollback"])
def test_failure_right_after_the_scatter(moved: World, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are written and the call fails all the same: the rank must know what it holds, and go back."""
    before = moved.bits()
    real, left = commits.apply_patch, [1]

    def fails_once(*arguments: Any) -> Any:
        measured = real(*arguments)
        if left:
            left.pop()
            raise RuntimeError("failed after the scatter")
        return measured

    monkeypatch.setattr(commits, "apply_patch", fails_once)
    with pytest.raises(EngineError, match="failed after the scatter"):
        moved.receiver.advance() if method == "advance" else moved.receiver.rollback(0)
    expect_before(moved, before)


def test_way_back_that_fails_too_is_lost_and_not_served(moved: World) -> None:
    failed = False

    def fail() -> None:
        nonlocal failed
        failed = True
        raise RuntimeError("the device is gone")

    rank = moved.port.ranks[0]
    watch_commits(rank, "transposed", fail)
    for name in ("embedding", "qkv", "norm"):
        watch_commits(rank, name, lambda: fail() if failed else None)
    with pytest.raises(WeightsLostError):
        moved.receiver.advance()
    assert not rank.intact
    assert moved.receiver.status()["state"] == "lost"
    assert len(moved.port.ended) == 1


# Random faults at random calls: after every action, what status claims is what every rank holds


SEEDS = (*seeds(12, 25), 105)
ACTIONS = ("train", "train", "grow", "advance", "advance", "advance", "rollback", "hold", "release", "verify")
LOOKED_AT = ("poll", "describe")


class FaultyPort(ModulePort):
    """An engine with a heartbeat on its pause, whose calls fail by chance: before they act, after, or as a whole."""

    def __init__(self, chance: random.Random, *models: Any) -> None:
        super().__init__(*models)
        self.chance = chance
        self.rate = 0.0
        self.paused = False
        self.expired = False
        self.labelled: int | None = None

    def fails(self, part: float = 1.0) -> bool:
        return self.chance.random() < part * self.rate

    def watchdog(self) -> None:
        """As the engine core's: once the pause has expired it brings all ranks to one version and goes on."""
        if not self.paused or not self.fails():
            return
        held = [self.call_rank(rank, Describe()) for rank in self.ranks]
        version = common_version(held)
        if not all_hold(held, version, confirmed=True):
            for rank in self.ranks:
                rank.revert(Revert(version))
        self.labelled, self.paused, self.expired = version, False, True

    def call(self, request: RankRequest[A]) -> list[A | RankFailure]:
        method, _ = named(request)
        self.watchdog()
        moves = method in ("commit", "revert")
        if moves and not self.paused:
            raise EngineError(f"the pause expired before {method}")
        answers = [self.ask(index, request) for index in range(len(self.ranks))]
        self.watchdog()
        # How often it is polled is a matter of time: asked of chance, no story would be told twice alike.
        if not moves and method != "poll" and self.fails(1 / 3):
            raise EngineError(f"the answer to {method} was lost")
        return answers

    def ask(self, index: int, request: RankRequest[A]) -> A | RankFailure:
        method, _ = named(request)
        fault = RankFailure("engine", f"injected at {method} of rank {index}")
        if method not in LOOKED_AT and self.fails():
            return fault
        answer = self.call_rank(self.ranks[index], request)
        return fault if method not in LOOKED_AT and self.fails() else answer

    def pause(self) -> None:
        if self.fails():
            raise EngineError("the pause failed")
        self.paused, self.expired = True, False
        if self.fails():
            raise EngineError("the pause timed out, and took effect")

    def resume(self) -> bool:
        self.watchdog()
        expired, self.expired, self.paused = self.expired, False, False
        return expired

    def label(self, version: int | None, run: str | None) -> None:
        if self.fails(1 / 3):
            raise EngineError("the label failed")
        self.labelled = version

    def label_paused(self, version: int | None, run: str | None) -> None:
        self.watchdog()
        if not self.paused:
            raise EngineError("the pause expired before its label")
        self.labelled = version
        self.watchdog()


class Story:
    """One world, and what every version's bits are."""

    def __init__(self, root: Path, seed: int, ranks: int) -> None:
        self.chance = random.Random(seed)
        self.rate = self.chance.choice([0.02, 0.05, 0.1])
        self.world = World(root, ranks=ranks, codec=self.chance.choice(["plain", "raw"]))
        self.port = FaultyPort(self.chance, *self.world.models)
        self.world.use(self.port)
        self.world.follow(
            rescan_bytes=0,
            undo_bytes=self.chance.choice([0, 20_000, 10**9]),
            stage_bytes=self.chance.choice([0, 80_000, 10**9]),
        )
        self.bits = [self.world.bits()]

    def train(self, grow: bool) -> None:
        if grow:
            for tensor in list(self.world.tensors.values())[:3]:
                tensor.mul_(-1.5)
        self.world.train(len(self.bits))
        fresh = [parameter for model in self.world.fresh() for parameter in model.parameters()]
        self.bits.append([parameter.view(torch.int16).clone() for parameter in fresh])

    def act(self, action: str) -> DeltaSyncError | None:
        receiver, versions = self.world.receiver, len(self.bits)
        try:
            if action == "rollback":
                receiver.rollback(self.chance.randrange(versions))
            elif action == "advance":
                receiver.advance(self.chance.choice([None, None, self.chance.randrange(versions)]))
            else:
                getattr(receiver, action)()
        except DeltaSyncError as error:
            return error
        return None

    def expect_honest(self, done: list[str]) -> None:
        status = self.world.receiver.status()
        assert not self.port.paused, done
        served = status["served"]
        if served is None:
            assert self.port.labelled is None, done
            assert status["state"] not in ("idle", "held"), done
            return
        assert status["state"] in ("idle", "held"), done
        assert self.port.labelled == served["version"], done
        for now, right in zip(self.world.bits(), self.bits[served["version"]], strict=True):
            assert torch.equal(now, right), done


@pytest.mark.parametrize("seed", SEEDS)
def test_status_tells_the_truth_whatever_fails(tmp_path: Path, seed: int, ranks: int) -> None:
    story = Story(tmp_path, seed, ranks)
    done: list[str] = []
    for _ in range(25):
        action = story.chance.choice(ACTIONS)
        if action in ("train", "grow"):
            story.train(action == "grow")
            continue
        story.port.rate = story.rate
        error = story.act(action)
        story.port.rate = 0.0
        done.append(f"{action}: {error}")
        if story.world.receiver.status()["state"] == "lost":
            assert story.port.ended, done
            return
        story.expect_honest(done)
    story.world.receiver.release()
    newest = len(story.bits) - 1
    deadline = time.monotonic() + 120
    while story.world.receiver.served_version != newest:
        assert time.monotonic() < deadline, done
        done.append(f"at last: {story.act('advance')}")
        story.expect_honest(done)
    story.world.expect_exact()

"""Something else writes weights, at awkward moments: never overlooked, and never believed without a look; and which
thread touches weights when: set-up, commits, sleep, and vLLM's own writers."""

import inspect
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.device import SimulatedDevice
from tests.support.hooks import hooked, nothing
from tests.support.modules import FusedModel, ModulePort
from tests.support.services import WAIT, wait_until
from tests.support.world import World
from vllm_delta_sync.engine.compat import write_hooks
from vllm_delta_sync.engine.model import route_map as engine_routes
from vllm_delta_sync.engine.model.device_patch import DevicePatch
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.engine.protocol import Adapter, Identify, Outcome, Poll, Progress, RankFailure, RankRequest, Scan
from vllm_delta_sync.engine.worker.rank_worker import RankWorker
from vllm_delta_sync.engine.worker.worker_extension import WorkerExtension
from vllm_delta_sync.errors import BusyError, FingerprintError
from vllm_delta_sync.format.fingerprint import Fingerprint


@pytest.fixture(params=[pytest.param(1, id="one rank", marks=pytest.mark.slow), pytest.param(2, id="two ranks")])
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


@pytest.mark.parametrize("moment", ["scan", "poll", "clear_external_write"])
def test_touch_while_the_one_before_is_checked(tmp_path: Path, moment: str) -> None:
    """Trust is given for touches that were known before the look; who comes later is looked at again."""
    world = World(tmp_path)
    port = hooked(world)
    world.follow(rescan_bytes=0)
    world.follow_each(1)
    port.ranks[0].note_external_write("start_weight_update")
    seen: list[str] = []

    def interfere(method: str, arguments: dict[str, Any]) -> None:
        name = arguments["operation"] if method == "start" else method
        if name == moment and not seen:
            seen.append(name)
            if moment == "clear_external_write":
                # Every tensor was looked at by now.
                world.model.norm.data.view(torch.int16)[0] ^= 1
            port.ranks[0].note_external_write("update_weights")

    port.before = interfere
    world.receiver.check_served()
    port.before = nothing
    assert seen == [moment]
    assert [rank.external_writer for rank in port.ranks] == ["update_weights"]
    world.train(2)
    if moment == "clear_external_write":
        expect_found(world)
    else:
        world.receiver.advance()
        assert port.ranks[0].external_writer is None
        world.expect_exact()


def test_touch_while_weights_are_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are hashed one after another: what is written behind the hashing must not count as proven."""
    world = World(tmp_path)
    world.follow(rescan_bytes=0)
    hash_routes = RouteMap.fingerprint_routes
    hashed: list[Any] = []

    def write_behind(routes: RouteMap, tensors: Any) -> Any:
        found = hash_routes(routes, tensors)
        if not hashed:
            world.model.norm.data.view(torch.int16)[0] ^= 1
            world.port.ranks[0].note_external_write("update_weights")
        hashed.append(tensors)
        return found

    monkeypatch.setattr(RouteMap, "fingerprint_routes", write_behind)
    world.receiver.advance()
    world.train(1)
    expect_found(world)


def test_touched_weights_are_checked_before_a_rollback(world: World) -> None:
    world.follow_each(2)
    world.models[-1].norm.data.view(torch.int16)[0] ^= 1
    world.port.ranks[-1].note_external_write("update_weights")
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
    world.port.ranks[-1].note_external_write("reload_weights")
    world.receiver.rollback(1)
    assert all(rank.external_writer is None for rank in world.port.ranks)
    world.expect_bits(seen[1])


@pytest.mark.parametrize(("policy", "remedy"), [("follow", "wait"), ("manual", "POST /delta_sync/sync")])
def test_restart_is_not_the_remedy_where_weights_are_rebuilt(world: World, policy: str, remedy: str) -> None:
    """As after sleep at level 2, before anything is asked for."""
    world.follow(policy=policy)
    world.follow_each(2)
    world.models[0].norm.data.mul_(2.0)
    world.port.ranks[0].note_external_write("wake_up")
    with pytest.raises(FingerprintError):
        world.receiver.check_served()
    (reason,) = world.receiver.status()["ready"]["reasons"]
    assert reason.endswith(f"changed from outside (wake_up)); {remedy}: the weights are rebuilt from the bucket")
    world.receiver.advance()
    assert world.receiver.status()["ready"] == {"ready": True, "reasons": []}
    world.expect_exact()


@pytest.mark.parametrize("undo", [0, 1 << 30])
@pytest.mark.parametrize(
    ("move", "to", "reached"), [("advance", None, 3), ("advance", 3, 3), ("target", "head", 3), ("rollback", 1, 1)]
)
def test_weights_that_a_sleep_has_lost_are_rebuilt_before_they_are_moved(
    world: World, move: str, to: int | str | None, reached: int, undo: int
) -> None:
    """At level 2 vLLM gives them up: what is asked for next must not fail because of that."""
    world.follow(rescan_bytes=0, undo_bytes=undo)
    seen = world.follow_each(2)
    world.train(3)
    for model, rank in zip(world.models, world.port.ranks, strict=True):
        for parameter in model.parameters():
            parameter.data.zero_()
        rank.note_external_write("wake_up")
    getattr(world.receiver, move)(to)
    assert (world.receiver.served_version, world.receiver.status()["last_error"]) == (reached, None)
    if reached == 3:
        world.expect_exact()
    else:
        world.expect_bits(seen[reached])
    assert world.receiver.verify()["verdict"]


def test_sleeping_server_is_no_error_to_whoever_looks_after_it(world: World) -> None:
    world.follow_each(1)
    world.receiver.hold()
    for rank in world.port.ranks:
        rank.memory.asleep = True
    world.receiver.check_served()
    assert (world.receiver.status()["state"], world.receiver.status()["last_error"]) == ("held", None)
    with pytest.raises(BusyError):
        world.receiver.rollback(0)
    world.receiver.release()
    world.train(2)
    world.expect_fails("busy")
    world.receiver.hold()
    for rank in world.port.ranks:
        rank.memory.asleep = False
        rank.note_external_write("wake_up")
    world.receiver.check_served()
    assert all(rank.external_writer is None for rank in world.port.ranks)
    world.receiver.release()
    world.receiver.advance()
    world.expect_exact()


def test_touch_between_staging_and_commit_is_not_overlooked(world: World) -> None:
    port = hooked(world)
    world.receiver.advance()
    world.train(1)

    def touch(method: str, arguments: dict[str, Any]) -> None:
        if method == "pause":
            port.ranks[-1].note_external_write("update_weights")

    port.after = touch
    world.expect_fails("engine")
    port.after = nothing
    world.receiver.advance()
    world.expect_exact()


# Which thread touches weights when. There is no device here: what would be asked of one is recorded, with the thread


MAIN, BACKGROUND = "MainThread", "delta-sync-stage"


class Recorded(SimulatedDevice):
    """A device that writes down what it is asked, by thread."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []

    def write(self, what: str) -> None:
        self.asked.append((threading.current_thread().name, what))

    def set_device(self) -> None:
        assert torch.is_inference_mode_enabled()
        self.write("set_device")

    def set_background_stream(self) -> None:
        self.write("set_background_stream")

    def synchronize_stream(self) -> None:
        self.write("synchronize_stream")

    def synchronize(self) -> None:
        self.write("synchronize")

    def of(self, thread: str) -> list[str]:
        return [what for name, what in self.asked if name == thread]


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[World, Recorded]:
    """A world whose one rank asks a recording accelerator."""
    world, accelerator = World(tmp_path), Recorded()
    port = ModulePort(world.model)
    port.ranks = [RankWorker(world.model, 0, memory=WeightMemory(accelerator))]
    world.use(port)
    return world, accelerator


def test_the_background_thread_sets_its_device_and_stream_first(recorded: tuple[World, Recorded]) -> None:
    world, accelerator = recorded
    world.receiver.advance()
    asked = accelerator.of(BACKGROUND)
    assert asked[:2] == ["set_device", "set_background_stream"]
    # Weights were read piece by piece, and each piece was over before the lock was.
    assert asked.count("synchronize_stream") > len(list(world.model.parameters()))
    assert asked[-1] == "synchronize_stream"
    assert "synchronize" not in asked
    assert accelerator.of(MAIN) == []


def test_a_commit_waits_for_the_device_before_and_after(
    recorded: tuple[World, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, accelerator = recorded
    world.follow_each(1)
    accelerator.asked.clear()
    original = DevicePatch.apply

    def applied(*arguments: Any) -> None:
        assert torch.is_inference_mode_enabled()
        accelerator.write("write")
        original(*arguments)

    monkeypatch.setattr(DevicePatch, "apply", applied)
    world.train(2)
    world.receiver.advance()
    asked = accelerator.of(MAIN)
    assert asked[:3] == ["set_device", "synchronize", "write"]
    assert asked[-2:] == ["write", "synchronize"]
    assert "write" not in accelerator.of(BACKGROUND)
    world.expect_exact()
    accelerator.asked.clear()
    world.receiver.rollback(1)
    asked = accelerator.of(MAIN)
    assert (asked[:2], asked[-1]) == (["set_device", "synchronize"], "synchronize")
    # The confirmed patch is no longer on the device, and its batches pass through the workspace.
    batches = asked.count("write")
    assert batches > 0
    assert asked[2:-1] == ["write", "synchronize_stream", "synchronize_stream"] * batches


def test_an_error_that_a_device_reports_late_reverts_the_commit(recorded: tuple[World, Recorded]) -> None:
    world, accelerator = recorded
    world.receiver.advance()
    world.train(1)
    before, asked = world.bits(), accelerator.synchronize

    def failing() -> None:
        asked()
        if accelerator.of(MAIN).count("synchronize") == 2:
            raise RuntimeError("the device reports an error")

    accelerator.synchronize = failing  # type: ignore[method-assign]
    accelerator.asked.clear()
    with pytest.raises(Exception, match="the device reports an error"):
        world.receiver.advance()
    world.expect_bits(before)
    world.receiver.advance()
    world.expect_exact()


def test_weights_that_were_made_in_inference_mode_are_patched(tmp_path: Path) -> None:
    """As those are that an engine makes during its first forward pass."""
    world = World(tmp_path)
    for parameter in world.model.parameters():
        with torch.inference_mode():
            parameter.data = parameter.data.clone()
    world.receiver.advance()
    world.train_and_follow(1)


ADAPTER, OTHER_ADAPTER = (Adapter(name, number, "/nowhere") for number, name in enumerate(("math", "code"), 1))


class Worker:
    """vLLM's worker, as far as its weights are concerned: ``sleep`` takes them away, ``reload_weights`` writes them."""

    def __init__(self, model: FusedModel) -> None:
        self.model = model
        self.saved: list[torch.Tensor] = []
        self.reading = False
        self.disturbed = False

    def _move(self) -> None:
        self.disturbed |= self.reading

    def sleep(self, level: int = 1) -> None:
        self._move()
        self.saved = [parameter.data.clone() for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.data.view(torch.int16).fill_(-1)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._move()
        for parameter, saved in zip(self.model.parameters(), self.saved, strict=True):
            parameter.data.copy_(saved)

    def reload_weights(self) -> None:
        self._move()
        self.model.load_weights([])


class SlowRead:
    """Holds the background thread in the middle of its next read of weights."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        original = engine_routes.fingerprint_in_place

        def slow(*arguments: Any) -> Fingerprint:
            worker.reading = True
            self.begun.set()
            assert self.let_go.wait(WAIT)
            found = original(*arguments)
            worker.reading = False
            return found

        monkeypatch.setattr(engine_routes, "fingerprint_in_place", slow)


def wait_until_moving(thread: threading.Thread) -> None:
    """Return once a thread is on its way into ``WeightMemory.exclusive``, and waits there if it has to."""

    def is_moving() -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        return frame is not None and frame.f_code is inspect.unwrap(WeightMemory.exclusive).__code__

    wait_until(is_moving)


@pytest.mark.parametrize("call", ["sleep", "reload_weights"])
def test_what_moves_weights_waits_for_a_read_and_then_keeps_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    world = World(tmp_path)
    world.receiver.advance()
    rank, worker = world.port.ranks[0], Worker(world.model)
    write_hooks.watch_writes(worker, world.model, rank.memory)
    slow = SlowRead(worker, monkeypatch)
    rank.answer(Scan(list(range(len(world.tensors)))))
    assert slow.begun.wait(WAIT)
    while_busy: list[RankRequest[Any]] = [Scan([0]), Outcome("scan")]
    for request in while_busy:
        with pytest.raises(BusyError, match="running"):
            rank.answer(request)
    mover = threading.Thread(target=getattr(worker, call))
    mover.start()
    wait_until_moving(mover)
    # It may not come to its end while the read is on; a thread that did not wait would have ended at once.
    mover.join(0.2)
    assert mover.is_alive()
    slow.let_go.set()
    mover.join(WAIT)
    assert not mover.is_alive()
    assert not worker.disturbed
    while rank.answer(Poll()) == Progress(True):
        pass
    outcome = rank.answer(Outcome("scan"))
    if call == "sleep":
        assert rank.describe().asleep
        assert isinstance(outcome, RankFailure)
        assert outcome.kind == BusyError.kind
        with pytest.raises(BusyError, match="wake_up"):
            rank.scan(Scan([0]))
        worker.wake_up()
        assert not rank.describe().asleep
    assert rank.describe().external_writer in ("wake_up", "reload_weights")
    world.receiver.check_served()
    assert rank.describe().external_writer is None
    assert world.receiver.verify()["verdict"]


class RefusingWorker(Worker):
    """As vLLM's at level 2, with a pattern in ``sleep_preserve_parameter_names`` that matches nothing."""

    def sleep(self, level: int = 1) -> None:
        raise ValueError("No parameter matches sleep retention")


def test_sleep_that_fails_does_not_stop_following(tmp_path: Path) -> None:
    """vLLM wakes nothing up that has not fallen asleep."""
    world = World(tmp_path)
    world.receiver.advance()
    rank, worker = world.port.ranks[0], RefusingWorker(world.model)
    write_hooks.watch_writes(worker, world.model, rank.memory)
    with pytest.raises(ValueError, match="retention"):
        worker.sleep(2)
    assert (rank.describe().asleep, rank.describe().external_writer) == (False, "sleep")
    world.train_and_follow(1)


class ExtendedWorker(WorkerExtension, Worker):
    """With the extension, and what that reads of vLLM's worker."""

    rank, vllm_config = 0, None
    model_config = SimpleNamespace(model="", revision=None)

    def get_model(self) -> FusedModel:
        return self.model


@pytest.mark.parametrize("order", [[None, ADAPTER], [ADAPTER, None], [ADAPTER, OTHER_ADAPTER]])
def test_all_that_a_worker_follows_sleeps_and_is_written_together(order: list[Adapter | None]) -> None:
    """Whichever is asked for first: the base's run, or that of an adapter, without a base that follows."""
    worker = ExtendedWorker(FusedModel())
    ranks = [worker._delta_sync_rank(adapter) for adapter in order]
    assert ranks == [worker._delta_sync_rank(adapter) for adapter in order]
    worker.sleep()
    assert [rank.describe().asleep for rank in ranks] == [True, True]
    for rank in ranks:
        with pytest.raises(BusyError, match="wake_up"):
            rank.identify(Identify("nowhere"))
    worker.wake_up(["kv_cache"])
    assert [rank.describe().asleep for rank in ranks] == [True, True]
    worker.wake_up(["weights"])
    assert [(rank.describe().asleep, rank.describe().external_writer) for rank in ranks] == [(False, "wake_up")] * 2
    worker.reload_weights()
    assert [rank.describe().external_writer for rank in ranks] == ["reload_weights", "reload_weights"]
    # Each call was wrapped once.
    assert len({rank.describe().external_writes for rank in ranks}) == 1
    assert ranks[0].describe().external_writes == 5

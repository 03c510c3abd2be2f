"""Which layouts are followed; and several engines behind one client: patched together or not at all, whichever of them
fails, sleeps or goes on alone.

Everything is real but vLLM: the receiver, its port and event loop, the guards, and ranks that are torch modules.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine_cores import Client, Core
from tests.support.modules import ModulePort
from tests.support.world import World
from vllm_delta_sync.engine.compat.cpu_experts import plain_experts
from vllm_delta_sync.engine.compat.features import check_layout
from vllm_delta_sync.engine.compat.version_labels import plain_label
from vllm_delta_sync.engine.core.ports import ServerEnginePort
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.errors import BusyError, DeltaSyncError, EngineError
from vllm_delta_sync.settings import Settings

ENGINES, RANKS = 2, 2


class Site:
    """A world whose ranks are there twice: two engines, each with all of the model."""

    def __init__(self, root: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.world = World(root, ranks=RANKS)
        self.models = [self.world.models, self.world.fresh()]
        self.cores = [Core(ModulePort(*models)) for models in self.models]
        settings = Settings(bucket=self.world.url, prefix_cache="keep")
        self.receiver = Receiver(ServerEnginePort(Client(self.cores, RANKS), loop, settings), settings)

    def expect(self, version: int) -> None:
        """Every rank of every engine holds the version, is labelled with it, and generates."""
        assert self.receiver.served_version == version
        assert [plain_label(core.labels[-1]) for core in self.cores] == [str(version)] * ENGINES
        for core in self.cores:
            given = [label for label, _ in groupby(core.labels)]
            assert len(set(given)) == len(given), "a label came twice"
        assert [core.state for core in self.cores] == ["UNPAUSED"] * ENGINES
        held = [rank.describe() for core in self.cores for rank in core.port.ranks]
        assert [rank.version for rank in held] == [version] * ENGINES * RANKS
        assert all(rank.intact for rank in held)

    def reaches(self, version: int) -> None:
        """Following ends at a version, bit for bit."""
        self.receiver.advance()
        self.expect(version)
        for models in self.models:
            self.world.models = models
            self.world.expect_exact()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield Site(tmp_path, loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture
def moved(site: Site) -> Site:
    """Version 0 is served, and version 1 is there."""
    site.receiver.advance()
    site.world.train(1)
    return site


def test_every_rank_of_every_engine_follows(site: Site) -> None:
    for step in range(1, 5):
        site.reaches(step - 1)
        assert site.receiver.verify()["verdict"]
        site.world.train(step)
    assert [rank["rank"] for rank in site.receiver.status()["ranks"]] == list(range(ENGINES * RANKS))
    site.receiver.rollback(2)
    site.expect(2)


def test_touch_of_one_engine_is_looked_into(site: Site) -> None:
    """Each engine's ranks are told of their own touches, not of those of the first."""
    site.receiver.advance()
    site.cores[1].port.ranks[1].note_external_write("reload_weights")
    site.receiver.check_served()
    assert [rank.external_writer for core in site.cores for rank in core.port.ranks] == [None] * ENGINES * RANKS
    site.world.train(1)
    site.reaches(1)


def test_drift_of_one_engine_is_found(site: Site) -> None:
    site.receiver.advance()
    site.models[1][0].norm.data.mul_(2.0)
    assert site.receiver.verify()["mismatched"] == ["model.norm.weight"]


@pytest.mark.parametrize("engine", range(ENGINES))
def test_engine_that_sleeps_stops_none(moved: Site, engine: int) -> None:
    moved.cores[engine].sleeping_tags = {"weights", "kv_cache"}
    with pytest.raises(BusyError, match="asleep"):
        moved.receiver.advance()
    assert not any(line.startswith("delta_sync_pause ") for core in moved.cores for line in core.log)
    moved.cores[engine].sleeping_tags = {"kv_cache"}
    moved.reaches(1)


@pytest.mark.parametrize("engine", range(ENGINES))
def test_engine_that_falls_asleep_right_before_a_pause_is_no_failed_engine(moved: Site, engine: int) -> None:
    core = moved.cores[engine]

    def fall_asleep(utility: str, method: str) -> None:
        if utility == "delta_sync_pause":
            core.sleeping_tags.add("weights")

    core.hook = fall_asleep
    with pytest.raises(BusyError, match="asleep"):
        moved.receiver.advance()
    moved.expect(0)
    core.hook = lambda utility, method: None
    core.sleeping_tags.clear()
    moved.reaches(1)


def test_commit_in_a_pause_of_another_caller_leaves_it_on(moved: Site) -> None:
    for core in moved.cores:
        core.pause_scheduler("keep", False)
    moved.receiver.advance()
    assert [core.state for core in moved.cores] == ["PAUSED_ALL"] * ENGINES
    for core in moved.cores:
        core.resume_scheduler()
    moved.reaches(1)


def expire(core: Core) -> None:
    """As if the pause had lasted too long: the watchdog settles the engine, which goes on."""
    heartbeat = core.guard._active
    assert heartbeat is not None
    heartbeat.deadline = 0.0
    core.guard.check_deadline()


def fail(core: Core) -> None:
    raise RuntimeError("injected")


@pytest.mark.parametrize("engine", range(ENGINES))
@pytest.mark.parametrize(
    ("at", "fault", "commits"),
    [
        pytest.param("delta_sync_pause ", fail, 0, id="one cannot be paused"),
        pytest.param("delta_sync_label_paused ", fail, 2, id="one cannot be labelled"),
        pytest.param("delta_sync_renew ", expire, 0, id="the pause of one runs out before the commit"),
        pytest.param("delta_sync_call_paused commit", expire, 1, id="the pause of one runs out at the commit"),
    ],
)
def test_one_engine_that_fails_or_goes_on_is_followed_back_by_all(
    moved: Site, engine: int, at: str, fault: Callable[[Core], None], commits: int
) -> None:
    """No engine commits where one has gone on; if it went on just then, the other goes back to where it is."""
    core = moved.cores[engine]
    core.hook = lambda utility, method: fault(core) if f"{utility} {method}".startswith(at) else None
    with pytest.raises(DeltaSyncError, match="injected" if fault is fail else "expired"):
        moved.receiver.advance()
    other = moved.cores[1 - engine].log
    assert ("delta_sync_call_paused commit" in other) == (commits > 0)
    moved.expect(0)
    core.hook = lambda utility, method: None
    moved.reaches(1)


class InStep(Core):
    """An engine that has stopped only when all that run in step with it were asked to, as vLLM's are."""

    pending_pause = False

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Any:
        super().pause_scheduler(mode, clear_cache)
        self.pending_pause = True
        self._idle_state_callbacks.append(lambda core: None)
        self.pending: Future[Any] = Future()
        return self.pending

    def resume_scheduler(self) -> None:
        if self.pending_pause:
            raise RuntimeError("pause is still in flight")
        super().resume_scheduler()


def test_pause_that_the_others_never_join_can_be_ended() -> None:
    core = InStep(ModulePort())
    core.guard.pause("keep", "keep", 60.0)
    assert core.pending is not None
    assert core.guard.resume() is False
    assert (core.pending_pause, core.state) == (False, "UNPAUSED")
    assert core._idle_state_callbacks == []
    assert isinstance(core.pending.exception(0), RuntimeError)


# Which layouts are followed


def config(moe: bool = False, **parallel: Any) -> Any:
    off = dict.fromkeys(("enable_eplb", "enable_elastic_ep", "local_engines_only"), False)
    settings = {"data_parallel_size": 1, "distributed_executor_backend": "mp", "world_size": 1, **off, **parallel}
    return SimpleNamespace(parallel_config=SimpleNamespace(**settings), model_config=SimpleNamespace(is_moe=moe))


@pytest.mark.parametrize(
    ("found", "given", "says"),
    [
        pytest.param(config(), {}, None, id="one engine"),
        pytest.param(config(data_parallel_size=2), {}, None, id="engines that know nothing of each other"),
        pytest.param(config(moe=True, data_parallel_size=2), {}, None, id="engines in step"),
        pytest.param(config(data_parallel_size=4, local_engines_only=True), {}, None, id="dense, others have the rest"),
        pytest.param(config(enable_eplb=True), {}, "--enable-eplb is on", id="experts that move"),
        pytest.param(config(enable_elastic_ep=True), {}, "--enable-elastic-ep is on", id="ranks that come and go"),
        pytest.param(
            config(distributed_executor_backend="external_launcher", world_size=2),
            {},
            "'external_launcher' with 2 ranks",
            id="ranks that cannot be reached",
        ),
        pytest.param(config(distributed_executor_backend="external_launcher"), {}, None, id="the only rank"),
        pytest.param(config(data_parallel_size=2), {"offline": True}, "data_parallel_size is 2", id="LLM object"),
        pytest.param(
            config(moe=True, data_parallel_size=2, local_engines_only=True),
            {},
            "external or hybrid load balancing",
            id="engines in step, out of reach",
        ),
    ],
)
def test_layouts_are_followed_or_refused(found: Any, given: dict[str, Any], says: str | None) -> None:
    if says is None:
        check_layout(found)
        return
    with pytest.raises(EngineError, match=says):
        check_layout(found, **given)


# The plain experts of a rank that has some of a model's experts


EXPERTS, TOKENS, CHOSEN, HIDDEN, INNER = 8, 40, 2, 32, 16


class Layer:
    """Random experts, and tokens that chose among them."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.x = random(TOKENS, HIDDEN)
        self.w13, self.bias13 = random(EXPERTS, 2 * INNER, HIDDEN), random(EXPERTS, 2 * INNER)
        self.w2, self.bias2 = random(EXPERTS, HIDDEN, INNER), random(EXPERTS, HIDDEN)
        self.ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(TOKENS)]).int()
        self.weights = torch.rand(TOKENS, CHOSEN, generator=generator)

    def computed(self, here: list[int] | None = None) -> torch.Tensor:
        """What a rank makes of it that has those experts (None: one rank that has all)."""
        rows = slice(None) if here is None else torch.tensor(here)
        expert_map = None
        if here is not None:
            expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
            expert_map[rows] = torch.arange(len(here), dtype=torch.int32)
        out = torch.full_like(self.x, torch.nan)
        held = self.w13[rows], self.w2[rows], self.bias13[rows], self.bias2[rows]
        plain_experts(out, self.x, *held, self.weights, self.ids, expert_map, "swigluoai", True)
        return out


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[6, 1], [0, 2, 3, 4, 5, 7]], [list(range(8)), [3]]])
def test_ranks_together_are_one_rank(parts: list[list[int]]) -> None:
    layer = Layer(torch.float32)
    if len(parts[1]) == 1:
        # A rank that nobody chose an expert of has nothing to add.
        layer.ids[layer.ids == parts[1][0]] = 5
    summed = sum((layer.computed(part) for part in parts), torch.zeros_like(layer.x))
    torch.testing.assert_close(summed, layer.computed())
    if len(parts[1]) == 1:
        assert not layer.computed(parts[1]).any()


def test_tokens_of_one_rank_are_exact() -> None:
    """Where all that a token chose is on one rank, that rank's bits are those of a rank that has every expert."""
    layer = Layer(torch.bfloat16)
    here = [1, 3, 4, 6]
    mine = torch.isin(layer.ids, torch.tensor(here)).all(1)
    assert mine.any()
    assert not mine.all()
    assert torch.equal(layer.computed(here)[mine].view(torch.int16), layer.computed()[mine].view(torch.int16))

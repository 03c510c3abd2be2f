"""A normal stop, of the engine or of the event loop that leads to it, ends what follows without a warning.

Everything is real but vLLM: the service and its threads, its port, event loops, and ranks that are torch modules.
"""

import asyncio
import gc
import logging
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from tests.support.engine_cores import Client, Core
from tests.support.modules import ModulePort
from tests.support.services import WAIT, wait_until
from tests.support.world import World
from vllm_delta_sync import open_run
from vllm_delta_sync.engine.api import embedded
from vllm_delta_sync.engine.core import ports
from vllm_delta_sync.engine.core.pause_watchdog import PauseWatchdog
from vllm_delta_sync.engine.core.ports import OfflineEnginePort, ServerEnginePort
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.engine.protocol import RankRequest, decode_request
from vllm_delta_sync.errors import EngineError, UsageError
from vllm_delta_sync.fleet.heartbeats import read_heartbeats
from vllm_delta_sync.settings import Settings

LOOPS = [
    pytest.param(uvloop.new_event_loop, id="uvloop"),
    pytest.param(asyncio.new_event_loop, id="asyncio", marks=pytest.mark.slow),
]
"""That of vLLM's servers, and of programs of one's own, one of which ``tests/e2e/test_doors.py`` ends too."""


class EngineDeadError(Exception):
    """vLLM's error for calls to an engine that has ended."""


class OneClient(Client):
    """The client of one engine, which can be shut down; a call can be held up.

    Attributes:
        holds: name of the operation that gets no answer until ``go_on`` is set. held: set once one was made.
        cancels: whether the next call is cancelled.
    """

    def __init__(self, core: Core) -> None:
        super().__init__([core])
        self.holds = ""
        self.held = asyncio.Event()
        self.cancels = False
        self.go_on = asyncio.Event()

    def die(self, answers: bool = True) -> None:
        """``answers``: the call that is held up gets an error; vLLM leaves some without an answer."""
        self.errored = True
        if answers:
            self.go_on.set()

    def shutdown(self, timeout: float | None = None) -> None:
        """With a timeout, requests in flight may finish until then."""
        if timeout is None:
            self.die()

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        operation = decode_request(args[0]).operation if args and isinstance(args[0], bytes) else method
        if operation == self.holds:
            self.held.set()
            await self.go_on.wait()
        if self.cancels:
            self.cancels = False
            raise asyncio.CancelledError
        if self.errored:
            raise EngineDeadError("EngineCore encountered an issue")
        return await super()._call_utility_async(method, *args, engine=engine)


class LocalClient:
    """The client of an ``LLM`` whose engine has a process of its own, and dies in one operation."""

    def __init__(self, core: Core, dies_in: str) -> None:
        self.core, self.dies_in, self.dead = core, dies_in, False

    def call_utility(self, method: str, *args: Any) -> Any:
        operation = decode_request(args[0]).operation if args and isinstance(args[0], bytes) else method
        if operation == self.dies_in:
            self.dead = True
            threading.Event().wait()
        return self.core.utility(method, *args)

    def ensure_alive(self) -> None:
        if self.dead:
            raise EngineDeadError("EngineCore encountered an issue")


class Site:
    """A service, in front of an engine that is reached through an event loop.

    Attributes:
        warned: what was logged as a warning or worse.
    """

    service: ReceiverService

    def __init__(self, root: Path) -> None:
        self.world = World(root)
        self.warned: list[str] = []

    def client(self) -> OneClient:
        return OneClient(Core(ModulePort(*self.world.models)))

    async def start(self) -> OneClient:
        """Follow until version 0 is served."""
        client = self.client()
        settings = Settings(bucket=self.world.url, poll_seconds=0.01, receiver_id="server", prefix_cache="keep")
        self.service = ReceiverService(ServerEnginePort(client, asyncio.get_running_loop(), settings), settings)
        self.service.start()
        await self.served(0)
        return client

    def attach(self, client: OneClient, **options: Any) -> embedded.AsyncSync:
        settings = Settings(bucket=self.world.url, poll_seconds=0.01, prefix_cache="keep", **options)
        sync = embedded.AsyncSync(client, settings)
        self.service = sync._service
        return sync

    async def served(self, version: int) -> None:
        async with asyncio.timeout(WAIT):
            while self.service.receiver.served_version != version:
                await asyncio.sleep(0.005)

    def expect_ended(self) -> None:
        """All threads end, the fleet learns of it, requests are refused, and no warning is logged."""
        self.service.join(WAIT)
        assert not any(thread.is_alive() for thread in self.service._threads)
        with pytest.raises(EngineError, match="following has stopped"):
            self.service.request("hold").result(WAIT)
        (heartbeat,) = read_heartbeats(open_run(self.world.url)).stored
        assert heartbeat.heartbeat.state == "left"
        gc.collect()
        assert self.warned == []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    # How its loop is woken up when a heartbeat runs out would load vLLM.
    monkeypatch.setattr(PauseWatchdog, "_watch", lambda guard, heartbeat: None)
    site = Site(tmp_path)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: site.warned.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.delta_sync")
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield site
    logger.removeHandler(handler)
    site.service.stop()
    assert [str(each.message) for each in warned if issubclass(each.category, RuntimeWarning)] == []


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("moment", ["", "describe", "stage", "delta_sync_pause", "commit"])
@pytest.mark.parametrize("end", ["loop", "engine", "engine dies first"])
def test_a_normal_stop_ends_without_a_warning(
    site: Site, new_loop: Callable[[], asyncio.AbstractEventLoop], moment: str, end: str
) -> None:
    async def main() -> None:
        client = await site.start()
        if moment:
            client.holds = moment
            await asyncio.to_thread(site.world.train, 1)
            await asyncio.wait_for(client.held.wait(), WAIT)
        if end == "engine dies first":
            # A signal to all processes of a server reaches the engine's before the API server reacts to it.
            client.die()
            await asyncio.sleep(0.1)
        if end != "loop":
            await asyncio.to_thread(client.shutdown)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    site.expect_ended()


def test_a_loop_that_is_closed_before_it_begins_a_call(site: Site) -> None:
    """The call is scheduled and never runs: its coroutine is closed."""
    loop = asyncio.new_event_loop()

    loop.run_until_complete(site.start())
    # The service's next call waits for a loop that no longer runs.
    wait_until(lambda: loop._ready)  # type: ignore[attr-defined]
    loop.close()
    site.expect_ended()


def test_a_stop_lets_a_commit_end_and_begins_no_other(site: Site) -> None:
    """vLLM may let requests in flight finish first; an engine that stays paused would not."""

    async def main() -> None:
        client = await site.start()
        client.holds = "commit"
        await asyncio.to_thread(site.world.train, 1)
        await asyncio.wait_for(client.held.wait(), WAIT)
        await asyncio.to_thread(client.shutdown, timeout=30)
        client.go_on.set()
        await site.served(1)
        assert client.cores[0].state == "UNPAUSED"
        await asyncio.to_thread(site.world.train, 2)
        await asyncio.to_thread(site.service.join, WAIT)
        assert site.service.receiver.served_version == 1
        assert client.cores[0].state == "UNPAUSED"

    asyncio.run(main())
    site.expect_ended()


def test_an_engine_that_dies_by_itself_is_reported(site: Site) -> None:
    async def main() -> None:
        client = await site.start()
        client.die()
        async with asyncio.timeout(WAIT):
            while not site.warned:
                await asyncio.sleep(0.01)
        assert "the engine failed: EngineDeadError" in site.warned[0]
        site.service.stop()

    asyncio.run(main())


def test_a_call_that_an_engine_has_not_answered_ends_with_it(site: Site) -> None:
    async def main() -> None:
        client = await site.start()
        client.holds = "describe"
        await asyncio.wait_for(client.held.wait(), WAIT)
        asked = site.service.request("sync")
        client.die(answers=False)
        with pytest.raises(EngineError, match="the engine failed: "):
            await asyncio.wait_for(asyncio.wrap_future(asked), 20)
        assert "it died before it answered" in site.warned[0]
        site.service.stop()

    asyncio.run(main())


@pytest.mark.parametrize(("moment", "kind"), [("stage", "engine"), ("commit", "weights_lost")])
def test_a_call_that_the_engine_of_an_llm_has_not_answered_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, kind: str
) -> None:
    monkeypatch.setattr(PauseWatchdog, "_watch", lambda guard, heartbeat: None)
    world = World(tmp_path)
    client = LocalClient(Core(ModulePort(*world.models)), moment)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client, has_unfinished_requests=lambda: False))
    settings = Settings(bucket=world.url, prefix_cache="keep")
    receiver = Receiver(OfflineEnginePort(llm, settings), settings)
    receiver.advance()
    world.train(1)
    ended: Future[None] = Future()

    def advance() -> None:
        with pytest.raises(EngineError, match="the engine failed: EngineDeadError") as caught:
            receiver.advance()
        assert caught.value.kind == kind
        ended.set_result(None)

    threading.Thread(target=advance, daemon=True).start()
    ended.result(20)


@pytest.mark.parametrize("end", ["close", "shutdown", "death"])
def test_who_waits_for_a_version_learns_at_once_that_it_cannot_come(site: Site, end: str) -> None:
    async def main() -> None:
        engine = site.client()
        sync = site.attach(engine)
        await sync.wait(0, WAIT)
        waiting = asyncio.create_task(sync.wait(9, timeout=10 * WAIT))
        await asyncio.sleep(0.05)
        await {"close": sync.close, "shutdown": in_thread(engine.shutdown), "death": in_thread(engine.die)}[end]()
        words = "this is closed and no longer follows" if end == "close" else "the engine has ended"
        with pytest.raises(EngineError, match=words):
            await asyncio.wait_for(waiting, WAIT)
        with pytest.raises(EngineError, match=words):
            await sync.wait(9)
        assert (await sync.wait(0))["served"]["version"] == 0
        await sync.close()

    asyncio.run(main())


def test_a_version_that_is_no_number_is_refused_with_the_way_to_one(site: Site) -> None:
    async def main() -> None:
        sync = site.attach(site.client())
        await sync.wait(0, WAIT)
        offline = embedded.OfflineSync(sync._service.receiver)
        for version in ("tag:best", 1.0, True, -1):
            calls: list[Callable[[Any], Any]] = [offline.to, offline.rollback, sync.to, sync.rollback, sync.wait]
            for call in calls:
                with pytest.raises(UsageError, match=r"give the number of a version.*resolve"):
                    await call(version)
        await sync.close()

    asyncio.run(main())


def in_thread(call: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    return lambda: asyncio.to_thread(call)


def test_a_close_that_was_cancelled_can_be_called_again(site: Site) -> None:
    async def main() -> None:
        engine = site.client()
        sync = site.attach(engine)
        setattr(engine, embedded.ATTACHED, sync)
        await sync.wait(0, WAIT)
        engine.holds = "describe"
        await asyncio.wait_for(engine.held.wait(), WAIT)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sync.close(), 0.1)
        assert getattr(engine, embedded.ATTACHED) is sync
        engine.go_on.set()
        await sync.close()
        assert getattr(engine, embedded.ATTACHED) is None
        assert not any(thread.is_alive() for thread in site.service._threads)

    asyncio.run(main())


@pytest.mark.parametrize("moment", ["outcome", "delta_sync_pause"])
@pytest.mark.parametrize("asked", [False, True])
def test_a_close_that_cannot_wait_for_a_commit_leaves_none_behind(
    site: Site, moment: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging, and requests that a pause waits for, may take longer than ``close`` does."""
    monkeypatch.setattr(embedded, "CLOSE_SECONDS", 0.1)

    async def main() -> None:
        engine = site.client()
        sync = site.attach(engine, policy="manual" if asked else "follow")
        if asked:
            await sync.to()
        await sync.wait(0, WAIT)
        engine.holds = moment
        await asyncio.to_thread(site.world.train, 1)
        call = asyncio.create_task(sync.to()) if asked else None
        await asyncio.wait_for(engine.held.wait(), WAIT)
        await sync.close()
        if call is not None:
            with pytest.raises(EngineError, match="closed before the call finished"):
                await call
        assert any(thread.is_alive() for thread in site.service._threads)
        engine.go_on.set()
        await asyncio.to_thread(site.service.join, WAIT)
        assert (site.service.receiver.served_version, engine.cores[0].state) == (0, "UNPAUSED")

    asyncio.run(main())
    assert site.warned == []


@pytest.mark.parametrize("moment", ["not asked", "answered"])
def test_a_loop_that_its_owner_blocks_in_a_commit_ends_no_engine(
    site: Site, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training that runs in the loop may begin between a pause and its commit, and take longer than that may."""
    # The engine may need seconds on a machine that is busy; the block is longer than it and its pause may take.
    monkeypatch.setattr(ports, "ANSWER_SECONDS", 3.0)
    blocks, ask = [lambda: time.sleep(5.0)], ServerEnginePort._ask_paused

    def asked(port: ServerEnginePort, request: RankRequest[Any]) -> Any:
        if moment == "not asked" and blocks:
            begun = threading.Event()
            port._loop.call_soon_threadsafe(begun.set)
            port._loop.call_soon_threadsafe(blocks.pop())
            begun.wait(WAIT)
        return ask(port, request)

    monkeypatch.setattr(ServerEnginePort, "_ask_paused", asked)

    async def main() -> None:
        engine = site.client()
        call = engine._call_utility_async

        async def answered(method: str, *args: Any, engine: bytes) -> Any:
            answer = await call(method, *args, engine=engine)
            if moment == "answered" and method == "delta_sync_call_paused" and blocks:
                blocks.pop()()
            return answer

        monkeypatch.setattr(engine, "_call_utility_async", answered)
        sync = site.attach(engine, pause_seconds=0.5)
        await sync.wait(0, WAIT)
        await asyncio.to_thread(site.world.train, 1)
        await sync.wait(1, WAIT)
        assert (blocks, engine.cores[0].state) == ([], "UNPAUSED")
        await sync.close()

    asyncio.run(main())


def test_a_cancelled_call_is_no_stop(site: Site) -> None:
    async def main() -> None:
        client = await site.start()
        client.cancels = True
        await asyncio.to_thread(site.world.train, 1)
        await site.served(1)
        site.service.stop()

    asyncio.run(main())
    assert "the engine failed: CancelledError" in site.warned[0]

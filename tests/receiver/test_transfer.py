"""vLLM's weight transfer calls on its own classes, with a real receiver on plain modules behind them."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM

from tests.support.services import WAIT, Site
from tests.support.world import World
from vllm_delta_sync.engine.api import embedded, weight_transfer
from vllm_delta_sync.engine.api.embedded import attach
from vllm_delta_sync.engine.api.weight_transfer import OverdueError, WeightTransferCalls
from vllm_delta_sync.engine.compat import write_hooks
from vllm_delta_sync.engine.entrypoints import plugin
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.engine.names import TRANSFER_BACKEND
from vllm_delta_sync.errors import BusyError, EngineError, NotFoundError
from vllm_delta_sync.settings import Settings


class Reached(Exception):
    """A call went on to where vLLM sends it."""


class Core:
    async def set_weight_version_async(self, label: str) -> None:
        raise Reached(label)

    def shutdown(self, timeout: float | None = None) -> None:
        """Called when the client is collected."""


def make_client(backend: str | None = TRANSFER_BACKEND) -> Any:
    """VLLM's own client, without an engine behind it."""
    client = object.__new__(AsyncLLM)
    chosen = None if backend is None else SimpleNamespace(backend=backend)
    client.vllm_config = SimpleNamespace(weight_transfer_config=chosen)  # type: ignore[assignment]
    client.engine_core = Core()  # type: ignore[assignment]

    async def collective_rpc(method: str, *args: Any, **kwargs: Any) -> Any:
        raise Reached(method)

    client.collective_rpc = collective_rpc  # type: ignore[method-assign]
    return client


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A run with a base."""
    site = Site(World(tmp_path))
    yield site
    site.end()


def run(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """One after the other, each with a bound; what it raised, where it did."""

    async def all_of_them() -> list[Any]:
        outcomes: list[Any] = []
        for call in calls:
            outcomes += await asyncio.gather(asyncio.wait_for(call(), WAIT), return_exceptions=True)
        return outcomes

    return asyncio.run(all_of_them())


def update(client: Any, **info: Any) -> Callable[[], Awaitable[None]]:
    return lambda: client.update_weights(WeightTransferUpdateRequest(update_info=info))


@pytest.fixture
def service(site: Site) -> ReceiverService:
    """It serves version 0, and moves only on request."""
    service = site.serve(policy="manual")
    service.start()
    service.request("sync", 0).result(WAIT)
    return service


@pytest.fixture
def client(site: Site, service: ReceiverService) -> Any:
    return WeightTransferCalls(service, site.world.url)


def test_whole_update_moves_the_model(site: Site, client: Any, service: ReceiverService) -> None:
    site.world.train(1)
    site.world.train(2)
    done = run(
        lambda: client.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"bucket": site.world.url})),
        client.start_weight_update,
        update(client, version=1),
        lambda: client.finish_weight_update("1"),
    )
    assert done == [None] * 4
    assert service.receiver.served_version == 1
    assert run(update(client), lambda: client.finish_weight_update("2"), client.finish_weight_update) == [None] * 3
    assert service.receiver.served_version == 2
    # What the last update led to may be named after a newer one was taken.
    site.world.train(3)
    service.request("sync").result(WAIT)
    assert run(lambda: client.finish_weight_update("2"), lambda: client.update_weight_version("3")) == [None, None]
    site.world.expect_exact()


def test_refusals_change_nothing(site: Site, client: Any, service: ReceiverService) -> None:
    site.world.train(1)
    before = site.world.bits()
    ranks = WeightTransferUpdateRequest(update_info=[{"version": 1}, {"version": 1}])
    elsewhere = WeightTransferInitRequest(init_info={"bucket": "s3://AKIA:geheim@elsewhere/run"})
    outcomes = run(
        lambda: client.init_weight_transfer_engine(elsewhere),
        lambda: client.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"master_port": 1})),
        client.start_draft_weight_update,
        update(client, version=2),
        lambda: client.update_weights(ranks),
        lambda: client.finish_weight_update("7"),
        lambda: client.update_weight_version("step-7"),
        update(client, version=-1),
        update(client, version=True, timeout_s="soon"),
        update(client, timeout_s=-1),
        update(client, names=["a"]),
    )
    assert [error.kind for error in outcomes] == ["transfer"] * 3 + ["not_found"] + ["transfer"] * 7
    for error, field in zip(outcomes[7:], ("version", "", "timeout_s", "names"), strict=True):
        assert f"update_info.{field}".rstrip(".") in error.message
    assert "geheim" not in outcomes[0].message
    # vLLM's routes answer ValueErrors with 400.
    assert all(isinstance(error, ValueError) for error in outcomes if error.kind == "transfer")
    assert (service.receiver.served_version, service.receiver.status()["last_error"]) == (0, None)
    site.world.expect_bits(before)


def test_update_waits_until_a_version_is_published(site: Site, client: Any, service: ReceiverService) -> None:
    soon = threading.Timer(0.3, site.world.train, (1,))
    soon.start()
    assert run(update(client, version=1, timeout_s=WAIT)) == [None]
    soon.join()
    site.world.expect_exact()
    ended = WeightTransferCalls(service, site.world.url, lambda: True)
    (error,) = run(update(ended, version=2, timeout_s=WAIT))
    assert isinstance(error, NotFoundError), "it waits for the version, and the server for it"
    (error,) = run(update(client, version=2, timeout_s=0.2))
    assert isinstance(error, NotFoundError)
    assert service.receiver.served_version == 1


def test_update_that_takes_too_long_says_that_it_goes_on(site: Site, client: Any, service: ReceiverService) -> None:
    site.world.train(1)
    release = threading.Event()

    def stall(method: str, arguments: dict[str, Any]) -> None:
        if method == "commit":
            release.wait(WAIT)

    site.port.before = stall
    (error,) = run(update(client, version=1, timeout_s=0.2))
    release.set()
    assert isinstance(error, OverdueError)
    assert "version 1 was not served within timeout_s = 0.2" in error.message
    assert service.request("sync").result(WAIT)["served"]["version"] == 1


def test_update_that_takes_too_long_says_whether_its_version_is_published(site: Site, service: ReceiverService) -> None:
    service.request("sync").result(WAIT)
    controller: Any = SimpleNamespace(receiver=service.receiver, request=lambda *_: Future())
    client = WeightTransferCalls(controller, site.world.url)
    calls = [update(client, version=version, timeout_s=0.01) for version in (0, 1)]
    published, unpublished, newest = run(*calls, update(client, timeout_s=0.01))
    assert [type(error) for error in (published, unpublished, newest)] == [OverdueError, NotFoundError, OverdueError]
    assert "version 1 was not seen in the bucket within timeout_s = 0.01" in unpublished.message


def test_labels_of_others_are_refused_without_a_backend_and_left_alone_with_another(
    site: Site, service: ReceiverService
) -> None:
    plain, other = make_client(None), make_client("nccl")
    for client in (plain, other):
        weight_transfer.install(client, service, site.world.url)
    (refused, passed) = run(lambda: plain.update_weight_version("7"), plain.start_weight_update)
    assert (type(refused).__name__, "version 0 is served" in str(refused)) == ("GracefulHTTPError", True)
    assert (type(passed), str(passed)) == (Reached, "start_weight_update")
    outcomes = run(lambda: other.update_weight_version("7"), other.start_weight_update)
    assert [(type(each), str(each)) for each in outcomes] == [(Reached, "7"), (Reached, "start_weight_update")]


def test_server_shows_errors_with_the_status_of_our_own_routes(site: Site, service: ReceiverService) -> None:
    client = make_client()
    weight_transfer.install(client, service, site.world.url)
    service.request("hold").result(WAIT)
    outcomes = run(update(client, version=3), update(client), update(client, names=[]))
    assert [int(error.http_status) for error in outcomes] == [404, 409, 400]
    assert str(outcomes[0]).startswith("not_found: version 3 is not published")


def test_nothing_is_finished_before_a_version_is_served(site: Site) -> None:
    controller: Any = SimpleNamespace(receiver=Receiver(site.port, Settings(bucket=site.world.url)))
    client = WeightTransferCalls(controller, site.world.url)
    (refused, begun) = run(client.finish_weight_update, client.start_weight_update)
    assert (type(refused), "no version is served yet" in str(refused), begun) == (BusyError, True, None)


def test_worker_refuses_what_nobody_forwarded() -> None:
    plugin.register()
    config = SimpleNamespace(backend=TRANSFER_BACKEND)
    vllm_config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = WeightTransferEngineFactory.create_engine(config, vllm_config, None, None)  # type: ignore[arg-type]
    for name, call in {
        "init_weight_transfer_engine": lambda: engine.init_transfer_engine(engine.parse_init_info({"a": 1})),
        "start_weight_update": engine.start_weight_update,
        "update_weights": lambda: engine.update_weights({"version": 1}),
        "finish_weight_update": engine.finish_weight_update,
    }.items():
        with pytest.raises(EngineError, match=f"^{name} reached a worker"):
            call()
    with pytest.raises(EngineError, match=r"^update_weights reached a worker"):
        engine.receive_weights({})
    engine.shutdown()
    assert not engine.supports_draft_weight_update


class Worker:
    """The doors of vLLM's worker."""

    def __init__(self, backend: str) -> None:
        self.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend))

    def update_weights(self, update_info: Any) -> None:
        raise Reached("update_weights")

    def reload_weights(self) -> None:
        """Another door."""


@pytest.mark.parametrize(("backend", "told"), [(TRANSFER_BACKEND, 0), ("nccl", 2)])
def test_calls_of_our_own_backend_are_nobody_elses_writing(backend: str, told: int) -> None:
    said: list[str] = []
    memory = WeightMemory()
    memory.listeners.append(SimpleNamespace(note_external_write=said.append, leave_device=lambda: None))
    worker = Worker(backend)
    write_hooks.watch_writes(worker, SimpleNamespace(), memory)
    with pytest.raises(Reached):
        worker.update_weights({})
    assert said == ["update_weights"] * told
    worker.reload_weights()
    assert said[told:] == ["reload_weights"] * 2


def test_each_attach_names_the_other() -> None:
    from vllm_delta_sync.engine import attach_async

    class Llm:
        llm_engine = None

    with pytest.raises(EngineError, match=r"attach is for a vllm\.LLM, this is AsyncLLM; .* await attach_async"):
        attach(make_client(), bucket="/x")
    with pytest.raises(EngineError, match=r"attach_async is for a vllm\.AsyncLLM, this is Llm; .* attach\(llm"):
        asyncio.run(attach_async(Llm(), bucket="/x"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> "list[Future[Any]]":
    """What a service is asked to do; nothing is answered."""
    found: list[Future[Any]] = []

    def request(*_: Any) -> "Future[Any]":
        found.append(Future())
        return found[-1]

    service = SimpleNamespace(request=request, start=lambda: None, stop=lambda: None, join=lambda seconds: None)
    monkeypatch.setattr(embedded, "ServerEnginePort", lambda *_: SimpleNamespace(stop=lambda: None))
    monkeypatch.setattr(embedded, "ReceiverService", lambda *_: service)
    return found


def test_call_that_ends_after_close_raises_where_it_was_made_and_nowhere_else(asked: "list[Future[Any]]") -> None:
    """A commit may outlast the time that ``close`` waits for it."""
    raised: list[dict[str, Any]] = []

    async def close_first() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        sync = embedded.AsyncSync(SimpleNamespace(vllm_config=None), Settings(bucket="/x"))
        call = asyncio.create_task(sync.to(1))
        await asyncio.sleep(0)
        assert asked[0].set_running_or_notify_cancel()
        await sync.close()
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        asked[0].set_result({})
        await asyncio.sleep(0.01)
        return outcome

    outcome = asyncio.run(close_first())
    assert (type(outcome), str(outcome)) == (EngineError, "this was closed before the call finished")
    assert raised == []


@pytest.mark.usefixtures("asked")
def test_call_that_its_caller_cancels_stays_cancelled() -> None:
    async def cancel() -> None:
        sync = embedded.AsyncSync(SimpleNamespace(vllm_config=None), Settings(bucket="/x"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sync.to(1), 0.01)
        call = asyncio.create_task(sync.to(1))
        await asyncio.sleep(0)
        call.cancel()
        await sync.close()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancel())

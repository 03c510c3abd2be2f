"""Pauses and what may be done in one; which version ranks agree on after a pause that its controller did not end; an
engine that waits for a lost rank."""

import multiprocessing
import os
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from tests.support.engine_cores import EngineCore
from vllm_delta_sync.engine.commit.transaction import common_version
from vllm_delta_sync.engine.compat.caches import WeightCaches
from vllm_delta_sync.engine.compat.version_labels import plain_label
from vllm_delta_sync.engine.core import pause_watchdog
from vllm_delta_sync.engine.core.pause_watchdog import PauseWatchdog
from vllm_delta_sync.engine.protocol import (
    Adapter,
    Describe,
    Done,
    RankFailure,
    RankRequest,
    RankState,
    Revert,
    decode_request,
    encode_answer,
    encode_request,
)
from vllm_delta_sync.errors import WeightsLostError

LOST = -1


def watchdog_of(engine: Any) -> PauseWatchdog:
    return PauseWatchdog(engine, WeightCaches(engine, "keep"))


def rank(version: int | None, *undo: int | None, intact: bool = True, confirmed: bool = True) -> RankState:
    return RankState(version, intact, confirmed, list(undo), 0, None, 0, False)


@pytest.mark.parametrize(
    ("answers", "version"),
    [
        pytest.param([rank(5, 4), rank(5, 4)], 5, id="all committed"),
        pytest.param([rank(4, 3), rank(4, 3)], 4, id="none committed"),
        pytest.param([rank(5, 4, confirmed=False), rank(5, 4, confirmed=False)], 4, id="all committed, unconfirmed"),
        pytest.param([rank(4, 5), rank(4, 5)], 4, id="together, though a newer one is in reach"),
        pytest.param([rank(5, 4, 3), rank(4, 3)], 4, id="one committed"),
        pytest.param([rank(5, 4, 3), rank(5, 3), rank(4, 3)], 3, id="the newest that all can reach"),
        pytest.param([rank(5, 4, confirmed=False), rank(5, 4)], 4, id="one committed, nobody knows whether rightly"),
        pytest.param([rank(None), rank(None)], None, id="nothing proven yet"),
        pytest.param([rank(0, None), rank(None)], None, id="back to nothing proven"),
        pytest.param([rank(5), rank(4)], LOST, id="no way back"),
        pytest.param([rank(5, 4), rank(4, 3, intact=False)], LOST, id="half written"),
        pytest.param([rank(5, 4), RankFailure("engine", "boom")], LOST, id="failed"),
        pytest.param([rank(5, confirmed=False)], LOST, id="nothing but unconfirmed weights"),
    ],
)
def test_on_which_version_ranks_agree(answers: list[RankState | RankFailure], version: int | None) -> None:
    if version != LOST:
        assert common_version(answers) == version
        return
    with pytest.raises(WeightsLostError):
        common_version(answers)


def test_an_engine_that_gets_no_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "7")
    monkeypatch.setattr(pause_watchdog, "call_executor", mock.Mock(side_effect=TimeoutError))
    monkeypatch.setattr(PauseWatchdog, "end", lambda watchdog, reason: ended.append(reason))
    with pytest.raises(TimeoutError):
        watchdog_of(SimpleNamespace(model_executor=None)).call_ranks(b"")
    assert ended == ["a rank has not answered within 7 s: it hangs, or its node is lost"]


def test_an_engine_that_hangs_in_vllms_own_pause_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it waits for every rank's device, without a limit."""
    ended = threading.Event()

    def pause_scheduler(mode: str, clear_cache: bool) -> None:
        if ended.wait(300):
            raise RuntimeError("ended")

    engine = EngineCore()
    monkeypatch.setattr(engine, "pause_scheduler", pause_scheduler)
    monkeypatch.setattr(pause_watchdog, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(PauseWatchdog, "end", lambda watchdog, reason: ended.set())
    with pytest.raises(RuntimeError, match="ended"):
        watchdog_of(engine).pause("keep", "keep", 0.05)


class Engine(EngineCore):
    """Its ranks say what the test has them hold."""

    def __init__(self, *held: RankState, busy: bool = False) -> None:
        super().__init__()
        self.held, self.busy = list(held), busy
        self.asked: list[RankRequest[Any]] = []
        self.handled: list[str] = []
        self.labels.append("4;sql=2")

    def add_request(self) -> None:
        raise NotImplementedError

    def run_busy_loop(self) -> None:
        raise NotImplementedError

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        self.handled.append(request_type.name)

    def collective_rpc(self, method: str, timeout: float | None, args: tuple[bytes, int]) -> list[Any]:
        request = decode_request(args[0])
        self.asked.append(request)
        if isinstance(request, Revert):
            self.held = [rank(request.version) for _ in self.held]
            return [{"call": args[1], "answer": encode_answer(Done())} for _ in self.held]
        return [{"call": args[1], "answer": encode_answer(state)} for state in self.held]


def installed(*held: RankState) -> Any:
    """An engine core with the watchdog in it, as vLLM's has it in a server."""
    engine = Engine(*held)
    pause_watchdog.install(engine)
    return engine


def test_what_belongs_into_a_pause_is_done_only_in_one() -> None:
    engine = Engine(rank(4))
    watchdog = watchdog_of(engine)
    for paused in (False, True, False):
        if paused:
            assert watchdog.pause("keep", "keep", 60.0) == 0
        assert engine.state == ("PAUSED_ALL" if paused else "UNPAUSED")
        assert watchdog.renew(60.0) is paused
        assert (watchdog.call_paused(encode_request(Describe()), 1.0) is not None) is paused
        assert watchdog.label_paused(None, "5~1", "run") is paused
        assert engine.get_weight_version() == ("5~1;sql=2" if paused else "4;sql=2")
        assert watchdog.label_paused("sql", "7~2", "run") is paused
        assert engine.get_weight_version() == ("5~1;sql=7~2" if paused else "4;sql=2")
        assert watchdog.resume() is False
        engine.set_weight_version("4;sql=2")
    assert len(engine.asked) == 1


def test_pausing_again_gives_a_pause_more_time() -> None:
    engine = Engine(rank(4), busy=True)
    watchdog = watchdog_of(engine)
    first = watchdog.pause("keep", "keep", 0.0)
    assert watchdog.call_paused(encode_request(Describe()), 1.0) is None
    assert watchdog.pause("keep", "keep", 60.0) is first
    assert watchdog.call_paused(encode_request(Describe()), 1.0) is not None
    watchdog.check_deadline()
    assert engine.state == "PAUSED_ALL"
    watchdog.resume()


def test_a_pause_that_is_ended_early_fails_and_leaves_those_of_others() -> None:
    engine = Engine(busy=True)
    watchdog = watchdog_of(engine)
    theirs = engine.pause_scheduler("wait", False)
    ours = watchdog.pause("keep", "keep", 60.0)
    assert theirs is not None
    assert isinstance(ours, Future)
    watchdog.resume()
    assert isinstance(ours.exception(0), RuntimeError)
    assert engine.state == "PAUSED_NEW"
    engine.stop()
    assert theirs.result(0) is None


def test_a_pause_that_fails_leaves_no_watchdog_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the engine later."""
    engine, running = Engine(), set(threading.enumerate())
    monkeypatch.setattr(engine, "pause_scheduler", mock.Mock(side_effect=RuntimeError("injected")))
    with pytest.raises(RuntimeError, match="injected"):
        watchdog_of(engine).pause("keep", "keep", 60.0)
    for thread in set(threading.enumerate()) - running:
        thread.join(10)
        assert not thread.is_alive()
    assert engine.state == "UNPAUSED"


@pytest.mark.parametrize("adapter", [None, Adapter("sql", 1, "/adapters/sql")], ids=["model", "adapter"])
def test_a_lost_pause_ends_on_a_common_version_with_its_label(adapter: Adapter | None) -> None:
    engine = Engine(rank(5, 3), rank(3, 2))
    watchdog = watchdog_of(engine)
    watchdog.pause("keep", "keep", 0.0, b"" if adapter is None else msgspec.msgpack.encode(adapter))
    watchdog.check_deadline()
    assert engine.asked == [
        Describe(adapter=adapter), Revert(version=3, adapter=adapter), Describe(adapter=adapter)
    ]  # fmt: skip
    assert plain_label(engine.get_weight_version()) == ("3;sql=2" if adapter is None else "4;sql=3")
    assert engine.state == "UNPAUSED"
    # The controller learns of it once.
    assert [watchdog.resume(), watchdog.resume()] == [True, False]


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_was_put_off_has_the_outcome_of_what_it_began(fails: bool) -> None:
    watchdog, begun = watchdog_of(Engine()), Future[int]()
    assert watchdog.defer(lambda: begun) is None
    watchdog.pause("keep", "keep", 60.0)
    answer = watchdog.defer(lambda: begun)
    assert answer is not None
    watchdog.resume()
    assert not answer.done()
    if fails:
        begun.set_exception(ValueError("injected"))
        assert isinstance(answer.exception(0), ValueError)
    else:
        begun.set_result(3)
        assert answer.result(0) == 3


def test_an_engine_ends_with_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    worker = SimpleNamespace(kill=lambda: ended.append("worker"))
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [worker])
    monkeypatch.setattr(os, "_exit", lambda status: ended.append(f"exit {status}"))
    engine = SimpleNamespace(_send_engine_dead=lambda: ended.append("clients notified"))
    watchdog_of(engine).end("injected")
    assert ended == ["clients notified", "worker", "exit 1"]


def test_pauses_of_other_callers_begin_after_ours() -> None:
    engine = installed()
    engine.delta_sync_pause("keep", "keep", 60.0)
    theirs = engine.pause_scheduler("wait", False)
    assert not theirs.done()
    assert engine.state == "PAUSED_ALL"
    engine.delta_sync_resume()
    assert theirs.result(0) is None
    assert engine.state == "PAUSED_NEW"


def test_a_loop_that_is_woken_after_the_deadline_ends_the_pause() -> None:
    engine = installed(rank(4))
    engine.delta_sync_pause("keep", "keep", 0.0)
    engine._handle_client_request(SimpleNamespace(name="ADD"), None)
    assert engine.state == "PAUSED_ALL"
    engine._handle_client_request(SimpleNamespace(name="WAKEUP"), None)
    assert engine.state == "UNPAUSED"
    assert engine.delta_sync_resume() is True
    assert engine.handled == ["ADD", "WAKEUP"]

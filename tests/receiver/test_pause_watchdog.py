"""Which version ranks agree on after a pause that its controller did not end; an engine that waits for a lost rank."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_delta_sync.engine.core import engine_core
from vllm_delta_sync.engine.core.engine_core import PauseWatchdog, common_version, is_settled
from vllm_delta_sync.engine.protocol import RankFailure, RankState
from vllm_delta_sync.errors import WeightsLostError

LOST = -1


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


def test_settled_means_every_rank_whole_and_confirmed() -> None:
    assert is_settled([rank(5), rank(5)], 5)
    assert not is_settled([rank(5), rank(4)], 5)
    assert not is_settled([rank(5), rank(5, confirmed=False)], 5)
    assert not is_settled([rank(5), rank(5, intact=False)], 5)


def test_an_engine_that_gets_no_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(executor: Any, request: bytes, seconds: float) -> list[bytes]:
        raise TimeoutError

    ended: list[str] = []
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "7")
    monkeypatch.setattr(engine_core, "call_executor", no_answer)
    monkeypatch.setattr(PauseWatchdog, "end", lambda watchdog, reason: ended.append(reason))
    with pytest.raises(TimeoutError):
        PauseWatchdog(SimpleNamespace(model_executor=None)).call_ranks(b"")
    assert ended == ["a rank has not answered within 7 s: it hangs, or its node is lost"]


def test_an_engine_that_hangs_in_vllms_own_pause_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it waits for every rank's device, without a limit."""
    ended = threading.Event()

    def pause_scheduler(mode: str, clear_cache: bool) -> None:
        if ended.wait(30):
            raise RuntimeError("ended")

    engine = SimpleNamespace(
        model_executor=SimpleNamespace(is_sleeping=False),
        scheduler=SimpleNamespace(pause_state=SimpleNamespace(name="UNPAUSED")),
        _idle_state_callbacks=[],
        input_queue=queue.Queue(),
        pause_scheduler=pause_scheduler,
        resume_scheduler=lambda: None,
    )
    monkeypatch.setattr(engine_core, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(PauseWatchdog, "end", lambda watchdog, reason: ended.set())
    with pytest.raises(RuntimeError, match="ended"):
        PauseWatchdog(engine).pause("keep", True, 0.05)

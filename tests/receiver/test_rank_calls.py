"""Answers of ranks through vLLM's own queues: those of other calls are dropped, a failure is no endless wait."""

import gc
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_delta_sync.engine.core import executors
from vllm_delta_sync.errors import EngineError

NUMBER = 17


def connected(worker: Any, reader: int) -> Any:
    """The other end of a worker's queue; it and the worker are ready."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    found = MessageQueue.create_from_handle(worker.export_handle(), reader)
    ready = threading.Thread(target=worker.wait_until_ready)
    ready.start()
    found.wait_until_ready()
    ready.join()
    return found


class Rank:
    """The two ends of one rank's answers: shared memory, as between a worker and its executor."""

    def __init__(self) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
        from vllm.v1.executor.multiproc_executor import WorkerProc

        self.status = WorkerProc.ResponseStatus
        self._worker = MessageQueue(1, 1)
        self.queue = connected(self._worker, 0)

    def answers(self, call: int, **values: Any) -> None:
        self._worker.enqueue((self.status.SUCCESS, {"call": call, **values}))

    def fails(self, message: str) -> None:
        self._worker.enqueue((self.status.FAILURE, message))


@pytest.fixture
def rank() -> Rank:
    return Rank()


def read(rank: Rank, seconds: float) -> Any:
    return executors._read_answer(rank.queue, 0, NUMBER, time.monotonic() + seconds)


def test_what_was_left_of_earlier_calls_is_dropped(rank: Rank) -> None:
    rank.answers(NUMBER - 2, version=1)
    rank.fails("an earlier call")
    rank.answers(NUMBER - 1, version=2)
    rank.answers(NUMBER, version=3)
    assert read(rank, 30) == {"call": NUMBER, "version": 3}


def test_a_failure_of_the_call_itself_ends_the_wait(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, it was dropped as an earlier call's, and the answer waited for without an end."""
    monkeypatch.setattr(executors, "FAILURE_SECONDS", 0.05)
    rank.fails("AttributeError: no delta_sync_call")
    with pytest.raises(
        EngineError, match="rank 0 failed outside of its rank worker: AttributeError: no delta_sync_call"
    ):
        read(rank, 30)
    assert not [record for record in caplog.records if "dropped" in record.getMessage()]


def test_no_answer_at_all_is_a_timeout(rank: Rank) -> None:
    with pytest.raises(TimeoutError):
        read(rank, 0.05)


def test_an_executor_of_another_kind_is_not_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{"call": NUMBER}, {"call": NUMBER - 1}]
    executor = SimpleNamespace(collective_rpc=lambda *_, **__: answers)
    monkeypatch.setattr(executors, "_numbers", iter([NUMBER]))
    with pytest.raises(EngineError, match="rank 1 answered another call"):
        executors.call_executor(executor, b"", 1.0)


# Ranks on other nodes


class RemoteRank:
    """The two ends of the answers of a rank on another node: a connection."""

    def __init__(self) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        self.worker = MessageQueue(1, 0, connect_ip="127.0.0.1")
        self.queue = connected(self.worker, -1)


@pytest.fixture
def ended() -> "queue.Queue[str]":
    return queue.Queue()


def test_an_engine_ends_with_a_rank_on_another_node(rank: Rank, ended: "queue.Queue[str]") -> None:
    remote = RemoteRank()
    executors.end_with_other_nodes(SimpleNamespace(response_mqs=[rank.queue, remote.queue]), ended.put)
    assert ended.empty()
    remote.worker.remote_socket.close(linger=0)
    assert ended.get(timeout=30) == "the connection to rank 1, on another node, is lost"


@pytest.mark.parametrize("ends", ["the engine", "its ranks, as it is shut down"])
def test_an_engine_that_is_shut_down_has_lost_nothing(ends: str, ended: "queue.Queue[str]") -> None:
    """Closing the queue waits for all that use its sockets, so this also shows that nothing holds it up."""
    remote = RemoteRank()
    executor = SimpleNamespace(response_mqs=[remote.queue], shutting_down=True)
    executors.end_with_other_nodes(executor, ended.put)
    if ends == "the engine":
        executor.response_mqs, remote.queue = [], None
        gc.collect()
    else:
        remote.worker.remote_socket.close(linger=0)
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.3)


def test_a_worker_ends_with_the_engine_on_another_node(
    ended: "queue.Queue[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.executor.multiproc_executor import WorkerProc

    looped: list[Any] = []
    monkeypatch.setattr(WorkerProc, "worker_busy_loop", lambda worker: looped.append(worker))
    monkeypatch.setattr(executors, "_end_worker", lambda: ended.put("ended"))
    executors.install()
    executors.install()
    remote = RemoteRank()
    worker: Any = SimpleNamespace(rpc_broadcast_mq=remote.queue)
    WorkerProc.worker_busy_loop(worker)
    assert looped == [worker]
    remote.worker.remote_socket.close(linger=0)
    assert ended.get(timeout=30) == "ended"
    assert ended.empty()

"""``call_executor`` sends a request to every rank of an engine; what this package assumes of the executor for that.

An engine on several nodes ends as one, by ``end_with_other_nodes`` and ``install``.

vLLM's executors: ``mp`` (``MultiprocExecutor``, on one node, or on several with ``--nnodes``), ``ray``
(``RayExecutorV2``, which has its queues), ``old ray`` (``RayDistributedExecutor``, with
``VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0``), ``uni`` (one worker inside the engine core). Each assumption, where it is used,
and who gives it:

1.  A call reaches every rank on every node and brings one answer of each, in the order of ranks:
    ``call_executor``, ``ServerEnginePort._call_ranks``. All four; ``external_launcher`` does not, and
    ``features.check_layout`` refuses it.
2.  An answer can be told from one to an earlier call: ``call_executor``. All, because answers are numbered.
3.  The answers after a failed call can be read on: ``_read_answer``. ``mp`` and ``ray`` by their queues;
    the others keep no answer for later.
4.  Calls and steps run on one thread of a worker, in the order in which they were made: ``RankWorker.commit`` works on
    the stream of that thread. All but ``old ray``, whose steps have another thread; there 5 must suffice.
5.  Nothing runs on any device once a pause is complete: ``RankWorker.commit``. vLLM waits for every rank's device
    before it completes a pause (``EngineCore._finish_pause``), with every executor.
6.  ``rank`` of a worker counts over all ranks of the engine: ``WorkerExtension``, ``RankWorker.set_version``. All.
7.  Every worker has the extension, and loads general plugins before the model: ``WorkerExtension``,
    ``plugin.register``. All, if this package is installed on every node.
8.  Every worker's environment leads to the bucket: ``RankWorker.identify``, ``DeltaSyncLoader``. ``mp``: that of its
    node; ``ray``: the engine core's, except for what the node sets; ``old ray`` copies few variables.
9.  The engine ends when the process of any rank ends, because calls wait for every rank's answer. ``mp`` watches only
    the ranks of its own node, therefore ``end_with_other_nodes``; ``old ray`` notices at the next call.
10. All ranks end with the engine core: ``PauseWatchdog.end``. ``ray`` and ``old ray`` by Ray; ``mp`` on its own node
    only; therefore ``install``.
11. A call ends when its timeout has passed: ``PauseWatchdog.call_ranks``. All but ``uni``, which calls its one rank
    directly.

docs/layouts.md ("Several nodes") says what happens where one does not hold.
"""

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_delta_sync.engine.compat.patches import wrap_once
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import EngineError

EXECUTOR_MODULE = "vllm.v1.executor.multiproc_executor"
FAILURE_SECONDS = 60.0
"""How long to wait for an answer after a rank reported a failure, which may belong to an earlier call. Calls are short:
long operations run in the rank's background thread."""
RANK_METHOD = "delta_sync_call"
"""Method of ``WorkerExtension`` that receives calls."""
_numbers = itertools.count(time.time_ns())
"""For calls; answers carry them. Unique among all processes that call these ranks."""


def call_executor(executor: Any, request: bytes, timeout_s: float) -> list[bytes]:
    """Send an encoded request to every rank of an executor; returns encoded answers in the order of ranks.

    Cause: when a call fails on one rank, vLLM's multiprocessing executor does not read the answers of the ranks after
    it; they stay in their queues, and every later call gets the previous call's answer from those ranks. Symptom: after
    any failed call under tensor parallelism, ranks answer the wrong call from then on. This function drops answers to
    other calls. Remove when: the executor reads all answers before it raises.

    Raises:
        TimeoutError: a rank does not answer in time. EngineError: a rank failed in the call; or it answered another
            call, and this executor has no queues to read on from.
    """
    number = next(_numbers)
    if not all(hasattr(executor, name) for name in ("rpc_broadcast_mq", "response_mqs", "futures_queue")):
        found = executor.collective_rpc(RANK_METHOD, timeout=timeout_s, args=(request, number))
        for rank, answer in enumerate(found):
            if not isinstance(answer, dict) or answer.get("call") != number:
                raise EngineError(
                    f"rank {rank} answered another call: an earlier one failed on another rank, and vLLM does not "
                    "recover from that; start the engine again"
                )
        return [answer["answer"] for answer in found]
    if executor.is_failed:
        raise EngineError("the engine's workers are gone")
    from vllm.v1.executor.multiproc_executor import FutureWrapper

    deadline = time.monotonic() + timeout_s
    executor.rpc_broadcast_mq.enqueue((RANK_METHOD, (request, number), {}, None))

    def read() -> list[bytes]:
        queues = enumerate(executor.response_mqs)
        return [_read_answer(queue, rank, number, deadline)["answer"] for rank, queue in queues]

    # In the executor's order: steps under way have answers in these queues too.
    answers: list[bytes] = FutureWrapper(executor.futures_queue, get_response=read).result()
    return answers


def _read_answer(queue: Any, rank: int, number: int, deadline: float) -> dict[str, Any]:
    """One rank's answer to the call of that number. A failure carries no number: it may belong to an earlier call whose
    answer is still in the queue, or to this call, which then gets no other answer."""
    failure: str | None = None
    while True:
        try:
            status, result = queue.dequeue(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if failure is None:
                raise
            raise EngineError(f"rank {rank} failed outside of its rank worker: {failure}") from None
        if isinstance(result, dict) and result.get("call") == number:
            return result
        if getattr(status, "name", "").startswith("FAILURE"):
            failure = str(result)
            deadline = min(deadline, time.monotonic() + FAILURE_SECONDS)
            logger.warning("rank %d reported a failure, of this call or an earlier one: %s", rank, failure)
            continue
        logger.warning("dropped an answer of rank %d to an earlier call, which had failed on another rank", rank)


def end_with_other_nodes(executor: Any, end: Callable[[str], None]) -> None:
    """Call ``end`` when a rank on another node disconnects.

    Cause: vLLM's multiprocessing executor watches only the worker processes of its own node. Symptom: when another node
    is lost, the next call to its rank blocks the engine forever, and generation with it. Remove when: the executor
    watches the ranks of all nodes.
    """

    def lost(rank: int) -> None:
        # The Ray executor ends its ranks itself when it is shut down.
        if not getattr(executor, "shutting_down", False):
            end(f"the connection to rank {rank}, on another node, is lost")

    for rank, queue in enumerate(getattr(executor, "response_mqs", None) or ()):
        _on_disconnect(queue, partial(lost, rank))


def install() -> None:
    """Let a worker end when it has lost the engine core on another node. Called in every process.

    Cause: such a worker waits for the next call forever. Symptom: an engine that is started again waits for this node,
    whose memory and port are still taken. Remove when: vLLM's workers end themselves.
    """

    def run(original: Callable[..., Any], self: Any) -> None:
        _on_disconnect(getattr(self, "rpc_broadcast_mq", None), _end_worker)
        original(self)

    worker = getattr(sys.modules.get(EXECUTOR_MODULE), "WorkerProc", None)
    if hasattr(worker, "worker_busy_loop"):
        wrap_once(worker, "worker_busy_loop", run)


def _end_worker() -> None:
    logger.critical("ending this rank: the connection to the engine core, on another node, is lost")
    os._exit(1)


def _on_disconnect(queue: Any, act: Callable[[], None]) -> None:
    """Start a thread that calls ``act`` once the connection to a queue's other node is lost; queues in shared memory
    have none."""
    socket = getattr(queue, "remote_socket", None)
    if socket is None:
        return
    import zmq
    from zmq.utils.monitor import recv_monitor_message

    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def wait() -> None:
        try:
            event = recv_monitor_message(monitor)["event"]
        except zmq.ContextTerminated:
            event = zmq.EVENT_MONITOR_STOPPED
        finally:
            # Ending the queue's context waits until this socket is closed.
            monitor.close(linger=0)
        if event == zmq.EVENT_DISCONNECTED:
            act()

    threading.Thread(target=wait, name="delta-sync-node", daemon=True).start()

"""What this package assumes of the executor that runs an engine's ranks, and how an engine on several nodes ends as
one.

vLLM's executors: ``mp`` (``MultiprocExecutor``, on one node, or on several with ``--nnodes``), ``ray``
(``RayExecutorV2``, which has its queues), ``old ray`` (``RayDistributedExecutor``, with
``VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0``), ``uni`` (one worker inside the engine core). Each assumption, where it is used,
and who gives it:

1.  A call reaches every rank on every node and brings one answer of each, in the order of ranks:
    ``rank_calls.call_executor``, ``ServerEnginePort._call_ranks``. All four; ``external_launcher`` does not, and
    ``features.check_layout`` refuses it.
2.  An answer can be told from one to an earlier call: ``rank_calls.check_numbers``. All, because answers are numbered.
3.  The answers after a failed call can be read on: ``rank_calls._read_answer``. ``mp`` and ``ray`` by their queues;
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

import os
import sys
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from vllm_delta_sync.engine.logger import logger

EXECUTOR_MODULE = "vllm.v1.executor.multiproc_executor"


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
    module = sys.modules.get(EXECUTOR_MODULE)
    worker = getattr(module, "WorkerProc", None)
    original = getattr(worker, "worker_busy_loop", None)
    if worker is None or original is None or hasattr(original, "delta_sync"):
        return

    @wraps(original)
    def run(self: Any) -> None:
        _on_disconnect(getattr(self, "rpc_broadcast_mq", None), _end_worker)
        original(self)

    run.delta_sync = True  # type: ignore[attr-defined]
    worker.worker_busy_loop = run


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

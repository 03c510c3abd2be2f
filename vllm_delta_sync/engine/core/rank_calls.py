"""``call_executor`` sends a request to every rank of an engine; each answer carries the number of its call.

Runs in the engine core's process, which has the executor.
"""

import itertools
import time
from typing import Any

from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import EngineError

FAILURE_SECONDS = 60.0
"""How long to wait for an answer after a rank reported a failure, which may belong to an earlier call. Calls are short:
long operations run in the rank's background thread."""
RANK_METHOD = "delta_sync_call"
"""Method of ``WorkerExtension`` that receives calls."""

_numbers = itertools.count(time.time_ns())


def next_number() -> int:
    """Return a number for a call, which its answers carry. Unique among all processes that call these ranks."""
    return next(_numbers)


def call_executor(executor: Any, request: bytes, timeout_s: float | None) -> list[bytes]:
    """Send an encoded request to every rank of an executor; returns encoded answers in the order of ranks.

    Cause: when a call fails on one rank, vLLM's multiprocessing executor does not read the answers of the ranks after
    it; they stay in their queues, and every later call gets the previous call's answer from those ranks. Symptom: after
    any failed call under tensor parallelism, ranks answer the wrong call from then on. This function drops answers to
    other calls. Remove when: the executor reads all answers before it raises.

    Raises:
        TimeoutError: a rank does not answer in time. EngineError: a rank failed in the call; or it answered another
            call, and this executor has no queues to read on from.
    """
    number = next_number()
    if not all(hasattr(executor, name) for name in ("rpc_broadcast_mq", "response_mqs", "futures_queue")):
        return check_numbers(executor.collective_rpc(RANK_METHOD, timeout=timeout_s, args=(request, number)), number)
    if executor.is_failed:
        raise EngineError("the engine's workers are gone")
    from vllm.v1.executor.multiproc_executor import FutureWrapper

    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    executor.rpc_broadcast_mq.enqueue((RANK_METHOD, (request, number), {}, None))

    def read() -> list[bytes]:
        queues = enumerate(executor.response_mqs)
        return [_read_answer(queue, rank, number, deadline)["answer"] for rank, queue in queues]

    # In the executor's order: steps under way have answers in these queues too.
    answers: list[bytes] = FutureWrapper(executor.futures_queue, get_response=read).result()
    return answers


def _read_answer(queue: Any, rank: int, number: int, deadline: float | None) -> dict[str, Any]:
    """One rank's answer to the call of that number. A failure carries no number: it may belong to an earlier call whose
    answer is still in the queue, or to this call, which then gets no other answer."""
    failure: str | None = None
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            status, result = queue.dequeue(timeout=left)
        except TimeoutError:
            if failure is None:
                raise
            raise EngineError(f"rank {rank} failed outside of its rank worker: {failure}") from None
        if isinstance(result, dict) and result.get("call") == number:
            return result
        if getattr(status, "name", "").startswith("FAILURE"):
            failure = str(result)
            until = time.monotonic() + FAILURE_SECONDS
            deadline = until if deadline is None else min(deadline, until)
            logger.warning("rank %d reported a failure, of this call or an earlier one: %s", rank, failure)
            continue
        logger.warning("dropped an answer of rank %d to an earlier call, which had failed on another rank", rank)


def check_numbers(answers: list[Any], number: int) -> list[bytes]:
    """Return the encoded answers if all belong to the call of that number. Raises EngineError."""
    for rank, answer in enumerate(answers):
        if not isinstance(answer, dict) or answer.get("call") != number:
            raise EngineError(
                f"rank {rank} answered another call: an earlier one failed on another rank, and vLLM does not recover "
                "from that; start the engine again"
            )
    return [answer["answer"] for answer in answers]

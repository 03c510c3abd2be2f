"""How callers notice that an engine ends: ``watch_shutdown`` on purpose, ``ask_engines``, ``ask_engine`` in a call.

``fail_when_engine_died`` makes the server's exit status tell the two apart.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

from vllm_delta_sync.engine.compat.patches import wrap_method
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import EngineError

ALIVE_CHECK_SECONDS = 0.5
"""Interval between checks, while a client waits for an answer, that its engine has not died."""
SHUTDOWN_BEGAN = "delta_sync_shutdown_began"
"""Attribute of a client that has the event of ``watch_shutdown``."""


def fail_when_engine_died(client: Any) -> None:
    """Make ``vllm serve`` exit with status 1 if its engine died.

    Cause: it shuts down as after a request to stop. Symptom: exit status 0, so that a supervisor does not restart it.
    Remove when: vLLM exits with an error itself.
    """
    was_errored: list[bool] = []

    def shutdown(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        # Only the first call counts: after any shutdown the client looks as if its engine had died.
        was_errored.append(client.errored)
        original(*args, **kwargs)
        if was_errored == [True]:
            logger.critical("the engine is dead; exit status 1")
            raise SystemExit(1)

    wrap_method(client, "shutdown", shutdown)


def watch_shutdown(client: Any) -> threading.Event:
    """Return an event that is set once a client begins to shut its engine down; the same event at each call.

    Cause: vLLM ends the engine of a server that is asked to stop while other threads still call it. Symptom: a warning
    or a traceback for each of these calls, at every normal stop. Remove when: vLLM notifies plugins before it stops.
    """
    began: threading.Event | None = getattr(client, SHUTDOWN_BEGAN, None)
    if began is not None:
        return began
    event = threading.Event()
    setattr(client, SHUTDOWN_BEGAN, event)

    def shutdown(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        event.set()
        return original(*args, **kwargs)

    wrap_method(client, "shutdown", shutdown)
    return event


async def ask_engines(client: Any, calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Return the answers to calls of a client's engines, in their order.

    Cause: vLLM never answers a call that an engine had not answered when it died. Symptom: the call, and the request
    that it was made for, wait on; and the server waits for its requests instead of exiting. Remove when: such calls
    fail.

    Raises:
        EngineError: an engine died before it answered. Exception: the first error, once all have answered.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    gathered = asyncio.gather(*tasks, return_exceptions=True)
    try:
        while not (await asyncio.wait({gathered}, timeout=ALIVE_CHECK_SECONDS))[0]:
            if client.errored:
                raise EngineError("it died before it answered")
    finally:
        for task in tasks:
            task.cancel()
    outcomes = gathered.result()
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def ask_engine(client: Any, method: str, *args: Any) -> Any:
    """Return the answer to a call of an ``LLM``'s engine in a process of its own. Cause and removal as ``ask_engines``.

    Raises:
        Exception: what the call raises, or vLLM's error that the engine is dead.
    """
    answer: Future[Any] = Future()

    def call(name: str) -> None:
        try:
            answer.set_result(client.call_utility(name, *args))
        except Exception as error:  # noqa: BLE001  the caller gets it through the future
            answer.set_exception(error)

    threading.Thread(target=call, args=(method,), name="delta-sync-call", daemon=True).start()
    while not wait([answer], ALIVE_CHECK_SECONDS).done:
        client.ensure_alive()
    return answer.result()

"""The lease on a pause: a watchdog in the engine core's process that ends a pause whose controller was lost.

The controller lives in the API server, the pause in the engine core, which is another process: a controller that dies
or hangs between pause and resume would leave generation paused for ever. So the controller pauses for a bounded time,
and when that has passed, the engine core settles what the ranks hold by itself, on the thread that runs its loop, and
goes on. Other callers' pauses (vLLM's /pause, /sleep) are kept apart from ours: what was paused before stays paused
after, and what is asked for meanwhile is done when ours is over.
"""

import asyncio
import inspect
import logging
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from vllm_delta_sync.engine import rank_calls
from vllm_delta_sync.engine.compat import NO_VERSION, wrap_method
from vllm_delta_sync.engine.lease import Answer, Guard
from vllm_delta_sync.errors import EngineError

# A child of vLLM's logger, the only one that vLLM gives a handler.
logger = logging.getLogger("vllm.delta_sync")

CORE_MODULE = "vllm.v1.engine.core"
END_SECONDS = 10.0


def _guard(engine: Any) -> Guard:
    guard: Guard | None = getattr(engine, "delta_sync_guard", None)
    if guard is None:
        guard = engine.delta_sync_guard = Guard(engine)
    return guard


@cache
def missing_names() -> list[str]:
    """What the guard needs of vLLM's engine core and does not find. Imports vLLM."""
    from vllm.v1 import engine
    from vllm.v1.engine import core

    process = getattr(core, "EngineCoreProc", None)
    methods = ["pause_scheduler", "resume_scheduler", "set_weight_version", "run_busy_loop", "_handle_client_request"]
    missing = [name for name in [*methods, "_send_engine_dead"] if not hasattr(process, name)]
    if not hasattr(getattr(engine, "EngineCoreRequestType", None), "WAKEUP"):
        missing.append("EngineCoreRequestType.WAKEUP")
    # These are set on instances: their names stand in the constructors.
    for owner, names in (("EngineCore", ["_idle_state_callbacks", "scheduler"]), ("EngineCoreProc", ["input_queue"])):
        constructor = inspect.unwrap(getattr(getattr(core, owner, None), "__init__", missing_names))
        missing += [name for name in names if name not in constructor.__code__.co_names]
    return missing


def install() -> None:
    """Give vLLM's engine core process its watchdog. Called in every process; does nothing where there is no engine.

    An engine inside the caller's own process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) is left alone: nothing there can
    be lost apart from it.
    """
    core = sys.modules.get(CORE_MODULE)
    if core is None or hasattr(getattr(core, "EngineCoreProc", None), "delta_sync_pause"):
        return
    missing = missing_names()
    if missing:
        logger.warning(
            "this vLLM's engine core is not as expected (no %s): a controller that is lost in the middle of a commit "
            "leaves generation paused",
            ", ".join(missing),
        )
        return
    process = core.EngineCoreProc

    def delta_sync_pause(self: Any, mode: str, clear_cache: bool, lease_s: float) -> Any:
        return _guard(self).pause(mode, clear_cache, lease_s)

    def delta_sync_resume(self: Any) -> Any:
        return _guard(self).resume()

    def delta_sync_renew(self: Any, lease_s: float) -> Any:
        return _guard(self).renew(lease_s)

    def delta_sync_ask(self: Any, method: str, arguments: Any) -> Any:
        return _guard(self).ask(method, arguments)

    def delta_sync_paused_call(self: Any, method: str, arguments: Any, timeout_s: float) -> Any:
        return _guard(self).call(method, arguments, timeout_s)

    def delta_sync_paused_label(self: Any, label: str) -> Any:
        return _guard(self).label(label)

    def delta_sync_end(self: Any, reason: str) -> Any:
        _guard(self).end(reason)

    calls = (delta_sync_pause, delta_sync_resume, delta_sync_renew, delta_sync_ask)
    for method in (*calls, delta_sync_paused_call, delta_sync_paused_label, delta_sync_end):
        setattr(process, method.__name__, method)
    for name in ("pause_scheduler", "resume_scheduler"):
        setattr(process, name, _deferring(getattr(process, name)))
    process._handle_client_request = _checking(process._handle_client_request)
    process.run_busy_loop = _ending_with_parent(process.run_busy_loop)


def _deferring(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        future = _guard(self).defer(lambda: original(self, *args, **kwargs))
        return original(self, *args, **kwargs) if future is None else future

    return call


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def handle(self: Any, request_type: Any, request: Any) -> Any:
        if request_type.name == "WAKEUP":
            _guard(self).check()
        return original(self, request_type, request)

    return handle


def _ending_with_parent(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def run(self: Any) -> Any:
        _guard(self).end_with_parent()
        return original(self)

    return run


async def pause(client: Any, mode: str, clear_cache: bool, lease_s: float) -> None:
    """Pause at the engine core, for at most ``lease_s`` seconds; waiting for requests in flight does not count.

    Cause: ``pause_generation`` ends with a fixed 20 ms sleep for the order of outputs, which weights do not need.
    Symptom: every pause is 20 ms longer. Remove when: the sleep is gone.
    """
    if clear_cache:
        await client.renderer.clear_mm_cache_async()
    if missing_names():
        await client.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
        return
    request = asyncio.ensure_future(
        client.engine_core.call_utility_async("delta_sync_pause", mode, clear_cache, lease_s)
    )
    try:
        # Mode ``wait`` lasts as long as the requests in flight.
        while not (await asyncio.wait({request}, timeout=lease_s / 3))[0]:
            await renew(client, lease_s)
        await request
    finally:
        request.cancel()


async def renew(client: Any, lease_s: float) -> Answer:
    """Guard.renew, in the engine core."""
    if missing_names():
        return {"expired": False}
    answer: Answer = await client.engine_core.call_utility_async("delta_sync_renew", lease_s)
    return answer


async def call(client: Any, method: str, arguments: Answer) -> list[Answer]:
    """``delta_sync_call`` on every rank.

    No timeout inside the engine: it would take a late answer for that of the next call.
    """
    answers: list[Answer]
    if missing_names():
        number = rank_calls.next_number()
        answers = await client.collective_rpc(rank_calls.METHOD, args=(method, arguments, number))
        return rank_calls.checked(answers, number)
    answers = await client.engine_core.call_utility_async("delta_sync_ask", method, arguments)
    return answers


async def call_paused(client: Any, method: str, arguments: Answer, timeout_s: float) -> Answer:
    """Guard.call, in the engine core: for ``commit`` and ``revert``, which must not reach an engine that runs."""
    if missing_names():
        return {"expired": False, "answers": await call(client, method, arguments)}
    answer: Answer = await client.engine_core.call_utility_async("delta_sync_paused_call", method, arguments, timeout_s)
    return answer


async def label_paused(client: Any, version: int | None) -> Answer:
    """Guard.label, in the engine core: what the watchdog has taken back is not to be labelled as if it were held."""
    label = NO_VERSION if version is None else str(version)
    if missing_names():
        await client.engine_core.set_weight_version_async(label)
        return {"expired": False}
    answer: Answer = await client.engine_core.call_utility_async("delta_sync_paused_label", label)
    return answer


async def resume(client: Any) -> Answer:
    """Guard.resume, in the engine core."""
    if missing_names():
        await client.engine_core.resume_scheduler_async()
        return {"expired": False, "outcome": None}
    answer: Answer = await client.engine_core.call_utility_async("delta_sync_resume")
    return answer


async def end_engine(client: Any, reason: str) -> None:
    """End the engine core and its workers, even if they hang in a call; the server then ends too.

    Raises:
        EngineError: the engine's processes are not this server's own, and the engine does not answer.
    """
    logger.critical("ending the engine: %s", reason)
    processes = getattr(client.engine_core.resources.engine_manager, "processes", None)
    if processes:
        from vllm.utils.system_utils import kill_process_tree

        for process in processes:
            kill_process_tree(process.pid)
        return
    try:
        await asyncio.wait_for(client.engine_core.call_utility_async("delta_sync_end", reason), END_SECONDS)
    except TimeoutError as error:
        raise EngineError("the engine core is not this server's own process and does not answer: end it") from error
    except Exception:  # noqa: BLE001  an engine that ends cannot answer
        return


def fail_when_engine_died(client: Any) -> None:
    """Let ``vllm serve`` exit with status 1 if its engine died.

    Cause: it winds down as after a request to stop. Symptom: exit status 0, which a supervisor takes for the wish to
    be off. Remove when: vLLM says so itself.
    """
    asked: list[bool] = []

    def shutdown(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        # Only the first call tells: any shutdown makes the client look as if its engine had died.
        asked.append(client.errored)
        original(*args, **kwargs)
        if asked == [True]:
            logger.critical("the engine is dead; exit status 1")
            raise SystemExit(1)

    wrap_method(client, "shutdown", shutdown)

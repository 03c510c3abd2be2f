"""``install`` adds the pause watchdog to vLLM's engine core, which then ends a pause whose controller was lost.

The controller runs in the API server, and the pause in the engine core, which is another process: a controller that
dies or hangs between pause and resume would leave generation paused forever. Therefore each pause has a deadline.
After it the engine core brings its ranks to one version, on the thread that runs its loop, and resumes. Other callers'
pauses (vLLM's /pause, /sleep) are kept apart: what was paused before stays paused, and calls that arrive meanwhile run
after our pause.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from vllm_delta_sync.engine.compat.patches import wrap_method
from vllm_delta_sync.engine.core.watchdog import PauseWatchdog
from vllm_delta_sync.engine.logger import logger

CORE_MODULE = "vllm.v1.engine.core"


def _watchdog_of(engine: Any) -> PauseWatchdog:
    watchdog: PauseWatchdog | None = getattr(engine, "delta_sync_watchdog", None)
    if watchdog is None:
        watchdog = engine.delta_sync_watchdog = PauseWatchdog(engine)
    return watchdog


WATCHDOG_CALLS = (
    PauseWatchdog.pause,
    PauseWatchdog.renew,
    PauseWatchdog.resume,
    PauseWatchdog.call_ranks,
    PauseWatchdog.call_paused,
    PauseWatchdog.label_paused,
    PauseWatchdog.end,
)
"""What a controller may call in the engine core, as ``delta_sync_pause`` and so on."""


def _on_watchdog(method: Callable[..., Any]) -> Callable[..., Any]:
    # vLLM compares the arguments of a call with the signature, which ``wraps`` keeps.
    @wraps(method)
    def call(self: Any, *args: Any) -> Any:
        return method(_watchdog_of(self), *args)

    return call


@cache
def missing_names() -> list[str]:
    """Return the names that the watchdog needs of vLLM's engine core and client, and that are missing. Imports vLLM."""
    from vllm.v1 import engine
    from vllm.v1.engine import core, core_client

    process = getattr(core, "EngineCoreProc", None)
    methods = ["pause_scheduler", "resume_scheduler", "set_weight_version", "run_busy_loop", "_handle_client_request"]
    missing = [name for name in [*methods, "_send_engine_dead"] if not hasattr(process, name)]
    if not hasattr(getattr(engine, "EngineCoreRequestType", None), "WAKEUP"):
        missing.append("EngineCoreRequestType.WAKEUP")
    if not hasattr(getattr(core_client, "AsyncMPClient", None), "_call_utility_async"):
        missing.append("AsyncMPClient._call_utility_async")
    # These are set on instances, so look for them in the constructors.
    for module, owner, names in (
        (core, "EngineCore", ["_idle_state_callbacks", "scheduler"]),
        (core, "EngineCoreProc", ["input_queue"]),
        (core_client, "MPClient", ["core_engines"]),
    ):
        constructor = inspect.unwrap(getattr(getattr(module, owner, None), "__init__", missing_names))
        missing += [name for name in names if name not in constructor.__code__.co_names]
    return missing


def install() -> None:
    """Add the watchdog to vLLM's engine core. Called in every process; does nothing where there is no engine.

    An engine inside the caller's own process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) gets none: its controller cannot be
    lost separately.
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
    for method in WATCHDOG_CALLS:
        setattr(process, f"delta_sync_{method.__name__}", _on_watchdog(method))
    process._handle_client_request = _check_on_wakeup(process._handle_client_request)
    # Engines that run in step have their own loop and their own way to resume.
    for cls in (process, getattr(core, "DPEngineCoreProc", process)):
        for name, wrap in OVERRIDABLE.items():
            if name in vars(cls) or (cls is process and hasattr(cls, name)):
                setattr(cls, name, wrap(getattr(cls, name)))


def _defer_while_paused(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        future = _watchdog_of(self).defer(lambda: original(self, *args, **kwargs))
        return original(self, *args, **kwargs) if future is None else future

    return call


def _check_on_wakeup(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def handle(self: Any, request_type: Any, request: Any) -> Any:
        if request_type.name == "WAKEUP":
            _watchdog_of(self).check_deadline()
        return original(self, request_type, request)

    return handle


def _end_with_parent(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def run(self: Any) -> Any:
        _watchdog_of(self).end_with_parent()
        return original(self)

    return run


OVERRIDABLE = {
    # vLLM's /pause since 0.33: it calls pause_scheduler and makes the engine reject new requests. Without this it would
    # reject them during our pause and accept them after it, because the end of our pause resumes the scheduler.
    "pause_generation": _defer_while_paused,
    "pause_scheduler": _defer_while_paused,
    "resume_scheduler": _defer_while_paused,
    "run_busy_loop": _end_with_parent,
}


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

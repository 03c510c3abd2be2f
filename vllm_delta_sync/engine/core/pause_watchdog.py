"""``PauseWatchdog``, in the engine core's process, makes each pause and ends a lost one; ``install`` adds it to vLLM's.

The controller runs in the API server, and the pause in the engine core, which is another process: a controller that
dies or hangs between pause and resume would leave generation paused forever. Therefore each pause has a deadline.
After it the watchdog brings the ranks to one version, on the thread that runs the engine core's loop, and resumes.
Other callers' pauses (vLLM's /pause, /sleep) are kept apart: what was paused before stays paused, and calls that arrive
meanwhile run after our pause. What an engine computed from older weights is dropped, or gets another key, within each
pause (``WeightCaches``).
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_delta_sync.engine import protocol
from vllm_delta_sync.engine.commit.transaction import all_hold, common_version
from vllm_delta_sync.engine.compat import patches
from vllm_delta_sync.engine.compat.caches import WeightCaches
from vllm_delta_sync.engine.compat.patches import wrap_method
from vllm_delta_sync.engine.core import executors
from vllm_delta_sync.engine.core.executors import call_executor
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.protocol import A, RankFailure, RankRequest, RankState
from vllm_delta_sync.errors import SettingsError, WeightsLostError
from vllm_delta_sync.settings import Settings, client_settings

RANK_CALL_SECONDS = 60.0
"""Bound on each call to the ranks while the watchdog ends a lost pause."""
NOT_PAUSED = -1
"""``PauseWatchdog.pause`` returns it where an error would do, because vLLM logs errors with a traceback."""
STUCK_SECONDS = 60.0
"""How long the engine's loop may be busy after a deadline before it counts as hung."""


@dataclass
class TimedPause:
    """One pause that we requested.

    Attributes:
        deadline: by time.monotonic().
        before: the scheduler's pause state before it.
        waiting: idle callbacks of other callers' pauses that were incomplete when ours began.
        deferred: calls of other callers to make after it.
        pending: vLLM's future, completes when the loop is idle; None if it was idle at once.
        outcome: what ``PauseWatchdog.pause`` returns.
        failure: why the ranks can no longer be called.
        adapter: whose weights are changed in it; None for the model's own.
    """

    deadline: float
    before: Any
    waiting: list[Callable[..., Any]]
    deferred: list[Callable[[], None]] = field(default_factory=list)
    pending: "Future[Any] | None" = None
    outcome: "Future[int] | int" = 0
    callback: Callable[..., Any] | None = None
    failure: str | None = None
    adapter: protocol.Adapter | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class PauseWatchdog:
    """The watchdog of one EngineCoreProc. All methods run on the thread of its loop, except ``_watch`` and ``end``."""

    def __init__(self, engine: Any, caches: WeightCaches) -> None:
        self._engine = engine
        self._caches = caches
        self._active: TimedPause | None = None
        self._expired = False

    def pause(self, mode: str, prefix_cache: str, limit_s: float, adapter: bytes = b"") -> "Future[int] | int":
        """Pause as ``pause_scheduler`` does, for at most ``limit_s`` seconds. During a pause of ours: renew it.

        Args:
            prefix_cache: the setting.
            adapter: whose weights are to be changed, encoded; empty for the model's own.

        Returns:
            see ``WeightCaches.drop``: if it is not 0, no weights may be changed in this pause. NOT_PAUSED if the engine
            sleeps, so its weights are not in memory.

        Raises:
            RuntimeError: a cache could not be dropped.
            EngineError: the setting came too late for this engine.
        """
        if self._active is not None:
            self.renew(limit_s)
            return self._active.outcome
        engine = self._engine
        if self.sleeps():
            return NOT_PAUSED
        self._caches.use(prefix_cache)
        before = engine.scheduler.pause_state
        keeps = before.name == "PAUSED_ALL"
        waiting = list(engine._idle_state_callbacks)
        engine._idle_state_callbacks.clear()
        changed = msgspec.msgpack.decode(adapter, type=protocol.Adapter) if adapter else None
        paused = TimedPause(time.monotonic() + limit_s, before, waiting, adapter=changed)
        self._expired = False
        if hasattr(engine, "input_queue"):
            # First: vLLM's pause calls every rank, and waits forever for one that is gone. An engine without a queue
            # runs in its controller's own process, which cannot be lost separately.
            threading.Thread(target=self._watch, args=(paused,), name="delta-sync-watchdog", daemon=True).start()
        try:
            # If another caller holds requests back, our mode must not let them run. vLLM would drop caches of inputs
            # too, which its front end believes to be there.
            paused.pending = engine.pause_scheduler("keep" if keeps and mode == "wait" else mode, False)
            if keeps:
                engine.scheduler.set_pause_state(before)
            if paused.pending is None:
                paused.outcome = self._caches.drop()
            else:
                paused.callback = engine._idle_state_callbacks[-1]
                paused.outcome = self._drop_after(paused.pending)
        except BaseException:  # after any failure, an interrupt included, restore other callers' pauses
            paused.ended.set()
            self._restore(paused)
            raise
        self._active = paused
        return paused.outcome

    def sleeps(self) -> bool:
        """Return whether the weights are not in memory. vLLM's ``is_sleeping`` is also True in a pause, and while only
        the KV cache sleeps."""
        return "weights" in self._engine.model_executor.sleeping_tags

    def _drop_after(self, pending: "Future[Any]") -> "Future[int]":
        """Drop caches once the loop is idle; on its thread, where vLLM completes ``pending``."""
        outcome: Future[int] = Future()

        def drop(done: "Future[Any]") -> int:
            done.result()
            return self._caches.drop()

        pending.add_done_callback(lambda done: _complete(outcome, lambda: drop(done)))
        return outcome

    def renew(self, limit_s: float) -> bool:
        """Move the deadline to ``limit_s`` seconds from now if that is later. False if no pause is on."""
        if self._active is None:
            return False
        self._active.deadline = max(self._active.deadline, time.monotonic() + limit_s)
        return True

    def call_ranks(self, request: bytes) -> list[bytes]:
        """Send an encoded request to every rank, paused or not; returns encoded answers. Ends the engine if a rank does
        not answer for as long as vLLM waits for a step."""
        from vllm import envs

        limit_s = float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
        try:
            return call_executor(self._engine.model_executor, request, limit_s)
        except TimeoutError:
            self.end(f"a rank has not answered within {limit_s:.0f} s: it hangs, or its node is lost")
            raise

    def call_paused(self, request: bytes, timeout_s: float) -> list[bytes] | None:
        """As ``call_ranks``, only before the deadline of a pause of ours; None if that has passed."""
        if self._active is None or time.monotonic() >= self._active.deadline:
            return None
        decoded = protocol.decode_request(request)
        if isinstance(decoded, protocol.Commit | protocol.Revert):
            self._caches.begin_change(_name_of(decoded.adapter))
        try:
            return call_executor(self._engine.model_executor, request, timeout_s)
        except Exception as error:  # a rank's late answer would be taken for the answer to the next call
            self._active.failure = f"{decoded.operation} has no outcome: {type(error).__name__}: {error}"
            raise

    def label(self, adapter: str | None, label: str, run: str | None, prefix_cache: str) -> None:
        """Label outputs from now on, and what is computed; see ``WeightCaches.name_weights``.

        Args:
            prefix_cache: the setting.
        """
        self._caches.use(prefix_cache)
        self._caches.name_weights(adapter, label, run)

    def label_paused(self, adapter: str | None, label: str, run: str | None) -> bool:
        """As ``label``, only during a pause of ours. False if there is none."""
        if self._active is None:
            return False
        self._caches.name_weights(adapter, label, run)
        return True

    def resume(self) -> bool:
        """End our pause; harmless if there is none. True if the watchdog ended it first."""
        if self._active is not None:
            self._release()
            return False
        expired, self._expired = self._expired, False
        return expired

    def check_deadline(self) -> None:
        """End the pause if its deadline has passed, and bring the ranks to one version."""
        paused = self._active
        if paused is None or time.monotonic() < paused.deadline:
            return
        logger.warning(
            "a pause passed its deadline: its controller is lost or hangs; checking the version of each rank"
        )
        try:
            outcome = self._converge(paused)
            self._release()
        except Exception as error:  # noqa: BLE001  after any error here the weights are unknown
            self.end(f"a pause was lost, and its ranks could not be brought to one version: {error}")
            return
        self._expired = True
        logger.warning("the lost pause is over: %s", outcome)

    def end_with_parent(self) -> None:
        """Start a thread that ends this process when its parent process dies.

        Cause: an engine core does not notice that its API server was killed. Symptom: it keeps its memory, and the
        server cannot be started again beside it. Remove when: vLLM does this.
        """
        parent = multiprocessing.parent_process()

        def wait() -> None:
            if parent is not None:
                parent.join()
                self.end("its parent process is gone", notify_clients=False)

        threading.Thread(target=wait, name="delta-sync-parent", daemon=True).start()

    def end(self, reason: str, notify_clients: bool = True) -> None:
        """End this process and its workers at once, so that a supervisor restarts them. Callable from any thread."""
        logger.critical("ending the engine: %s", reason)
        try:
            if notify_clients:
                self._engine._send_engine_dead()
        finally:
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(1)

    def defer(self, call_paused: Callable[[], Any]) -> "Future[Any] | None":
        """Make another caller's call after our pause; None if there is no pause and the caller should make the call."""
        if self._active is None:
            return None
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = call_paused()
            except Exception as error:  # noqa: BLE001  the future passes it to the caller
                future.set_exception(error)
                return
            if isinstance(result, Future):
                result.add_done_callback(lambda done: _complete(future, done.result))
            else:
                future.set_result(result)

        self._active.deferred.append(run)
        return future

    def _ask(self, request: RankRequest[A]) -> list[A | RankFailure]:
        if isinstance(request, protocol.Revert):
            self._caches.begin_change(_name_of(request.adapter))
        payload = protocol.encode_request(request)
        answers = call_executor(self._engine.model_executor, payload, RANK_CALL_SECONDS)
        return protocol.decode_answers(request, answers)

    def _converge(self, paused: TimedPause) -> str:
        """Bring all ranks to one complete version and label it; returns what was found and done, for the log.

        Raises:
            WeightsLostError: there is no such version. Exception: what the engine raises.
        """
        if paused.failure is not None:
            raise WeightsLostError(paused.failure)
        describe, adapter = protocol.Describe(adapter=paused.adapter), paused.adapter
        found = self._ask(describe)
        version = common_version(found)
        was_settled = all_hold(found, version, confirmed=True)
        if not was_settled:
            self._ask(protocol.Revert(version, adapter=adapter))
            current = self._ask(describe)
            if not all_hold(current, version, confirmed=True):
                raise WeightsLostError(f"ranks should have reverted to version {version}, but they report {current}")
        # Which run's version it is, only the controller knew.
        self._caches.name_version(_name_of(adapter), version)
        held = [rank.version for rank in found if isinstance(rank, RankState)]
        action = "kept" if was_settled else "reverted"
        return f"ranks held {held}, {action}, generation goes on with version {version}"

    def _release(self) -> None:
        paused, self._active = self._active, None
        if paused is None:
            return
        paused.ended.set()
        if paused.pending is not None and not paused.pending.done():
            if paused.callback in self._engine._idle_state_callbacks:
                self._engine._idle_state_callbacks.remove(paused.callback)
            paused.pending.set_exception(RuntimeError("the pause was ended before it was complete"))
        self._restore(paused)
        for run in paused.deferred:
            run()

    def _restore(self, paused: TimedPause) -> None:
        """Restore the scheduler's state from before our pause."""
        # Engines that run in step stop once all of them are asked to, and do not resume before they have stopped.
        stopping = getattr(self._engine, "pending_pause", False)
        if stopping:
            self._engine.pending_pause = False
        if paused.before.name == "UNPAUSED" and not stopping:
            self._engine.resume_scheduler()
        else:
            self._engine.scheduler.set_pause_state(paused.before)
        self._engine._idle_state_callbacks.extend(paused.waiting)

    def _watch(self, paused: TimedPause) -> None:
        """Wake the loop at the deadline, and end a loop that does not react; runs in one thread per pause."""
        from vllm.v1.engine import EngineCoreRequestType

        while True:
            if paused.ended.wait(max(0.0, paused.deadline - time.monotonic())):
                return
            if time.monotonic() < paused.deadline:
                continue
            self._engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
            if paused.ended.wait(STUCK_SECONDS):
                return
            if time.monotonic() >= paused.deadline + STUCK_SECONDS:
                self.end(f"a pause was lost, and the engine did not react within {STUCK_SECONDS:.0f} s")


def _complete(future: "Future[Any]", call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001  the future passes it on
        future.set_exception(error)


def _name_of(adapter: protocol.Adapter | None) -> str | None:
    return None if adapter is None else adapter.name


def install(engine: Any) -> None:
    """Equip one engine core, on the instance, before it has a scheduler. See ``plugin.register``."""
    patches.sleep_between_polls()
    try:
        prefix_cache = client_settings().prefix_cache
    except SettingsError:
        prefix_cache = Settings.model_fields["prefix_cache"].default  # reported where the settings are used
    caches = WeightCaches(engine, prefix_cache)
    watchdog = PauseWatchdog(engine, caches)
    # vLLM calls utility methods by name and converts the arguments to what their signatures say.
    for method in (
        watchdog.pause,
        watchdog.sleeps,
        watchdog.renew,
        watchdog.resume,
        watchdog.call_ranks,
        watchdog.call_paused,
        watchdog.label,
        watchdog.label_paused,
        watchdog.end,
    ):
        setattr(engine, f"delta_sync_{method.__name__}", method)

    def add_request(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        caches.equip()
        del engine.add_request
        return original(*args, **kwargs)

    def defer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        future = watchdog.defer(lambda: original(*args, **kwargs))
        return original(*args, **kwargs) if future is None else future

    def check_on_wakeup(original: Callable[..., Any], request_type: Any, request: Any) -> Any:
        if request_type.name == "WAKEUP":
            watchdog.check_deadline()
        return original(request_type, request)

    def run_busy_loop(original: Callable[..., Any]) -> Any:
        watchdog.end_with_parent()
        executors.end_with_other_nodes(getattr(engine, "model_executor", None), watchdog.end)
        return original()

    wrap_method(engine, "add_request", add_request)
    for name, wrapper in (
        ("pause_scheduler", defer),
        ("resume_scheduler", defer),
        # vLLM's /pause since 0.33: it calls pause_scheduler and makes the engine reject new requests. Without this it
        # would reject them during our pause and accept them after it, because its end resumes the scheduler.
        ("pause_generation", defer),
        ("_handle_client_request", check_on_wakeup),
        ("run_busy_loop", run_busy_loop),
    ):
        # An engine in its controller's own process lacks the last ones.
        if hasattr(engine, name):
            wrap_method(engine, name, wrapper)

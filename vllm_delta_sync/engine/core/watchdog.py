"""``PauseWatchdog`` gives pauses a deadline; if it passes, the watchdog brings the ranks to one version and resumes."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm_delta_sync.engine import protocol
from vllm_delta_sync.engine.compat.patches import NO_VERSION
from vllm_delta_sync.engine.core import rank_rpc
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.protocol import A, RankFailure, RankRequest, RankState
from vllm_delta_sync.errors import WeightsLostError

RANK_CALL_SECONDS = 60.0
"""Bound on each call to the ranks while the watchdog ends a lost pause."""
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
        pending: completes when the loop is idle; None if it was idle at once.
        failure: why the ranks can no longer be called.
    """

    deadline: float
    before: Any
    waiting: list[Callable[..., Any]]
    deferred: list[Callable[[], None]] = field(default_factory=list)
    pending: "Future[Any] | None" = None
    callback: Callable[..., Any] | None = None
    failure: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class PauseWatchdog:
    """The watchdog of one EngineCoreProc. All methods run on the thread of its loop, except ``_watch`` and ``end``."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._active: TimedPause | None = None
        self._expired = False

    def pause(self, mode: str, clear_cache: bool, limit_s: float) -> "Future[Any] | None":
        """Pause as ``pause_scheduler`` does, for at most ``limit_s`` seconds. During a pause of ours: renew it.

        Raises:
            RuntimeError: the engine sleeps, so its weights are not in memory.
        """
        if self._active is not None:
            self.renew(limit_s)
            return self._active.pending
        engine = self._engine
        if engine.model_executor.is_sleeping:
            raise RuntimeError("the engine sleeps and holds no weights to patch; wake it up first")
        before = engine.scheduler.pause_state
        keeps = before.name == "PAUSED_ALL"
        waiting = list(engine._idle_state_callbacks)
        engine._idle_state_callbacks.clear()
        paused = TimedPause(time.monotonic() + limit_s, before, waiting)
        self._expired = False
        try:
            # If another caller holds requests back, our mode must not let them run.
            paused.pending = engine.pause_scheduler("keep" if keeps and mode == "wait" else mode, clear_cache)
        except BaseException:  # after any failure, an interrupt included, restore other callers' pauses
            self._restore(paused)
            raise
        if keeps:
            engine.scheduler.set_pause_state(before)
        if paused.pending is not None:
            paused.callback = engine._idle_state_callbacks[-1]
        self._active = paused
        threading.Thread(target=self._watch, args=(paused,), name="delta-sync-watchdog", daemon=True).start()
        return paused.pending

    def renew(self, limit_s: float) -> bool:
        """Move the deadline to ``limit_s`` seconds from now if that is later. False if no pause is on."""
        if self._active is None:
            return False
        self._active.deadline = max(self._active.deadline, time.monotonic() + limit_s)
        return True

    def call_ranks(self, request: bytes) -> list[bytes]:
        """Send an encoded request to every rank, paused or not; returns encoded answers."""
        return rank_rpc.call_ranks(self._engine.model_executor, request, None)

    def call_paused(self, request: bytes, timeout_s: float) -> list[bytes] | None:
        """As ``call_ranks``, only before the deadline of a pause of ours; None if that has passed."""
        if self._active is None or time.monotonic() >= self._active.deadline:
            return None
        try:
            return rank_rpc.call_ranks(self._engine.model_executor, request, timeout_s)
        except Exception as error:  # a rank's late answer would be taken for the answer to the next call
            operation = protocol.decode_request(request).operation
            self._active.failure = f"{operation} has no outcome: {type(error).__name__}: {error}"
            raise

    def label_paused(self, label: str) -> bool:
        """Set vLLM's weight version, only during a pause of ours. False if there is none."""
        if self._active is None:
            return False
        self._engine.set_weight_version(label)
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
            outcome = self._converge(paused.failure)
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
                result.add_done_callback(lambda done: _copy_outcome(done, future))
            else:
                future.set_result(result)

        self._active.deferred.append(run)
        return future

    def _ask(self, request: RankRequest[A]) -> list[A | RankFailure]:
        executor = self._engine.model_executor
        return protocol.decode_answers(
            request, rank_rpc.call_ranks(executor, protocol.encode_request(request), RANK_CALL_SECONDS)
        )

    def _converge(self, failure: str | None) -> str:
        """Bring all ranks to one complete version and label it; returns what was found and done, for the log.

        Raises:
            WeightsLostError: there is no such version. Exception: what the engine raises.
        """
        if failure is not None:
            raise WeightsLostError(failure)
        found = self._ask(protocol.Describe())
        version = common_version(found)
        was_settled = is_settled(found, version)
        if not was_settled:
            self._ask(protocol.Revert(version))
            current = self._ask(protocol.Describe())
            if not is_settled(current, version):
                raise WeightsLostError(f"ranks should have reverted to version {version}, but they report {current}")
        self._engine.set_weight_version(NO_VERSION if version is None else str(version))
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


def is_settled(ranks: Sequence[RankState | RankFailure], version: int | None) -> bool:
    """Return whether every rank holds that version, intact and confirmed."""
    return all(
        isinstance(rank, RankState) and rank.intact and rank.confirmed and rank.version == version for rank in ranks
    )


def common_version(ranks: Sequence[RankState | RankFailure]) -> int | None:
    """Return the version that all ranks can have: the one they have, else the newest each has or can revert to.

    An unconfirmed version does not count, because the controller has not found it right on all ranks.

    Raises:
        WeightsLostError: a rank's weights are unknown, or there is no such version.
    """
    reachable: set[int | None] | None = None
    held: set[int | None] = set()
    for index, rank in enumerate(ranks):
        if isinstance(rank, RankFailure) or not rank.intact:
            raise WeightsLostError(f"the weights of rank {index} are unknown: {rank}")
        held.add(rank.version)
        own = {*rank.undo, rank.version} if rank.confirmed else set(rank.undo)
        reachable = own if reachable is None else reachable & own
    if not reachable:
        raise WeightsLostError(f"there is no version that every rank has or can revert to: {ranks}")
    if len(held) == 1 and held <= reachable:
        return held.pop()
    return max(reachable, key=lambda version: -1 if version is None else version)


def _copy_outcome(done: "Future[Any]", future: "Future[Any]") -> None:
    error = done.exception()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())

"""The lease on a pause, and the watchdog that settles the engine when it has run out, in the engine core's process."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm_delta_sync.engine.compat.patches import NO_VERSION
from vllm_delta_sync.engine.core import rank_rpc
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import WeightsLostError

Answer = dict[str, Any]
RANK_CALL_SECONDS = 60.0
"""Bound on each question to the ranks while a lost pause is settled."""
STUCK_SECONDS = 60.0
"""How long after the end of a lease the engine's loop may be busy elsewhere before it counts as hung."""


@dataclass
class TimedPause:
    """One pause of ours.

    Attributes:
        deadline: by time.monotonic().
        before: the scheduler's pause state before it.
        waiting: idle callbacks of others' pauses that were not complete when ours began.
        deferred: what others asked for since.
        pending: the pause itself, until the loop is idle; None if it was at once.
        failure: why the ranks can be asked nothing any more.
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
    """The watchdog of one EngineCoreProc. Every method runs on its loop's thread, ``_watch`` apart."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._active: TimedPause | None = None
        self._outcome: Answer | None = None

    def pause(self, mode: str, clear_cache: bool, limit_s: float) -> "Future[Any] | None":
        """Pause as ``pause_scheduler`` does, for ``limit_s`` seconds at most; again while a lease is on: renew it.

        Raises:
            RuntimeError: the engine sleeps, so that its weights are not in place.
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
        self._outcome = None
        try:
            # Requests that somebody else holds back must not run on because our mode would let them.
            paused.pending = engine.pause_scheduler("keep" if keeps and mode == "wait" else mode, clear_cache)
        except BaseException:  # whatever stops it, an interrupt too, others' pauses must be as they were
            self._restore(paused)
            raise
        if keeps:
            engine.scheduler.set_pause_state(before)
        if paused.pending is not None:
            paused.callback = engine._idle_state_callbacks[-1]
        self._active = paused
        threading.Thread(target=self._watch, args=(paused,), name="delta-sync-lease", daemon=True).start()
        return paused.pending

    def renew(self, limit_s: float) -> Answer:
        """Let the lease end ``limit_s`` seconds from now, if that is later. {"expired": whether none is on}."""
        if self._active is None:
            return {"expired": True}
        self._active.deadline = max(self._active.deadline, time.monotonic() + limit_s)
        return {"expired": False}

    def call_paused(self, method: str, arguments: Answer, timeout_s: float) -> Answer:
        """``delta_sync_call`` on every rank, only while a lease is on: {"expired", "answers": one per rank}."""
        if self._active is None or time.monotonic() >= self._active.deadline:
            return {"expired": True, "answers": []}
        try:
            return {"expired": False, "answers": self.call_ranks(method, arguments, timeout_s)}
        except Exception as error:  # a rank that is late would be heard as the answer to the next question
            self._active.failure = f"{method} has no outcome: {type(error).__name__}: {error}"
            raise

    def label_paused(self, label: str) -> Answer:
        """Set vLLM's weight version, only while a lease is on: {"expired"}."""
        if self._active is None:
            return {"expired": True}
        self._engine.set_weight_version(label)
        return {"expired": False}

    def resume(self) -> Answer:
        """End the lease; harmless if none is on.

        Returns:
            {"expired": whether it had run out, "outcome": None, or what the watchdog found and did about that:
            {"found": versions by rank, "action": "kept" or "reverted", "version": held now}}.
        """
        if self._active is not None:
            self._release()
            return {"expired": False, "outcome": None}
        outcome, self._outcome = self._outcome, None
        return {"expired": outcome is not None, "outcome": outcome}

    def check_deadline(self) -> None:
        """Settle the engine if the lease has run out."""
        paused = self._active
        if paused is None or time.monotonic() < paused.deadline:
            return
        logger.warning("the lease on a pause ran out: its controller is lost or hangs; settling what the ranks hold")
        try:
            outcome = self._converge(paused.failure)
            self._release()
        except Exception as error:  # noqa: BLE001  whatever it was, nobody can tell what is held
            self.end(f"a pause was lost and could not be settled: {error}")
            return
        self._outcome = outcome
        logger.warning(
            "the lost pause is over: ranks held %s, %s, generation goes on with version %s",
            outcome["found"],
            outcome["action"],
            outcome["version"],
        )

    def end_with_parent(self) -> None:
        """Start to wait for the death of the process that started this one, and then end.

        Cause: an engine core does not notice that its API server was killed. Symptom: it keeps its memory, and the
        server cannot be started again beside it. Remove when: vLLM does this.
        """
        parent = multiprocessing.parent_process()

        def wait() -> None:
            if parent is not None:
                parent.join()
                self.end("the process that started it is gone", notify_clients=False)

        threading.Thread(target=wait, name="delta-sync-parent", daemon=True).start()

    def end(self, reason: str, notify_clients: bool = True) -> None:
        """End this process and its workers, at once and from any thread, so that a supervisor starts them again."""
        logger.critical("ending the engine: %s", reason)
        try:
            if notify_clients:
                self._engine._send_engine_dead()
        finally:
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(1)

    def defer(self, call_paused: Callable[[], Any]) -> "Future[Any] | None":
        """Do somebody else's call when our lease is over; None if none is on and the call should just be made."""
        if self._active is None:
            return None
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = call_paused()
            except Exception as error:  # noqa: BLE001  handed to whoever asked, through the future
                future.set_exception(error)
                return
            if isinstance(result, Future):
                result.add_done_callback(lambda done: _copy_outcome(done, future))
            else:
                future.set_result(result)

        self._active.deferred.append(run)
        return future

    def call_ranks(self, method: str, arguments: Answer, timeout_s: float | None = None) -> list[Answer]:
        """``delta_sync_call`` on every rank, paused or not."""
        return rank_rpc.call_ranks(self._engine.model_executor, method, arguments, timeout_s)

    def _converge(self, failure: str | None) -> Answer:
        """Bring all ranks to one complete version and label it. Raises WeightsLostError, or what the engine raises."""
        if failure is not None:
            raise WeightsLostError(failure)
        found = self.call_ranks("describe", {}, RANK_CALL_SECONDS)
        version = common_version(found)
        was_settled = is_settled(found, version)
        if not was_settled:
            self.call_ranks("revert", {"version": version}, RANK_CALL_SECONDS)
            held = self.call_ranks("describe", {}, RANK_CALL_SECONDS)
            if not is_settled(held, version):
                raise WeightsLostError(f"ranks were to go back to version {version} and hold {held}")
        self._engine.set_weight_version(NO_VERSION if version is None else str(version))
        return {
            "found": [answer["version"] for answer in found],
            "action": "kept" if was_settled else "reverted",
            "version": version,
        }

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
        """The scheduler as somebody else had it before the lease."""
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
        """A thread per lease: wake the loop when it runs out, and end a loop that does not wake up."""
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
                self.end(f"a pause was lost, and the engine did not turn to it within {STUCK_SECONDS:.0f} s")


def is_settled(answers: list[Answer], version: int | None) -> bool:
    """Whether every rank's ``describe`` says that it holds that version, whole and as declared."""
    return all(
        answer.get("intact") is True and answer.get("confirmed", True) and answer["version"] == version
        for answer in answers
    )


def common_version(answers: list[Answer]) -> int | None:
    """The version on which every rank can agree: the one all hold, else the newest that each holds or can go back to.

    Args:
        answers: ``describe`` of every rank; a rank with ``confirmed`` False has no use for the version it holds: nobody
            has yet found it right on all ranks.

    Raises:
        WeightsLostError: a rank cannot tell what it holds, or there is no such version.
    """
    reachable: set[int | None] | None = None
    for rank, answer in enumerate(answers):
        if "error" in answer or answer.get("intact") is not True:
            raise WeightsLostError(f"rank {rank} cannot tell what it holds: {answer}")
        own = {answer["version"]} if answer.get("confirmed", True) else set()
        own |= set(answer.get("undo", []))
        reachable = own if reachable is None else reachable & own
    if not reachable:
        raise WeightsLostError(f"there is no version that every rank holds or can go back to: {answers}")
    if answers[0]["version"] in reachable and len({answer["version"] for answer in answers}) == 1:
        held: int | None = answers[0]["version"]
        return held
    return max(reachable, key=lambda version: -1 if version is None else version)


def _copy_outcome(done: "Future[Any]", future: "Future[Any]") -> None:
    error = done.exception()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())

"""One move of all ranks, forward or back: pause, move everywhere or nowhere, resume.

Whatever goes wrong, one of three things is true afterwards: every rank holds the new version and generation goes on;
every rank holds what it held before, under its old label, and generation goes on; or nobody can tell, and the engine
must be ended and started again (WeightsLostError).
"""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, Protocol

from vllm_delta_sync.engine.commit.interrupts import postpone_interrupts
from vllm_delta_sync.errors import (
    BusyError,
    DeltaSyncError,
    EngineError,
    FingerprintError,
    MemoryLimitError,
    WeightsLostError,
    error_kinds,
)

Answer = dict[str, Any]
TRIES = 3
WAIT_S = 0.2


class EnginePort(Protocol):
    """What the receiver needs of an engine. Methods raise EngineError when the engine fails or does not answer."""

    def call(self, method: str, arguments: Answer) -> list[Answer]:
        """WorkerExtension.delta_sync_call on every rank, answers in the order of ranks."""

    def pause(self) -> None:
        """Stop generation between two steps, for at most as long as a commit may take."""

    def resume(self) -> bool:
        """Let generation go on; harmless if it does. True if it had gone on by itself, the pause having expired."""

    def label(self, version: int | None) -> None:
        """Name the weights that produce outputs from now on; None: they are no known version."""

    def label_paused(self, version: int | None) -> None:
        """``label``, only while our pause lasts. Raises EngineError if it expired: the weights may be others again."""

    def end(self, reason: str) -> None:
        """End the engine, which cannot tell its weights, so that whoever watches it starts it again."""


class LabelKeepingPort:
    """An ``EnginePort`` that remembers a label which could not be set, until it is set or another one is."""

    def __init__(self, port: EnginePort) -> None:
        self._port = port
        self._pending_label: list[int | None] = []

    def call(self, method: str, arguments: Answer) -> list[Answer]:
        """See EnginePort."""
        return self._port.call(method, arguments)

    def pause(self) -> None:
        """See EnginePort."""
        self._port.pause()

    def resume(self) -> bool:
        """See EnginePort."""
        return self._port.resume()

    def end(self, reason: str) -> None:
        """See EnginePort."""
        self._port.end(reason)

    def label(self, version: int | None) -> None:
        """See EnginePort."""
        self._pending_label = [version]
        self._port.label(version)
        self._pending_label = []

    def label_paused(self, version: int | None) -> None:
        """See EnginePort."""
        self._port.label_paused(version)
        self._pending_label = []

    def set_pending_label(self) -> None:
        """Set the label that could not be set before, if there is one. Raises EngineError: it still cannot."""
        for version in self._pending_label:
            self.label(version)


class FingerprintMismatchError(FingerprintError):
    """The commit did not change the weights as declared and was taken back."""


class PauseExpiredError(EngineError):
    """The pause of a commit lasted too long; the engine took the commit back and went on."""

    kind = "pause_expired"


class DrainError(BusyError):
    """With ``pause_mode`` wait: requests in flight took longer than ``wait_seconds``; generation goes on as before."""

    kind = "drain"


class Transaction:
    """Moves every rank from ``ranks`` to ``target`` (None: no version).

    Args:
        method: ``commit``: the target is staged on every rank. ``revert``: every rank's undo log reaches it.
        matches: whether what the ranks measured is what the target declares.
        label: what outputs are labelled with afterwards, if not with the target.
        paused: called once the engine stands still.
    """

    def __init__(
        self,
        port: EnginePort,
        target: int | None,
        current: int | None,
        *,
        method: Literal["commit", "revert"] = "commit",
        matches: Callable[[list[Answer]], bool] = lambda answers: True,
        label: int | Literal["target"] | None = "target",
        on_paused: Callable[[], None] = lambda: None,
    ) -> None:
        self._port = port
        self._target = target
        self._current = current
        self._method = method
        self._matches = matches
        self._label = target if label == "target" else label
        self._on_paused = on_paused
        self._times: list[float] = []

    def commit(self) -> None:
        """Pause and move; the engine is still paused on return, and runs again if this raises.

        Raises:
            Mismatch: the weights were not what the version was made against.
            WeightsLostError: nobody can tell what the ranks hold.
            DeltaSyncError: what failed; the weights are those of before.
        """
        self._mark_time()
        try:
            self._port.pause()
            self._mark_time()
            self._on_paused()
            answers = self._port.call(self._method, {"version": self._target})
            self._mark_time()
            for answer in answers:
                raise_if_error(answer)
            if not self._matches(answers):
                raise FingerprintMismatchError(
                    f"version {self._target} did not change the weights as declared, so it was taken back"
                )
            self._port.label_paused(self._label)
        except BaseException as error:  # an interrupt too must not leave the engine paused, nor a second one
            with postpone_interrupts():
                reached_target = self._converge(error)
            if not reached_target or not isinstance(error, Exception):
                raise
            # What was cut short has no time of its own.
            self._times += [time.monotonic()] * (3 - len(self._times))

    def resume(self) -> dict[str, float]:
        """Let generation go on; returns the timings in ms.

        Raises:
            PauseExpiredError: the engine went on by itself, with the version of before.
            WeightsLostError: the engine does not resume, or went on with something else.
        """
        if self._resume("generation does not resume"):
            # The engine's own watchdog may have been faster. It takes back what was not confirmed yet.
            ranks = self._describe_with_retries()
            if _all_at(ranks, self._current):
                raise PauseExpiredError(
                    f"the pause for version {self._target} expired before its controller ended it; the engine took it "
                    f"back and serves version {self._current}"
                )
            if not _all_at(ranks, self._target):
                raise self._lost(f"the pause expired, and {describe_ranks(ranks)}")
        self._mark_time()
        spans = [1e3 * (end - start) for start, end in pairwise(self._times)]
        return {"wait": spans[0], "commit": spans[1], "resume": spans[2], "pause": sum(spans)}

    def _mark_time(self) -> None:
        self._times.append(time.monotonic())

    def _describe(self) -> list[Answer]:
        return self._port.call("describe", {})

    def _describe_with_retries(self) -> list[Answer]:
        """What ranks hold, asked again if there is no answer. Raises WeightsLostError."""
        reason = ""
        for attempt in range(TRIES):
            try:
                return self._describe()
            except DeltaSyncError as error:
                reason = error.message
                time.sleep(WAIT_S * attempt)
        raise self._lost(reason)

    def _converge(self, error: BaseException) -> bool:
        """Bring every rank, the label and generation back to what they were.

        Returns:
            True if all ranks went back all the same: then the target is what is held.
        """
        if isinstance(error, WeightsLostError):
            raise self._lost(error.message) from error
        reason = str(error)
        for _ in range(2):
            try:
                self._restore()
                if self._resume(reason):
                    ranks = self._describe_with_retries()
                    if not _all_at(ranks, self._current):
                        raise WeightsLostError(f"the pause expired, and {describe_ranks(ranks)}")
                return False
            except WeightsLostError as later:
                raise self._lost(f"{error}; then {later.message}") from error
            except DeltaSyncError as later:
                reason = f"{reason}; then {later.message}"
            # Versions behind are proven ones; what a commit leads to is not, before it was found to match.
            if self._method == "revert" and _all_at(self._describe_with_retries(), self._target):
                self._port.label(self._label)
                self._resume(reason)
                return True
        raise self._lost(reason) from error

    def _restore(self) -> None:
        ranks = self._describe()
        if any(answer.get("version") != self._current for answer in ranks):
            for answer in self._port.call("revert", {"version": self._current}):
                raise_if_error(answer)
            ranks = self._describe()
        if not _all_at(ranks, self._current):
            raise WeightsLostError(describe_ranks(ranks))
        self._port.label(self._current)

    def _resume(self, reason: str) -> bool:
        """True if the engine may have gone on by itself."""
        for attempt in range(TRIES):
            try:
                # What an attempt that failed did, nobody knows.
                return self._port.resume() or attempt > 0
            except DeltaSyncError as error:
                reason = f"{reason}; {error.message}"
                time.sleep(WAIT_S * attempt)
        raise self._lost(reason)

    def _lost(self, reason: str) -> WeightsLostError:
        return WeightsLostError(
            f"the commit of version {self._target} could not be brought to an end; the engine must be started again "
            f"({reason})"
        )


def _all_at(ranks: list[Answer], version: int | None) -> bool:
    return all(answer.get("intact") is True and answer.get("version") == version for answer in ranks)


def describe_ranks(ranks: list[Answer]) -> str:
    """What ranks hold, for messages."""
    return ", ".join(
        f"rank {rank} holds version {answer.get('version')}{'' if answer.get('intact') else ' or cannot tell'}"
        for rank, answer in enumerate(ranks)
    )


def raise_if_error(answer: Answer) -> None:
    """Raise the error that a rank answered with, as its own class."""
    if "error" in answer:
        kind, message = answer["error"]["kind"], answer["error"]["message"]
        error = error_kinds().get(kind, EngineError)(message)
        set_failed_step(error, answer["error"].get("step"))
        raise error


def error_answer(error: DeltaSyncError) -> Answer:
    """An error as plain data, for the way from a worker to the controller."""
    return {"error": {"kind": error.kind, "message": error.message, "step": failed_step(error)}}


def set_failed_step(error: DeltaSyncError, step: int | None) -> None:
    """Note which step of those staged together an error is about."""
    vars(error)["step"] = step


def failed_step(error: DeltaSyncError) -> int | None:
    """Which step of those staged together an error is about, if that is known."""
    step: int | None = vars(error).get("step")
    return step


def wrap_error(error: Exception) -> DeltaSyncError:
    """An error of torch or Python as one of ours."""
    # torch's error for devices derives from RuntimeError, and is named so in every release.
    # On the CPU it is a plain RuntimeError.
    out_of_memory = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    if out_of_memory or isinstance(error, MemoryError):
        return MemoryLimitError(f"this rank is out of memory ({error}); free some, the weights are as they were")
    return EngineError(f"unexpected {type(error).__name__}: {error}")

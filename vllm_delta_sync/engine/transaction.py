"""One commit over all ranks: pause, commit everywhere or nowhere, resume.

Whatever goes wrong, one of three things is true afterwards: every rank holds the new version and generation goes on;
every rank holds what it held before, under its old label, and generation goes on; or nobody can tell, and the engine
stays paused until it is started again (WeightsLostError).
"""

import time
from itertools import pairwise
from typing import Any, Protocol

from vllm_delta_sync.errors import DeltaSyncError, EngineError, FingerprintError, WeightsLostError, error_kinds

Answer = dict[str, Any]
RESUME_TRIES = 3
RESUME_WAIT_S = 0.2


class EnginePort(Protocol):
    """What the receiver needs of an engine. Methods raise EngineError when the engine fails or does not answer."""

    def call(self, method: str, arguments: Answer) -> list[Answer]:
        """WorkerExtension.delta_sync_call on every rank."""

    def pause(self) -> None:
        """Stop generation between two steps."""

    def resume(self) -> None:
        """Let generation go on; harmless if it does."""

    def label(self, version: int | None) -> None:
        """Name the weights that produce outputs from now on; None: they are no known version."""


class Mismatch(FingerprintError):
    """The commit did not change the weights as declared and was taken back."""


class Transaction:
    """Moves every rank from ``held`` (None: no version) to ``target``, which must be staged on all of them."""

    def __init__(self, port: EnginePort, target: int, held: int | None) -> None:
        self._port = port
        self._target = target
        self._held = held
        self._clock: list[float] = []

    def commit(self) -> None:
        """Pause and commit; the engine is still paused on return, and runs again if this raises.

        Raises:
            Mismatch: the weights were not what the version was made against.
            WeightsLostError: the engine stays paused.
            DeltaSyncError: what failed; the weights are those of before.
        """
        self._tick()
        try:
            self._port.pause()
            self._tick()
            answers = self._port.call("commit", {"version": self._target})
            self._tick()
            for answer in answers:
                raise_if_error(answer)
            if not all(answer["matched"] for answer in answers):
                raise Mismatch(f"version {self._target} did not change the weights as declared, so it was taken back")
            self._port.label(self._target)
        except BaseException as error:  # an interrupt too must not leave the engine paused
            self._settle(error)
            raise

    def resume(self) -> dict[str, float]:
        """Let generation go on; returns the timings in ms.

        Raises:
            WeightsLostError: the engine does not resume.
        """
        self._resume("generation does not resume")
        self._tick()
        spans = [1e3 * (end - start) for start, end in pairwise(self._clock)]
        return {"wait": spans[0], "commit": spans[1], "resume": spans[2], "pause": sum(spans)}

    def _tick(self) -> None:
        self._clock.append(time.perf_counter())

    def _settle(self, error: BaseException) -> None:
        """Bring every rank, the label and generation back to what they were."""
        try:
            held = self._port.call("describe", {})
            if any(answer.get("version") == self._target for answer in held):
                for answer in self._port.call("revert", {}):
                    raise_if_error(answer)
                held = self._port.call("describe", {})
            if not all(answer.get("intact") and answer.get("version") == self._held for answer in held):
                raise WeightsLostError(f"ranks hold {held}")
            self._port.label(self._held)
        except DeltaSyncError as second:
            raise self._lost(f"{error}; then {second.message}") from error
        self._resume(str(error))

    def _resume(self, reason: str) -> None:
        for attempt in range(RESUME_TRIES):
            try:
                self._port.resume()
                return
            except DeltaSyncError as error:
                reason = f"{reason}; {error.message}"
                time.sleep(RESUME_WAIT_S * attempt)
        raise self._lost(reason)

    def _lost(self, reason: str) -> WeightsLostError:
        return WeightsLostError(
            f"the commit of version {self._target} could not be brought to an end, the engine stays paused; start the "
            f"server again ({reason})"
        )


def raise_if_error(answer: Answer) -> None:
    """Raise the error that a rank answered with, as its own class."""
    if "error" in answer:
        kind, message = answer["error"]["kind"], answer["error"]["message"]
        raise error_kinds().get(kind, EngineError)(message)

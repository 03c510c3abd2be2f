"""The receiver's logic: follow a run, one version at a time, through whatever engine it is given.

Knows buckets and manifests, and an engine only as an ``EnginePort``; so the vLLM server and the offline ``LLM`` share
it. One thread drives it; ``status`` may be called from any.
"""

import logging
import threading
import time
from collections import deque
from typing import Literal

from vllm_delta_sync.chain import Run, check_follows, open_run
from vllm_delta_sync.config import Settings
from vllm_delta_sync.engine.transaction import Answer, EnginePort, Mismatch, Transaction, raise_if_error
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    EngineError,
    FingerprintError,
    ModelError,
    NotFoundError,
    TensorMismatchError,
    UnsupportedError,
    WeightsLostError,
)
from vllm_delta_sync.wire.manifest import Manifest

# A child of vLLM's logger, the only one that vLLM gives a handler.
logger = logging.getLogger("vllm.delta_sync")

State = Literal["waiting_for_run", "proving", "refused", "idle", "staging", "committing", "verifying", "lost"]
STATES: dict[State, str] = {
    "waiting_for_run": "the bucket holds no run yet, or cannot be read; see last_error",
    "proving": "tracing the model's loader and comparing its weights with the run's version 0",
    "refused": "this model cannot follow this run, or its weights are no version any more; see last_error",
    "idle": "serving; nothing under way",
    "staging": "fetching, verifying, decoding and routing a version, beside generation",
    "committing": "the engine is paused and weights are being patched",
    "verifying": "rescanning all weights against what the history declares",
    "lost": "a commit could neither be finished nor taken back, or generation does not resume: start the server again",
}

REFUSALS = (ModelError, ChainError, TensorMismatchError, UnsupportedError)
"""What no later look can mend before the first version is served, short of another run or another server."""
RECENT_COMMITS = 64
POLL_SHORTEST_S = 0.001
POLL_LONGEST_S = 0.02


class Receiver:
    """Follows one run URL with one engine."""

    def __init__(self, port: EnginePort, settings: Settings) -> None:
        self.port = port
        self.settings = settings
        self.run: Run | None = None
        self._lock = threading.Lock()
        self._state: State = "waiting_for_run"
        self._error: dict[str, str] | None = None
        self._served: Manifest | None = None
        self._head: Manifest | None = None
        self._ranks: list[Answer] = []
        self._timings: dict[str, float] = {}
        self._recent: deque[Answer] = deque(maxlen=RECENT_COMMITS)
        self._commits = 0
        # Digest and message of a version that was committed and taken back: trying again would only pause again.
        self._rejected = ("", "")

    @property
    def served_version(self) -> int | None:
        """The version that answers now; None until the weights are proven to be one."""
        served = self._served
        return None if served is None else served.version

    @property
    def run_id(self) -> str | None:
        """The run followed, once known."""
        run = self.run
        return None if run is None else run.info.run

    @property
    def served_run(self) -> str | None:
        """The run that ``served_version`` counts in."""
        served = self._served
        return None if served is None else served.run

    def status(self) -> Answer:
        """The body of ``GET /delta_sync/status``."""
        with self._lock:
            lag = None if self._served is None or self._head is None else self._head.version - self._served.version
            return {
                "run": self.run_id,
                "served": _point(self._served),
                "head": _point(self._head),
                "lag": lag,
                "state": self._state,
                "last_error": self._error,
                "policy": self.settings.policy,
                "ranks": list(self._ranks),
                "timings_ms": dict(self._timings),
                "commits": self._commits,
                "recent": list(self._recent),
            }

    def advance(self, version: int | None = None) -> None:
        """Bring the engine to a version, the head if None, committing each version on the way.

        Raises:
            DeltaSyncError: the first thing that failed; what is served then is ``served_version``.
        """
        self._refuse_lost()
        try:
            stopped_by = self._refresh()
        except DeltaSyncError as error:
            self.fail(error)
            raise
        target = self._target(version)
        try:
            if self._served is None:
                self._prove()
            while self._served is not None and self._served.version < target:
                self._step(self._manifest(self._served.version + 1))
            if version is None and stopped_by is not None:
                raise stopped_by
        except DeltaSyncError as error:
            self.fail(error)
            raise
        finally:
            if self._state in ("proving", "staging", "committing"):
                self._set(state="idle" if self._served is not None else "waiting_for_run")
        self._set(state="idle", error=None)

    def _refuse_lost(self) -> None:
        if self._state == "lost":
            raise WeightsLostError(STATES["lost"])

    def _target(self, version: int | None) -> int:
        """The version to go to. What the caller got wrong is not recorded as the receiver's last error."""
        head, served = self._head, self.served_version
        if head is None:
            raise NotFoundError(f"no version is published at {self.settings.bucket!r} yet")
        target = head.version if version is None else version
        if target > head.version:
            raise NotFoundError(f"version {target} is not published; the head is {head.version}")
        if served is not None and target < served:
            raise ChainError(f"version {target} precedes the served version {served}; this release only goes forward")
        return target

    def is_replaced(self) -> bool:
        """Whether another run lies at the URL than the one known. Raises DeltaSyncError if that cannot be read."""
        return self.run is None or not self.run.is_current()

    def verify(self) -> Answer:
        """Rescan every rank's weights: ``verdict`` is True only if they are the served version's, bit for bit."""
        self._refuse_lost()
        served = self._served
        if served is None:
            raise EngineError("no version is served yet; there is nothing to verify against")
        outcome = self._rescan(served)
        if not outcome["verdict"]:
            shown = ", ".join(outcome["mismatched"][:3]) or "the sum"
            error = FingerprintError(f"served weights are not version {served.version}: {shown} differ")
            self._distrust(error)
        return outcome

    def _rescan(self, served: Manifest) -> Answer:
        before = self._state
        self._set(state="verifying")
        try:
            answers = self._operate("verify", {})
        finally:
            self._set(state=before)
        mismatched = sorted({name for answer in answers for name in answer["mismatched"]})
        measured = answers[0]["fingerprint"]
        right = measured == served.fingerprint and answers[0]["version"] == served.version
        return {
            "verdict": right and not mismatched,
            "version": served.version,
            "fingerprint": measured,
            "expected": served.fingerprint,
            "mismatched": mismatched,
        }

    def _distrust(self, error: DeltaSyncError) -> None:
        """The weights are no version any more: say so in status and spans until they are proven again."""
        with self._lock:
            self._served = None
            self._state, self._error = "refused", {"kind": error.kind, "message": error.message}
        self.port.label(None)

    def _refresh(self) -> DeltaSyncError | None:
        """Open the run, notice if it was replaced, find the newest good manifest; returns what is wrong beyond it."""
        if self.is_replaced():
            run = open_run(self.settings.bucket)
            if self.run is not None:
                logger.warning("run %s was replaced by run %s in the same place", self.run_id, run.info.run)
            if self._served is not None:
                self.port.label(None)
            with self._lock:
                self.run, self._served, self._head = run, None, None
        if self._state == "waiting_for_run":
            self._set(state="proving" if self._served is None else "idle")
        head, stopped_by = self._run().reachable_head()
        with self._lock:
            self._head = head
        return stopped_by

    def _run(self) -> Run:
        if self.run is None:
            raise NotFoundError(f"no run at {self.settings.bucket!r} yet")
        return self.run

    def _manifest(self, version: int) -> Manifest:
        head = self._head
        return head if head is not None and head.version == version else self._run().manifest(version)

    def _prove(self) -> None:
        """Establish what the engine holds: version 0, or something that an anchor can replace."""
        self._set(state="proving")
        first = self._manifest(0)
        try:
            answers = self._operate("prove", {"url": self.settings.bucket, "manifest": first.to_bytes().decode()})
        except REFUSALS as error:
            self._distrust(error)
            raise
        with self._lock:
            self._ranks = [
                {
                    "rank": rank,
                    "tensors": answer["tensors"],
                    "unloaded": answer["unloaded"],
                    "ms": answer["ms"],
                }
                for rank, answer in enumerate(answers)
            ]
        for answer in answers:
            if answer["unloaded"]:
                logger.info("tensors that this model does not load: %s", ", ".join(answer["unloaded"]))
        wrong = next((answer for answer in answers if not answer["matches_base"]), None)
        if wrong is None:
            self.port.label(0)
            with self._lock:
                self._served = first
            logger.info("weights proven: %d tensors are version 0 of run %s", answers[0]["tensors"], self.run_id)
        elif first.kind == "anchor":
            logger.info("%d tensors differ from version 0; taking its anchor", wrong["different_count"])
            self._step(first)
        else:
            unlike = ChainError(
                f"this server's weights are not the run's base: {wrong['different_count']} of {wrong['tensors']} "
                f"tensors differ, first {wrong['different'][0]!r}. Start vLLM from the checkpoint the run refers to "
                f"({first.base.location if first.base else 'unknown'}); if it was, this model keeps those tensors in "
                "another layout than it loads them in, and cannot be patched in place"
            )
            self._distrust(unlike)
            raise unlike

    def _step(self, target: Manifest) -> None:
        """Stage and commit one version."""
        parent = self._served
        if parent is not None:
            check_follows(parent, target)
        if target.digest == self._rejected[0]:
            raise FingerprintError(self._rejected[1])
        self._set(state="staging")
        arguments = {
            "manifest": target.to_bytes().decode(),
            "parent": None if parent is None else parent.to_bytes().decode(),
        }
        try:
            staged = self._operate("stage", arguments)
        except ModelError as error:
            self._distrust(error)
            raise
        timings = {name: max(answer["ms"][name] for answer in staged) for name in staged[0]["ms"]}
        timings |= self._commit(target)
        with self._lock:
            self._timings = {name: round(value, 3) for name, value in timings.items()}
            self._commits += 1
            self._recent.append(
                {
                    "version": target.version,
                    "step": target.step,
                    "changed": target.changed,
                    "payload_bytes": target.payload_bytes,
                    "timings_ms": self._timings,
                }
            )
        logger.info(
            "version %d (step %d) served: %.2f %% changed, %.1f kB; %s",
            target.version,
            target.step,
            100 * target.changed / max(1, target.total),
            target.payload_bytes / 1e3,
            ", ".join(f"{name} {value:.1f} ms" for name, value in timings.items()),
        )

    def _commit(self, target: Manifest) -> dict[str, float]:
        self._set(state="committing")
        transaction = Transaction(self.port, target.version, self.served_version)
        try:
            transaction.commit()
        except Mismatch as error:
            raise self._judge(target, error) from error
        with self._lock:
            self._served = target
        timings = transaction.resume()
        # Only now: until generation goes on, the undo data is the way back.
        self.port.call("forget", {})
        return timings

    def _judge(self, target: Manifest, error: Mismatch) -> FingerprintError:
        """A commit was taken back: was the version wrong, or the weights held? A rescan tells."""
        served = self._served
        if served is not None and self._rescan(served)["verdict"]:
            wrong = f"{error.message}: it was made against other weights than version {served.version}"
            self._rejected = (target.digest, wrong)
            return FingerprintError(wrong)
        changed = FingerprintError(f"{error.message}: the weights held were changed from outside")
        self._distrust(changed)
        return changed

    def _operate(self, operation: str, arguments: Answer) -> list[Answer]:
        """Start an operation on every rank and poll until all are done."""
        for answer in self.port.call("start", {"operation": operation, "arguments": arguments}):
            raise_if_error(answer)
        pause = POLL_SHORTEST_S
        while True:
            time.sleep(pause)
            answers = self.port.call("poll", {})
            if not any(answer.get("running") for answer in answers):
                break
            pause = min(2 * pause, POLL_LONGEST_S)
        for answer in answers:
            raise_if_error(answer)
        return answers

    def _set(self, state: State, error: dict[str, str] | Literal["as is"] | None = "as is") -> None:
        with self._lock:
            self._state = state
            if error != "as is":
                self._error = error  # type: ignore[assignment]

    def fail(self, error: DeltaSyncError) -> None:
        """Show an error in status until something succeeds."""
        state: State = "idle" if self._served is not None else "waiting_for_run"
        if isinstance(error, WeightsLostError):
            state = "lost"
        elif self._state == "refused":
            state = "refused"
        self._set(state=state, error={"kind": error.kind, "message": error.message})


def _point(manifest: Manifest | None) -> Answer | None:
    if manifest is None:
        return None
    return {"version": manifest.version, "step": manifest.step, "fingerprint": manifest.fingerprint}

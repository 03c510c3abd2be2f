"""What a doctor finds, and how its checks are carried out: one after the other, none longer than it may take."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, Literal, TypeVar

from vllm_delta_sync.bucket.transfer_observers import with_observers
from vllm_delta_sync.errors import DeadlineError, DeltaSyncError, StoreError

DEFAULT_BYTES = 32_000_000
"""Size of the object that measures throughput."""
Verdict = Literal["ok", "warning", "failed", "skipped"]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes moved so far and in all."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class CheckResult:
    """What one check found.

    Attributes:
        check: its name. said: in plain words what was found, or what is wrong.
        figures: the same for programs. mend: what to do about it, where ``said`` does not say it.
        error: of a failure; its kind and exit code are those of the check.
    """

    check: str
    verdict: Verdict
    said: str
    figures: dict[str, Any] = field(default_factory=dict)
    mend: str = ""
    error: DeltaSyncError | None = None

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "check": self.check,
            "verdict": self.verdict,
            "kind": None if self.error is None else self.error.kind,
            "said": self.said,
            "mend": self.mend or None,
            "figures": self.figures,
        }


class Failure(DeltaSyncError):
    """A check's own error, with more to say than its message."""

    def __init__(self, error: DeltaSyncError, figures: dict[str, Any] | None = None, mend: str = "") -> None:
        super().__init__(error.message)
        self.error, self.figures, self.mend = error, figures or {}, mend


class CheckRunner:
    """Carries out checks, tells each finding at once, and keeps them.

    Args:
        keep_going: after a failure go on with what does not need what failed.

    Attributes:
        findings: so far. hung: whether a check did not come back, so that its thread is still at work.
    """

    def __init__(self, tell: Callable[[CheckResult], None], keep_going: bool = False) -> None:
        self._tell = tell
        self._keep_going = keep_going
        self.findings: list[CheckResult] = []
        self.hung = False
        self._thread: Thread | None = None

    def check(
        self, name: str, call: Callable[[], CheckResult], seconds: float, after: tuple[str, ...] = ()
    ) -> CheckResult:
        """Carry out one check.

        Args:
            call: returns what it found; a DeltaSyncError that it raises is a failure.
            seconds: longest that it may take. after: checks that must have come out well or with a warning.
        """
        reason = self._reason(after)
        found = (
            CheckResult(name, "skipped", f"not checked: {reason}") if reason else self._carry_out(name, call, seconds)
        )
        return self.add(found)

    def skip(self, name: str, reason: str) -> CheckResult:
        """Say that a check is left out."""
        return self.add(CheckResult(name, "skipped", reason))

    def add(self, found: CheckResult) -> CheckResult:
        """Keep and tell a finding."""
        self.findings.append(found)
        self._tell(found)
        return found

    def settle(self, seconds: float) -> None:
        """After an interrupt: wait so long for the check that was under way, so that it leaves nothing behind."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _reason(self, after: tuple[str, ...]) -> str:
        if self.hung:
            return "a check before it did not come back"
        bad = [finding.check for finding in self.findings if finding.verdict == "failed"]
        if bad and not self._keep_going:
            return f"{bad[0]!r} failed"
        missing = [finding.check for finding in self.findings if finding.verdict in ("failed", "skipped")]
        needed = next((name for name in after if name in missing), None)
        return "" if needed is None else f"it needs {needed!r}"

    def _carry_out(self, name: str, call: Callable[[], CheckResult], seconds: float) -> CheckResult:
        outcome: Future[CheckResult] = Future()
        self._thread = begun(call, outcome)
        try:
            return awaited(outcome, seconds)
        except Failure as failure:
            return CheckResult(name, "failed", failure.message, failure.figures, failure.mend, failure.error)
        except HungError as error:
            self.hung = True
            return CheckResult(name, "failed", error.message, error=error)
        except DeltaSyncError as error:
            return CheckResult(name, "failed", error.message, error=error)
        except Exception as error:  # noqa: BLE001  whatever a client library lets out is a finding, not a traceback
            unexpected = StoreError(f"unexpected {type(error).__name__}: {error}")
            return CheckResult(name, "failed", unexpected.message, error=unexpected)


class HungError(DeadlineError):
    """A call did not come back; its thread is still at work."""


def bounded(call: Callable[[], _Result], seconds: float) -> _Result:
    """What ``call`` returns or raises, in a thread of its own, so that this one can be interrupted at any moment.

    Raises:
        HungError: it did not come back in time.
    """
    outcome: Future[_Result] = Future()
    begun(call, outcome)
    return awaited(outcome, seconds)


def begun(call: Callable[[], _Result], outcome: Future[_Result]) -> Thread:
    """A thread that has begun to do ``call`` for ``outcome``."""

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001  handed to whoever waits, through the future
            outcome.set_exception(error)

    thread = Thread(target=with_observers(run), name="delta-sync-doctor", daemon=True)
    thread.start()
    return thread


def awaited(outcome: Future[_Result], seconds: float) -> _Result:
    """The outcome. Raises HungError if there is none in time, and what the call raised."""
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():
            raise
        raise HungError(
            f"no end after {seconds:.0f} s; see whether the store or mount answers at all, or raise store_deadline"
        ) from None


def milliseconds(seconds: float) -> float:
    """Rounded as figures are."""
    return round(1000 * seconds, 2)

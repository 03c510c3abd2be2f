"""``CheckRunner`` runs the doctor's checks one after another, each with a time limit, into ``CheckResult`` objects."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, Literal, TypeVar

from vllm_delta_sync.bucket.transfer_observers import with_observers
from vllm_delta_sync.errors import DeadlineError, DeltaSyncError, StoreError

DEFAULT_BYTES = 32_000_000
"""Default size of the throughput test's object."""
Verdict = Literal["ok", "warning", "failed", "skipped"]
Progress = Callable[[str, int, int], None]
"""Called with the transfer's direction, bytes moved so far, and bytes in total."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        check: its name. summary: what was found, or what is wrong, in words.
        figures: the same for programs. remedy: what to do, if ``summary`` does not say it.
        error: of a failure; the check takes its kind and exit code.
    """

    check: str
    verdict: Verdict
    summary: str
    figures: dict[str, Any] = field(default_factory=dict)
    remedy: str = ""
    error: DeltaSyncError | None = None

    def document(self) -> dict[str, Any]:
        """Return the finding for ``--json``."""
        return {
            "check": self.check,
            "verdict": self.verdict,
            "kind": None if self.error is None else self.error.kind,
            "said": self.summary,
            "mend": self.remedy or None,
            "figures": self.figures,
        }


class Failure(DeltaSyncError):
    """The error of a failed check, with figures and a remedy."""

    def __init__(self, error: DeltaSyncError, figures: dict[str, Any] | None = None, remedy: str = "") -> None:
        super().__init__(error.message)
        self.error, self.figures, self.remedy = error, figures or {}, remedy


class CheckRunner:
    """Runs checks, reports each finding at once, and keeps it.

    Args:
        keep_going: after a failure, continue with the checks that do not depend on the failed one.

    Attributes:
        findings: so far. hung: whether a check did not return and its thread is still running.
    """

    def __init__(self, on_finding: Callable[[CheckResult], None], keep_going: bool = False) -> None:
        self._on_finding = on_finding
        self._keep_going = keep_going
        self.findings: list[CheckResult] = []
        self.hung = False
        self._thread: Thread | None = None

    def check(
        self, name: str, call: Callable[[], CheckResult], seconds: float, after: tuple[str, ...] = ()
    ) -> CheckResult:
        """Run one check.

        Args:
            call: returns the finding; if it raises a DeltaSyncError, the check failed.
            seconds: time limit. after: checks that must be ok or have a warning.
        """
        reason = self._reason(after)
        found = CheckResult(name, "skipped", f"not checked: {reason}") if reason else self._run(name, call, seconds)
        return self.add(found)

    def skip(self, name: str, reason: str) -> CheckResult:
        """Report that a check is skipped."""
        return self.add(CheckResult(name, "skipped", reason))

    def add(self, found: CheckResult) -> CheckResult:
        """Keep and report a finding."""
        self.findings.append(found)
        self._on_finding(found)
        return found

    def settle(self, seconds: float) -> None:
        """Wait, after an interrupt, up to ``seconds`` for the running check, so that it leaves nothing behind."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _reason(self, after: tuple[str, ...]) -> str:
        if self.hung:
            return "an earlier check did not return"
        bad = [finding.check for finding in self.findings if finding.verdict == "failed"]
        if bad and not self._keep_going:
            return f"{bad[0]!r} failed"
        missing = [finding.check for finding in self.findings if finding.verdict in ("failed", "skipped")]
        needed = next((name for name in after if name in missing), None)
        return "" if needed is None else f"it needs {needed!r}"

    def _run(self, name: str, call: Callable[[], CheckResult], seconds: float) -> CheckResult:
        outcome: Future[CheckResult] = Future()
        self._thread = start_thread(call, outcome)
        try:
            return wait_for(outcome, seconds)
        except Failure as failure:
            return CheckResult(name, "failed", failure.message, failure.figures, failure.remedy, failure.error)
        except HungError as error:
            self.hung = True
            return CheckResult(name, "failed", error.message, error=error)
        except DeltaSyncError as error:
            return CheckResult(name, "failed", error.message, error=error)
        except Exception as error:  # noqa: BLE001  an exception from a client library is a finding, not a traceback
            unexpected = StoreError(f"unexpected {type(error).__name__}: {error}")
            return CheckResult(name, "failed", unexpected.message, error=unexpected)


class HungError(DeadlineError):
    """A call did not return in time; its thread is still running."""


def bounded(call: Callable[[], _Result], seconds: float) -> _Result:
    """Run ``call`` in another thread, so that this one stays interruptible; return or raise what it does.

    Raises:
        HungError: ``call`` did not return in time.
    """
    outcome: Future[_Result] = Future()
    start_thread(call, outcome)
    return wait_for(outcome, seconds)


def start_thread(call: Callable[[], _Result], outcome: Future[_Result]) -> Thread:
    """Start a thread that runs ``call`` and sets ``outcome``."""

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001  passed to the waiting thread through the future
            outcome.set_exception(error)

    thread = Thread(target=with_observers(run), name="delta-sync-doctor", daemon=True)
    thread.start()
    return thread


def wait_for(outcome: Future[_Result], seconds: float) -> _Result:
    """Wait for the outcome. Raises HungError if there is none in time, or whatever the call raised."""
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():
            raise
        raise HungError(
            f"no answer within {seconds:.0f} s; check whether the store or mount responds, or raise store_deadline"
        ) from None


def milliseconds(seconds: float) -> float:
    """Convert to milliseconds, rounded to two decimals like all figures."""
    return round(1000 * seconds, 2)

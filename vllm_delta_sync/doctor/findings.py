"""``CheckRunner`` runs the doctor's checks one after another, each with a time limit, into ``CheckResult`` objects."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from vllm_delta_sync.bucket.threads import start_call
from vllm_delta_sync.errors import DeadlineError, DeltaSyncError, StoreError

Verdict = Literal["ok", "warning", "failed", "skipped"]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        summary: what was found, or what is wrong, in words. figures: the same for programs.
        remedy: what to do, if ``summary`` does not say it.
        error: of a failure; the check takes its kind and exit code. check: its name, which ``CheckRunner`` sets.
    """

    verdict: Verdict
    summary: str
    figures: dict[str, Any] = field(default_factory=dict)
    remedy: str = ""
    error: DeltaSyncError | None = None
    check: str = ""

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


def ok(summary: str, **figures: Any) -> CheckResult:
    """Return the result of a check that passed."""
    return CheckResult("ok", summary, figures)


def warning(summary: str, remedy: str = "", **figures: Any) -> CheckResult:
    """Return the result of a check that found something to look at."""
    return CheckResult("warning", summary, figures, remedy)


def skipped(reason: str) -> CheckResult:
    """Return the result of a check that was not made."""
    return CheckResult("skipped", reason)


class Failure(DeltaSyncError):
    """The error of a failed check, with a remedy and figures."""

    def __init__(self, error: DeltaSyncError, remedy: str = "", **figures: Any) -> None:
        super().__init__(error.message)
        self.result = CheckResult("failed", error.message, figures, remedy, error)


class HungError(DeadlineError):
    """A call did not return in time; its thread is still running."""


class CheckRunner:
    """Runs checks, reports each finding at once, and keeps it.

    Attributes:
        findings: so far. hung: whether a check did not return and its thread is still running.
    """

    def __init__(self, on_finding: Callable[[CheckResult], None]) -> None:
        self._on_finding = on_finding
        self.findings: list[CheckResult] = []
        self.hung = False
        self._running: Future[CheckResult] | None = None

    def check(self, name: str, call: Callable[[], CheckResult], seconds: float, needs: str = "") -> None:
        """Run one check.

        Args:
            call: returns the finding; if it raises a DeltaSyncError, the check failed.
            seconds: time limit. needs: an earlier check that must be ok or have a warning.
        """
        reason = self._reason(needs)
        self.add(name, skipped(f"not checked: {reason}") if reason else self._run(call, seconds))

    def add(self, name: str, found: CheckResult) -> None:
        """Keep and report the finding of a check."""
        found = replace(found, check=name)
        self.findings.append(found)
        self._on_finding(found)

    def settle(self, seconds: float) -> None:
        """Wait, after an interrupt, up to ``seconds`` for the running check, so that it leaves nothing behind."""
        if self._running is not None:
            wait((self._running,), seconds)

    def _reason(self, needs: str) -> str:
        """Return why a check cannot run; empty if it can."""
        verdicts = {finding.check: finding.verdict for finding in self.findings}
        if self.hung:
            return "an earlier check did not return"
        return f"it needs {needs!r}" if verdicts.get(needs) in ("failed", "skipped") else ""

    def _run(self, call: Callable[[], CheckResult], seconds: float) -> CheckResult:
        self._running = start_call(call)
        try:
            return wait_for(self._running, seconds)
        except Failure as failure:
            return failure.result
        except DeltaSyncError as error:
            self.hung = isinstance(error, HungError)
            return Failure(error).result
        except Exception as error:  # noqa: BLE001  an exception from a client library is a finding, not a traceback
            return Failure(StoreError(f"unexpected {type(error).__name__}: {error}")).result


def wait_for(call: Future[_Result], seconds: float) -> _Result:
    """Return the result of a call, or raise its error; HungError if it does not return in time."""
    try:
        return call.result(seconds)
    except TimeoutError:
        if call.done():
            raise
        raise HungError(
            f"no answer within {seconds:.0f} s; check whether the store, mount or server responds, or raise "
            "store_deadline"
        ) from None

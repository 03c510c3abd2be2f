"""``CheckRunner`` runs the doctor's checks one after another, each with a time limit, into ``CheckResult`` objects."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from vllm_delta_sync.bucket.threads import start_call
from vllm_delta_sync.errors import DeadlineError, DeltaSyncError, StoreError

DEFAULT_BYTES = 32_000_000
"""Default size of the throughput test's object."""
Verdict = Literal["ok", "warning", "failed", "skipped"]
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


class HungError(DeadlineError):
    """A call did not return in time; its thread is still running."""


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
        self._running: Future[CheckResult] | None = None

    def check(self, name: str, call: Callable[[], CheckResult], seconds: float, needs: str = "") -> None:
        """Run one check.

        Args:
            call: returns the finding; if it raises a DeltaSyncError, the check failed.
            seconds: time limit. needs: an earlier check that must be ok or have a warning.
        """
        reason = self._reason(needs)
        self.add(CheckResult(name, "skipped", f"not checked: {reason}") if reason else self._run(name, call, seconds))

    def add(self, found: CheckResult) -> None:
        """Keep and report a finding."""
        self.findings.append(found)
        self._on_finding(found)

    def settle(self, seconds: float) -> None:
        """Wait, after an interrupt, up to ``seconds`` for the running check, so that it leaves nothing behind."""
        if self._running is not None:
            wait((self._running,), seconds)

    def _reason(self, needs: str) -> str:
        """Return why a check cannot run; empty if it can."""
        verdicts = {finding.check: finding.verdict for finding in self.findings}
        failed = next((name for name, verdict in verdicts.items() if verdict == "failed"), None)
        if self.hung:
            return "an earlier check did not return"
        if failed is not None and not self._keep_going:
            return f"{failed!r} failed"
        return f"it needs {needs!r}" if verdicts.get(needs) in ("failed", "skipped") else ""

    def _run(self, name: str, call: Callable[[], CheckResult], seconds: float) -> CheckResult:
        self._running = start_call(call)
        try:
            return wait_for(self._running, seconds)
        except Failure as failure:
            return CheckResult(name, "failed", failure.message, failure.figures, failure.remedy, failure.error)
        except DeltaSyncError as error:
            self.hung = isinstance(error, HungError)
            return CheckResult(name, "failed", error.message, error=error)
        except Exception as error:  # noqa: BLE001  an exception from a client library is a finding, not a traceback
            unexpected = StoreError(f"unexpected {type(error).__name__}: {error}")
            return CheckResult(name, "failed", unexpected.message, error=unexpected)


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

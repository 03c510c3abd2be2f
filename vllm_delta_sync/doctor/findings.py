"""``CheckResult``: what one check of the doctor found."""

from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_delta_sync.errors import DeltaSyncError

Verdict = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        summary: what was found, or what is wrong, in words. figures: the same for programs.
        remedy: what to do, if ``summary`` does not say it.
        error: of a failure; the check takes its kind and exit code. check: its name, which ``examine`` sets.
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
            "remedy": self.remedy or None,
            "figures": self.figures,
        }


def ok(summary: str, **figures: Any) -> CheckResult:
    """Return the result of a check that passed."""
    return CheckResult("ok", summary, figures)


def warning(summary: str, remedy: str = "", **figures: Any) -> CheckResult:
    """Return the result of a check that found something to look at."""
    return CheckResult("warning", summary, figures, remedy)


def failed(error: DeltaSyncError, remedy: str = "", **figures: Any) -> CheckResult:
    """Return the result of a check that failed."""
    return CheckResult("failed", error.message, figures, remedy, error)


def skipped(reason: str) -> CheckResult:
    """Return the result of a check that was not made."""
    return CheckResult("skipped", reason)

"""``ServerProbe`` checks whether a vLLM server follows a run, from what the server reports."""

from typing import Any

from vllm_delta_sync.doctor.findings import CheckResult, Failure
from vllm_delta_sync.errors import ChainError, DeltaSyncError, EngineError, UsageError, error_kinds
from vllm_delta_sync.server_client import MAX_MESSAGE, NOT_LOADED, Reply, ask, check_server_url

WAIT_SECONDS = 5
"""Seconds that a server may take to catch up before it counts as lagging."""
QUIET_SECONDS = 30.0
"""Seconds without a notice after which notices count as lost; publishers and brokers repeat the last every 2 s."""
HEALTHY = ("idle", "held", "staging", "draining", "committing", "verifying")
STARTING = ("waiting_for_run", "identifying", "repairing")


class ServerProbe:
    """The checks of one server. All but the first two read the status that ``plugin`` fetched.

    Args:
        run, head: id and newest version of the run at the bucket's URL, if known.
    """

    def __init__(self, url: str, run: str | None, head: int | None) -> None:
        self._url, self._run, self._head = url, run, head
        self._status = Reply(0, {})

    def reach(self) -> CheckResult:
        """Check whether a vLLM API server answers and its engine is alive."""
        check_server_url(self._url)
        health = ask(self._url, "/health").status
        figures: dict[str, Any] = {"health": health}
        if health == 503:
            summary = "the server answers, but /health returns 503: its engine is dead"
            raise Failure(EngineError(summary), figures, "Restart it; the end of its log shows why the engine died")
        if health != 200:
            summary = f"what answers at {self._url} is not a vLLM server: /health returns {health}"
            raise Failure(
                UsageError(summary), figures, "Check host, port and path; a proxy must forward /delta_sync too"
            )
        models = ask(self._url, "/v1/models")
        listed = models.field("data", list) or []
        names = [entry["id"] for entry in listed[:8] if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
        figures |= {"models": names, "api_key": models.status == 401}
        serves = f", serves {', '.join(names)[:200]}" if names else ""
        return CheckResult(
            "server",
            "ok",
            f"the server answers{serves}{', requires an API key' if models.status == 401 else ''}",
            figures,
        )

    def plugin(self) -> CheckResult:
        """Check whether the plugin's routes exist."""
        self._status = status = ask(self._url, "/delta_sync/status")
        if status.status == 404:
            raise Failure(EngineError("the plugin is not loaded: there is no /delta_sync/status"), remedy=NOT_LOADED)
        if status.status != 200 or status.field("state", str) is None:
            summary = f"/delta_sync/status answers with {status.status} and not with the plugin's status"
            remedy = "Use the server's own address, without a proxy in between"
            raise Failure(EngineError(summary), {"status": status.status}, remedy)
        return CheckResult("plugin", "ok", "the plugin is loaded")

    def state(self) -> CheckResult:
        """Check the state of the receiver."""
        state = str(self._status.field("state", str))[:100]
        figures: dict[str, Any] = {"state": state, "policy": self._status.field("policy", str)}
        error = self._last_error()
        if state in HEALTHY:
            held = ", so it applies nothing until POST /delta_sync/release" if state == "held" else ""
            return CheckResult("state", "ok", f"{state}{held}", figures)
        if state in STARTING:
            remedy = "" if state == "repairing" else "Wait some minutes; last_error below says what it waits for"
            return CheckResult("state", "warning", f"{state}: it serves no version of the run yet", figures, remedy)
        summary = f"{state}: {error.message if error else 'the server gives no reason'}"
        remedy = "It applies nothing until it is restarted" if state == "lost" else ""
        raise Failure(type(error)(summary) if error else EngineError(summary), figures, remedy)

    def same_run(self) -> CheckResult:
        """Check whether the server follows the run at the bucket's URL."""
        run = self._status.field("run", str)
        figures = {"run": run, "bucket": self._run}
        if run is None:
            return CheckResult("same run", "warning", "the server has found no run yet", figures, "See `last_error`")
        if self._run is None:
            summary = f"the server follows run {run[:64]}; the run at the bucket's URL is unknown"
            return CheckResult("same run", "warning", summary, figures)
        if run != self._run:
            summary = f"the server follows run {run[:64]}, but the run at the bucket's URL is {self._run}"
            remedy = "Compare the server's DELTA_SYNC_BUCKET with this URL; a server notices a new run at its next poll"
            raise Failure(ChainError(summary), figures, remedy)
        return CheckResult("same run", "ok", "the server follows the run at the bucket's URL", figures)

    def lag(self) -> CheckResult:
        """Compare the served version with the head."""
        head = self._head if self._head is not None else self._status.field("head.version", int)
        served = self._served()
        holding = self._status.field("holding", bool) or self._status.field("policy", str) == "manual"
        ordered = holding or self._status.field("target", str) not in (None, "head")
        if served is not None and head is not None and served < head and not ordered and not self._skips_to(head):
            ask(self._url, f"/delta_sync/wait?version={head}&timeout={WAIT_SECONDS}")
            self._status = ask(self._url, "/delta_sync/status")
            served = self._served()
        figures = {"served": served, "head": head, "lag": self._status.field("lag", int)}
        if served is None or head is None:
            return CheckResult("lag", "warning", "the server serves no version of the run yet", figures, "See `state`")
        if served >= head:
            return CheckResult("lag", "ok", f"serves version {served}, the newest", figures)
        summary = f"serves version {served}, {head - served} behind the head"
        if ordered:
            return CheckResult("lag", "ok", f"{summary}, as ordered (hold, target or policy)", figures)
        if self._skips_to(head):
            return CheckResult("lag", "ok", f"{summary}; the versions in between are quarantined or not exact", figures)
        remedy = "If this persists: see `last_error` and the server's log, and check that the server reaches the bucket"
        return CheckResult("lag", "warning", summary, figures, remedy)

    def _skips_to(self, head: int) -> bool:
        """Return whether the server has seen the head and serves the newest version that it may."""
        return self._status.field("lag", int) == 0 and self._status.field("head.version", int) == head

    def last_error(self) -> CheckResult:
        """Check the receiver's last error, whose message names the remedy."""
        error = self._last_error()
        if error is None:
            return CheckResult("last error", "ok", "no error since the last successful attempt")
        figures = {"kind": self._status.field("last_error.kind", str), "message": error.message}
        if self._served() is None:
            raise Failure(error, figures)
        remedy = f"The server keeps serving version {self._served()} and retries by itself"
        return CheckResult("last error", "warning", error.message, figures, remedy)

    def notice(self) -> CheckResult:
        """Check whether the server receives the publisher's notices."""
        listens = self._status.field("notice.listens", bool)
        heard = self._status.field("notice.heard_seconds", float)
        figures = {"listens": listens, "heard_seconds": heard}
        if listens is None:
            return CheckResult("notice", "skipped", "the server does not report it")
        if not listens:
            return CheckResult("notice", "ok", "no notices are set up: the server polls the bucket", figures)
        if heard is not None and heard <= QUIET_SECONDS:
            return CheckResult("notice", "ok", f"connected: the last notice came {heard:.0f} s ago", figures)
        since = "none came yet" if heard is None else f"the last came {heard:.0f} s ago"
        remedy = (
            "Polling still finds new versions, but later. Check that the publisher runs and has published, that the "
            "server's DELTA_SYNC_NOTICE is its address, and that both sides or neither use CURVE keys"
        )
        return CheckResult("notice", "warning", f"the server receives no notices: {since}", figures, remedy)

    def _served(self) -> int | None:
        return self._status.field("served.version", int)

    def _last_error(self) -> DeltaSyncError | None:
        """Return the server's ``last_error`` as an error of its kind, with its message cut to ``MAX_MESSAGE``."""
        kind, message = self._status.field("last_error.kind", str), self._status.field("last_error.message", str)
        if kind is None or message is None:
            return None
        return error_kinds().get(kind, EngineError)(message[:MAX_MESSAGE])

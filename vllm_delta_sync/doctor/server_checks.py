"""``ServerProbe`` checks whether a vLLM server follows a run, from what the server reports."""

import time
from urllib.parse import urlencode

from vllm_delta_sync.doctor.findings import CheckResult, failed, ok, skipped, warning
from vllm_delta_sync.errors import ChainError, DeltaSyncError, EngineError, NotFoundError, UsageError, error_kinds
from vllm_delta_sync.server_client import NOT_LOADED, Reply, ServerStatus, ask, check_server_url

WAIT_SECONDS = 5
"""Seconds that a server may take to catch up before it counts as lagging."""
POLL_SECONDS = 0.2
QUIET_SECONDS = 30.0
"""Seconds without a notice after which notices count as lost; publishers and brokers repeat the last every 2 s."""
HEALTHY = ("idle", "held", "staging", "draining", "committing", "verifying")
STARTING = ("waiting_for_run", "identifying", "repairing")


class ServerProbe:
    """The checks of one server. All but the first two read the status that ``plugin`` fetched.

    Args:
        run, head: id and newest version of the run at the bucket's URL, if known.
        adapter: whose run that is, of those in the server's setting ``lora_adapters``; None: the setting ``bucket``.
    """

    def __init__(self, url: str, run: str | None, head: int | None, adapter: str | None = None) -> None:
        self._url, self._run, self._head, self._adapter = url, run, head, adapter
        self._status = ServerStatus.model_validate({})

    def reach(self) -> CheckResult:
        """Check whether a vLLM API server answers and its engine is alive."""
        check_server_url(self._url)
        health = ask(self._url, "/health").status
        if health == 503:
            summary = "the server answers, but /health returns 503: its engine is dead"
            remedy = "Restart it; the end of its log shows why the engine died"
            return failed(EngineError(summary), remedy, health=health)
        if health != 200:
            summary = f"what answers at {self._url} is not a vLLM server: /health returns {health}"
            remedy = "Check host, port and path; a proxy must forward /delta_sync too"
            return failed(UsageError(summary), remedy, health=health)
        models = ask(self._url, "/v1/models")
        listed = models.document.get("data")
        entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        names = [entry["id"] for entry in entries[:8] if isinstance(entry.get("id"), str)]
        serves = f", serves {', '.join(names)[:200]}" if names else ""
        key = ", requires an API key" if models.status == 401 else ""
        return ok(f"the server answers{serves}{key}", health=health, models=names, api_key=models.status == 401)

    def plugin(self) -> CheckResult:
        """Check whether the plugin's routes exist."""
        reply = self._ask_status()
        self._status = reply.server_status
        error = self._status.error
        if reply.status == 404 and self._adapter is not None and error is not None:
            return failed(
                NotFoundError(error.message), "Give --adapter one of these names; without it, the base is checked"
            )
        if reply.status == 404:
            return failed(EngineError("the plugin is not loaded: there is no /delta_sync/status"), NOT_LOADED)
        if reply.status != 200 or self._status.state is None:
            summary = f"/delta_sync/status answers with {reply.status} and not with the plugin's status"
            remedy = "Use the server's own address, without a proxy in between"
            return failed(EngineError(summary), remedy, status=reply.status)
        return ok("the plugin is loaded")

    def state(self) -> CheckResult:
        """Check the state of the receiver."""
        state, error = str(self._status.state), self._last_error()
        figures = {"state": state, "policy": self._status.policy}
        if state in HEALTHY:
            held = ""
            if state == "held" and self._status.holding:
                held = ", so it applies nothing until POST /delta_sync/release"
            elif state == "held":
                held = ": it serves a newer version than its target names, see `last error`"
            return ok(f"{state}{held}", **figures)
        if state in STARTING:
            remedy = "" if state == "repairing" else "Wait some minutes; last_error below says what it waits for"
            return warning(f"{state}: it serves no version of the run yet", remedy, **figures)
        summary = f"{state}: {error.message if error else 'the server gives no reason'}"
        remedy = "It applies nothing until it is restarted" if state == "lost" else ""
        return failed(type(error)(summary) if error else EngineError(summary), remedy, **figures)

    def same_run(self) -> CheckResult:
        """Check whether the server follows the run at the bucket's URL."""
        run = self._status.run
        figures = {"run": run, "bucket": self._run}
        if run is None:
            return warning("the server has found no run yet", "See `last_error`", **figures)
        if self._run is None:
            return warning(f"the server follows run {run}; the run at the bucket's URL is unknown", "", **figures)
        if run != self._run:
            summary = f"the server follows run {run}, but the run at the bucket's URL is {self._run}"
            remedy = (
                "Compare the server's DELTA_SYNC_BUCKET with this URL; a server notices a new run at its next poll. If "
                "this is the run of an adapter in lora_adapters, add --adapter NAME"
            )
            return failed(ChainError(summary), remedy, **figures)
        return ok("the server follows the run at the bucket's URL", **figures)

    def lag(self) -> CheckResult:
        """Compare the served version with the head."""
        head = self._head if self._head is not None else self._seen_head()
        served = self._served()
        holding = self._status.holding or self._status.policy == "manual"
        ordered = holding or self._status.target not in (None, "head")
        if served is not None and head is not None and served < head and not ordered and not self._skips_to(head):
            self._wait(head)
            served = self._served()
        figures = {"served": served, "head": head, "lag": self._status.lag}
        if served is None or head is None:
            return warning("the server serves no version of the run yet", "See `state`", **figures)
        if served >= head:
            return ok(f"serves version {served}, the newest", **figures)
        summary = f"serves version {served}, {head - served} behind the head"
        if ordered:
            return ok(f"{summary}, as ordered (hold, target or policy)", **figures)
        if self._skips_to(head):
            return ok(f"{summary}; the versions in between are quarantined or not exact", **figures)
        remedy = "If this persists: see `last_error` and the server's log, and check that the server reaches the bucket"
        return warning(summary, remedy, **figures)

    def _ask_status(self) -> Reply:
        query = "" if self._adapter is None else "?" + urlencode({"adapter": self._adapter})
        return ask(self._url, f"/delta_sync/status{query}")

    def _wait(self, version: int) -> None:
        """Give the server time to serve a version."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (self._served() or 0) < version and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._status = self._ask_status().server_status

    def _skips_to(self, head: int) -> bool:
        """Return whether the server has seen the head and serves the newest version that it may."""
        return self._status.lag == 0 and self._seen_head() == head

    def last_error(self) -> CheckResult:
        """Check the receiver's last error, whose message names the remedy."""
        found, error = self._status.last_error, self._last_error()
        if found is None or error is None:
            return ok("no error since the last successful attempt")
        if self._served() is None or self._status.state == "lost":
            return failed(error, **found.model_dump())
        remedy = f"The server keeps serving version {self._served()}"
        remedy += " and retries by itself" if self._status.retries else " until an operator acts"
        return warning(error.message, remedy, **found.model_dump())

    def notice(self) -> CheckResult:
        """Check whether the server receives the publisher's notices."""
        listens, heard = self._status.listens, self._status.heard
        figures = {"listens": listens, "heard_seconds": heard}
        if listens is None:
            return skipped("the server does not report it")
        if not listens:
            return ok("no notices are set up: the server polls the bucket", **figures)
        if heard is not None and heard <= QUIET_SECONDS:
            return ok(f"connected: the last notice came {heard:.0f} s ago", **figures)
        since = "none came yet" if heard is None else f"the last came {heard:.0f} s ago"
        remedy = (
            "Polling still finds new versions, but later. Check that the publisher runs and has published, that the "
            "server's DELTA_SYNC_NOTICE is its address, and that both sides or neither use CURVE keys"
        )
        return warning(f"the server receives no notices: {since}", remedy, **figures)

    def _served(self) -> int | None:
        return None if self._status.served is None else self._status.served.version

    def _seen_head(self) -> int | None:
        return None if self._status.head is None else self._status.head.version

    def _last_error(self) -> DeltaSyncError | None:
        """Return the server's ``last_error`` as an error of its kind."""
        found = self._status.last_error
        return None if found is None else error_kinds().get(found.kind, EngineError)(found.message)

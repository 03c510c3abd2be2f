"""``ServerProbe`` checks whether a vLLM server follows a run, from what the server reports."""

from typing import Any

from vllm_delta_sync import __version__
from vllm_delta_sync.doctor.findings import CheckResult, Failure
from vllm_delta_sync.doctor.server_client import Reply, ServerClient, field
from vllm_delta_sync.errors import ChainError, DeltaSyncError, EngineError, UsageError, error_kinds

WAIT_SECONDS = 5
"""Seconds that a server may take to catch up before it counts as lagging."""
QUIET_SECONDS = 30.0
"""Seconds without a notice after which notices count as lost; publishers and brokers repeat the last every 2 s."""
HEALTHY = ("idle", "held", "staging", "draining", "committing", "verifying")
STARTING = ("waiting_for_run", "proving", "repairing")
NOT_LOADED = (
    "Start it with `delta-sync serve MODEL --bucket URL`. With plain `vllm serve`: install vllm-delta-sync there, add "
    "delta_sync to VLLM_PLUGINS, set DELTA_SYNC_BUCKET, and pass --worker-extension-cls "
    "vllm_delta_sync.engine.WorkerExtension"
)
NO_PROXY = "Use the server's own address, without a proxy in between"


class ServerProbe:
    """The checks of one server. All but the first two read the status that ``plugin`` fetched.

    Attributes:
        run, head: id and newest version of the run at the bucket's URL, if known.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: ServerClient | None = None
        self._status = Reply(0, {})
        self.run: str | None = None
        self.head: int | None = None

    def reach(self) -> CheckResult:
        """Check whether a vLLM API server answers and its engine is alive."""
        self._client = ServerClient(self._url)
        health = self._client.ask("/health").status
        figures: dict[str, Any] = {"health": health}
        if health == 503:
            summary = "the server answers, but /health returns 503: its engine is dead"
            raise Failure(EngineError(summary), figures, "Restart it; the end of its log shows why the engine died")
        if health != 200:
            summary = f"what answers at {self._url} is not a vLLM server: /health returns {health}"
            raise Failure(
                UsageError(summary), figures, "Check host, port and path; a proxy must forward /delta_sync too"
            )
        models = self._client.ask("/v1/models")
        listed = models.field("data", list) or []
        names = [name for entry in listed[:8] if (name := field(entry, "id", str)) is not None]
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
        self._status = status = self._connected().ask("/delta_sync/status")
        if status.status == 404:
            raise Failure(EngineError("the plugin is not loaded: there is no /delta_sync/status"), remedy=NOT_LOADED)
        if status.status != 200 or status.field("state", str) is None:
            summary = f"/delta_sync/status answers with {status.status} and not with the plugin's status"
            raise Failure(EngineError(summary), {"status": status.status}, NO_PROXY)
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

    def routes(self) -> CheckResult:
        """Check whether all routes were traced and the weights were verified to be those of a version."""
        ranks = [entry for entry in self._status.field("ranks", list) or [] if isinstance(entry, dict)]
        unloaded = sorted({str(name) for entry in ranks for name in field(entry, "unloaded", list) or []})
        tensors = max((field(entry, "tensors", int) or 0 for entry in ranks), default=0)
        figures = {"ranks": len(ranks), "tensors": tensors, "unloaded": unloaded[:100]}
        if not ranks:
            remedy = "See `state` and `last_error`: the model is traced once there is a run to compare its weights with"
            return CheckResult("routes", "warning", "no rank has traced the model yet", figures, remedy)
        counted = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}, {tensors} tensors"
        if unloaded:
            counted += f", of which the model does not load {len(unloaded)} ({', '.join(unloaded[:3])[:200]})"
        if self._served() is None:
            remedy = (
                "See `state` and `last_error`: the server's model must be the run's base, or the run needs an anchor"
            )
            return CheckResult(
                "routes", "warning", f"traced, {counted}, but the weights match no version", figures, remedy
            )
        return CheckResult("routes", "ok", f"verified: {counted}", figures)

    def same_run(self) -> CheckResult:
        """Check whether the server follows the run at the bucket's URL."""
        run = self._status.field("run", str)
        figures = {"run": run, "bucket": self.run}
        if run is None:
            return CheckResult("same run", "warning", "the server has found no run yet", figures, "See `last_error`")
        if self.run is None:
            summary = f"the server follows run {run[:64]}; the run at the bucket's URL is unknown"
            return CheckResult("same run", "warning", summary, figures)
        if run != self.run:
            summary = f"the server follows run {run[:64]}, but the run at the bucket's URL is {self.run}"
            remedy = "Compare the server's DELTA_SYNC_BUCKET with this URL; a server notices a new run at its next poll"
            raise Failure(ChainError(summary), figures, remedy)
        return CheckResult("same run", "ok", "the server follows the run at the bucket's URL", figures)

    def lag(self) -> CheckResult:
        """Compare the served version with the head."""
        head = self.head if self.head is not None else self._status.field("head.version", int)
        served = self._served()
        holding = self._status.field("holding", bool) or self._status.field("policy", str) == "manual"
        follows_head = self._status.field("target", str) in (None, "head")
        if served is not None and head is not None and served < head and follows_head and not holding:
            self._wait_for(head)
            served = self._served()
        figures = {"served": served, "head": head, "lag": self._status.field("lag", int)}
        if served is None or head is None:
            return CheckResult("lag", "warning", "the server serves no version of the run yet", figures, "See `state`")
        if served >= head:
            return CheckResult("lag", "ok", f"serves version {served}, the newest", figures)
        summary = f"serves version {served}, {head - served} behind the head"
        if holding or not follows_head:
            return CheckResult("lag", "ok", f"{summary}, as ordered (hold, target or policy)", figures)
        if self._status.field("lag", int) == 0 and self._status.field("head.version", int) == head:
            return CheckResult("lag", "ok", f"{summary}; the versions in between are quarantined", figures)
        remedy = "If this persists: see `last_error` and the server's log, and check that the server reaches the bucket"
        return CheckResult("lag", "warning", summary, figures, remedy)

    def _wait_for(self, version: int) -> None:
        client = self._connected()
        client.ask(f"/delta_sync/wait?version={version}&timeout={WAIT_SECONDS}")
        self._status = client.ask("/delta_sync/status")

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

    def versions(self) -> CheckResult:
        """Check the server's versions of vLLM, torch and the plugin."""
        found = {name: self._status.field(f"versions.{name}", str) for name in ("vllm", "torch", "vllm_delta_sync")}
        figures: dict[str, Any] = {**found, "tested": self._status.field("versions.tested", bool), "here": __version__}
        summary = ", ".join(f"{name.replace('_', '-')} {str(value)[:40]}" for name, value in found.items() if value)
        if not summary:
            remedy = f"Install this machine's release, {__version__}, on the server"
            summary = "an older plugin, which does not report its version"
            return CheckResult("versions", "warning", summary, figures, remedy)
        if not figures["tested"]:
            remedy = "It may work; docs/REFERENCE.md lists the tested releases of vLLM"
            return CheckResult(
                "versions",
                "warning",
                f"{summary}: the plugin was not tested with this release of vLLM",
                figures,
                remedy,
            )
        if found["vllm_delta_sync"] != __version__:
            remedy = "Install the same release on both sides"
            return CheckResult("versions", "warning", f"{summary}; this machine has {__version__}", figures, remedy)
        return CheckResult("versions", "ok", f"{summary}, tested", figures)

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

    def admin(self) -> CheckResult:
        """Check who may call the state-changing routes. Sends a request that every server refuses unread."""
        reply = self._connected().ask("/delta_sync/rollback", "POST", {"Content-Type": "text/plain"})
        figures: dict[str, Any] = {"status": reply.status}
        if reply.status == 401:
            return CheckResult(
                "admin", "ok", "state-changing routes require the admin token", {**figures, "token": True}
            )
        figures["token"] = False
        if reply.status == 403:
            summary = "no admin token is set: only clients on the server's machine may change state"
            return CheckResult("admin", "ok", summary, figures)
        if reply.status in (400, 415):
            summary = "no admin token is set: any client on the server's machine may change state, including this one"
            return CheckResult("admin", "ok", summary, figures)
        summary = f"a state-changing route answers with {reply.status}, which the plugin never does"
        return CheckResult("admin", "warning", summary, figures, NO_PROXY)

    def _connected(self) -> ServerClient:
        if self._client is None:
            raise UsageError("the server was not reached by an earlier check")
        return self._client

    def _served(self) -> int | None:
        return self._status.field("served.version", int)

    def _last_error(self) -> DeltaSyncError | None:
        """Return the server's ``last_error`` as an error of its kind, with its message cut to 2000 characters."""
        kind, message = self._status.field("last_error.kind", str), self._status.field("last_error.message", str)
        if kind is None or message is None:
            return None
        return error_kinds().get(kind, EngineError)(message[:2000])

"""Whether a vLLM server follows a run as it should, as far as it tells by itself."""

from typing import Any

from vllm_delta_sync import __version__
from vllm_delta_sync.doctor.findings import CheckResult, Failure
from vllm_delta_sync.doctor.server_client import Reply, ServerClient, field
from vllm_delta_sync.errors import ChainError, DeltaSyncError, EngineError, UsageError, error_kinds

WAIT_SECONDS = 5
"""How long a server that lags may take to catch up before that counts as a lag."""
QUIET_SECONDS = 30.0
"""Publishers and brokers repeat the last notice every other second."""
WELL = ("idle", "held", "staging", "draining", "committing", "verifying")
BEGINNING = ("waiting_for_run", "proving", "repairing")
NOT_LOADED = (
    "Start it with `delta-sync serve MODEL --bucket URL`. With plain `vllm serve`: install vllm-delta-sync there, set "
    "VLLM_PLUGINS so that it names delta_sync (beside the plugins that you load), set DELTA_SYNC_BUCKET, and give "
    "--worker-extension-cls vllm_delta_sync.engine.WorkerExtension"
)


class ServerProbe:
    """The checks of one server; each but the first two reads the status that ``plugin`` got.

    Args:
        run, head: id and newest version of the run at the bucket's URL, where they are known.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: ServerClient | None = None
        self._status = Reply(0, {})
        self.run: str | None = None
        self.head: int | None = None

    def reach(self) -> CheckResult:
        """Somebody is there, and it is vLLM's API server, whose engine lives."""
        self._client = ServerClient(self._url)
        health = self._client.ask("/health").status
        figures: dict[str, Any] = {"health": health}
        if health == 503:
            said = "the server answers, but /health says 503: its engine is dead"
            raise Failure(EngineError(said), figures, "Start it again; the end of its log says what killed the engine")
        if health != 200:
            said = f"what answers at {self._url} is no vLLM server: /health says {health}"
            raise Failure(
                UsageError(said), figures, "Check host, port and path; a proxy has to pass /delta_sync on too"
            )
        models = self._client.ask("/v1/models")
        listed = models.field("data", list) or []
        names = [name for entry in listed[:8] if (name := field(entry, "id", str)) is not None]
        figures |= {"models": names, "api_key": models.status == 401}
        serves = f", serves {', '.join(names)[:200]}" if names else ""
        return CheckResult(
            "server",
            "ok",
            f"the server answers{serves}{', asks for an API key' if models.status == 401 else ''}",
            figures,
        )

    def plugin(self) -> CheckResult:
        """Our routes are there."""
        self._status = status = self._asked().ask("/delta_sync/status")
        if status.status == 404:
            raise Failure(EngineError("the plugin is not loaded: there is no /delta_sync/status"), mend=NOT_LOADED)
        if status.status != 200 or status.field("state", str) is None:
            said = f"/delta_sync/status answers with {status.status}, which is no status of ours"
            raise Failure(
                EngineError(said), {"status": status.status}, "Ask the server itself, without a proxy between"
            )
        return CheckResult("plugin", "ok", "the plugin is loaded")

    def state(self) -> CheckResult:
        """What it is at."""
        state = str(self._status.field("state", str))[:100]
        figures: dict[str, Any] = {"state": state, "policy": self._status.field("policy", str)}
        error = self._last_error()
        if state in WELL:
            held = " and follows nothing until POST /delta_sync/release" if state == "held" else ""
            return CheckResult("state", "ok", f"{state}{held}", figures)
        if state in BEGINNING:
            mend = "" if state == "repairing" else "Give it some minutes; last_error below says what it waits for"
            return CheckResult("state", "warning", f"{state}: it serves no version of the run yet", figures, mend)
        said = f"{state}: {error.message if error else 'no reason is given'}"
        mend = "It follows nothing until it is started again" if state == "lost" else ""
        raise Failure(type(error)(said) if error else EngineError(said), figures, mend)

    def routes(self) -> CheckResult:
        """Where every tensor goes was traced, and the weights were proven to be a version's."""
        ranks = [entry for entry in self._status.field("ranks", list) or [] if isinstance(entry, dict)]
        unloaded = sorted({str(name) for entry in ranks for name in field(entry, "unloaded", list) or []})
        tensors = max((field(entry, "tensors", int) or 0 for entry in ranks), default=0)
        figures = {"ranks": len(ranks), "tensors": tensors, "unloaded": unloaded[:100]}
        if not ranks:
            mend = "See `state` and `last_error`: the weights are looked at once there is a run to compare them with"
            return CheckResult("routes", "warning", "no rank has traced the model yet", figures, mend)
        spoken = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}, {tensors} tensors"
        if unloaded:
            spoken += f", {len(unloaded)} of which the model does not load ({', '.join(unloaded[:3])[:200]})"
        if self._served() is None:
            mend = (
                "See `state` and `last_error`: the server's model has to be the run's base, or the run needs an anchor"
            )
            return CheckResult(
                "routes", "warning", f"traced, {spoken}, but weights are proven to be no version", figures, mend
            )
        return CheckResult("routes", "ok", f"proven: {spoken}", figures)

    def same_run(self) -> CheckResult:
        """It follows the run that lies at the bucket's URL."""
        run = self._status.field("run", str)
        figures = {"run": run, "bucket": self.run}
        if run is None:
            return CheckResult("same run", "warning", "the server has found no run yet", figures, "See `last_error`")
        if self.run is None:
            return CheckResult("same run", "warning", f"the server follows run {run[:64]}; none is known here", figures)
        if run != self.run:
            said = f"the server follows run {run[:64]}, at the bucket's URL lies {self.run}"
            mend = "Compare DELTA_SYNC_BUCKET there with the URL here; a run that was replaced is found within a poll"
            raise Failure(ChainError(said), figures, mend)
        return CheckResult("same run", "ok", "it follows the run at the bucket's URL", figures)

    def lag(self) -> CheckResult:
        """What it serves, against the newest that there is."""
        head = self.head if self.head is not None else self._status.field("head.version", int)
        served = self._served()
        holding = self._status.field("holding", bool) or self._status.field("policy", str) == "manual"
        aims = self._status.field("target", str) in (None, "head")
        if served is not None and head is not None and served < head and aims and not holding:
            self._client_wait(head)
            served = self._served()
        figures = {"served": served, "head": head, "lag": self._status.field("lag", int)}
        if served is None or head is None:
            return CheckResult("lag", "warning", "it serves no version of the run yet", figures, "See `state`")
        if served >= head:
            return CheckResult("lag", "ok", f"version {served} is served, the newest", figures)
        said = f"version {served} is served, {head - served} behind the head"
        if holding or not aims:
            return CheckResult("lag", "ok", f"{said}, as it was told to", figures)
        if self._status.field("lag", int) == 0 and self._status.field("head.version", int) == head:
            return CheckResult("lag", "ok", f"{said}; the versions between are quarantined", figures)
        mend = "If it stays so: see `last_error`, the server's log, and whether it reaches the bucket"
        return CheckResult("lag", "warning", said, figures, mend)

    def _client_wait(self, version: int) -> None:
        self._asked().ask(f"/delta_sync/wait?version={version}&timeout={WAIT_SECONDS}")
        self._status = self._asked().ask("/delta_sync/status")

    def last_error(self) -> CheckResult:
        """What went wrong last, which says how to mend it."""
        error = self._last_error()
        if error is None:
            return CheckResult("last error", "ok", "nothing went wrong since the last attempt that succeeded")
        figures = {"kind": self._status.field("last_error.kind", str), "message": error.message}
        if self._served() is None:
            raise Failure(error, figures)
        said = f"{error.message}"
        mend = "Version " + str(self._served()) + " is served meanwhile; it tries again by itself"
        return CheckResult("last error", "warning", said, figures, mend)

    def versions(self) -> CheckResult:
        """Of vLLM, torch and the plugin."""
        found = {name: self._status.field(f"versions.{name}", str) for name in ("vllm", "torch", "vllm_delta_sync")}
        figures: dict[str, Any] = {**found, "tested": self._status.field("versions.tested", bool), "here": __version__}
        said = ", ".join(f"{name.replace('_', '-')} {str(value)[:40]}" for name, value in found.items() if value)
        if not said:
            mend = f"Install the release that is here, {__version__}, there too"
            return CheckResult("versions", "warning", "an older plugin, which does not say its version", figures, mend)
        if not figures["tested"]:
            mend = "It may work; docs/REFERENCE.md says which releases of vLLM were tested"
            return CheckResult(
                "versions", "warning", f"{said}: this vLLM was never tested with the plugin", figures, mend
            )
        if found["vllm_delta_sync"] != __version__:
            mend = "Install one release on both sides"
            return CheckResult("versions", "warning", f"{said}; {__version__} is here", figures, mend)
        return CheckResult("versions", "ok", f"{said}, tested", figures)

    def notice(self) -> CheckResult:
        """Whether it hears the publisher's notices."""
        listens = self._status.field("notice.listens", bool)
        heard = self._status.field("notice.heard_seconds", float)
        figures = {"listens": listens, "heard_seconds": heard}
        if listens is None:
            return CheckResult("notice", "skipped", "the server does not say")
        if not listens:
            return CheckResult("notice", "ok", "none are set up: the bucket is polled", figures)
        if heard is not None and heard <= QUIET_SECONDS:
            return CheckResult("notice", "ok", f"connected: the last notice came {heard:.0f} s ago", figures)
        since = "none has come yet" if heard is None else f"the last came {heard:.0f} s ago"
        mend = (
            "Polling finds new versions all the same, later. See whether the publisher runs and has published, whether "
            "DELTA_SYNC_NOTICE there is its address, and whether both sides, or neither, have CURVE keys"
        )
        return CheckResult("notice", "warning", f"no notices are heard: {since}", figures, mend)

    def admin(self) -> CheckResult:
        """Who may change state there. The request that is made is refused by everybody, before it is read."""
        reply = self._asked().ask("/delta_sync/rollback", "POST", {"Content-Type": "text/plain"})
        figures: dict[str, Any] = {"status": reply.status}
        if reply.status == 401:
            return CheckResult(
                "admin", "ok", "routes that change state ask for the admin token", {**figures, "token": True}
            )
        figures["token"] = False
        if reply.status == 403:
            said = "no admin token is set: only clients on the server's own machine may change state"
            return CheckResult("admin", "ok", said, figures)
        if reply.status in (400, 415):
            said = "no admin token is set: whoever is on the server's machine may change state, as from here"
            return CheckResult("admin", "ok", said, figures)
        said = f"a route that changes state answers with {reply.status}, which ours does not"
        return CheckResult("admin", "warning", said, figures, "Ask the server itself, without a proxy between")

    def _asked(self) -> ServerClient:
        if self._client is None:
            raise UsageError("the server was not reached before")
        return self._client

    def _served(self) -> int | None:
        return self._status.field("served.version", int)

    def _last_error(self) -> DeltaSyncError | None:
        """What the server shows, as an error of its own kind; text for people, of any length."""
        kind, message = self._status.field("last_error.kind", str), self._status.field("last_error.message", str)
        if kind is None or message is None:
            return None
        return error_kinds().get(kind, EngineError)(message[:2000])

"""``build_overview`` returns the one JSON document that the page shows, of a run, of servers, or of both.

What comes from a bucket or a server is untrusted: texts are cut here, and the page shows them as text only.
``BackgroundReader`` reads a run in a thread, at most every few seconds and only while its result is asked for.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm_delta_sync import __version__
from vllm_delta_sync.dashboard.page_reader import MAX_TEXT
from vllm_delta_sync.dashboard.remedies import remedy_of
from vllm_delta_sync.errors import DeltaSyncError, EngineError
from vllm_delta_sync.fleet.fleet import versions_behind
from vllm_delta_sync.server_client import ServerStatus

Source = Literal["server", "dashboard", "report"]
PAGE_SECONDS = 2.0
"""Interval at which a page asks for its document."""
READ_SECONDS = 5.0
"""Shortest interval between two reads of the bucket, however many viewers there are."""
MAX_PROBLEMS = 24


@dataclass(frozen=True)
class RunView:
    """What was read of a run.

    Attributes:
        document: of ``PageReader.read``; the last good one if reading fails, None before the first. error: why reading
            failed. at: Unix time of ``document``.
    """

    document: dict[str, Any] | None
    error: DeltaSyncError | None = None
    at: float | None = None


@dataclass(frozen=True)
class ServerView:
    """One server: its status, or why there is none. ``name``: its URL, None for the server that shows the page."""

    name: str | None
    status: Mapping[str, Any] | DeltaSyncError


def build_overview(
    source: Source,
    now: float,
    run: RunView | None,
    servers: Sequence[ServerView],
    states: Mapping[Any, str],
    seconds: float | None = None,
) -> dict[str, Any]:
    """Return the page's document.

    Args:
        source: where the page is shown. now: Unix time.
        run: None if no run was read. states: what each state of a receiver means.
        seconds: interval at which the page asks again; None: never.
    """
    document = None if run is None else run.document
    shown = [_server(view, states) for view in servers]
    if document is not None and document["head"] is not None:
        for server in shown:
            if server["error"] is None and server["run"] == document["id"]:
                server["lag"] = _lag(server, document["head"])
    problems = _problems(run, document, shown)
    return {
        "source": source,
        "at": round(now, 3),
        "seconds": seconds,
        "release": __version__,
        "run": document,
        "run_at": None if run is None else run.at,
        "run_pending": run is not None and document is None and run.error is None,
        "servers": shown,
        "headline": {"level": _level(problems, document), "text": _headline(source, run, document, shown)},
        "problems": problems[:MAX_PROBLEMS],
        "problem_count": len(problems),
    }


def _level(problems: list[dict[str, Any]], run: dict[str, Any] | None) -> str:
    """Return the worst level: error, warning, good, or idle while there is nothing to judge."""
    levels = {problem["level"] for problem in problems}
    worst = next((level for level in ("error", "warning") if level in levels), None)
    return worst or ("idle" if run is None or run["head"] is None else "good")


def _headline(source: Source, view: RunView | None, run: dict[str, Any] | None, servers: list[dict[str, Any]]) -> str:
    """Say in one sentence what is served."""
    if source == "server" and servers and servers[0]["error"] is None:
        served, lag = servers[0]["served"], servers[0]["lag"]
        if served is not None:
            behind = "" if lag is None else ", the newest" if lag == 0 else f", {_count(lag, 'version')} behind"
            return f"Version {served['version']:,} is served{behind}"
        return "No version is served yet"
    if run is None:
        return "The run cannot be read" if view is not None and view.error is not None else "Reading the run"
    head = run["head"]
    if head is None:
        return "Nothing is published yet" if run["error"] is None else "No version can be read"
    sound = head["sound"]
    if sound is None:
        return f"All versions up to {head['version']:,} are quarantined"
    # Counted before the list of receivers was cut.
    live, serving = run["fleet"]["live"], run["fleet"]["newest"]
    known = {row["receiver"] for row in run["receivers"]}
    for server in servers:
        # Versions of another run are other weights, whatever their numbers.
        if server["error"] is None and server["run"] in (None, run["id"]) and server["receiver"] not in known:
            live += 1
            serving += server["lag"] == 0
    if not live:
        return f"Version {sound:,} is the newest; no receiver reports what it serves"
    return f"{serving} of {_count(live, 'receiver')} serve{'s' * (serving == 1)} the newest version, {sound:,}"


def _lag(server: dict[str, Any], head: dict[str, Any]) -> int | None:
    served, seen = (server[place] and server[place]["version"] for place in ("served", "head"))
    return versions_behind(served, server["lag"], seen, server["target"], head["version"], head["sound"])


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _server(view: ServerView, states: Mapping[Any, str]) -> dict[str, Any]:
    if isinstance(view.status, DeltaSyncError):
        return {"name": view.name, "error": {"kind": view.status.kind, "message": view.status.message[:MAX_TEXT]}}
    status = ServerStatus.model_validate(view.status)
    return {"name": view.name, "error": None, "meaning": states.get(status.state), **status.model_dump()}


# Problems: what is wrong, where, and what to do


def _problem(level: str, where: str, what: str, remedy: str | None, kind: str | None = None) -> dict[str, Any]:
    return {"level": level, "where": where, "kind": kind, "what": what, "remedy": remedy}


def _problems(run: RunView | None, document: dict[str, Any] | None, servers: list[dict[str, Any]]) -> list[Any]:
    found: list[dict[str, Any]] = []
    for server in servers:
        found += _problems_of_server(server)
    if run is not None and run.error is not None:
        found.append(_problem("error", "the bucket", run.error.message[:MAX_TEXT], *_known(run.error.kind)))
    if document is not None:
        found += _problems_of_run(document)
        for server in servers:
            if server.get("run") not in (None, document["id"]):
                what = f"follows run {server['run']}; versions and receivers below are those of run {document['id']}"
                found.append(
                    _problem("warning", server["name"] or "this server", what, "Name the run that it follows.")
                )
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda item: order[item["level"]])


def _known(kind: str) -> tuple[str, str]:
    return remedy_of(kind), kind


def _problems_of_server(server: dict[str, Any]) -> list[dict[str, Any]]:
    where = server["name"] or "this server"
    error = server["error"]
    if error is not None:
        return [_problem("error", where, error["message"], *_known(error["kind"]))]
    found = []
    last = server["last_error"]
    if last is not None:
        found.append(_problem("error", where, last["message"], *_known(last["kind"])))
    for reason in server["reasons"]:
        if last is None or last["message"][:80] not in reason:
            found.append(_problem("note" if server["holding"] else "warning", where, f"not ready: {reason}", None))
    if server["holding"] and not server["reasons"]:
        found.append(_problem("note", where, "holds its version", "delta-sync release makes it follow again."))
    served = server["served"]
    if served is not None and served["quarantined"]:
        what = f"serves version {served['version']}, which is quarantined: {'; '.join(served['quarantined'])}"
        found.append(_problem("warning", where, what, "Roll back with delta-sync rollback, or leave it if meant."))
    return found


def _problems_of_run(run: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    error, head = run["error"], run["head"]
    if error is not None:
        found.append(_problem("error", "the run", error["message"], *_known(error["kind"])))
    elif head is None:
        found.append(_problem("note", "the run", "no version is published yet", "Start the publisher."))
    if run["damaged"]:
        newest = run["damaged"][0]
        others = ", ".join(str(damage["version"]) for damage in run["damaged"][1:8])
        more = f"; the same for {others}" + ("" if run["damaged_count"] <= 8 else " and more") if others else ""
        what = f"version {newest['version']} cannot be read: {newest['message']}{more}"
        found.append(_problem("error", "the run", what, *_known(newest["kind"])))
    if head is not None and head["sound"] != head["version"]:
        stays = "no version is served" if head["sound"] is None else f"servers stay at version {head['sound']}"
        what = f"the newest version, {head['version']}, is quarantined; {stays}"
        found.append(_problem("warning", "the run", what, *_known("gate")))
    for row in run["receivers"]:
        where = f"receiver {row['receiver']}"
        if row["live"] and row["error"] is not None:
            found.append(_problem("error", where, row["error"]["message"], *_known(row["error"]["kind"])))
        elif row["live"] and row["holding"]:
            what = "holds" + ("" if row["served"] is None else f" version {row['served']}")
            found.append(_problem("note", where, what, "delta-sync release makes it follow again."))
        elif not row["live"] and not row["left"]:
            remedy = "See whether that server still runs. Garbage collection deletes old heartbeats."
            found.append(_problem("warning", where, "its heartbeat has expired", remedy))
    for text in run["ignored"]:
        found.append(_problem("note", "heartbeats", f"ignored: {text}", "Find out who wrote it, and delete it."))
    return found


class BackgroundReader:
    """The newest view of a run, for any number of viewers.

    Args:
        read: see ``PageReader.read``; called in a thread of its own, never twice at once.
        seconds: shortest time from the end of a read to the beginning of the next; None: ``READ_SECONDS``.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], seconds: float | None = None) -> None:
        self._read, self._seconds = read, READ_SECONDS if seconds is None else seconds
        self._lock = threading.Lock()
        self._reading: threading.Thread | None = None
        self._due = 0.0
        self._view = RunView(None)

    def latest(self, may_read: bool = True) -> RunView:
        """Return the last view at once, and begin to read again if it is old.

        Args:
            may_read: whether a read may begin now; False while an engine is paused.
        """
        with self._lock:
            if may_read and self._reading is None and time.monotonic() >= self._due:
                reading = threading.Thread(target=self._work, name="delta-sync-page", daemon=True)
                # This fails where there are too many threads. The thread takes the lock before it ends.
                reading.start()
                self._reading = reading
            return self._view

    def _work(self) -> None:
        view = self._view
        try:
            view = RunView(self._read(), None, time.time())
        except DeltaSyncError as error:
            view = RunView(view.document, error, view.at)
        except Exception as error:  # noqa: BLE001  the page shows it, and the next read may succeed
            view = RunView(view.document, EngineError(f"unexpected {type(error).__name__}: {error}"), view.at)
        with self._lock:
            self._view, self._reading = view, None
            self._due = time.monotonic() + self._seconds

"""``delta-sync fleet list``, ``wait`` and ``watch``: arguments, output, and the document for ``--json``."""

import argparse
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import (
    VERSION,
    Answer,
    add_bucket,
    add_group,
    add_trust,
    count,
    exit_codes,
    interval,
    opened,
    print_event,
    version,
)
from vllm_delta_sync.cli.text import clean, print_columns, redraw

if TYPE_CHECKING:
    from vllm_delta_sync.client import Run
    from vllm_delta_sync.fleet.fleet import Fleet, Replica

SERVERS = """
Servers are listed that were started with --receiver-id and write heartbeats to the bucket. A server whose heartbeat is
older than its setting heartbeat_seconds counts as ended.

"""
WAIT_TEXT = """
The wait ends when every live server serves the version or a newer one, and these servers, together with those that
ended since it was published, are at least N.

"""
LIST = "  delta-sync fleet list --bucket /data/runs/a\n"
WAIT = "  delta-sync fleet wait --bucket /data/runs/a --version 12 --replicas 8 --timeout 5m\n"
WATCH = "  delta-sync fleet watch --bucket /data/runs/a --poll 5s\n"
REFUSED = "the run is damaged, or not signed by a trusted key"
POLL_SECONDS = 2.0
WAIT_SECONDS = 60.0
LONGEST_ERROR = 60


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    group = add_group(commands, "fleet", "list the servers that follow a run, or wait for them", LIST + WAIT + WATCH)

    listing = group.add_parser(
        "list",
        help="list the servers",
        description="List the servers that follow a run, with what they serve.",
        epilog=f"{SERVERS}examples:\n{LIST}{exit_codes(REFUSED)}",
    )
    add_bucket(listing)
    add_trust(listing)
    listing.set_defaults(handler=_list)

    waiting = group.add_parser(
        "wait",
        help="wait until all servers serve a version",
        description="Wait until all servers serve a version, and list them.",
        epilog=WAIT_TEXT + f"examples:\n{WAIT}{exit_codes('the timeout passed; the error names the servers that lag')}",
    )
    add_bucket(waiting)
    waiting.add_argument("--version", type=version, metavar=VERSION, help="version to wait for; default: the head")
    waiting.add_argument("--replicas", type=count, default=1, metavar="N", help="least number of servers (default: 1)")
    waiting.add_argument(
        "--timeout",
        type=interval,
        default=WAIT_SECONDS,
        metavar="TIME",
        help=f"longest wait (default: {WAIT_SECONDS:g})",
    )
    add_trust(waiting)
    waiting.set_defaults(handler=_wait)

    watching = group.add_parser(
        "watch",
        help="show the servers until Ctrl-C",
        description="Show the servers that follow a run until Ctrl-C: on a terminal as a table that is redrawn, "
        "else as one line for each server.",
        epilog=f"{SERVERS}examples:\n{WATCH}{exit_codes(REFUSED)}",
    )
    add_bucket(watching)
    watching.add_argument(
        "--poll",
        type=interval,
        default=POLL_SECONDS,
        metavar="TIME",
        help=f"time between polls of the bucket (default: {POLL_SECONDS:g})",
    )
    add_trust(watching)
    watching.set_defaults(handler=_watch)


def _list(options: argparse.Namespace) -> Answer:
    run = opened(options)
    document = fleet_document(run, run.fleet())
    return document, lambda: print_fleet(document)


def _wait(options: argparse.Namespace) -> Answer:
    run = opened(options)
    fleet = run.fleet()
    wanted = options.version if isinstance(options.version, int) else run.resolve(options.version).version
    fleet.wait(wanted, options.replicas, options.timeout)
    document = fleet_document(run, fleet)
    return document, lambda: print_fleet(document)


def _watch(options: argparse.Namespace) -> Answer:
    """Show the list until an interrupt or an error."""
    run = opened(options)
    fleet = run.fleet()
    while True:
        document = fleet_document(run, fleet)
        print_event(options, document, partial(_show, document))
        time.sleep(options.poll)
        fleet.poll()


def _show(document: dict[str, Any]) -> None:
    if sys.stdout.isatty():
        redraw(partial(print_fleet, document))
    else:
        print_lines(document)


def fleet_document(run: "Run", fleet: "Fleet") -> dict[str, Any]:
    """Return all servers, the live ones first."""
    rows = [_row(replica) for replica in [*fleet.live, *fleet.ended]]
    served = [row["served"] for row in rows if row["live"] and row["served"] is not None]
    return {
        "run": run.info.run,
        "url": run.bucket.url,
        "head": max((row["head"] for row in rows if row["head"] is not None), default=None),
        "live": len(fleet.live),
        "ended": len(fleet.ended),
        "lowest": min(served, default=None),
        "highest": max(served, default=None),
        "replicas": rows,
        "ignored": fleet.ignored,
    }


def _row(replica: "Replica") -> dict[str, Any]:
    heartbeat = replica.heartbeat
    return {
        "receiver": heartbeat.receiver,
        "live": replica.live,
        "left": replica.left,
        "served": heartbeat.served,
        "step": heartbeat.step,
        "head": heartbeat.head,
        "lag": heartbeat.lag,
        "state": heartbeat.state,
        "following": heartbeat.following,
        "holding": heartbeat.holding,
        "paused": heartbeat.paused,
        "pause_ms": heartbeat.pause_ms,
        "error": None if heartbeat.error is None else heartbeat.error.model_dump(),
        "age_seconds": round(replica.age, 1),
        "started_at": heartbeat.started_at,
    }


def print_fleet(document: dict[str, Any]) -> None:
    """Print a table, and one line of totals."""
    rows = document["replicas"]
    if rows:
        titles = ("receiver", "served", "step", "lag", "state", "target", "pause", "heartbeat", "last error")
        print_columns(titles, [_cells(row) for row in rows], left=(0, 4, 5, 8))
        print()
    for line in document["ignored"]:
        print(clean(f"ignored: {line}"))
    print(_totals(document))


def print_lines(document: dict[str, Any]) -> None:
    """Print one line for each server, each with the time, so that it can be read by itself in a log."""
    from vllm_delta_sync.format.manifest import timestamp

    now = timestamp()
    for row in document["replicas"]:
        receiver, served, step, lag, state, target, pause, heartbeat, error = map(clean, _cells(row))
        text = f"{now} {receiver}: version {served} (step {step}), lag {lag}, {state}, target {target}, pause {pause}"
        print(f"{text}, heartbeat {heartbeat}" + (f", {error}" if row["error"] else ""))
    print(f"{now} {_totals(document)}", flush=True)


def _totals(document: dict[str, Any]) -> str:
    lowest, highest = document["lowest"], document["highest"]
    spread = "nothing served" if lowest is None else f"version {lowest}" + (f" to {highest}" * (lowest != highest))
    return f"{document['live']} live, {document['ended']} ended; {spread}; head {_text(document['head'])}"


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    if row["live"]:
        state = _text(row["state"])
    else:
        state = "left" if row["left"] else "ended"
    error = row["error"]
    text = "-" if error is None else f"{error['kind']}: {error['message']}"
    return (
        row["receiver"],
        _text(row["served"]),
        _text(row["step"]),
        _text(row["lag"]),
        state,
        _text(row["following"]) + (", holds" if row["holding"] else ""),
        "-" if row["pause_ms"] is None else f"{row['pause_ms']:.1f} ms",
        f"{row['age_seconds']:.0f} s ago",
        text if len(text) <= LONGEST_ERROR else text[: LONGEST_ERROR - 1] + "…",
    )


def _text(value: object) -> str:
    return "-" if value is None else str(value)

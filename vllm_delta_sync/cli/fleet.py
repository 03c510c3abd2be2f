"""``delta-sync fleet`` lists the servers of a run with what they serve, or waits until all serve a version."""

import argparse
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import (
    VERSION,
    Answer,
    add_bucket,
    add_trust,
    count,
    exit_codes,
    opened,
    seconds,
    version,
)
from vllm_delta_sync.cli.text import clean, print_columns, redraw
from vllm_delta_sync.errors import UsageError

if TYPE_CHECKING:
    from vllm_delta_sync.client import Run
    from vllm_delta_sync.fleet.fleet import Fleet, Replica

EXAMPLES = """\
Lists servers that were started with --receiver-id and write heartbeats to the bucket. A server whose heartbeat is older
than its setting lease_seconds counts as ended. --wait ends when every live server serves the version or a newer one,
and these servers, together with those that ended since it was published, are at least N.

examples:
  delta-sync fleet --bucket /data/runs/a
  delta-sync fleet --bucket /data/runs/a --watch 2
  delta-sync fleet --bucket /data/runs/a --wait 12 --replicas 8 --timeout 300
"""
LONGEST_ERROR = 60


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    fleet = commands.add_parser(
        "fleet",
        help="list the servers that follow a run, or wait for them",
        description="List the servers that follow a run, from their heartbeats.",
        epilog=EXAMPLES + exit_codes("with --wait: the timeout passed; the error names the servers that lag"),
    )
    add_bucket(fleet)
    add_trust(fleet)
    fleet.add_argument(
        "--watch", type=seconds, metavar="SECONDS", help="refresh the list until Ctrl-C; not with --wait"
    )
    fleet.add_argument("--wait", type=version, metavar=VERSION, help="wait until all servers serve this version")
    fleet.add_argument(
        "--replicas", type=count, default=None, metavar="N", help="with --wait: least number of servers (default: 1)"
    )
    fleet.add_argument(
        "--timeout", type=seconds, default=None, metavar="SECONDS", help="with --wait: longest wait (default: 60)"
    )
    fleet.set_defaults(handler=_fleet)


def _fleet(options: argparse.Namespace) -> Answer:
    if options.watch is not None and options.wait is not None:
        raise UsageError("--watch cannot be combined with --wait")
    if options.wait is None and (options.replicas is not None or options.timeout is not None):
        raise UsageError("--replicas and --timeout need --wait VERSION")
    run = opened(options)
    if options.watch is not None:
        _watch(run, options)
    fleet = run.fleet()
    if options.wait is not None:
        wanted = options.wait if isinstance(options.wait, int) else run.resolve(options.wait).version
        replicas = 1 if options.replicas is None else options.replicas
        fleet.wait(wanted, replicas, 60.0 if options.timeout is None else options.timeout)
    document = fleet_document(run, fleet)
    return document, lambda: print_fleet(document)


def _watch(run: "Run", options: argparse.Namespace) -> None:
    """Refresh the list until an interrupt or an error."""
    fleet = run.fleet()
    while True:
        document = fleet_document(run, fleet)
        if options.json:
            print(json.dumps(document), flush=True)
        else:
            redraw(partial(print_fleet, document))
        time.sleep(options.watch)
        fleet.poll()


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
    lease = replica.lease
    return {
        "receiver": lease.receiver,
        "live": replica.live,
        "left": replica.left,
        "served": lease.served,
        "step": lease.step,
        "head": lease.head,
        "lag": lease.lag,
        "state": lease.state,
        "following": lease.following,
        "holding": lease.holding,
        "waiting": lease.waiting,
        "paused": lease.paused,
        "pause_ms": lease.pause_ms,
        "error": None if lease.error is None else lease.error.model_dump(),
        "age_seconds": round(replica.age, 1),
        "started_at": lease.started_at,
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
    lowest, highest = document["lowest"], document["highest"]
    spread = "nothing served" if lowest is None else f"version {lowest}" + (f" to {highest}" * (lowest != highest))
    print(f"{document['live']} live, {document['ended']} ended; {spread}; head {_text(document['head'])}")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    if not row["live"]:
        state = "left" if row["left"] else "ended"
    else:
        state = _text(row["state"]) + (", waits for a pause slot" if row["waiting"] else "")
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

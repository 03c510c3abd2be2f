"""``delta-sync fleet list`` and ``fleet wait``."""

import argparse
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import RUN, VERSION, count, interval, opened, version
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import clean, known, print_columns
from vllm_delta_sync.errors import NotFoundError

if TYPE_CHECKING:
    from vllm_delta_sync.client import Run
    from vllm_delta_sync.fleet.fleet import Fleet

REFUSED = "the run is damaged, or not signed by a trusted key"
LONGEST_ERROR = 60


@command("fleet list", "list the servers", *RUN, failed=REFUSED)
def list_servers(options: argparse.Namespace) -> Report:
    """List the servers that follow a run, with what they serve.

    Servers are listed that were started with --receiver-id and write heartbeats to the bucket. A server whose heartbeat
    is older than its setting heartbeat_seconds counts as ended.

    examples:
      delta-sync fleet list --bucket /data/runs/a
    """
    run = opened(options)
    return Report(fleet_document(run, run.fleet()), print_fleet)


@command(
    "fleet wait",
    "wait until all servers serve a version",
    *RUN,
    option("--version", type=version, metavar=VERSION, help="version to wait for; default: the newest not quarantined"),
    option("--replicas", type=count, default=1, metavar="N", help="least number of servers (default: 1)"),
    option("--timeout", type=interval, default=60.0, metavar="TIME", help="longest wait (default: 60)"),
    failed="the timeout passed; the error names the servers that lag",
)
def wait(options: argparse.Namespace) -> Report:
    """Wait until all servers serve a version, and list them.

    The wait ends when every live server serves the version or a newer one, and these servers, together with those that
    ended since it was published, are at least N.

    examples:
      delta-sync fleet wait --bucket /data/runs/a --version 12 --replicas 8 --timeout 5m
    """
    run = opened(options)
    fleet = run.fleet()
    wanted = options.version
    if not isinstance(wanted, int):
        found = run.resolve(wanted)
        wanted = found.version if options.version is not None or found.sound is None else found.sound
    fleet.wait(wanted, options.replicas, options.timeout)
    return Report(fleet_document(run, fleet), print_fleet)


def fleet_document(run: "Run", fleet: "Fleet") -> dict[str, Any]:
    """Return all servers, the live ones first."""
    from vllm_delta_sync.fleet.fleet import versions_behind

    rows = [replica.document() for replica in [*fleet.live, *fleet.ended]]
    served = [row["served"] for row in rows if row["live"] and row["served"] is not None]
    head = None
    with suppress(NotFoundError):
        found = run.reachable_head()[0]
        head = found.version
        for row in rows:
            row["lag"] = versions_behind(row["served"], row["lag"], row["head"], row["following"], head, found.sound)
    return {
        "run": run.info.run,
        "url": run.bucket.url,
        "head": head,
        "live": len(fleet.live),
        "ended": len(fleet.ended),
        "lowest": min(served, default=None),
        "highest": max(served, default=None),
        "replicas": rows,
        "ignored": fleet.ignored,
    }


def print_fleet(data: dict[str, Any]) -> None:
    """Print a table, and one line of totals."""
    if data["replicas"]:
        titles = ("receiver", "served", "step", "lag", "state", "target", "pause", "heartbeat", "last error")
        print_columns(titles, map(_cells, data["replicas"]), left=(0, 4, 5, 8))
        print()
    for line in data["ignored"]:
        print(clean(f"ignored: {line}"))
    print(_totals(data))


def _totals(data: dict[str, Any]) -> str:
    lowest, highest = data["lowest"], data["highest"]
    spread = "nothing served" if lowest is None else f"version {lowest}" + (f" to {highest}" * (lowest != highest))
    return f"{data['live']} live, {data['ended']} ended; {spread}; head {known(data['head'])}"


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    ended = "left" if row["left"] else "ended"
    error = known(row["error"], "{0[kind]}: {0[message]}")
    return (
        row["receiver"],
        known(row["served"]),
        known(row["step"]),
        known(row["lag"]),
        known(row["state"]) if row["live"] else ended,
        known(row["following"]) + (", holds" if row["holding"] else ""),
        known(row["pause_ms"], "{:.1f} ms"),
        f"{row['age_seconds']:.0f} s ago",
        error if len(error) <= LONGEST_ERROR else error[: LONGEST_ERROR - 1] + "…",
    )

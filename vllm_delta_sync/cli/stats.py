"""``delta-sync stats``: arguments and output; the work is done by ``maintenance.run_stats``."""

import argparse
import math
import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import (
    Answer,
    add_bucket,
    add_last,
    add_trust,
    checking_history,
    exit_codes,
    last_count,
    opened,
)
from vllm_delta_sync.cli.fleet import fleet_document
from vllm_delta_sync.cli.text import ProgressBar, clean, many, percent, print_columns, print_fields, size
from vllm_delta_sync.errors import UsageError

if TYPE_CHECKING:
    from vllm_delta_sync.client import Run
    from vllm_delta_sync.maintenance.run_stats import VersionStats

SHOWN = 20

EXAMPLES = """\
Reads manifests and heartbeats, no objects. Bytes are those that were published, also of what gc has removed since;
`delta-sync du` shows what is stored. Savings are against a full checkpoint for each version, counted from the first
version that is read. Times are by the publisher's clock. Without --last, all versions count and the newest 20 are
listed. Receivers are those with heartbeats (setting receiver_id); `delta-sync fleet list` shows more of them.

examples:
  delta-sync stats --bucket /data/runs/a
  delta-sync stats --bucket /data/runs/a --last 1h
  delta-sync stats --bucket /data/runs/a --last 200 --plot versions.png
  delta-sync stats --bucket s3://bucket/runs/a --json
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "stats",
        help="show what was published, how often, and what it saved",
        description="Show bytes, changed share and time of each version, their spread, savings, and the lag of "
        "receivers.",
        epilog=EXAMPLES + exit_codes("a version is missing or damaged, or does not follow the one before it"),
    )
    add_bucket(parser)
    add_trust(parser)
    add_last(parser)
    parser.add_argument("--plot", metavar="FILE.png", help="also draw this picture, if matplotlib is installed")
    parser.set_defaults(handler=_stats)


def _stats(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.maintenance.run_stats import summarize, version_stats

    if options.plot is not None:
        _check_plot(options.plot)
    run = opened(options)
    with run.caching_manifests():
        last = last_count(run, options.last)
        with checking_history(run), ProgressBar("manifests") as bar:
            versions = version_stats(run, last, bar.update)
    summary = summarize(versions)
    newest = versions[-1]
    fleet = _fleet(run, versions)
    published = newest.manifest.version + 1
    document = {
        "run": run.info.run,
        "url": run.bucket.url,
        "versions": [_row(version) for version in versions],
        "summary": {
            **asdict(summary),
            "first": versions[0].manifest.version,
            "last": newest.manifest.version,
            "published_bytes": newest.published,
            "full_bytes": newest.full,
            "saved_share": newest.saved_share,
        },
        "fleet": fleet,
        "plot": options.plot,
        "read": {
            # Two before the first: for the time since then, and to check that one.
            "manifests": published if last is None else min(published, last + 2),
            "heartbeats": len(fleet["replicas"]) + len(fleet["ignored"]),
        },
    }
    if options.plot is not None:
        _plot(versions, run.bucket.url, options.plot)
    shown = options.last if isinstance(options.last, int) else SHOWN
    return document, lambda: _print(document, shown)


def _check_plot(path: str) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install matplotlib") from error
    if not path.lower().endswith(".png"):
        raise UsageError(f"--plot {path!r} is not the name of a PNG file; end it with .png")


def _plot(versions: "list[VersionStats]", url: str, path: str) -> None:
    from vllm_delta_sync.maintenance.run_stats import draw

    try:
        draw(versions, url).savefig(path, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"--plot {path!r} cannot be written: {error.strerror}; name another file") from error


def _row(version: "VersionStats") -> dict[str, Any]:
    manifest = version.manifest
    return {
        "version": manifest.version,
        "step": manifest.step,
        "kind": manifest.kind,
        "created_at": manifest.created_at,
        "seconds": version.seconds,
        "codec": manifest.codec,
        "compression": manifest.compression,
        "changed": manifest.changed,
        "total": manifest.total,
        "changed_share": version.changed_share,
        "payload_bytes": manifest.payload_bytes,
        "full_bytes": manifest.full_bytes,
        "published_bytes": version.published,
        "published_full_bytes": version.full,
        "saved_share": version.saved_share,
    }


def _fleet(run: "Run", versions: "list[VersionStats]") -> dict[str, Any]:
    """Return the heartbeats, with the time between the version that each receiver serves and the newest one."""
    from vllm_delta_sync.maintenance.run_stats import seconds_between

    manifests = {version.manifest.version: version.manifest for version in versions}
    newest = versions[-1].manifest
    document = fleet_document(run, run.fleet())
    for row in document["replicas"]:
        served = manifests.get(row["served"])
        row["behind"] = None if row["served"] is None else max(0, newest.version - row["served"])
        row["behind_seconds"] = None if served is None else seconds_between(served, newest)
    return document


def _print(document: dict[str, Any], shown: int) -> None:
    summary, rows = document["summary"], document["versions"]
    saved = summary["saved_share"]
    fields: list[tuple[str, object]] = [
        ("run", document["run"]),
        ("url", document["url"]),
        ("versions", f"{summary['first']} to {summary['last']} in {_span(3600 * summary['hours'])}"),
        ("published", f"{size(summary['published_bytes'])} instead of {size(summary['full_bytes'])}"
                      + ("" if saved is None else f": {100 * saved:.4g} % saved")),
    ]  # fmt: skip
    if summary["versions_per_hour"] is not None:
        rate = f"{summary['versions_per_hour']:.3g} versions, {size(round(summary['bytes_per_hour']))}"
        fields.append(("per hour", rate))
    print_fields(fields)
    print()
    spreads = (
        ("bytes of a delta", "payload_bytes", lambda value: size(round(value))),
        ("changed share", "changed_share", lambda value: f"{100 * value:.3g} %"),
        ("time between versions", "seconds", _span),
    )
    print_columns(
        ("", "median", "p95", "max"),
        [
            (title, *("-" if summary[name] is None else text(summary[name][part]) for part in ("median", "p95", "max")))
            for title, name, text in spreads
        ],
    )
    print()
    _print_versions(rows[-shown:])
    if len(rows) > shown:
        print(f"… {len(rows) - shown} before them; --last or --json lists more")
    print()
    _print_fleet(document["fleet"])
    if document["plot"]:
        print(clean(f"drawn: {document['plot']}"))
    read = document["read"]
    print(f"read {many(read['manifests'], 'manifest')}, {many(read['heartbeats'], 'heartbeat')}, no objects")


def _print_versions(rows: list[dict[str, Any]]) -> None:
    titles = ("version", "step", "kind", "codec", "changed", "payload", "after", "saved so far", "created")
    cells = [
        (
            row["version"],
            row["step"],
            row["kind"],
            row["codec"] or "-",
            percent(row["changed"], row["total"]) if row["kind"] == "delta" else "-",
            size(row["payload_bytes"]),
            "-" if row["seconds"] is None else _span(row["seconds"]),
            "-" if row["saved_share"] is None else f"{100 * row['saved_share']:.4g} %",
            row["created_at"],
        )
        for row in rows
    ]
    print_columns(titles, cells, left=(2, 3))


def _print_fleet(document: dict[str, Any]) -> None:
    live = [row for row in document["replicas"] if row["live"]]
    if live:
        cells = [
            (
                row["receiver"],
                _text(row["served"]),
                _text(row["behind"]),
                "-" if row["behind_seconds"] is None else _span(row["behind_seconds"]),
                _text(row["state"]),
            )
            for row in live[:SHOWN]
        ]
        print_columns(("receiver", "served", "behind", "behind in time", "state"), cells, left=(0, 4))
        if len(live) > SHOWN:
            print(f"… {len(live) - SHOWN} more; --json lists them")
    for line in document["ignored"]:
        print(clean(f"ignored: {line}"))
    behind = [row["behind"] for row in live if row["behind"] is not None]
    lag = f"; behind the newest version: median {statistics.median(behind):g}, max {max(behind)}" if behind else ""
    print(f"{many(len(live), 'live receiver')}, {document['ended']} ended{lag}")


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _span(seconds: float) -> str:
    """Format a duration with three digits, such as ``950 ms``, ``12.5 s``, ``3.2 min`` or ``1.5 h``."""
    for unit, length in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if math.fabs(seconds) >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{1000 * seconds:.3g} ms"

"""``delta-sync stats``, which ``maintenance.run_stats`` computes."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import LAST, RUN, checking_history, last_count, opened
from vllm_delta_sync.cli.command import Report, command
from vllm_delta_sync.cli.text import ProgressBar, many, percent, pick, print_columns, print_fields, size
from vllm_delta_sync.units import rounded

if TYPE_CHECKING:
    from vllm_delta_sync.maintenance.run_stats import VersionRow

SHOWN = 20


@command(
    "stats",
    "show what was published, how often, and what it saved",
    *RUN,
    LAST,
    failed="a version is missing or damaged, or does not follow the one before it",
)
def stats(options: argparse.Namespace) -> Report:
    """Show bytes, changed share and time of each version, their spread, and savings.

    Reads manifests, no objects. Bytes are those that were published, also of what gc has removed since;
    `delta-sync du` shows what is stored. Savings are against a full checkpoint for each version, counted from the first
    version that is read. Times are by the publisher's clock. Without --last, all versions count and the newest 20 are
    listed. `delta-sync fleet list` shows the lag of servers, and `delta-sync report` draws all this.

    examples:
      delta-sync stats --bucket /data/runs/a
      delta-sync stats --bucket /data/runs/a --last 1h
      delta-sync stats --bucket s3://bucket/runs/a --json
    """
    from vllm_delta_sync.maintenance.run_stats import read_rows, seconds_since, summarize

    run = opened(options)
    with run.caching_manifests():
        last = last_count(run, options.last)
        with checking_history(run), ProgressBar("manifests") as bar:
            # One more, for the time since the version before the first.
            read = read_rows(run, None if last is None else last + 1, bar.update)
    versions, since = read[-(last or 0) :], seconds_since(read)
    published = read[-1].version + 1
    data = {
        "run": run.info.run,
        "url": run.bucket.url,
        "versions": _rows(versions, since),
        "summary": {
            **asdict(summarize(versions, since)),
            "first": versions[0].version,
            "last": versions[-1].version,
        },
        "read": {
            # Two before the first: for the time since then, and to check that one.
            "manifests": published if last is None else min(published, last + 2),
        },
    }
    shown = options.last if isinstance(options.last, int) else SHOWN
    return Report(data, lambda data: _print(data, shown))


def _rows(versions: "list[VersionRow]", since: dict[int, float]) -> list[dict[str, Any]]:
    rows = []
    published = full = 0
    for version in versions:
        published, full = published + version.payload_bytes, full + version.saved_from
        row = pick(version, "version step kind created_at codec compression changed total payload_bytes full_bytes")
        rows.append(
            {
                **row,
                "seconds": since.get(version.version),
                "changed_share": version.changed_share,
                "saved_share": 1 - published / full if full else None,
                "published_bytes": published,
                "published_full_bytes": full,
            }
        )
    return rows


def _print(data: dict[str, Any], shown: int) -> None:
    summary, rows, read = data["summary"], data["versions"], data["read"]
    rate = None
    if summary["versions_per_hour"] is not None:
        rate = f"{rounded(summary['versions_per_hour'])} versions, {size(round(summary['bytes_per_hour']))}"
    took = f" in {_span(3600 * summary['hours'])}" if summary["hours"] else ""
    saved = "" if summary["saved_share"] is None else f": {_share(summary['saved_share'])} saved"
    print_fields(
        ("run", data["run"]),
        ("url", data["url"]),
        ("versions", f"{summary['first']} to {summary['last']}{took}"),
        ("published", f"{size(summary['published_bytes'])} instead of {size(summary['full_bytes'])}{saved}"),
        ("per hour", rate),
    )
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
    titles = ("version", "step", "kind", "codec", "changed", "payload", "after", "saved so far", "created")
    cells = [
        (
            row["version"],
            row["step"],
            row["kind"],
            row["codec"] or "-",
            percent(row["changed"], row["total"]) if row["kind"] == "delta" else "-",
            size(row["payload_bytes"]),
            _span(row["seconds"]),
            _share(row["saved_share"]),
            row["created_at"],
        )
        for row in rows[-shown:]
    ]
    print_columns(titles, cells, left=(2, 3))
    if len(rows) > shown:
        print(f"… {len(rows) - shown} before them; --last or --json lists more")
    print(f"\nread {many(read['manifests'], 'manifest')}, no objects")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.4g} %"


def _span(seconds: float | None) -> str:
    """Format a duration with three digits, such as ``950 ms``, ``12.5 s``, ``3.2 min`` or ``1.5 h``."""
    if seconds is None:
        return "-"
    for unit, length in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= length:
            return f"{rounded(seconds / length)} {unit}"
    return f"{rounded(1000 * seconds)} ms"

"""``delta-sync gc``, which ``maintenance.gc`` does."""

import argparse
from collections.abc import Iterable
from typing import Any

from vllm_delta_sync.cli.arguments import RUN, duration, opened, positive
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import ProgressBar, pick, print_columns, print_fields, size
from vllm_delta_sync.errors import IncompleteError, UsageError

SHOWN = 20
KEEP_LAST = 100


@command(
    "gc",
    "remove objects that no kept version needs",
    *RUN,
    option("--keep-last", type=positive, metavar="N", help=f"keep the newest N versions (default: {KEEP_LAST})"),
    option("--keep-every", type=positive, metavar="K", help="keep versions whose number K divides"),
    option("--keep-for", type=duration, metavar="TIME", help="keep versions published within this time"),
    option(
        "--no-tagged", action="store_true", help="do not keep tagged versions, except those of branches and rebases"
    ),
    option(
        "--min-age",
        type=duration,
        default=3600.0,
        metavar="TIME",
        help="keep everything newer than this (default: 1h)",
    ),
    option(
        "--longest-pin",
        type=duration,
        default=7 * 24 * 3600.0,
        metavar="TIME",
        help="receivers keep no version published longer ago than this (default: 7d)",
    ),
    option("--yes", action="store_true", help="collect by the defaults, without any --keep-… option"),
    option("--dry-run", action="store_true", help="only report what would be removed"),
    failed="a version that should be kept cannot be rebuilt",
)
def gc(options: argparse.Namespace) -> Report:
    """Remove objects, anchors and merged deltas that no kept version needs. Kept versions are: the head, the newest
    that is not quarantined, and the newest exact one; the last N versions with all their deltas; every K-th
    version; tagged versions; versions that another run branches from, or that the publisher rebased to; versions
    published within --keep-for; versions that a live receiver serves, targets or pins, with its path to the head.
    Each kept version can still be rebuilt bit for bit. Manifests stay, so the log stays complete. Heartbeats that
    expired a day ago or more are removed too. Without any --keep-… option, --yes or --dry-run is required. If nothing
    can be removed, the output says why. Safe beside publishers and receivers, and to interrupt: the next one
    continues. Only one collection runs at a time; a killed one delays the next by at most ten minutes.

    --min-age must exceed an upload, a compaction, and a read without a heartbeat.

    examples:
      delta-sync gc --bucket /data/runs/a --dry-run
      delta-sync gc --bucket /data/runs/a --keep-last 50 --keep-every 1000
      delta-sync gc --bucket /data/runs/a --keep-last 1 --keep-for 7d --min-age 15m --json
    """
    from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect

    chosen = (options.keep_last, options.keep_every, options.keep_for)
    if not (options.yes or options.dry_run or any(value is not None for value in chosen)):
        raise UsageError(
            "choose what to keep with --keep-last N, --keep-every K or --keep-for TIME; or give --yes to keep the "
            f"newest {KEEP_LAST} versions and those tagged or in use. --dry-run shows what would be removed"
        )
    policy = RetentionPolicy(
        keep_last=KEEP_LAST if options.keep_last is None else options.keep_last,
        keep_every=options.keep_every,
        keep_tagged=not options.no_tagged,
        keep_seconds=options.keep_for,
        min_age=options.min_age,
        longest_pin=options.longest_pin,
    )
    run = opened(options)
    with ProgressBar("removed") as bar:
        report = collect(run, policy, options.dry_run, lambda done, total, count: bar.update(done, total, size(count)))
    data = {
        "run": run.info.run,
        "url": run.bucket.url,
        **pick(report, "dry_run head bytes gone nothing_because notes"),
        **{
            name: [{"version": version, "because": reasons} for version, reasons in versions.items()]
            for name, versions in (("kept", report.kept), ("lost", report.lost))
        },
        "removed": {
            **pick(report, "objects anchors sidecars heartbeats"),
            "merged_deltas": [{"first": first, "last": last} for first, last in report.merged_deltas],
        },
    }
    return Report(data, _print, IncompleteError(_lost(report.lost)) if report.lost else None)


def _lost(versions: Iterable[int]) -> str:
    from vllm_delta_sync.maintenance.gc.record import spelled

    return f"versions {spelled(versions)} should be kept but cannot be rebuilt; run delta-sync repair"


def _print(data: dict[str, Any]) -> None:
    from vllm_delta_sync.maintenance.gc.record import spelled

    removed = {name: len(rows) for name, rows in data["removed"].items()}
    counts = f"{removed['objects']} objects, {removed['anchors']} anchors, {removed['merged_deltas']} merged deltas"
    if removed["sidecars"]:
        counts += f", {removed['sidecars']} sidecars"
    if removed["heartbeats"]:
        counts += f", {removed['heartbeats']} heartbeats"
    kept, lost = ([row["version"] for row in data[name]] for name in ("kept", "lost"))
    gone = [version for first, last in data["gone"] for version in range(first, last + 1)]
    print_fields(
        ("head", f"version {data['head']}"),
        ("kept", f"{len(kept)} versions: {spelled(kept)}"),
        ("would remove" if data["dry_run"] else "removed", f"{counts}, {size(data['bytes'])}"),
        ("without own delta", f"versions {spelled(gone)}" if gone else None),
        ("LOST", _lost(lost) if lost else None),
        *(("nothing, because", reason) for reason in data["nothing_because"]),
        notes=data["notes"],
    )
    named = [row for row in data["kept"] if set(row["because"]) - {"last", "every", "recent"}]
    if named:
        print()
        rows = [(row["version"], ", ".join(row["because"])) for row in named[-SHOWN:]]
        print_columns(("version", "kept because of"), rows, left=(1,))
        if len(named) > SHOWN:
            print(f"… {len(named) - SHOWN} more; --json lists them")

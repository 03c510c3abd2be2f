"""``delta-sync gc``: arguments and output; the work is done by ``maintenance.gc``."""

import argparse
from typing import Any

from vllm_delta_sync.cli.arguments import (
    Answer,
    CommandFailedError,
    add_bucket,
    add_trust,
    duration,
    exit_codes,
    opened,
    positive,
)
from vllm_delta_sync.cli.text import ProgressBar, print_columns, print_fields, size
from vllm_delta_sync.errors import IncompleteError, UsageError

SHOWN = 20
KEEP_LAST = 100

GC_TEXT = """\
Remove objects, anchors and merged deltas that no kept version needs. Kept versions are: the head; the last N versions
with all their deltas; every K-th version; tagged versions; versions that another run branches from; versions published
within --keep-for; versions that a live receiver serves, targets or pins, with its path to the head. Each kept version
can still be rebuilt bit for bit. Manifests stay, so the log stays complete. Heartbeats that expired a day ago
or more are removed too.

Without any --keep-… option, --yes or --dry-run is required. If nothing can be removed, the output says why. Safe beside
publishers and receivers, and to interrupt with Ctrl-C: the next collection continues. Only one collection runs at a
time; a killed one delays the next by at most ten minutes.
"""
GC_EXAMPLES = """\
--min-age must be longer than an upload, a compaction, and a read by a process without a heartbeat. TIME is
written as 90s, 15m, 2h or 7d.

examples:
  delta-sync gc --bucket /data/runs/a --dry-run
  delta-sync gc --bucket /data/runs/a --keep-last 50 --keep-every 1000
  delta-sync gc --bucket /data/runs/a --keep-last 1 --keep-for 7d --min-age 15m --json
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    gc = commands.add_parser(
        "gc",
        help="remove objects that no kept version needs",
        description=GC_TEXT,
        epilog=GC_EXAMPLES + exit_codes("a version that should be kept cannot be rebuilt"),
    )
    add_bucket(gc)
    add_trust(gc)
    gc.add_argument(
        "--keep-last", type=positive, metavar="N", help=f"keep the newest N versions (default: {KEEP_LAST})"
    )
    gc.add_argument("--keep-every", type=positive, metavar="K", help="keep versions whose number K divides")
    gc.add_argument("--keep-for", type=duration, metavar="TIME", help="keep versions published within this time")
    gc.add_argument(
        "--no-tagged", action="store_true", help="do not keep tagged versions, except those of branches and rebases"
    )
    gc.add_argument(
        "--min-age",
        type=duration,
        default=3600.0,
        metavar="TIME",
        help="keep everything newer than this (default: 1h)",
    )
    gc.add_argument(
        "--longest-pin",
        type=duration,
        default=7 * 24 * 3600.0,
        metavar="TIME",
        help="receivers keep no version published longer ago than this (default: 7d)",
    )
    gc.add_argument("--yes", action="store_true", help="collect by the defaults, without any --keep-… option")
    gc.add_argument("--dry-run", action="store_true", help="only report what would be removed")
    gc.set_defaults(handler=_gc)


def _gc(options: argparse.Namespace) -> Answer:
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
    document = {
        "run": run.info.run,
        "url": run.bucket.url,
        "dry_run": report.dry_run,
        "head": report.head,
        "kept": _reasons(report.kept),
        "lost": _reasons(report.lost),
        "removed": {
            "objects": report.objects,
            "anchors": report.anchors,
            "merged_deltas": [{"first": first, "last": last} for first, last in report.merged_deltas],
            "sidecars": report.sidecars,
            "heartbeats": report.heartbeats,
        },
        "bytes": report.bytes,
        "gone": report.gone,
        "nothing_because": report.nothing_because,
        "notes": report.notes,
    }
    if report.lost:
        error = IncompleteError(f"{_lost(document)} should be kept but cannot be rebuilt; run delta-sync repair")
        raise CommandFailedError(error, document, lambda: _print_gc(document))
    return document, lambda: _print_gc(document)


def _reasons(versions: dict[int, list[str]]) -> list[dict[str, Any]]:
    return [{"version": version, "because": reasons} for version, reasons in versions.items()]


def _lost(document: dict[str, Any]) -> str:
    from vllm_delta_sync.maintenance.gc.record import spelled

    return f"versions {spelled(row['version'] for row in document['lost'])}"


def _print_gc(document: dict[str, Any]) -> None:
    from vllm_delta_sync.maintenance.gc.record import spelled

    removed = document["removed"]
    counts = f"{len(removed['objects'])} objects, {len(removed['anchors'])} anchors, "
    counts += f"{len(removed['merged_deltas'])} merged deltas"
    if removed["sidecars"]:
        counts += f", {len(removed['sidecars'])} sidecars"
    if removed["heartbeats"]:
        counts += f", {len(removed['heartbeats'])} heartbeats"
    fields: list[tuple[str, object]] = [
        ("head", f"version {document['head']}"),
        ("kept", f"{len(document['kept'])} versions: {spelled(row['version'] for row in document['kept'])}"),
        ("would remove" if document["dry_run"] else "removed", f"{counts}, {size(document['bytes'])}"),
    ]
    if document["gone"]:
        gone = [version for first, last in document["gone"] for version in range(first, last + 1)]
        fields.append(("without own delta", f"versions {spelled(gone)}"))
    if document["lost"]:
        fields.append(("LOST", f"{_lost(document)} should be kept but cannot be rebuilt; run delta-sync repair"))
    because = [("nothing, because", reason) for reason in document["nothing_because"]]
    print_fields([*fields, *because, *(("note", note) for note in document["notes"])])
    named = [row for row in document["kept"] if set(row["because"]) - {"last", "every", "recent"}]
    if named:
        print()
        rows = [(row["version"], ", ".join(row["because"])) for row in named[-SHOWN:]]
        print_columns(("version", "kept because of"), rows, left=(1,))
        if len(named) > SHOWN:
            print(f"… {len(named) - SHOWN} more; --json lists them")

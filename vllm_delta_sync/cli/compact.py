"""``delta-sync compact``, which ``maintenance.compact`` does."""

import argparse
from typing import Any

from vllm_delta_sync.cli.arguments import BASE, SIGNED_RUN, VERSION, as_finding, opened, version
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import ProgressBar, clean, pick, print_columns, print_fields, size
from vllm_delta_sync.errors import DeltaSyncError, IncompleteError, NotFoundError, UsageError
from vllm_delta_sync.format.codecs import RELATIVE_CODECS


@command(
    "compact",
    "make the merged deltas that a run lacks, and an anchor",
    *SIGNED_RUN,
    BASE,
    option("--anchor", type=version, metavar=VERSION, help="also make the anchor of this version"),
    option("--no-merge", action="store_true", help="make no merged deltas"),
    option(
        "--codec",
        choices=RELATIVE_CODECS,
        default="plain",
        help="codec of new merged deltas; tiled is smaller and can only be read forwards; default: plain",
    ),
    option("--scratch", metavar="DIR", help="folder for temporary files; default: the system's"),
    option("--dry-run", action="store_true", help="only report what is missing"),
    failed="a merged delta or the anchor cannot be made, because its input is missing or damaged",
)
def compact(options: argparse.Namespace) -> Report:
    """Make a run cheap to read: merged deltas for catching up, an anchor for starting.

    A merged delta replaces the deltas of 4, 16, 64 … versions, so that a server that is n versions behind reads
    O(log n) objects. An anchor is a full snapshot, so that readers need not replay the versions before it. Both are
    made from the bucket (an anchor also from the base), on any machine, and beside a running publisher. It is safe to
    interrupt: the next call continues.

    Merged deltas have codec plain, which is fast to read, forwards and backwards. With --codec tiled they are smaller,
    for slow links and archives, but slower to read, and forwards only, because reading them takes the weights before
    them. Writing them, and merging versions of codec tiled, takes these weights too, so it needs the base. Existing
    merged deltas are not changed.

    examples:
      delta-sync compact --bucket /data/runs/a --dry-run
      delta-sync compact --bucket /data/runs/a
      delta-sync compact --bucket /data/runs/a --anchor head --base /models/qwen3
      delta-sync compact --bucket /data/runs/a --no-merge --anchor tag:best --json
      delta-sync compact --bucket /data/archive/a --codec tiled --base /models/qwen3
      delta-sync compact --bucket /data/runs/a --signing-key trainer.key  # if the run is signed
    """
    from vllm_delta_sync.maintenance.compact import compact
    from vllm_delta_sync.run.checks import check_base_exists

    anchor = options.anchor
    if options.no_merge and anchor is None:
        raise UsageError("--no-merge without --anchor leaves nothing to do; name the version that gets an anchor")
    run = opened(options, writes=not options.dry_run)
    # First check what the arguments name: NotFoundError after that means that the run is damaged.
    run.head()
    check_base_exists(options.base)
    if anchor is not None:
        anchor = run.resolve(anchor).version
    try:
        with ProgressBar("documents") as bar:
            report = compact(
                run,
                options.base,
                merged_deltas=not options.no_merge,
                anchor=anchor,
                dry_run=options.dry_run,
                scratch=options.scratch,
                progress=bar.update,
                codec=options.codec,
            )
    except NotFoundError as missing:
        as_finding(missing)
        raise
    data = {
        **pick(report, "head anchor anchor_present bytes"),
        "dry_run": options.dry_run,
        "merged_deltas": [{"first": first, "last": last} for first, last in report.merged_deltas],
        "merged_deltas_present": report.present,
        "skipped": [{"first": first, "last": last, "reason": reason} for first, last, reason in report.skipped],
        "seconds": round(report.seconds, 3),
    }
    error: DeltaSyncError | None = report.base_error
    if report.damaged:
        error = IncompleteError("a merged delta or the anchor was not made: its input is missing or damaged")
    return Report(data, _print, error)


def _print(data: dict[str, Any]) -> None:
    dry_run, made = data["dry_run"], data["merged_deltas"]
    verb = "to make" if dry_run else "made"
    state = "already exists" if data["anchor_present"] else verb
    print_fields(
        ("head", f"version {data['head']}"),
        ("merged deltas", f"{len(made)} {verb}, {data['merged_deltas_present']} already exist"),
        ("anchor", None if data["anchor"] is None else f"of version {data['anchor']}, {state}"),
        ("written", None if dry_run else size(data["bytes"])),
        ("seconds", None if dry_run else f"{data['seconds']:.1f}"),
    )
    if dry_run and made:
        print_columns(("first", "last"), [(row["first"], row["last"]) for row in made], left=())
    for row in data["skipped"]:
        print(clean(f"skipped versions {row['first']} to {row['last']}: {row['reason']}"))

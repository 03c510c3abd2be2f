"""``delta-sync repair``, which ``maintenance.repair`` does."""

import argparse
from typing import Any

from vllm_delta_sync.cli.arguments import BASE, SIGNED_RUN, bucket_url, keyring_of, without_mirror
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import ProgressBar, clean, pick, print_fields, size
from vllm_delta_sync.errors import IncompleteError


@command(
    "repair",
    "repair a damaged run, and report what is lost",
    *SIGNED_RUN,
    option("--mirror", metavar="URL", help="a copy of the run to restore from; may be damaged too"),
    BASE,
    option("--dry-run", action="store_true", help="only report what could be repaired and what is lost"),
    failed="something is lost, and the output says what would help; with --dry-run: something is damaged",
    done="the run is complete now",
)
def repair(options: argparse.Namespace) -> Report:
    """Restore or rebuild what a run lacks.

    Checks the run like `delta-sync verify --all`, and takes what is missing or damaged from a mirror (--mirror).
    Without a mirror it writes HEAD.json, anchors and merged deltas again, and records deltas that other documents
    replace as gone. It writes only what digests and fingerprints of the history prove, and overwrites nothing that is
    intact. With trusted keys it uses only validly signed documents; in a signed run it signs what it writes with
    --signing-key. It is safe to interrupt (Ctrl-C): the next call continues.

    examples:
      delta-sync repair --bucket /data/runs/a --dry-run
      delta-sync repair --bucket /data/runs/a --mirror /mnt/copy/runs/a
      delta-sync repair --bucket /data/runs/a --base /models/qwen3 --json
    """
    from vllm_delta_sync.bucket import open_bucket
    from vllm_delta_sync.format.manifest import VERSIONS_PREFIX
    from vllm_delta_sync.maintenance.gc.record import ranges
    from vllm_delta_sync.maintenance.repair.repair import repair

    bucket = options.closing.enter_context(open_bucket(bucket_url(options), without_mirror(options)))
    versions = sum(1 for _ in bucket.list(VERSIONS_PREFIX))
    with ProgressBar("versions") as bar:
        report = repair(
            bucket,
            options.mirror,
            options.base,
            options.dry_run,
            lambda so_far: bar.update(so_far.versions, versions, size(so_far.bytes)),
            keyring=keyring_of(options),
        )
    error = None
    if report.lost:
        error = IncompleteError("something is lost")
    elif options.dry_run and report.repaired:  # a dry run repairs nothing, so what it could repair is still damaged
        error = IncompleteError("the run is damaged, and all of it could be repaired")
    data = {
        "verdict": error is None,
        "url": bucket.url,
        "dry_run": options.dry_run,
        **pick(report, "repaired lost notes"),
        "unreadable": ranges(report.unreadable),
    }
    return Report(data, _print, error)


def _print(data: dict[str, Any]) -> None:
    verb, verdict = "repaired", "ok, repaired" if data["repaired"] else "ok"
    if data["dry_run"]:
        verb, verdict = "could be repaired", "damaged, and all of it could be repaired" if data["repaired"] else "ok"
    for kind, lines in ((verb, data["repaired"]), ("lost", data["lost"])):
        for line in lines:
            print(clean(f"{kind}: {line}"))
    if data["repaired"] or data["lost"]:
        print()
    print_fields(
        ("verdict", "something is lost" if data["lost"] else verdict),
        (verb, len(data["repaired"])),
        ("lost", len(data["lost"])),
        notes=data["notes"],
    )

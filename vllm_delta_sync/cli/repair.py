"""``delta-sync repair``: arguments and output; the work is done by ``maintenance.repair``."""

import argparse
from typing import Any

from vllm_delta_sync.cli.arguments import (
    Answer,
    CommandFailedError,
    add_base,
    add_bucket,
    add_trust,
    bucket_url,
    exit_codes,
    keyring_of,
    without_mirror,
)
from vllm_delta_sync.cli.text import ProgressBar, clean, print_fields, size
from vllm_delta_sync.errors import IncompleteError

EXAMPLES = """\
Checks the run like `delta-sync verify --all` and repairs what it finds: from a mirror, or by merged deltas and anchors
of the weights on both sides of a gap. It writes only what digests and fingerprints of the history prove, and
overwrites nothing that is intact. With trusted keys it uses only validly signed documents; in a signed run it signs
what it writes with --signing-key. It is safe to interrupt (Ctrl-C): the next call continues.

examples:
  delta-sync repair --bucket /data/runs/a --dry-run
  delta-sync repair --bucket /data/runs/a --mirror /mnt/copy/runs/a
  delta-sync repair --bucket /data/runs/a --base /models/qwen3 --json
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "repair",
        help="repair a damaged run, and report what is lost",
        description="Restore or rebuild what a run lacks.",
        epilog=EXAMPLES
        + exit_codes(
            "something is lost, and the output says what would help; with --dry-run: something is damaged",
            "the run is complete now",
        ),
    )
    add_bucket(parser)
    parser.add_argument("--mirror", metavar="URL", help="a copy of the run to restore from; may be damaged too")
    add_base(parser)
    add_trust(parser, signing=True)
    parser.add_argument("--dry-run", action="store_true", help="only report what could be repaired and what is lost")
    parser.set_defaults(handler=_repair)


def _repair(options: argparse.Namespace) -> Answer:
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
    # A dry run repairs nothing, so what it could repair is still damaged.
    intact = not report.lost and not (options.dry_run and report.repaired)
    document = {
        "verdict": intact,
        "url": bucket.url,
        "dry_run": options.dry_run,
        "repaired": report.repaired,
        "lost": report.lost,
        "unreadable": ranges(report.unreadable),
        "notes": report.notes,
    }
    if not intact:
        error = IncompleteError(
            "something is lost" if report.lost else "the run is damaged, and all of it could be repaired"
        )
        raise CommandFailedError(error, document, lambda: _print(document))
    return document, lambda: _print(document)


def _verdict(document: dict[str, Any]) -> str:
    if document["lost"]:
        return "something is lost"
    if not document["repaired"]:
        return "ok"
    return "damaged, and all of it could be repaired" if document["dry_run"] else "ok, repaired"


def _print(document: dict[str, Any]) -> None:
    verb = "could be repaired" if document["dry_run"] else "repaired"
    for line in document["repaired"]:
        print(clean(f"{verb}: {line}"))
    for line in document["lost"]:
        print(clean(f"lost: {line}"))
    if document["repaired"] or document["lost"]:
        print()
    print_fields(
        [
            ("verdict", _verdict(document)),
            (verb, len(document["repaired"])),
            ("lost", len(document["lost"])),
            *(("note", note) for note in document["notes"]),
        ]
    )

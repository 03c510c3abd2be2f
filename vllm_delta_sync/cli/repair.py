"""``delta-sync repair``: arguments and output; what it does is in ``chain_repair``."""

import argparse
from typing import Any

from vllm_delta_sync.cli.arguments import (
    Answer,
    Command,
    add_base,
    add_bucket,
    add_json,
    add_trust,
    bucket_url,
    keyring_of,
    without_mirror,
)
from vllm_delta_sync.cli.text import Progress, clean, print_fields
from vllm_delta_sync.cli.verify import show

EXAMPLES = """\
Checks the run as `delta-sync verify --all` does, and mends what it finds: from a mirror, from anchors and folded
ranges, from the weights on both sides of a gap. Nothing is written that digests and fingerprints of the chain do not
prove; nothing that is good is overwritten. With trusted keys nothing is taken that is not signed; into a signed run
nothing is written that --signing-key has not signed. Ended at any moment (Ctrl-C), it goes on with the next call. The
exit code is 0 if all is well afterwards, 1 if something is lost: the list says what, and what would help.

examples:
  delta-sync repair --bucket /data/runs/a --dry-run
  delta-sync repair --bucket /data/runs/a --mirror /mnt/copy/runs/a
  delta-sync repair --bucket /data/runs/a --base /models/qwen3 --json
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "repair",
        help="mend a damaged run, and say what is lost",
        description="Bring back, or rebuild, what a run lacks.",
        epilog=EXAMPLES,
    )
    add_bucket(parser)
    parser.add_argument("--mirror", metavar="URL", help="a copy of the run to take from; it may be damaged too")
    add_base(parser)
    add_trust(parser, signing=True)
    parser.add_argument("--dry-run", action="store_true", help="only say what could be repaired, and what is lost")
    add_json(parser)


def _repair(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.bucket import open_bucket
    from vllm_delta_sync.upkeep.repair import repair
    from vllm_delta_sync.upkeep.retention_record import ranges
    from vllm_delta_sync.wire import manifest as keys

    bucket = open_bucket(bucket_url(options), without_mirror())
    bar = Progress(sum(1 for _ in bucket.list(keys.VERSIONS_PREFIX)), "versions")
    try:
        report = repair(
            bucket,
            options.mirror,
            options.base,
            options.dry_run,
            lambda so_far: show(bar, so_far),
            keyring=keyring_of(options),
        )
    finally:
        bar.close()
    document = {
        "verdict": not report.lost,
        "url": bucket.url,
        "dry_run": options.dry_run,
        "repaired": report.repaired,
        "lost": report.lost,
        "unreadable": ranges(report.unreadable),
        "notes": report.notes,
        "exit_code": 1 if report.lost else 0,
    }
    return document, lambda: _print(document)


def _print(document: dict[str, Any]) -> None:
    verb = "could be repaired" if document["dry_run"] else "repaired"
    for line in document["repaired"]:
        print(clean(f"{verb}: {line}"))
    for line in document["lost"]:
        print(clean(f"lost: {line}"))
    if document["repaired"] or document["lost"]:
        print()
    verdict = "something is lost" if document["lost"] else "ok" if not document["repaired"] else f"ok, {verb}"
    print_fields(
        [
            ("verdict", verdict),
            (verb, len(document["repaired"])),
            ("lost", len(document["lost"])),
            *(("note", note) for note in document["notes"]),
        ]
    )


COMMANDS: dict[str, Command] = {"repair": _repair}

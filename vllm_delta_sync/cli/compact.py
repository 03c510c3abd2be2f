"""``delta-sync compact``: arguments and output; the work is done by ``maintenance.compact``."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_delta_sync.cli.arguments import (
    VERSION,
    Answer,
    CommandFailedError,
    add_base,
    add_bucket,
    add_trust,
    exit_codes,
    failed_check,
    opened,
    version,
)
from vllm_delta_sync.cli.text import ProgressBar, clean, print_columns, print_fields, size
from vllm_delta_sync.errors import IncompleteError, NotFoundError, UsageError
from vllm_delta_sync.format.codecs import RELATIVE_CODECS

EXAMPLES = """\
A merged delta replaces the deltas of 4, 16, 64 … versions, so that a server that is n versions behind reads O(log n)
objects. An anchor is a full snapshot, so that readers need not replay the versions before it. Both are made from the
bucket (an anchor also from the base), on any machine, and beside a running publisher. It is safe to interrupt: the next
call continues. Ctrl-C ends it after a clean-up of temporary files; a second Ctrl-C ends it at once.

Merged deltas have codec plain, which is fast to read, forwards and backwards. With --codec tiled they are smaller,
for slow links and archives, but slower to read, and forwards only, because reading them takes the weights before them.
Writing them, and merging versions of codec tiled, takes these weights too, so it needs the base. Existing merged
deltas are not changed.

examples:
  delta-sync compact --bucket /data/runs/a --dry-run
  delta-sync compact --bucket /data/runs/a
  delta-sync compact --bucket /data/runs/a --anchor head --base /models/qwen3
  delta-sync compact --bucket /data/runs/a --no-merge --anchor tag:best --json
  delta-sync compact --bucket /data/archive/a --codec tiled --base /models/qwen3
  delta-sync compact --bucket /data/runs/a --signing-key trainer.key   (if the run is signed)
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "compact",
        help="make the merged deltas that a run lacks, and an anchor",
        description="Make a run cheap to read: merged deltas for catching up, an anchor for starting.",
        epilog=EXAMPLES
        + exit_codes("a merged delta or the anchor cannot be made, because its input is missing or damaged"),
    )
    add_bucket(parser)
    add_base(parser)
    add_trust(parser, signing=True)
    parser.add_argument("--anchor", type=version, metavar=VERSION, help="also make the anchor of this version")
    parser.add_argument("--no-merge", action="store_true", help="make no merged deltas")
    parser.add_argument(
        "--codec",
        choices=RELATIVE_CODECS,
        default="plain",
        help="codec of new merged deltas; tiled is smaller and can only be read forwards; default: plain",
    )
    parser.add_argument("--scratch", metavar="DIR", help="folder for temporary files; default: the system's")
    parser.add_argument("--dry-run", action="store_true", help="only report what is missing")
    parser.set_defaults(handler=_compact)


def _compact(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.maintenance.compact import compact
    from vllm_delta_sync.run.checks import check_base

    anchor = options.anchor
    if options.no_merge and anchor is None:
        raise UsageError("--no-merge without --anchor leaves nothing to do; name the version that gets an anchor")
    run = opened(options, writes=not options.dry_run)
    # First check what the arguments name: NotFoundError after that means that the run is damaged.
    check_base(options.base)
    if anchor is not None:
        anchor = run.resolve(anchor).version
    try:
        with ProgressBar("documents") as bar, _stop_on_interrupt() as stop:
            report = compact(
                run,
                options.base,
                merged_deltas=not options.no_merge,
                anchor=anchor,
                dry_run=options.dry_run,
                scratch=options.scratch,
                progress=bar.update,
                stop=stop,
                codec=options.codec,
            )
    except NotFoundError as error:
        raise failed_check(error) from error
    document = {
        "head": report.head,
        "dry_run": options.dry_run,
        "merged_deltas": [{"first": first, "last": last} for first, last in report.merged_deltas],
        "merged_deltas_present": report.present,
        "skipped": [{"first": first, "last": last, "reason": reason} for first, last, reason in report.skipped],
        "anchor": report.anchor,
        "anchor_present": report.anchor_present,
        "bytes": report.bytes,
        "seconds": round(report.seconds, 3),
    }
    if report.damaged:
        left = IncompleteError("a merged delta or the anchor was not made: its input is missing or damaged")
        raise CommandFailedError(left, document, lambda: _print(document))
    if report.base_error is not None:
        raise CommandFailedError(
            report.base_error, document, lambda: _print(document), exit_code=report.base_error.exit_code
        )
    return document, lambda: _print(document)


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C stop the work at a clean point, and only the second interrupt it anywhere.

    An interrupt anywhere could hit a store's client or the removal of temporary files. Does nothing if the process
    ignores SIGINT.

    Raises:
        KeyboardInterrupt: the work was stopped by a Ctrl-C.
    """
    from vllm_delta_sync.maintenance.rolling_weights import StoppedError, never_stop

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield never_stop
        return
    asked = threading.Event()

    def ask(_number: int, _frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        # os.write, not print: this handler may have interrupted a write to stderr.
        os.write(sys.stderr.fileno(), b"\ncompact stops at the next clean point; Ctrl-C again stops it at once\n")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    except StoppedError as error:
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGINT, before)


def _print(document: dict[str, Any]) -> None:
    verb = "to make" if document["dry_run"] else "made"
    fields = [
        ("head", f"version {document['head']}"),
        (
            "merged deltas",
            f"{len(document['merged_deltas'])} {verb}, {document['merged_deltas_present']} already exist",
        ),
    ]
    if document["anchor"] is not None:
        state = "already exists" if document["anchor_present"] else verb
        fields.append(("anchor", f"of version {document['anchor']}, {state}"))
    if not document["dry_run"]:
        fields += [("written", size(document["bytes"])), ("seconds", f"{document['seconds']:.1f}")]
    print_fields(fields)
    if document["dry_run"] and document["merged_deltas"]:
        print_columns(["first", "last"], [(row["first"], row["last"]) for row in document["merged_deltas"]], left=())
    for row in document["skipped"]:
        print(clean(f"skipped versions {row['first']} to {row['last']}: {row['reason']}"))

"""``delta-sync compact``: arguments and output; what it does is in ``maintenance.compact``."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_delta_sync.cli.arguments import (
    Answer,
    Command,
    add_base,
    add_bucket,
    add_json,
    add_trust,
    exit_codes,
    failed_check,
    opened,
)
from vllm_delta_sync.errors import NotFoundError, UsageError
from vllm_delta_sync.format.codecs import RELATIVE_CODECS

EXAMPLES = """\
A folded range is one object in the place of 4, 16, 64 … versions, so that a server that is n versions behind reads
O(log n) objects. An anchor is a full snapshot, so that nobody has to replay what lies before it. Both are made from
what is in the bucket (an anchor also from the base), on any machine, beside a running publisher. Ended at any moment
the run stays whole; the next call goes on from there. Ctrl-C ends it with temporary files removed, twice at once.

Folded ranges are of codec packed, which is read fast, forwards and backwards. --codec context makes them smaller, for
slow links and archives; they are read more slowly, and forwards only, since it takes the weights before them. Writing
them, and folding versions that are of codec context, takes those weights too: the base has to be at hand. Ranges that
are there stay as they are.

examples:
  delta-sync compact --bucket /data/runs/a --dry-run
  delta-sync compact --bucket /data/runs/a
  delta-sync compact --bucket /data/runs/a --anchor head --base /models/qwen3
  delta-sync compact --bucket /data/runs/a --no-folds --anchor tag:best --json
  delta-sync compact --bucket /data/archive/a --codec context --base /models/qwen3
  delta-sync compact --bucket /data/runs/a --signing-key trainer.key   (where the run is signed)
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "compact",
        help="make the folded ranges that a run lacks, and an anchor",
        description="Make reading a run cheap: folded ranges for catching up, an anchor for starting.",
        epilog=EXAMPLES
        + exit_codes("a range or the anchor cannot be made, since something that it takes is missing or damaged"),
    )
    add_bucket(parser)
    add_base(parser)
    add_trust(parser, signing=True)
    parser.add_argument("--anchor", metavar="N|head|tag:NAME", help="also make the anchor of this version")
    parser.add_argument("--no-folds", action="store_true", help="make no folded ranges")
    parser.add_argument(
        "--codec",
        choices=RELATIVE_CODECS,
        default="packed",
        help="of the folded ranges that are made; context is smaller and read forwards only; default: packed",
    )
    parser.add_argument("--scratch", metavar="DIR", help="folder for temporary files; default: the system's")
    parser.add_argument("--dry-run", action="store_true", help="only say what is missing")
    add_json(parser)


def _compact(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.cli.text import ProgressBar
    from vllm_delta_sync.maintenance.compact import compact
    from vllm_delta_sync.run.checks import check_base
    from vllm_delta_sync.run.roots import BaseError

    anchor = _wanted(options.anchor)
    if options.no_folds and anchor is None:
        raise UsageError("--no-folds without --anchor leaves nothing to do; name the version that gets an anchor")
    run = opened(options, writes=not options.dry_run)
    # What the arguments name has to be there; what is missed afterwards is missing from the run.
    check_base(options.base)
    if anchor is not None:
        anchor = run.resolve(None if anchor == "head" else anchor).version
    bar: list[ProgressBar] = []

    def tell(done: int, work: int, what: str) -> None:
        bar[:] = bar or [ProgressBar(work, "documents")]
        bar[0].update(done, what)

    try:
        with _stopping() as stop:
            report = compact(
                run,
                options.base,
                folds=not options.no_folds,
                anchor=anchor,
                dry_run=options.dry_run,
                scratch=options.scratch,
                progress=tell,
                stop=stop,
                codec=options.codec,
            )
    except BaseError:
        raise
    except NotFoundError as error:
        raise failed_check(error) from error
    finally:
        for drawn in bar:
            drawn.close()
    document = {
        "head": report.head,
        "dry_run": options.dry_run,
        "folds": [{"first": first, "last": last} for first, last in report.folds],
        "folds_present": report.present,
        "skipped": [{"first": first, "last": last, "reason": reason} for first, last, reason in report.skipped],
        "anchor": report.anchor,
        "anchor_present": report.anchor_present,
        "bytes": report.bytes,
        "seconds": round(report.seconds, 3),
        "exit_code": 1 if report.damaged else 0,
    }
    return document, lambda: _print(document)


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks to stop where nothing is half done; wherever it may strike, a store's client and the removal of
    temporary files among it, only the second one does. Whoever has told this process to ignore it is obeyed.

    Raises:
        KeyboardInterrupt: it was asked to stop, and has.
    """
    from vllm_delta_sync.maintenance.compact_uploads import StoppedError, never

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield never
        return
    asked = threading.Event()

    def ask(_number: int, _frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        # A write of Python's own could have been interrupted by this very call.
        os.write(sys.stderr.fileno(), b"\ncompact ends as soon as nothing is half done; Ctrl-C again ends it at once\n")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    except StoppedError as error:
        raise KeyboardInterrupt from error
    finally:
        signal.signal(signal.SIGINT, before)


def _wanted(text: str | None) -> int | str | None:
    if text is None or text == "head" or text.startswith("tag:"):
        return text
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"--anchor {text!r} is no version; give a number, head, or tag:NAME")
    return int(text)


def _print(document: dict[str, Any]) -> None:
    from vllm_delta_sync.cli.text import clean, print_columns, print_fields, size

    verb = "to make" if document["dry_run"] else "made"
    fields = [
        ("head", f"version {document['head']}"),
        ("folded ranges", f"{len(document['folds'])} {verb}, {document['folds_present']} were there"),
    ]
    if document["anchor"] is not None:
        state = "was there" if document["anchor_present"] else verb
        fields.append(("anchor", f"of version {document['anchor']}, {state}"))
    if not document["dry_run"]:
        fields += [("written", size(document["bytes"])), ("seconds", f"{document['seconds']:.1f}")]
    print_fields(fields)
    if document["dry_run"] and document["folds"]:
        print_columns(["first", "last"], [(row["first"], row["last"]) for row in document["folds"]], left=())
    for row in document["skipped"]:
        print(clean(f"skipped versions {row['first']} to {row['last']}: {row['reason']}"))


COMMANDS: dict[str, Command] = {"compact": _compact}

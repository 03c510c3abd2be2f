"""``python -m examples.fleet``: see ``--help``."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from examples.demo.processes import DemoError
from examples.demo.rollouts import ServerError
from examples.fleet import tables
from examples.fleet.arguments import count, interrupted_by_signals, positive
from examples.fleet.orchestrate import Fleet
from examples.fleet.output import SUMMARY, TABLE, prepare_output, write_summary
from examples.fleet.record import Record
from examples.fleet.screen import Screen
from examples.fleet.settings import SIZES, Options
from vllm_delta_sync.errors import DeltaSyncError

DESCRIPTION = """\
A trainer and a fleet of real vLLM servers, each behind a slow link of its own: by default 100 Mbit/s and 50 ms
to the store (S3, served on loopback). About 1 % of the weights change with each version. Measured are the bytes
over each link and the time from publish() until each server serves the version; one server is killed and catches
up, one is added from the bucket alone, and all are proven to hold the trainer's weights and to answer alike. In
the same run, over the same links, the full checkpoint is stored and fetched, to compare.
"""

EPILOG = """\
The output directory gets summary.json, fleet.md (the tables), the logs, checkpoints and the store's objects.
Exit status: 0 everything holds (with --size full also that a version is fresh 20 times sooner than full
weights are there), 1 it does not or something failed, 2 wrong usage, 130 interrupted.
"""


def parse_options(arguments: list[str]) -> Options:
    """The command line; exits with status 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.fleet",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=SIZES, default="full", help="100 M parameters, or 3 M (default full)")
    parser.add_argument(
        "--replicas", type=count, default=3, help="servers at the start, of some 3 GB each; one joins (default 3)"
    )
    parser.add_argument(
        "--versions", type=count, default=8, help="versions before the first server is killed (default 8)"
    )
    parser.add_argument("--mbit", type=positive, default=100.0, help="Mbit/s of each link, each way (default 100)")
    parser.add_argument(
        "--round-trip-ms", type=positive, default=50.0, help="ms from a machine to the store and back (default 50)"
    )
    parser.add_argument(
        "--slow-start",
        action="store_true",
        help="new connections, and those that were idle for a second, start with ten packets, as TCP does",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("fleet-out"), help="directory to write, made anew (default fleet-out)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the model and its steps (default 0)")
    values = parser.parse_args(arguments)
    return Options(**vars(values))


def main(arguments: list[str]) -> int:
    """Run the example; returns the exit status."""
    options = parse_options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    interrupted_by_signals()
    try:
        return _run(options, console)
    except KeyboardInterrupt:
        console.print("interrupted; all processes have ended")
        return 130
    except (DemoError, ServerError, DeltaSyncError, OSError) as error:
        Console(stderr=True).print(Text(f"fleet: {error}"), soft_wrap=True)
        return 1


def _run(options: Options, console: Console) -> int:
    out = prepare_output(options.out)
    screen = Screen(console)
    try:
        fleet = Fleet(options, out, screen)
        fleet.run()
    finally:
        screen.close()
    ratio = SIZES[options.size].ratio
    write_summary(out, fleet.record.summary(ratio, screen.seconds))
    (out / TABLE).write_text(tables.markdown(fleet.record))
    failed = _report(console, fleet.record, ratio)
    console.print(Text(f"written: {out / SUMMARY} and {out / TABLE}, in {screen.seconds:.0f} s"), soft_wrap=True)
    return 1 if failed else 0


def _report(console: Console, record: Record, ratio: float | None) -> list[str]:
    """Print tables and claims; the claims that do not hold."""
    for rows in tables.everything(record):
        console.print(tables.on_screen(rows))
    console.print(Text(record.listing))
    claims = record.claims(ratio)
    for text, holds in claims.items():
        mark = Text("✓ ", style="bold green") if holds else Text("✗ ", style="bold red")
        console.print(mark + Text(text.replace("_", " ")), soft_wrap=True)
    return [text for text, holds in claims.items() if not holds]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``python -m examples.three_machines``: see ``--help``."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from examples.demo.processes import DemoError
from examples.fleet.arguments import count, interrupted_by_signals, positive
from examples.fleet.output import prepare_output, write_summary
from examples.fleet.screen import Screen
from examples.fleet.tables import on_screen
from examples.three_machines import tables
from examples.three_machines.machines import NETWORK_KINDS
from examples.three_machines.orchestrate import Example
from examples.three_machines.record import Record
from examples.three_machines.settings import MARKER, PICTURE, SUMMARY, TABLES, Options
from vllm_delta_sync.errors import DeltaSyncError

DESCRIPTION = """\
Reinforcement learning on three machines that meet only in a bucket: a trainer, a rollout machine with a real vLLM
server and a worker, and an environment that a word game is played against. Weights go one way through the bucket,
finished games the other; there is no connection between trainer and server, and neither knows of the other. Each
machine is a network namespace where root may make them, behind a link of 100 Mbit/s and 50 ms. Environment, worker,
rollout machine and trainer are killed in the middle, one after the other, and started again.
"""

EPILOG = """\
The output directory gets summary.json, three-machines.md (the tables), three-machines.png, logs, and the store's
objects. Exit status: 0 the verdict holds (and, from 100 versions on, the reward rose), 1 it does not or something
failed, 2 wrong usage, 130 interrupted.
"""


def parse_options(arguments: list[str]) -> Options:
    """The command line; exits with status 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.three_machines",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--versions", type=count, default=120, help="that the trainer publishes (default %(default)s)")
    parser.add_argument(
        "--max-staleness",
        type=count,
        default=4,
        help="train on what is at most so many versions behind the weights (default %(default)s)",
    )
    parser.add_argument(
        "--ahead", type=count, default=1, help="batches that the worker plays per version (default %(default)s)"
    )
    parser.add_argument("--mbit", type=positive, default=100.0, help="Mbit/s of each link, each way (default 100)")
    parser.add_argument(
        "--round-trip-ms", type=positive, default=50.0, help="ms from a machine to any other place (default 50)"
    )
    parser.add_argument(
        "--network",
        choices=NETWORK_KINDS,
        default="auto",
        help="a network namespace for each machine, one loopback for all, or the first if possible (default auto)",
    )
    parser.add_argument("--no-kills", dest="kills", action="store_false", help="kill nothing")
    parser.add_argument(
        "--warm-up",
        type=count,
        default=None,
        help="supervised steps before (default: until guesses begin to fit the feedback)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("three-out"), help="directory to write, made anew (default three-out)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the policy and the games (default 0)")
    return Options(**vars(parser.parse_args(arguments)))


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
    except (DemoError, DeltaSyncError, OSError) as error:
        Console(stderr=True).print(Text(f"three machines: {error}"), soft_wrap=True)
        return 1


def _run(options: Options, console: Console) -> int:
    out = prepare_output(options.out, MARKER)
    screen = Screen(console)
    try:
        example = Example(options, out, screen)
        example.run()
    finally:
        screen.close()
    record = example.record
    write_summary(out, record.summary(screen.seconds))
    (out / TABLES).write_text(tables.markdown(record))
    from examples.three_machines.picture import draw

    draw(record, out / PICTURE)
    _report(console, record)
    written = ", ".join(str(out / name) for name in (SUMMARY, TABLES, PICTURE))
    console.print(Text(f"written: {written}, in {screen.seconds:.0f} s"), soft_wrap=True)
    return 0 if all(record.claims.values()) else 1


def _report(console: Console, record: Record) -> None:
    for rows in tables.everything(record):
        console.print(on_screen(rows))
    (first, last), (few, many) = record.rewards(), record.solved()
    console.print(Text(f"reward {first:.3f} → {last:.3f}, games solved {few:.0%} → {many:.0%}"), soft_wrap=True)
    for text, holds in record.claims.items():
        mark = Text("✓ ", style="bold green") if holds else Text("✗ ", style="bold red")
        console.print(mark + Text(text.replace("_", " ")), soft_wrap=True)
    for text in record.wrong:
        console.print(Text(text, style="red"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

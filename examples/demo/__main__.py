"""``python -m examples.demo``: see ``--help``."""

import argparse
import math
import signal
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text

from examples.demo.orchestrate import Demo, Options
from examples.demo.output import prepare_output
from examples.demo.processes import DemoError
from examples.demo.record import NEEDED_RISE, NEEDED_VERSIONS
from examples.demo.report import report
from examples.demo.rollouts import ServerError
from examples.demo.screen import make_screen
from vllm_delta_sync.errors import DeltaSyncError

DESCRIPTION = """\
Reinforcement learning with a real vLLM server on this machine's CPU. A trainer teaches a toy model to write
words backwards; the answers it learns from come from `vllm serve`, which follows the trainer's weights through
a bucket: after every optimizer step only the changed weights are published, and the running server takes
them over between two of its steps. At the end the demo proves that the server holds the trainer's weights bit
for bit, and answers exactly like a vLLM that loaded them afresh.
"""

EPILOG = """\
The output directory gets summary.json, demo.png, details.json, the logs, both checkpoints and the bucket.
Exit status: 0 the proof holds (and, from 100 steps on, the reward rose by 0.25 over 100 versions or more),
1 it does not or something failed, 2 wrong usage, 130 interrupted.
"""


def parse_options(arguments: list[str]) -> Options:
    """The command line; exits with status 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps", type=_positive, default=300, help="optimizer steps, one weight version each (default 300)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="directory to write, made anew (default demo-out)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the model and the words (default 0)")
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=1200.0,
        help="stop training in time to end within this many seconds, proof included (default 1200)",
    )
    parser.add_argument("--port", type=_positive, default=None, help="of the server (default: any free one)")
    parser.add_argument(
        "--bucket",
        default="dir",
        metavar="dir|hf|s3|URL",
        help="where to publish: dir (OUT/bucket), hf (the real Hub client against a Hub on loopback), s3 (an S3 server "
        "on loopback), or the URL of an unused run (default dir)",
    )
    values = parser.parse_args(arguments)
    return Options(values.steps, values.out, values.seed, values.max_seconds, values.port, values.bucket)


def main(arguments: list[str]) -> int:
    """Run the demo; returns the exit status."""
    options = parse_options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return _run(options, console)
    except KeyboardInterrupt:
        console.print("interrupted; trainer and server have ended")
        return 130
    except (DemoError, ServerError, DeltaSyncError) as error:
        Console(stderr=True).print(Text(f"demo: {error}"), soft_wrap=True)
        return 1


def _run(options: Options, console: Console) -> int:
    output = prepare_output(options.out)
    screen = make_screen(console, options.steps)
    try:
        demo = Demo(options, output, screen)
        demo.run()
    finally:
        screen.close()
    summary = demo.record.summary(demo.verdict, demo.seconds)
    output.write("summary.json", summary)
    output.write("details.json", demo.record.details(demo.verdict))
    from examples.demo.picture import draw

    draw(demo.record, output.picture)
    failures = shortcomings(demo, options.steps)
    report(console, demo, output, failures)
    return 1 if failures else 0


def shortcomings(demo: Demo, steps: int) -> list[str]:
    """Why the demo failed; empty if it succeeded. A run of few steps need not learn."""
    failures = [f"{claim} does not hold" for claim, holds in demo.verdict.claims().items() if not holds]
    first, last = demo.record.first_and_last_reward()
    if steps >= NEEDED_VERSIONS:
        if demo.record.versions < NEEDED_VERSIONS:
            failures.append(f"only {demo.record.versions} versions were published; give it more --max-seconds")
        if last - first < NEEDED_RISE:
            failures.append(f"the reward rose from {first:.3f} to {last:.3f} only; give it more --max-seconds")
    return failures


def _positive(text: str) -> int:
    value = float(text)
    if not value >= 1 or not math.isfinite(value) or value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(value)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``python -m examples.trl_async``: see ``--help``."""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from examples.demo import output
from examples.demo.__main__ import shortcomings
from examples.demo.orchestrate import Options
from examples.demo.processes import DemoError
from examples.demo.record import NEEDED_RISE, NEEDED_VERSIONS
from examples.demo.rollouts import ServerError
from examples.demo.screen import make_screen
from examples.fleet.arguments import interrupted_by_signals
from examples.fleet.output import prepare_output
from examples.trl_async.orchestrate import TrlRun
from examples.trl_async.report import report
from vllm_delta_sync.errors import DeltaSyncError

STEPS = 300
MARKER = ".delta-sync-trl"

DESCRIPTION = """\
TRL's AsyncGRPOTrainer, its own rollout worker and a real vLLM server, on this machine's CPU. The trainer teaches a
toy model to write words backwards; its weight transfer is a bucket: each weight sync publishes the weights that
changed as a version, and the running server takes it over between two of its steps. At the end it is proven that the
server holds the trainer's weights bit for bit, and answers exactly like a vLLM that loaded them afresh.
"""

EPILOG = f"""\
The output directory gets summary.json, details.json, log_history.json (all that TRL logged), trl.png, the logs, both
checkpoints and the bucket.
Exit status: 0 everything holds (and, from {NEEDED_VERSIONS} steps on, the reward rose by {NEEDED_RISE}), 1 it does
not or something failed, 2 wrong usage, 130 interrupted.
"""


def parse_options(arguments: list[str]) -> Options:
    """The command line; exits with status 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.trl_async",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"optimizer steps, one weight sync each (default {STEPS})"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("trl-out"), help="directory to write, made anew (default trl-out)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the model and the words (default 0)")
    parser.add_argument(
        "--bucket",
        default="dir",
        metavar="dir|hf|s3|URL",
        help="where to publish: dir (OUT/bucket), hf (a Hub on loopback), s3 (an S3 server on loopback), or the URL of "
        "an unused run (default dir)",
    )
    values = parser.parse_args(arguments)
    if values.steps < 1:
        parser.error(f"argument --steps: {values.steps} is not a number of at least 1")
    return Options(values.steps, values.out, values.seed, math.inf, None, values.bucket)


def main(arguments: list[str]) -> int:
    """Run the example; returns the exit status."""
    options = parse_options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 200)
    interrupted_by_signals()
    try:
        return _run(options, console)
    except KeyboardInterrupt:
        console.print("interrupted; trainer and server have ended")
        return 130
    except (DemoError, ServerError, DeltaSyncError) as error:
        Console(stderr=True).print(Text(f"trl: {error}"), soft_wrap=True)
        return 1


@dataclass(frozen=True)
class Output(output.Output):
    """The demo's, with a picture of another name."""

    @property
    def picture(self) -> Path:
        return self.path / "trl.png"


def _run(options: Options, console: Console) -> int:
    written = Output(prepare_output(options.out, MARKER))
    screen = make_screen(console, options.steps)
    try:
        run = TrlRun(options, written, screen)
        run.run()
    finally:
        screen.close()
    written.write("summary.json", run.record.summary(run.verdict, run.seconds))
    written.write("details.json", run.record.details(run.verdict))
    from examples.trl_async.picture import draw

    draw(run.record, written.picture)
    failures = shortcomings(run, options.steps)
    report(console, run, written, failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

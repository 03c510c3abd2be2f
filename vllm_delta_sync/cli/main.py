"""``main``, the entry point of the ``delta-sync`` command: parser, output, errors and exit codes.

Every command prints text, or with ``--json`` one line of JSON: ``{"ok": true, "command", "data"}``. Errors are one line
on stderr, or with ``--json`` a line ``{"ok": false, "command", "error": {"kind", "message"}}`` on stdout, with ``data``
if the command has found something. A command that runs until it is interrupted prints such a line for each event.
The exit code is the error's, but 1 for what a check finds.
"""

import argparse
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from inspect import getdoc
from typing import Any, NoReturn

from vllm_delta_sync import __version__
from vllm_delta_sync.cli import (
    branch,
    broker,
    compact,
    dashboard,
    diff,
    doctor,
    du,
    export,
    fleet,
    follow,
    gc,
    inspect,
    keygen,
    log,
    mirror,
    publish,
    repair,
    serve,
    server,
    stats,
    tag,
    verify,
)
from vllm_delta_sync.cli.arguments import FLAGS
from vllm_delta_sync.cli.command import Report
from vllm_delta_sync.cli.serve import before_dashes, split_serve
from vllm_delta_sync.cli.text import OutputError, discard_output, print_error, print_json
from vllm_delta_sync.errors import DeltaSyncError, StoreError, UsageError
from vllm_delta_sync.settings import client_settings

INTERRUPTED = 130
CLOSED_PIPE = 141
TERMINATED = 143

COMMANDS = (
    serve.serve, publish.publish, log.log, inspect.inspect, du.du, diff.diff, stats.stats, dashboard.dashboard,
    dashboard.report, export.export, follow.follow, verify.verify, repair.repair, gc.gc, tag.set_tag, tag.remove,
    tag.list_tags, branch.branch, compact.compact, keygen.keygen, doctor.doctor, broker.broker,
    mirror.mirror,
    fleet.list_servers, fleet.wait, *server.COMMANDS,
)  # fmt: skip
"""In the order of ``--help``."""
GROUPS = {
    "tag": "name versions, so that gc keeps them",
    "fleet": "list the servers that follow a run, or wait for them",
}
"""What commands with the same first word do."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs and indented entries to the width of the terminal, and leaves examples as they are.

    A line that is indented by four spaces continues the entry before it.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(self._fill_block(block, width) for block in text.strip("\n").split("\n\n"))

    def _fill_block(self, block: str, width: int) -> str:
        lines = block.strip("\n").replace("\n    ", " ").split("\n")
        if lines[0] == "examples:":  # command lines stay whole, so that they can be copied
            return block
        if not any(line.startswith("  ") for line in lines):
            return textwrap.fill(" ".join(lines), width)
        return "\n".join(textwrap.fill(line, width, subsequent_indent="    ") for line in lines)


class Parser(argparse.ArgumentParser):
    """Raises UsageError for a bad command line, so that it is reported like every error.

    Attributes:
        children: the parsers of the commands right below this one, by name.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.formatter_class = HelpFormatter
        self.allow_abbrev = False
        self.color = False  # Python 3.14 colours help by default
        self.children: dict[str, Parser] = {}

    def add_subparsers(self, **options: Any) -> Any:
        commands = super().add_subparsers(**options)
        self.children = commands.choices
        return commands

    @property
    def commands(self) -> "dict[str, Parser]":
        """The parser of each command that can be run, by its whole name: ``log``, ``tag set``."""
        found: dict[str, Parser] = {}
        for name, parser in self.children.items():
            found |= {f"{name} {last}": below for last, below in parser.commands.items()} or {name: parser}
        return found

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print what ``--help`` or ``--version`` shows; argparse's own method ignores failures."""
        try:
            print(message, end="", file=file or sys.stderr, flush=True)
        except BrokenPipeError:
            discard_output()
        except OSError as error:
            raise _unwritable(error) from error


def build_parser() -> Parser:
    """Build the parser of the whole command line; its help is the docstring of ``main``."""
    description, _, epilog = (getdoc(main) or "").partition("\n\n")
    parser = Parser(prog="delta-sync", description=description, epilog=epilog)
    parser.add_argument("--version", action="version", version=f"delta-sync {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    groups: dict[str, Any] = {}
    for command in COMMANDS:
        name = command.name.split()[0]
        if name in GROUPS and name not in groups:
            brief = GROUPS[name]
            examples = "".join(f"{other.examples}\n" for other in COMMANDS if other.name.startswith(f"{name} "))
            group = commands.add_parser(
                name, help=brief, description=f"{brief[0].upper()}{brief[1:]}.", epilog=f"examples:\n{examples}"
            )
            groups[name] = group.add_subparsers(metavar="COMMAND", required=True)
        command.add(groups.get(name, commands))
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line.

    The result's ``closing`` is an ExitStack that is closed after the command.

    Raises:
        UsageError: the command line is not valid.
    """
    rest: list[str] = []
    if arguments and arguments[0] == "serve":
        ours, rest = split_serve(arguments[1:])
        arguments = ["serve", *ours]
    options = build_parser().parse_args(arguments)
    options.command, options.rest, options.closing = options.spec.name, rest, ExitStack()
    return options


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; prints, and never raises a DeltaSyncError."""
    as_json = "--json" in before_dashes(arguments)[0]
    command: str | None = None
    try:
        options = parse(arguments)
        command = options.command
        check_working_folder()
        if command != "serve":  # serve reads a server's settings, and has a flag for each
            options.settings = client_settings({name: getattr(options, name, None) for name in FLAGS})
        with options.closing:
            report: Report = options.spec.run(options)
    except DeltaSyncError as error:
        report = Report(error=error)
    code = 0 if report.error is None else report.error.exit_code
    try:
        if as_json:
            if report.data is not None or report.error is not None:
                print_json(command, report.data, report.error)
        elif report.show is not None:
            report.show(report.data)
        elif report.error is not None:
            print_error(report.error)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough; what was done, or found, is as it is.
        discard_output()
    except OSError as error:
        failed = _unwritable(error)
        print_error(failed)
        return code or failed.exit_code
    return code


def _unwritable(error: OSError) -> StoreError:
    """Return the error of standard output that cannot be written, such as on a full disk."""
    discard_output(sys.stdout)
    return StoreError(f"the output cannot be written: {error.strerror}")


def check_working_folder() -> None:
    """Raise UsageError if the working folder was removed; relative paths and libraries would fail in their own ways."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError("the folder in which the command runs was removed; change to one that exists") from error


def main() -> int:
    """Ship weight changes from a trainer to running vLLM servers, through a bucket.

    examples:
      delta-sync serve Qwen/Qwen3-0.6B --bucket /data/runs/a --port 8000
      delta-sync serve --bucket s3://weights/runs/a --port 8000
      delta-sync publish --watch out --bucket s3://weights/runs/a
      delta-sync log --bucket /data/runs/a --last 10
      delta-sync inspect --bucket /data/runs/a --version 7
      delta-sync verify --bucket file:///data/runs/a --base /models/qwen3

    values:
      A version is a number, head, head~2 (two before the head), tag:NAME, step:400 (the newest of
        that optimizer step) or ago:1d (the newest that is at least a day old, by the publisher's clock).
      TIME is in seconds, or has a unit: 500ms, 90s, 15m, 2h, 7d.
      SIZE is in bytes, or has a unit: 500MB, 8GiB.

    settings:
      A flag overrides the environment variable DELTA_SYNC_<NAME>, which overrides the TOML file
        named by DELTA_SYNC_CONFIG.

    exit codes:
      0 done, 1 a check failed or data were refused, 2 usage, 3 not found, 4 store or network,
        5 another writer, 130 interrupted, 141 output closed, 143 terminated
    """
    for name in ("stdout", "stderr"):
        # None if it was closed when the process began. ``print`` would then write errors to standard output.
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        # Escape characters that the terminal's encoding lacks, instead of failing.
        stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)
    if sys.argv[1:2] != ["serve"]:  # vLLM has handlers of its own
        # As after Ctrl-C, a command removes what it has half written.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED))
    try:
        return run(sys.argv[1:])
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # A command that reports as it goes on: not done, so not 0.
        discard_output()
        return CLOSED_PIPE
    except OutputError as error:
        failed = _unwritable(error)
        print_error(failed)
        return failed.exit_code

"""``main``, the entry point of the ``delta-sync`` command: parser, output, errors and exit codes.

Every subcommand prints text, or with ``--json`` one JSON document. Errors are one line on stderr, or with ``--json``
the document ``{"error": {"kind", "message"}}`` on stdout. The exit code is the error's, but 1 for what a check finds.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from vllm_delta_sync import __version__
from vllm_delta_sync.cli import (
    branch,
    broker,
    compact,
    diff,
    doctor,
    du,
    export,
    fleet,
    follow,
    gc,
    inspect,
    keys,
    log,
    publish,
    repair,
    serve,
    server,
    stats,
    tag,
    verify,
)
from vllm_delta_sync.cli.arguments import CheckFailedError, settings_of
from vllm_delta_sync.cli.serve import before_dashes, split_serve
from vllm_delta_sync.cli.text import clean
from vllm_delta_sync.errors import DeltaSyncError, UsageError

CHECK_FAILED = 1
INTERRUPTED = 130

SETTINGS = """\
settings:
  A flag overrides the environment variable DELTA_SYNC_<NAME>, which overrides the TOML file named by DELTA_SYNC_CONFIG.

"""
EXIT_CODES = """\
exit codes:
  0 done, 1 a check failed or data were refused, 2 usage, 3 not found, 4 store or network, 5 another writer,
  130 interrupted
"""
EXAMPLES = """\
examples:
  delta-sync serve Qwen/Qwen3-0.6B --bucket /data/runs/a --port 8000
  delta-sync serve --bucket s3://weights/runs/a --port 8000
  delta-sync publish --watch out --bucket s3://weights/runs/a
  delta-sync log --bucket /data/runs/a --last 10
  delta-sync inspect --bucket /data/runs/a --version 7
  delta-sync verify --bucket file:///data/runs/a --base /models/qwen3

"""
MODULES = (
    serve, publish, log, inspect, du, diff, stats, export, follow, verify, repair, gc, tag, branch, compact, keys,
    doctor, broker, fleet, server,
)  # fmt: skip
"""The subcommands, in the order of ``--help``. ``add`` of each module adds its parser, whose ``handler`` runs it."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError for a bad command line, so that it is reported like every error.

    Attributes:
        children: the parsers of the commands right below this one, by name.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.allow_abbrev = False
        self.children: dict[str, Parser] = {}

    def add_subparsers(self, **options: Any) -> Any:
        commands = super().add_subparsers(**options)
        self.children = commands.choices
        return commands

    @property
    def commands(self) -> "dict[str, Parser]":
        """The parser of each command that can be run, by its whole name: ``log``, ``keys add``."""
        found: dict[str, Parser] = {}
        for name, parser in self.children.items():
            found |= {f"{name} {last}": below for last, below in parser.commands.items()} or {name: parser}
        return found

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def build_parser() -> Parser:
    """Build the parser of the whole command line."""
    parser = Parser(
        prog="delta-sync",
        description="Ship weight changes from a trainer to running vLLM servers, through a bucket.",
        epilog=EXAMPLES + SETTINGS + EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"delta-sync {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in MODULES:
        module.add(commands)
    for command in parser.commands.values():
        command.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. The result's ``closing`` is an ExitStack that is closed after the command.

    Raises:
        UsageError: the command line is not valid.
    """
    rest: list[str] = []
    if arguments and arguments[0] == "serve":
        ours, rest = split_serve(arguments[1:])
        arguments = ["serve", *ours]
    options = build_parser().parse_args(arguments)
    if hasattr(options, "action"):
        options.command = f"{options.command} {options.action}"
    options.rest = rest
    options.closing = ExitStack()
    return options


def report(error: DeltaSyncError, as_json: bool) -> None:
    """Print an error: as JSON on stdout, or as one line on stderr."""
    if as_json:
        print(json.dumps({"error": {"kind": error.kind, "message": error.message}}, indent=2))
        return
    print(f"delta-sync: {error.kind}: {clean(error.message)}", file=sys.stderr)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; prints, and never raises a DeltaSyncError."""
    as_json = "--json" in before_dashes(arguments)[0]
    try:
        options = parse(arguments)
        if options.command != "serve":  # serve reads a server's settings, and has a flag for each
            settings_of(options)
        with options.closing:
            document, show = options.handler(options)
            if not as_json:
                show()
            elif document:
                print(json.dumps(document, indent=2))
            sys.stdout.flush()
    except DeltaSyncError as error:
        report(error, as_json)
        sys.stdout.flush()
        return error.exit_code
    except CheckFailedError as failed:
        report(failed.error, as_json)
        sys.stdout.flush()
        return CHECK_FAILED
    return int(document.get("exit_code", 0))


def main() -> int:
    """Run the ``delta-sync`` command."""
    for stream in (sys.stdout, sys.stderr):
        # Escape characters that the terminal's encoding lacks, instead of failing.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        return run(sys.argv[1:])
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe. Python would report it again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

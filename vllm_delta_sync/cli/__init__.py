"""The ``delta-sync`` command: arguments, output, errors and exit codes. What it prints is made in ``log``.

Every subcommand prints text for people, or with ``--json`` one JSON document. Errors are one line on stderr, or with
``--json`` one document ``{"error": {"kind", "message"}}`` on stdout; the exit code is the error's, and 1 for whatever a
check finds.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from vllm_delta_sync import __version__
from vllm_delta_sync.cli import broker as cli_broker
from vllm_delta_sync.cli import compact as cli_compact
from vllm_delta_sync.cli import doctor as cli_doctor
from vllm_delta_sync.cli import export as cli_export
from vllm_delta_sync.cli import fleet as cli_fleet
from vllm_delta_sync.cli import gc as cli_retention
from vllm_delta_sync.cli import keys as cli_keys
from vllm_delta_sync.cli import repair as cli_repair
from vllm_delta_sync.cli import verify as cli_verify
from vllm_delta_sync.cli.arguments import (
    Answer,
    CheckFailedError,
    Command,
    add_bucket,
    add_json,
    add_trust,
    count,
    exit_codes,
    failed_check,
    opened,
    positive,
    settings_of,
)
from vllm_delta_sync.errors import DeltaSyncError, StoreError, UsageError
from vllm_delta_sync.redaction import public_url

CHECK_FAILED = 1
INTERRUPTED = 130

SETTINGS = """\
settings:
  A flag wins over the environment variable DELTA_SYNC_<NAME>, and that over the TOML file named by DELTA_SYNC_CONFIG.

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
  delta-sync log --bucket /data/runs/a --last 10
  delta-sync inspect /data/runs/a --version 7
  delta-sync verify --bucket file:///data/runs/a --base /models/qwen3

"""
SERVE_EXAMPLES = """\
Without MODEL the server starts from the bucket alone: weights, and the configuration and tokenizer that the run keeps.
The model is then called as the last part of the URL; --served-model-name gives it another name.

MODEL comes first. Every argument that is not listed here goes to `vllm serve` as it is: see `vllm serve --help=all`.
So does everything behind `--`, be it listed or not.
What is not given as a flag is taken from DELTA_SYNC_<NAME>, then from the TOML file named by DELTA_SYNC_CONFIG.

examples:
  delta-sync serve Qwen/Qwen3-0.6B --bucket /data/runs/a --port 8000 --max-model-len 4096
  delta-sync serve --bucket s3://weights/runs/a --port 8000
  delta-sync serve /models/base --bucket /data/runs/a --notice tcp://trainer:5555
  delta-sync serve /models/base --bucket /data/runs/a --policy manual --dry-run
  delta-sync serve /models/base --bucket /data/runs/a -- --port 8000 --enforce-eager
"""
MODULES = (cli_export, cli_verify, cli_repair, cli_retention, cli_compact, cli_keys, cli_doctor, cli_broker, cli_fleet)
"""Further subcommands: each has ``add`` and ``COMMANDS``."""
# Settings that `serve` takes as flags: field, metavar, help. Values are checked where settings are.
SERVE_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("bucket", "URL", "run to follow: hf://buckets/NAMESPACE/BUCKET/run, s3://bucket/run, … or a path"),
    ("notice", "ADDRESS", "the publisher's notices, tcp://host:port; without it the bucket is polled"),
    ("trusted_keys", "FILES", "public key files, separated by commas: what they have not signed is refused"),
    ("state_dir", "DIR", "where what was seen of the run is kept across restarts; goes with --trusted-keys"),
    ("expired_head", "MODE", "a signed HEAD.json that has run out: warn, or refuse new versions"),
    ("notice_key", "PATH", "own secret CURVE certificate for notices; goes with --notice-server-key"),
    ("notice_server_key", "PATH", "public CURVE certificate of the publisher or broker that notices come from"),
    ("poll_seconds", "SECONDS", "how often to look into the bucket when no notice comes"),
    ("pause_mode", "MODE", "requests in flight at a commit: keep (go on), wait (finish first) or abort"),
    ("wait_seconds", "SECONDS", "with pause mode wait: longest that a commit waits for requests in flight"),
    ("prefix_cache", "MODE", "KV cache at a commit: reset, or keep entries of the older weights"),
    ("pause_seconds", "SECONDS", "longest that generation stands still; after that a hung commit ends the engine"),
    ("stage_bytes", "BYTES", "memory of each rank for versions that are folded into one commit"),
    ("undo_bytes", "BYTES", "memory of each rank for commits that a rollback can take back"),
    ("rescan_bytes", "BYTES", "weights to compare beside each staging, all in turn; 0: none"),
    ("cache_dir", "DIR", "where the ranks of a node share what they fetch"),
    ("cache_bytes", "BYTES", "how much may lie there"),
    ("mirror", "URL", "copy or HTTP cache in front of the bucket, from which objects are taken if they are right"),
    ("store_endpoint", "URL", "address of an S3-compatible store, another Hub or an emulator"),
    ("store_deadline", "SECONDS", "when one try of a request to the store is given up"),
    ("store_connections", "N", "requests that one process has in flight to the store"),
    ("store_download_limit", "BYTES", "bytes per second that one process takes from the store"),
    ("store_upload_limit", "BYTES", "bytes per second that one process sends to the store"),
    ("store_progress", "MODE", "what shows long transfers: auto, bar, log or off"),
    ("receiver_id", "NAME", "tell in the bucket under this name what is served; without it nothing is written"),
    ("lease_seconds", "SECONDS", "how long that holds; it is told again after a third of it"),
    ("fleet_pauses", "N", "servers of the run that may be paused at once; goes with --receiver-id"),
    ("admin_token_file", "PATH", "file with the token that state-changing routes then ask for"),
    ("max_lag", "N", "versions behind beyond which GET /delta_sync/ready says no; without it any lag is fine"),
    ("min_version_seconds", "SECONDS", "longest that a request waits for its X-Delta-Sync-Min-Version"),
    ("target", "VERSION", "what to serve: head, a version's number, or tag:NAME, followed as the tag moves forward"),
    ("quarantined", "MODE", "versions that the publisher's gate marked as bad: skip, or serve them"),
    ("policy", "POLICY", "follow every new version, or manual: only when POST /delta_sync/sync says so"),
)


class Parser(argparse.ArgumentParser):
    """Reports a bad command line as UsageError, like everything else."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.allow_abbrev = False

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="delta-sync",
        description="Weights that changed, from a trainer to running vLLM servers, through a bucket.",
        epilog=EXAMPLES + SETTINGS + EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"delta-sync {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_readers(commands)
    for module in MODULES:
        module.add(commands)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[Parser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="start vLLM so that it follows a run",
        usage="delta-sync serve [MODEL] --bucket URL [options] [any argument of vllm serve] [-- more of them]",
        description="Set up and become `vllm serve`, following the versions of a run.",
        epilog=SERVE_EXAMPLES,
    )
    serve.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="the run's base: a checkpoint directory, or a model name; without it the run's own files are taken",
    )
    for field, metavar, text in SERVE_FLAGS:
        serve.add_argument(_flag(field), metavar=metavar, help=text)
    serve.add_argument("--dry-run", action="store_true", help="print the environment and the command, start nothing")
    add_json(serve)


def _add_readers(commands: "argparse._SubParsersAction[Parser]") -> None:
    log = commands.add_parser(
        "log",
        help="list the versions of a run",
        description="List versions, oldest first, and check that each follows the one before it: all of them from "
        "version 0 on, or with --last those shown and the one before them.",
        epilog="examples:\n  delta-sync log --bucket /data/runs/a\n"
        "  delta-sync log --bucket /data/runs/a --last 5 --json\n"
        + exit_codes("a version is missing or damaged, or does not follow the one before it"),
    )
    add_bucket(log)
    add_trust(log)
    log.add_argument("--last", type=positive, metavar="N", help="only the newest N versions")
    add_json(log)

    inspect = commands.add_parser(
        "inspect",
        help="show a run, one of its versions, or a single file",
        description="Show what a run consists of; with --version what one version changed, tensor by tensor; for a "
        ".safetensors file what its header says.",
        epilog="examples:\n  delta-sync inspect /data/runs/a\n  delta-sync inspect /data/runs/a --version 7 --all\n"
        "  delta-sync inspect ./objects/4fc55e65….safetensors\n"
        + exit_codes("what is shown is damaged, or an object of the version is missing"),
    )
    inspect.add_argument("target", metavar="URL_OR_FILE", help="run URL, or path of a .safetensors file")
    inspect.add_argument("--version", type=count, metavar="N", help="a version of the run")
    inspect.add_argument("--top", type=positive, default=20, metavar="N", help="tensors to list (default: 20)")
    inspect.add_argument("--all", action="store_true", help="list every tensor")
    add_trust(inspect)
    add_json(inspect)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


# Commands: each returns the document for --json, and a function that prints it for people.


def _log(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.cli import log as cli_views

    run = opened(options)
    with run.caching_manifests():
        document, failure = cli_views.log_document(run, options.last)
    if failure is not None:
        if not options.json:
            cli_views.print_log(document)
        raise failure if isinstance(failure, StoreError) else failed_check(failure)
    return document, lambda: cli_views.print_log(document)


def _inspect(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.cli import log as cli_views

    top = None if options.all else options.top
    if "://" not in options.target and Path(options.target).is_file():
        if options.version is not None:
            raise UsageError("--version goes with a run; a file holds one version's object")
        document = cli_views.file_document(Path(options.target))
        return document, lambda: cli_views.print_file(document, top)
    run = opened(options, url=options.target)
    if options.version is None:
        document = cli_views.run_document(run)
        return document, lambda: cli_views.print_run(document, top)
    document = cli_views.version_document(run, options.version)
    return document, lambda: cli_views.print_version(document, top)


def _serve(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.engine.entrypoints import serve_command

    chosen = {field: getattr(options, field) for field, _, _ in SERVE_FLAGS}
    settings = {field: value for field, value in chosen.items() if value is not None}
    if not options.dry_run:
        sys.stdout.flush()
        serve_command.exec_serve(options.model, settings, options.rest)
    environment, command = serve_command.serve_command(options.model, settings, options.rest)
    environment = {name: public_url(value) for name, value in environment.items()}
    lines = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())] + [shlex.join(command)]
    return {"environment": environment, "command": command}, lambda: print(" \\\n".join(lines))


COMMANDS: dict[str, Command] = {
    "serve": _serve,
    "log": _log,
    "inspect": _inspect,
    **{name: command for module in MODULES for name, command in module.COMMANDS.items()},
}


def split_serve(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the arguments after ``serve`` into ours and vLLM's, each in their order.

    Whatever stands behind ``--`` is vLLM's; before it, ours are taken wherever they stand. MODEL is the first that is
    not ours, unless that is a flag: then there is no MODEL.
    """
    with_value = {_flag(field) for field, _, _ in SERVE_FLAGS}
    ours: list[str] = []
    rest: list[str] = []
    pending, behind = _before_dashes(arguments)
    while pending:
        argument = pending.pop(0)
        name = argument.partition("=")[0]
        if name in with_value:
            ours.append(argument)
            if "=" not in argument and pending:
                ours.append(pending.pop(0))
        elif argument in ("--dry-run", "--json", "-h", "--help"):
            ours.append(argument)
        else:
            rest.append(argument)
    model = rest[: 1 if rest and not rest[0].startswith("-") else 0]
    return ours + model, rest[len(model) :] + behind


def _before_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before the first ``--``, and those behind it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. What ``closing`` holds is closed when the command has ended.

    Raises:
        UsageError: it makes no sense.
    """
    rest: list[str] = []
    if arguments and arguments[0] == "serve":
        ours, rest = split_serve(arguments[1:])
        arguments = ["serve", *ours]
    options = build_parser().parse_args(arguments)
    options.rest = rest
    options.closing = ExitStack()
    return options


def report(error: DeltaSyncError, as_json: bool) -> None:
    """Print an error where the caller of the command looks for it."""
    if as_json:
        print(json.dumps({"error": {"kind": error.kind, "message": error.message}}, indent=2))
        return
    from vllm_delta_sync.cli.text import clean

    print(f"delta-sync: {error.kind}: {clean(error.message)}", file=sys.stderr)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; prints, and never raises a DeltaSyncError."""
    as_json = "--json" in _before_dashes(arguments)[0]
    try:
        options = parse(arguments)
        if options.command != "serve":  # which reads a server's settings, and has flags for all of them
            settings_of(options)
        with options.closing:
            document, show = COMMANDS[options.command](options)
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
    """Entry point of the ``delta-sync`` command."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal without a character gets its escape instead of a traceback.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        return run(sys.argv[1:])
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough. Python would complain again while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

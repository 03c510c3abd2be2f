"""``delta-sync serve``: arguments and output; what it does is in ``engine.entrypoints.serve_command``."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from vllm_delta_sync.cli.arguments import Answer, Command, add_json
from vllm_delta_sync.redaction import public_url

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


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand."""
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


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


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


def split_serve(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the arguments after ``serve`` into ours and vLLM's, each in their order.

    Whatever stands behind ``--`` is vLLM's; before it, ours are taken wherever they stand. MODEL is the first that is
    not ours, unless that is a flag: then there is no MODEL.
    """
    with_value = {_flag(field) for field, _, _ in SERVE_FLAGS}
    ours: list[str] = []
    rest: list[str] = []
    pending, behind = before_dashes(arguments)
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


def before_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before the first ``--``, and those behind it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])


COMMANDS: dict[str, Command] = {"serve": _serve}

"""``delta-sync serve``: arguments and output; the work is done by ``engine.entrypoints.serve_command``."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from vllm_delta_sync.cli.arguments import Answer, Command, add_json
from vllm_delta_sync.redaction import public_url

SERVE_EXAMPLES = """\
Without MODEL the server starts from the bucket alone: weights, configuration and tokenizer come from the run. The
model's name is then the last part of the URL; --served-model-name changes it.

MODEL comes first. Arguments that are not listed here, and all arguments after `--`, are passed to `vllm serve`
unchanged; see `vllm serve --help=all`.
Settings without a flag come from DELTA_SYNC_<NAME>, then from the TOML file named by DELTA_SYNC_CONFIG.

examples:
  delta-sync serve Qwen/Qwen3-0.6B --bucket /data/runs/a --port 8000 --max-model-len 4096
  delta-sync serve --bucket s3://weights/runs/a --port 8000
  delta-sync serve /models/base --bucket /data/runs/a --notice tcp://trainer:5555
  delta-sync serve /models/base --bucket /data/runs/a --policy manual --dry-run
  delta-sync serve /models/base --bucket /data/runs/a -- --port 8000 --enforce-eager
"""
# Settings that `serve` takes as flags: field, metavar, help. `settings.py` checks the values.
SERVE_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("bucket", "URL", "run to follow: hf://buckets/NAMESPACE/BUCKET/run, s3://bucket/run, … or a path"),
    ("notice", "ADDRESS", "address of the publisher's notices, tcp://host:port; without it the bucket is polled"),
    ("trusted_keys", "FILES", "public key files, separated by commas; refuse what none of these keys has signed"),
    ("state_dir", "DIR", "where to remember the newest seen version across restarts; needs --trusted-keys"),
    ("expired_head", "MODE", "if a signed HEAD.json has expired: warn, or refuse new versions"),
    ("notice_key", "PATH", "this server's secret CURVE certificate for notices; needs --notice-server-key"),
    ("notice_server_key", "PATH", "public CURVE certificate of the publisher or broker that sends the notices"),
    ("poll_seconds", "SECONDS", "interval between polls of the bucket when no notice comes"),
    ("pause_mode", "MODE", "requests in flight at a commit: keep (they continue), wait (they finish first) or abort"),
    ("wait_seconds", "SECONDS", "with pause mode wait: longest time that a commit waits for requests in flight"),
    ("prefix_cache", "MODE", "KV cache at a commit: reset, or keep entries of the older weights"),
    ("pause_seconds", "SECONDS", "longest pause of generation; a commit that hangs longer ends the engine"),
    ("stage_bytes", "BYTES", "memory of each rank for versions that are merged into one commit"),
    ("undo_bytes", "BYTES", "memory of each rank for the undo log, from which a rollback reverts commits"),
    ("rescan_bytes", "BYTES", "bytes of weights to verify beside each staging, in rotation; 0: none"),
    ("cache_dir", "DIR", "directory in which the ranks of a node share fetched objects"),
    ("cache_bytes", "BYTES", "size limit of the cache"),
    ("mirror", "URL", "copy of the bucket, or HTTP cache, to read objects from first; damaged ones are ignored"),
    ("store_endpoint", "URL", "address of an S3-compatible store, another Hub or an emulator"),
    ("store_deadline", "SECONDS", "time limit of one attempt of a request to the store"),
    ("store_connections", "N", "most requests to the store that one process has in flight"),
    ("store_download_limit", "BYTES", "most bytes per second that one process downloads from the store"),
    ("store_upload_limit", "BYTES", "most bytes per second that one process uploads to the store"),
    ("store_progress", "MODE", "how to show long transfers: auto, bar, log or off"),
    ("receiver_id", "NAME", "write a heartbeat of this name to the bucket; without it the server writes nothing"),
    ("lease_seconds", "SECONDS", "how long a heartbeat is valid; it is renewed after a third of that"),
    ("fleet_pauses", "N", "most servers of the run that may pause at once; needs --receiver-id"),
    ("admin_token_file", "PATH", "file with the token that state-changing routes then require"),
    ("max_lag", "N", "lag in versions beyond which GET /delta_sync/ready fails; default: any lag is ready"),
    ("min_version_seconds", "SECONDS", "longest time that a request waits for its X-Delta-Sync-Min-Version"),
    ("target", "VERSION", "version to serve: head, a number, or tag:NAME, which is followed as the tag moves forward"),
    ("quarantined", "MODE", "versions that failed the publisher's update gate: skip, or serve"),
    ("policy", "POLICY", "follow: apply every new version; manual: only on POST /delta_sync/sync"),
)


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand."""
    serve = commands.add_parser(
        "serve",
        help="start a vLLM server that follows a run",
        usage="delta-sync serve [MODEL] --bucket URL [options] [any argument of vllm serve] [-- more of them]",
        description="Start `vllm serve` in this process, so that it follows the versions of a run.",
        epilog=SERVE_EXAMPLES,
    )
    serve.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="the run's base: a checkpoint directory or a model name; default: the files stored in the run",
    )
    for field, metavar, text in SERVE_FLAGS:
        serve.add_argument(_flag(field), metavar=metavar, help=text)
    serve.add_argument("--dry-run", action="store_true", help="print the environment and the command; start nothing")
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
    """Split the arguments after ``serve`` into those of this command and those of vLLM, each in order.

    All arguments after ``--`` are vLLM's; before it, this command's are picked out at any position. The first remaining
    argument is MODEL, unless it is a flag.
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
    """Return the arguments before the first ``--``, and those after it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])


COMMANDS: dict[str, Command] = {"serve": _serve}

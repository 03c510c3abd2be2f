"""``delta-sync serve``, which ``engine.entrypoints.serve_command`` does; ``split_serve`` picks out its arguments."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Literal, get_args, get_origin

from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.logs import public_url
from vllm_delta_sync.settings import Settings, StoreOptions

METAVARS = {
    "bucket": "URL",
    "mirror": "URL",
    "peer": "URLS",
    "store_endpoint": "URL",
    "notice": "ADDRESS",
    "target": "VERSION",
    "trusted_keys": "FILES",
    "receiver_id": "NAME",
    "lora_name": "NAME",
    "lora_adapters": "NAME=URL,…",
}
METAVARS_BY_END = {
    "_dir": "DIR",
    "_file": "FILE",
    "_key": "FILE",
    "_bytes": "BYTES",
    "_seconds": "SECONDS",
    "_deadline": "SECONDS",
}


def metavar(field: str) -> str:
    """Return what stands for the value of a setting in the help: its choices if it has some."""
    annotation = Settings.model_fields[field].annotation
    if get_origin(annotation) is Literal:
        return "{" + ",".join(get_args(annotation)) + "}"
    if annotation is bool:
        return "{true,false}"
    by_end = next((name for end, name in METAVARS_BY_END.items() if field.endswith(end)), None)
    return METAVARS.get(field) or by_end or "N"


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting; those of the store's client last: few need them."""
    parser.usage = "delta-sync serve [MODEL] --bucket URL [options] [any argument of vllm serve] [-- more of them]"
    for field, setting in sorted(Settings.model_fields.items(), key=lambda item: item[0] in StoreOptions.model_fields):
        shown = str(setting.default).lower() if isinstance(setting.default, bool) else setting.default
        default = "" if setting.default is None or setting.is_required() else f" Default: {shown}."
        text = f"{setting.description}{default}".replace("%", "%%")
        parser.add_argument(_flag(field), metavar=metavar(field), help=text)


@command(
    "serve",
    "start a vLLM server that follows a run",
    option(
        "model",
        metavar="MODEL",
        nargs="?",
        help="the run's base: a checkpoint directory or a model name; default: the files stored in the run",
    ),
    _add_settings,
    option("--dry-run", action="store_true", help="print the environment and the command; start nothing"),
)
def serve(options: argparse.Namespace) -> Report:
    """Start `vllm serve` in this process, so that it follows the versions of a run.

    Without MODEL the server starts from the bucket alone: weights, configuration and tokenizer come from the run. The
    model's name is then the last part of the URL; --served-model-name changes it.

    MODEL comes first, or is `model` in the file that vLLM's --config names. Arguments that are not listed here, and all
    arguments after `--`, are passed to `vllm serve` unchanged; see `vllm serve --help=all`.
    Settings without a flag come from DELTA_SYNC_<NAME>, then from the TOML file named by DELTA_SYNC_CONFIG.

    examples:
      delta-sync serve Qwen/Qwen3-0.6B --bucket /data/runs/a --port 8000 --max-model-len 4096
      delta-sync serve --bucket s3://weights/runs/a --port 8000
      delta-sync serve /models/base --bucket /data/runs/a --notice tcp://trainer:5555
      delta-sync serve /models/base --bucket /data/runs/a --policy manual --dry-run
      delta-sync serve /models/base --bucket /data/runs/a -- --port 8000 --enforce-eager
    """
    from vllm_delta_sync.engine.entrypoints import serve_command

    chosen = {field: getattr(options, field) for field in Settings.model_fields}
    settings = {field: value for field, value in chosen.items() if value is not None}
    if not options.dry_run:
        sys.stdout.flush()
        serve_command.exec_serve(options.model, settings, options.rest)
    environment, words = serve_command.serve_command(options.model, settings, options.rest)
    environment = {name: public_url(value) for name, value in environment.items()}
    lines = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())] + [shlex.join(words)]
    return Report({"environment": environment, "command": words}, lambda _: print(" \\\n".join(lines)))


def split_serve(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments after ``serve`` into those of this command and those of vLLM, each in order.

    All arguments after ``--`` are vLLM's; before it, this command's are picked out at any position. The first remaining
    argument is MODEL, unless it is a flag.
    """
    with_value = {_flag(field) for field in Settings.model_fields}
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

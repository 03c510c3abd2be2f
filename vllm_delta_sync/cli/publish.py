"""``delta-sync publish``: arguments and output; the work is done by ``trainer_side.checkpoint_folders``."""

import argparse
import signal
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import (
    Answer,
    CommandFailedError,
    add_bucket,
    add_trust,
    bucket_url,
    count,
    exit_codes,
    interval,
    print_event,
    settings_of,
)
from vllm_delta_sync.cli.text import ProgressBar, clean, percent, size
from vllm_delta_sync.errors import IncompleteError, UsageError

if TYPE_CHECKING:
    from trainer_side.checkpoint_folders import CheckpointPublisher, CheckpointWatcher, PublishedCheckpoint

EXAMPLES = """\
A checkpoint is a folder as save_pretrained writes it: model.safetensors, or the files that model.safetensors.index.json
names. The first one begins the run, with its config.json and tokenizer; later ones become one delta each. A checkpoint
that equals the newest version is not published. With --base, version 0 is a reference to that checkpoint, from which
servers start, and --from or the first checkpoint becomes version 1. Floating-point weights are then rounded to its
dtypes.

--watch publishes a checkpoint once it is complete and none of its files has changed between two polls, in the order of
steps, and never one whose step is not after that of the newest version. The step is the number at the end of the
folder's name (checkpoint-100), else global_step of its trainer_state.json, else one more than the newest version's.
Ctrl-C and SIGTERM end it: the version in progress is completed or dropped, and the same command continues. It takes
memory for the largest tensor and the changes, and space for the model in the temporary directory (TMPDIR).

examples:
  delta-sync publish --from /models/a --bucket /data/runs/a
  delta-sync publish --watch out --bucket s3://bucket/runs/a --base Qwen/Qwen3-0.6B@main
  delta-sync publish --watch out --bucket /data/runs/a --once --json
"""
CODECS = ("auto", "packed", "context", "raw")
POLL_SECONDS = 5.0


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "publish",
        help="publish checkpoint folders as versions",
        description="Publish a checkpoint folder, or each one that appears in a folder, as a version of a run.",
        epilog=EXAMPLES + exit_codes("a checkpoint is not complete, or has other tensors than the run"),
    )
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("--from", dest="source", metavar="DIR", help="checkpoint folder to publish")
    folder.add_argument("--watch", metavar="DIR", help="publish each checkpoint that appears as a subfolder")
    add_bucket(parser)
    parser.add_argument(
        "--step", type=count, metavar="N", help="with --from: its step; default: as the folder's name or files say"
    )
    parser.add_argument(
        "--base", metavar="DIR|MODEL", help="checkpoint that servers start from: a folder, or org/name@revision"
    )
    parser.add_argument(
        "--poll", type=interval, metavar="TIME", help=f"with --watch: time between polls (default: {POLL_SECONDS:g})"
    )
    parser.add_argument("--once", action="store_true", help="with --watch: publish what is complete now, and end")
    parser.add_argument("--codec", choices=CODECS, default="auto", help="how changes are encoded (default: auto)")
    parser.add_argument(
        "--notice", metavar="ADDRESS", help="announce versions: tcp://*:5555, or a broker: connect:tcp://HOST:PORT"
    )
    add_trust(parser, signing=True)
    parser.set_defaults(handler=_publish)


class _Ended(KeyboardInterrupt):
    """SIGTERM came: everything ends as after Ctrl-C."""


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended


def _publish(options: argparse.Namespace) -> Answer:
    if options.step is not None and options.watch is not None:
        raise UsageError("--step needs --from: with --watch each checkpoint has a step of its own")
    if options.source is not None and (options.once or options.poll is not None):
        raise UsageError("--once and --poll need --watch DIR")
    from trainer_side.checkpoint_folders import CheckpointPublisher, CheckpointWatcher

    settings = settings_of(options)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with CheckpointPublisher(
            bucket_url(options),
            options.base,
            codec=options.codec,
            notice=options.notice,
            signing_key=settings.signing_key,
            trusted_keys=settings.trusted_keys,
        ) as publisher:
            if options.source is not None:
                with ProgressBar("bytes") as bar:
                    result = publisher.publish(options.source, options.step, progress=bar.update)
                document = _document(publisher, result)
                return document, lambda: _print(document)
            watcher = CheckpointWatcher(options.watch, publisher, options.poll or POLL_SECONDS)
            return _watch(publisher, watcher, options)
    except _Ended:
        if options.watch is None or options.once:
            raise
        # Nothing is left to print: each line was printed as it came.
        return None, lambda: None
    finally:
        signal.signal(signal.SIGTERM, before)


def _watch(publisher: "CheckpointPublisher", watcher: "CheckpointWatcher", options: argparse.Namespace) -> Answer:
    """Print each result as it comes; with --once and --json, return one document with all of them."""
    documents = []
    for result in watcher.watch(options.once):
        document = _document(publisher, result)
        if options.once:
            documents.append(document)
        if not (options.once and options.json):
            print_event(options, document, partial(_print, document))
    refused = [{"checkpoint": name, "message": message} for name, message in watcher.refused.items()]
    report = {"checkpoints": documents, "refused": refused}
    if refused:
        names = ", ".join(watcher.refused)
        raise CommandFailedError(IncompleteError(f"not published: {names}"), report, lambda: None)
    return report, lambda: None


def _document(publisher: "CheckpointPublisher", result: "PublishedCheckpoint") -> dict[str, Any]:
    manifest = result.manifest
    return {
        "run": publisher.run.info.run,
        "checkpoint": str(result.folder),
        "outcome": result.outcome,
        "version": manifest.version,
        "step": result.step,
        "kind": manifest.kind,
        "changed": manifest.changed,
        "total": manifest.total,
        "payload_bytes": manifest.payload_bytes,
        "full_bytes": manifest.full_bytes,
        "seconds": round(result.seconds, 3),
    }


def _print(document: dict[str, Any]) -> None:
    name, version, step = document["checkpoint"], document["version"], document["step"]
    match document["outcome"]:
        case "published":
            changed = document["kind"]
            if changed == "delta":
                changed = f"{percent(document['changed'], document['total'])} changed"
            text = f"version {version} (step {step}), {changed}, {size(document['payload_bytes'])}"
            text += f", {document['seconds']:.1f} s"
        case "unchanged":
            text = f"not published: its weights are those of version {version}"
        case _:
            text = f"not published: version {version} is as new or newer"
    print(clean(f"{name}: {text}"), flush=True)

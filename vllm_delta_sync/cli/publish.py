"""``delta-sync publish``: arguments and output; the work is done by ``trainer_side.checkpoint_folders``."""

import argparse
import os
import signal
import sys
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
from vllm_delta_sync.cli.text import ProgressBar, clean, percent, print_error, size
from vllm_delta_sync.errors import IncompleteError, UsageError
from vllm_delta_sync.format.codecs import CODECS

if TYPE_CHECKING:
    from trainer_side.checkpoint_folders import CheckpointPublisher, CheckpointWatcher, PublishedCheckpoint

EXAMPLES = """\
A checkpoint is a folder as save_pretrained writes it, or a trainer's folder that holds one. The first one begins the
run; later ones become one delta each. With --base, version 0 is a reference to that checkpoint, and the first one,
rounded to its dtypes, becomes version 1. The step is in the name of the folder (checkpoint-100, step_100), else
in its trainer_state.json.

--watch publishes each checkpoint once it is complete, follows a trainer that starts again from an earlier step, and
names each folder that it leaves out, with the reason. SIGTERM and Ctrl-C end it after it has published what is there.

examples:
  delta-sync publish --from /models/a --bucket /data/runs/a
  delta-sync publish --watch out --bucket s3://bucket/runs/a --base Qwen/Qwen3-0.6B@main
  delta-sync publish --watch out --bucket /data/runs/a --once --json
"""
FAILED = (
    "a checkpoint is not complete, or has other tensors than the run; --once: nothing is published, or a checkpoint is "
    "refused; --watch after SIGTERM: a checkpoint is left"
)
DONE = "done; --watch after SIGTERM: everything that was there is published"
POLL_SECONDS = 5.0
GRACE_SECONDS = 25.0
"""Less than the 30 seconds that Kubernetes waits after SIGTERM."""
NAMES_SHOWN = 20


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "publish",
        help="publish checkpoint folders as versions",
        description="Publish a checkpoint folder, or each one that appears in a folder, as a version of a run.",
        epilog=EXAMPLES + exit_codes(FAILED, DONE),
    )
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("--from", dest="source", metavar="DIR", help="checkpoint folder to publish")
    folder.add_argument("--watch", metavar="DIR", help="publish each checkpoint that appears as a subfolder")
    add_bucket(parser)
    parser.add_argument(
        "--step", type=count, metavar="N", help="with --from: its step; default: the one in the folder's name"
    )
    parser.add_argument(
        "--base", metavar="DIR|MODEL", help="checkpoint that servers start from: a folder, or org/name@revision"
    )
    parser.add_argument("--expect-run", metavar="ID", help="continue the run of this id only, and begin none")
    parser.add_argument(
        "--poll", type=interval, metavar="TIME", help=f"with --watch: time between polls (default: {POLL_SECONDS:g})"
    )
    parser.add_argument(
        "--grace",
        type=interval,
        metavar="TIME",
        help=f"with --watch: longest time to go on publishing after SIGTERM or Ctrl-C (default: {GRACE_SECONDS:g})",
    )
    parser.add_argument("--once", action="store_true", help="with --watch: publish what is complete now, and end")
    parser.add_argument("--codec", choices=CODECS, default="tiled", help="how changes are encoded (default: tiled)")
    parser.add_argument(
        "--notice", metavar="ADDRESS", help="announce versions: tcp://*:5555, or a broker: connect:tcp://HOST:PORT"
    )
    add_trust(parser, signing=True)
    parser.set_defaults(handler=_publish)


class _Ended(KeyboardInterrupt):
    """SIGTERM came: everything ends as after Ctrl-C."""


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended


class _Ending:
    """What SIGTERM and SIGINT do to a watcher: the first stops it within the grace period, the second at once.

    Attributes:
        signal: the first signal; None before it.
    """

    def __init__(self, watcher: "CheckpointWatcher", grace_seconds: float) -> None:
        self._watcher, self._grace_seconds = watcher, grace_seconds
        self.signal: int | None = None
        # A shell starts commands in its background with SIGINT ignored.
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        numbers = (signal.SIGTERM, signal.SIGALRM, *(() if ignored else (signal.SIGINT,)))
        self._before = {number: signal.signal(number, self) for number in numbers}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None and number != signal.SIGALRM:
            self.signal = number
            self._watcher.stop()
            signal.setitimer(signal.ITIMER_REAL, self._grace_seconds)
            return
        print_error(IncompleteError(_not_published(self._watcher.unfinished())))
        sys.stderr.flush()
        # Closing the publisher would wait for the version in progress. A run is whole whenever its publisher ends.
        os._exit(self.exit_code)

    @property
    def exit_code(self) -> int:
        return 1 if self.signal == signal.SIGTERM else 130

    def close(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _not_published(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    listed = ", ".join(names[:NAMES_SHOWN]) + more or "no checkpoint; the last version may not be announced"
    return f"not published: {listed}; the same command continues"


def _publish(options: argparse.Namespace) -> Answer:
    if options.step is not None and options.watch is not None:
        raise UsageError("--step needs --from: with --watch each checkpoint has a step of its own")
    if options.source is not None and (options.once or options.poll is not None or options.grace is not None):
        raise UsageError("--once, --poll and --grace need --watch DIR")
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
            expect_run=options.expect_run,
        ) as publisher:
            if options.source is not None:
                with ProgressBar("bytes") as bar:
                    result = publisher.publish(options.source, options.step, progress=bar.update)
                document = _document(publisher, result)
                return document, lambda: _print(document)
            watcher = CheckpointWatcher(options.watch, publisher, options.poll or POLL_SECONDS)
            ending = _Ending(watcher, options.grace or GRACE_SECONDS)
            try:
                answer = _watch(publisher, watcher, options)
                publisher.close()
            finally:
                ending.close()
        if ending.signal == signal.SIGINT:
            raise KeyboardInterrupt
        return answer
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
    if not options.once:
        return None, lambda: None  # each line was printed as it came
    report = {
        "checkpoints": documents,
        "refused": _reasons(watcher.refused),
        "left_out": _reasons(watcher.left_out),
    }
    if watcher.refused:
        names = ", ".join(watcher.refused)
        raise CommandFailedError(IncompleteError(f"not published: {names}"), report, lambda: None)
    if not documents:
        reasons = [f"{name}: {reason}" for name, reason in watcher.left_out.items()]
        more = [f"and {len(reasons) - NAMES_SHOWN} more"] if len(reasons) > NAMES_SHOWN else []
        why = "; ".join(reasons[:NAMES_SHOWN] + more) or "there is no checkpoint folder in it"
        raise CommandFailedError(IncompleteError(f"nothing is published from {options.watch}: {why}"), report)
    return report, lambda: None


def _reasons(folders: "dict[str, str]") -> list[dict[str, str]]:
    return [{"checkpoint": name, "message": message} for name, message in folders.items()]


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
        "reason": result.reason,
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
        case _:
            text = f"not published: {document['reason']}"
    print(clean(f"{name}: {text}"), flush=True)

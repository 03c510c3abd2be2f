"""``delta-sync publish``, which ``trainer_side.checkpoint_folders`` does."""

import argparse
import os
import signal
import sys
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import SIGNED_RUN, bucket_url, count, interval
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import ProgressBar, clean, percent, pick, print_error, print_event, size
from vllm_delta_sync.errors import IncompleteError, UsageError
from vllm_delta_sync.format.codecs import CODECS

if TYPE_CHECKING:
    from trainer_side.checkpoint_folders import CheckpointPublisher, CheckpointWatcher, PublishedCheckpoint

POLL_SECONDS = 5.0
GRACE_SECONDS = 25.0
"""Less than the 30 seconds that Kubernetes waits after SIGTERM."""
NAMES_SHOWN = 20
GIVEN = ("codec", "notice", "expect_run")
"""Arguments of ``Publisher`` that have a flag of the same name."""


def _add_folder(parser: argparse.ArgumentParser) -> None:
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("--from", dest="source", metavar="DIR", help="checkpoint folder to publish")
    folder.add_argument("--watch", metavar="DIR", help="publish each checkpoint that appears as a subfolder")


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


@command(
    "publish",
    "publish checkpoint folders as versions",
    _add_folder,
    *SIGNED_RUN,
    option("--step", type=count, metavar="N", help="with --from: its step; default: the one in the folder's name"),
    option("--base", metavar="DIR|MODEL", help="checkpoint that servers start from: a folder, or org/name@revision"),
    option("--expect-run", metavar="ID", help="continue the run of this id only, and begin none"),
    option(
        "--poll", type=interval, metavar="TIME", help=f"with --watch: time between polls (default: {POLL_SECONDS:g})"
    ),
    option(
        "--grace",
        type=interval,
        metavar="TIME",
        help=f"with --watch: longest time to go on publishing after SIGTERM or Ctrl-C (default: {GRACE_SECONDS:g})",
    ),
    option("--once", action="store_true", help="with --watch: publish what is complete now, and end"),
    option("--codec", choices=("auto", *CODECS), help="how changes are encoded (default: tiled)"),
    option("--notice", metavar="ADDRESS", help="announce versions: tcp://*:5555, or a broker: connect:tcp://HOST:PORT"),
    failed="a checkpoint is not complete, or has other tensors than the run; --once: nothing is published, or a "
    "checkpoint is refused; --watch after SIGTERM: a checkpoint is left",
    done="done; --watch after SIGTERM: all that was complete is published",
)
def publish(options: argparse.Namespace) -> Report:
    """Publish a checkpoint folder, or each one that appears in a folder, as a version of a run.

    A checkpoint is a folder as save_pretrained writes it, or a trainer's folder that holds one. The first one begins
    the run; later ones become one delta each. With --base, version 0 is a reference to that checkpoint, and the first
    one, rounded to its dtypes, becomes version 1. The step is in the name of the folder (checkpoint-100, step_100),
    else in its trainer_state.json. A delta that slime wrote (weight_v000007) is published after the version that it
    builds on; --base is then slime's --hf-checkpoint.

    --watch publishes each checkpoint once it is complete, follows a trainer that starts again from an earlier step, and
    names each folder that it leaves out, with the reason. SIGTERM and Ctrl-C end it after it has published what is
    there.

    examples:
      delta-sync publish --from /models/a --bucket /data/runs/a
      delta-sync publish --watch out --bucket s3://bucket/runs/a --base Qwen/Qwen3-0.6B@main
      delta-sync publish --watch out --bucket /data/runs/a --once --json
    """
    if options.step is not None and options.watch is not None:
        raise UsageError("--step needs --from: with --watch each checkpoint has a step of its own")
    if options.source is not None and (options.once or options.poll is not None or options.grace is not None):
        raise UsageError("--once, --poll and --grace need --watch DIR")
    from trainer_side.checkpoint_folders import CheckpointPublisher, CheckpointWatcher

    settings = options.settings
    with CheckpointPublisher(
        bucket_url(options),
        options.base,
        signing_key=settings.signing_key,
        trusted_keys=settings.trusted_keys,
        **{name: getattr(options, name) for name in GIVEN if getattr(options, name) is not None},
    ) as publisher:
        if options.source is not None:
            with ProgressBar("bytes") as bar:
                result = publisher.publish(options.source, options.step, progress=bar.update)
            return Report(_document(publisher, result), _print)
        watcher = CheckpointWatcher(options.watch, publisher, options.poll or POLL_SECONDS)
        ending = _Ending(watcher, options.grace or GRACE_SECONDS)
        try:
            report = _watch(publisher, watcher, options)
            publisher.close()
        finally:
            ending.close()
    if ending.signal == signal.SIGINT:
        raise KeyboardInterrupt
    return report


def _watch(publisher: "CheckpointPublisher", watcher: "CheckpointWatcher", options: argparse.Namespace) -> Report:
    """Print each result as it comes; with --once and --json, return one document with all of them."""
    documents = []
    for result in watcher.watch(options.once):
        document = _document(publisher, result)
        if options.once:
            documents.append(document)
        if not (options.once and options.json):
            print_event(options, document, partial(_print, document))
    if not options.once:
        return Report()  # each line was printed as it came
    data = {
        "checkpoints": documents,
        "refused": _reasons(watcher.refused),
        "left_out": _reasons(watcher.left_out),
    }
    if watcher.refused:
        names = ", ".join(watcher.refused)
        return Report(data, lambda _: None, IncompleteError(f"not published: {names}"))
    if not documents:
        reasons = [f"{name}: {reason}" for name, reason in watcher.left_out.items()]
        more = [f"and {len(reasons) - NAMES_SHOWN} more"] if len(reasons) > NAMES_SHOWN else []
        why = "; ".join(reasons[:NAMES_SHOWN] + more) or "there is no checkpoint folder in it"
        return Report(data, error=IncompleteError(f"nothing is published from {options.watch}: {why}"))
    return Report(data, lambda _: None)


def _reasons(folders: "dict[str, str]") -> list[dict[str, str]]:
    return [{"checkpoint": name, "message": message} for name, message in folders.items()]


def _document(publisher: "CheckpointPublisher", result: "PublishedCheckpoint") -> dict[str, Any]:
    return {
        "run": publisher.run.info.run,
        "checkpoint": str(result.folder),
        **pick(result, "outcome step reason"),
        **pick(result.manifest, "version kind changed total payload_bytes full_bytes"),
        "seconds": round(result.seconds, 3),
    }


def _print(document: dict[str, Any]) -> None:
    name, version, step = document["checkpoint"], document["version"], document["step"]
    text = f"not published: {document['reason']}"
    if document["outcome"] == "published":
        changed = document["kind"]
        if changed == "delta":
            changed = f"{percent(document['changed'], document['total'])} changed"
        text = f"version {version} (step {step}), {changed}, {size(document['payload_bytes'])}"
        text += f", {document['seconds']:.1f} s"
    print(clean(f"{name}: {text}"))

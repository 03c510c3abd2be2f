"""``delta-sync follow``, which ``maintenance.follow`` does."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import (
    BASE,
    RUN,
    SHARD_BYTES,
    VERSION,
    bucket_url,
    interval,
    keyring_of,
    opened,
    positive,
    version,
)
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import ProgressBar, clean, pick, print_event, size
from vllm_delta_sync.engine.commit.interrupts import postpone_interrupts
from vllm_delta_sync.errors import IncompleteError, UsageError
from vllm_delta_sync.run.run_reader import MOVING
from vllm_delta_sync.settings import ON_UPDATE_VARIABLES

if TYPE_CHECKING:
    from vllm_delta_sync.maintenance.follow_folder import FollowedVersion

STDERR = 2
"""File descriptor of standard error."""


@command(
    "follow",
    "keep a checkpoint folder at the newest version",
    *RUN,
    option("--to", required=True, metavar="DIR", help="folder to keep; created if it does not exist"),
    option(
        "--version",
        type=version,
        metavar=VERSION,
        help="follow this tag, or end at this version, as it is at the start; default: the newest that is not "
        "quarantined",
    ),
    option(
        "--format",
        choices=("checkpoint", "slime", "slime-full"),
        default="checkpoint",
        help="slime: folders with deltas; slime-full: whole ones; default: checkpoint",
    ),
    option("--once", action="store_true", help="end when the folder is at the version"),
    option("--poll", type=interval, default=2.0, metavar="TIME", help="time between polls of the bucket; default: 2"),
    option("--keep", type=positive, default=2, metavar="N", help="versions to keep, with the current one; default: 2"),
    option("--on-update", metavar="COMMAND", help="command to run after each switch"),
    BASE,
    SHARD_BYTES,
    failed="with --once: weights or documents are damaged, or the --on-update command failed",
)
def follow(options: argparse.Namespace) -> Report:
    """Keep a checkpoint folder at the newest version of a run, bit for bit, for engines other than vLLM.

    DIR/current is a symbolic link to the folder of one whole version, which any engine loads as a Hugging Face
    checkpoint. It switches in one step. Give engines the folder itself: the link may switch while they load. Files
    whose tensors did not change are hard links to those of the version before. Digests, fingerprints and (with
    --trusted-keys) signatures are checked.

    --format slime writes DIR/weight_v000007 for version 7 instead, as SGLang, miles, Stitch and vime read it: a delta
    on the version before, or a whole checkpoint.

    The command of --on-update runs after each switch, without a shell, with DELTA_SYNC_FOLDER, DELTA_SYNC_VERSION and
    DELTA_SYNC_STEP in its environment; the next version waits for it. If it failed or was interrupted, it runs
    again at the next start. It is safe to interrupt or kill at any moment: DIR/current stays one whole version.

    examples:
      delta-sync follow --bucket s3://bucket/runs/a --to /models/a --on-update "./reload.sh --now"
      delta-sync follow --bucket /data/runs/a --to /models/a --version tag:best --once
      delta-sync follow --bucket /data/runs/a --to /mnt/shared/updates --format slime
    """
    from vllm_delta_sync.maintenance.checkpoint_files import SHARD_BYTES
    from vllm_delta_sync.maintenance.follow import follow

    on_update = [] if options.on_update is None else _split(options.on_update)
    rows: list[dict[str, Any]] = []
    failed: IncompleteError | None = None
    bar = options.closing.enter_context(ProgressBar("bytes"))
    named = options.version
    if isinstance(named, str) and named.startswith(MOVING):  # only the head and tags are followed
        named = opened(options).resolve(named).version
    updates = follow(
        bucket_url(options), options.to, named, once=options.once, poll_seconds=options.poll,
        keep=options.keep, base=options.base, format=options.format, shard_bytes=options.shard_bytes or SHARD_BYTES,
        keyring=keyring_of(options), store=options.settings.store(), progress=bar.update,
    )  # fmt: skip
    ends = options.once or isinstance(named, int)
    if not ends:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    update = next(updates, None)
    while update is not None:
        row = {
            **pick(update, "version step manifest read_bytes linked"),
            "directory": str(update.folder),
            "seconds": round(update.seconds, 3),
        }
        rows += [row] if ends else []
        if not (ends and options.json):
            print_event(options, row, partial(_print, row))
        if on_update:
            failed = _run(on_update, update, options.json)
        try:
            update = updates.send(failed is None)
        except StopIteration:
            break
    if not rows and not options.json and failed is None:
        print(f"{clean(options.to)} is at the version already")
    return Report({"directory": options.to, "versions": rows}, lambda _: None, failed)


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--on-update {command!r} cannot be split into words: {error}") from error
    if not words:
        raise UsageError("--on-update is empty; name a command")
    return words


def _run(command: list[str], update: "FollowedVersion", as_json: bool) -> IncompleteError | None:
    """Run the command for a version; report and return its failure. Args: as_json: whether output is JSON only."""
    # Absolute: the command gives it to engines that run elsewhere.
    values = os.path.abspath(update.folder), update.version, update.step
    variables = dict(zip(ON_UPDATE_VARIABLES, map(str, values), strict=True))
    try:
        with ExitStack() as ended:
            with postpone_interrupts(signal.SIGTERM):  # until it is known what is to be ended
                started = subprocess.Popen(
                    command,
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=STDERR if as_json else None,
                )
                ended.enter_context(started)
                ended.callback(started.kill)
            code = started.wait()
        problem = f"ended with exit code {code}" if code else None
    except OSError as error:
        problem = f"cannot be started: {error.strerror}"
    if problem is None:
        return None
    failed = IncompleteError(f"version {update.version}: {command[0]!r} {problem}")
    print(clean(failed.message), file=sys.stderr, flush=True)
    return failed


def _print(row: dict[str, Any]) -> None:
    where = f"version {row['version']} (step {row['step']}) in {row['directory']}"
    read = f"read {size(row['read_bytes'])} in {row['seconds']:.1f} s, {len(row['linked'])} files unchanged"
    print(clean(f"{where}: {read}"))

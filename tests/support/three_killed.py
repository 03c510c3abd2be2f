"""Trainers of examples/three_machines to be killed: a warm process that forks one for each line it reads.

Each line is ``FOLDER POINT ARGUMENT…``: a trainer with those arguments, which writes to FOLDER's files ``events`` and
``errors``, and kills itself with SIGKILL at POINT, if that is not ``-``: ``NAME:before:3`` is before the third call of
what NAME stands for in CALLS, ``NAME:after:1`` after the first; ``NAME:before:3:SIGTERM`` uses another signal. It
answers with the exit status. Only the seconds that imports take are spared.
"""

import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from examples.three_machines import trainer
from trainer_side import Publisher
from vllm_delta_sync.bucket.local import LocalBucket

CALLS: dict[str, tuple[Any, str, str]] = {
    "gradient": (trainer, "gradient", ""),
    "flush": (Publisher, "flush", ""),
    "step": (torch.optim.AdamW, "step", ""),
    "save": (trainer.Trainer, "save", ""),
    "sync": (trainer, "sync", ""),
    "publish": (Publisher, "publish", ""),
    "object": (LocalBucket, "put", "objects/"),
    "sidecar": (LocalBucket, "put", "sidecars/"),
    "manifest": (LocalBucket, "put", "versions/"),
    "head": (LocalBucket, "put", "HEAD"),
}
"""Name → where it is, what it is called, and of calls for a key how that begins."""


def kill_at(point: str) -> None:
    name, when, number, *chosen = point.split(":")
    deadly_signal = signal.Signals[chosen[0] if chosen else "SIGKILL"]
    owner, attribute, prefix = CALLS[name]
    original: Callable[..., Any] = getattr(owner, attribute)
    left = [int(number)]

    @functools.wraps(original)
    def deadly(*arguments: Any, **named: Any) -> Any:
        counts = not prefix or str(arguments[1]).startswith(prefix)
        left[0] -= counts
        if counts and left[0] == 0 and when == "before":
            os.kill(os.getpid(), deadly_signal)
        result = original(*arguments, **named)
        if counts and left[0] == 0:
            os.kill(os.getpid(), deadly_signal)
        return result

    setattr(owner, attribute, deadly)


def run_forked(folder: str, point: str, arguments: list[str]) -> int:
    """Exit status of a trainer in a child of its own; minus the signal that ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 70
    try:
        for number, name in ((1, "events"), (2, "errors")):
            os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        if point != "-":
            kill_at(point)
        try:
            status = trainer.main(arguments)
        except SystemExit as ended:
            print(ended, file=sys.stderr, flush=True)
            status = 1
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(status)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, point, *arguments = line.split()
        print(run_forked(folder, point, arguments), flush=True)


if __name__ == "__main__":
    main()

"""Trainers of examples/three_machines that kill themselves, for ``tests.trainer.sharded.nursery``, which spares each of
them the seconds that imports take."""

import functools
import os
import signal
import sys
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
    """``NAME:before:3`` is before the third call of what NAME stands for in CALLS, ``NAME:after:1`` after the first;
    ``NAME:before:3:SIGTERM`` uses another signal than SIGKILL."""
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


def train(rank: int, size: int, folder: str, point: str, arguments: list[str]) -> None:
    """A trainer with those arguments, which writes to ``folder``'s files ``events`` and ``errors``, and is killed at a
    point, if that is not ``-``."""
    for number, name in ((1, "events"), (2, "errors")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if point != "-":
        kill_at(point)
    sys.exit(trainer.main(arguments))

"""``StopSignal``: end a training at a step boundary when SIGTERM comes, on all ranks at the same step."""

import signal
import threading
import time
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch import distributed

from trainer_side.ranks.group import WORK_SECONDS, in_world
from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger(__name__)

GRACE_SECONDS = 25.0
"""Kubernetes and Slurm kill a process 30 s after SIGTERM by default."""


class StopSignal:
    """From construction until ``close``, SIGTERM ends the training at a step, instead of the process at once.

    A handler that was there before is called as well, except Python's own that raises KeyboardInterrupt. Outside of the
    main thread, and where SIGTERM is ignored, nothing is changed. Every rank of a world constructs it at the same point
    of the program.

    Args:
        seconds: how long after the signal the process may still work.
    """

    def __init__(self, seconds: float = GRACE_SECONDS) -> None:
        self._seconds = seconds
        self._came_at: float | None = None
        self._before: Any = None  # as ``signal.getsignal`` returns it
        self._installed = False
        self._group: distributed.ProcessGroup | None = None
        self._vote: tuple[distributed.Work, torch.Tensor] | None = None
        if in_world():
            self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=WORK_SECONDS))
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            if self._before is not signal.SIG_IGN and self._before is not None:
                signal.signal(signal.SIGTERM, self._handle)
                self._installed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._came_at is None:
            self._came_at = time.monotonic()
        if callable(self._before) and self._before is not signal.default_int_handler:
            self._before(number, frame)

    def came(self) -> bool:
        """Return whether training is to end now, the same on every rank; to be called by all of them at each step.

        With several ranks it answers what was known at the call before, so that no rank waits for another.
        """
        if self._group is None:
            return self._came_at is not None
        vote, wanted = self._vote, False
        if vote is not None:
            vote[0].wait()
            wanted = bool(vote[1].item())
        flag = torch.tensor([int(self._came_at is not None)], dtype=torch.int32, device="cpu")
        work = distributed.all_reduce(flag, distributed.ReduceOp.MAX, group=self._group, async_op=True)
        self._vote = None if work is None else (work, flag)
        return wanted

    @property
    def left(self) -> float:
        """Seconds that this process may still work; without a signal, no limit."""
        return float("inf") if self._came_at is None else max(0.0, self._came_at + self._seconds - time.monotonic())

    def close(self) -> None:
        """Put the former handler back."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)
        self._installed = False
        group, self._group, self._vote = self._group, None, None
        if group is not None and distributed.is_initialized():
            distributed.destroy_process_group(group)

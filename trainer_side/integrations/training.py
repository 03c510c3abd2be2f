"""``TrainingPublisher``: the publisher of one training, for the integration of any framework.

It makes the publisher, reports each version, keeps the other processes waiting while the store is slow, ends a training
at SIGTERM (``StopSignal``), and decides whether an error of publishing ends it too. ``MetricReporter`` reports versions
as metrics, to the Trainer and to this project's log.
"""

import inspect
import math
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed

from trainer_side.options import PublisherOptions
from trainer_side.publisher import Publisher
from trainer_side.ranks.group import WORK_SECONDS, ProcessGroup, in_world, leave
from trainer_side.result import METRICS, Deadline, PublishResult
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import ConflictError, DeltaSyncError
from vllm_delta_sync.logs import guarded_logger

logger = guarded_logger(__name__)


def find_calling_trainer() -> Any:
    """Return the Trainer of transformers among the callers; None if there is none.

    Callbacks and weight transfers do not receive their Trainer. Loggers named by ``report_to`` are called before a
    callback, so that metrics added to the ``logs`` of ``on_log`` never reach them; only ``Trainer.log`` does. To be
    removed once events name their Trainer.
    """
    module = sys.modules.get("transformers.trainer")
    frame = inspect.currentframe()
    while module is not None and frame is not None:
        # Of other frames the locals stay unread: before Python 3.13, a frame keeps alive what is read of it.
        if frame.f_globals is vars(module):
            owner = frame.f_locals.get("self")
            if isinstance(owner, module.Trainer):
                return owner
        frame = frame.f_back
    return None


class MetricReporter:
    """Reports each version once it is durable, and errors of publishing.

    Attributes:
        trainer: its log gets the metrics; if None, only this project's log does.
    """

    def __init__(self) -> None:
        self.trainer: Any = None
        self._ended: deque[PublishResult] = deque()  # filled by the publisher's thread; can be copied and pickled
        self._skipped = 0
        self._skipped_before: dict[int, int] = {}
        self._failure: str | None = None

    def begin(self) -> None:
        """Report to the Trainer that called."""
        self.trainer = find_calling_trainer()
        if self.trainer is None:
            logger.warning("no Trainer is found among the callers: metrics go to this log only")

    def listening(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return options of ``Publisher`` with an ``on_version`` that tells this reporter, and then the one given."""
        # Not this reporter, which knows the publisher: the publisher's thread would keep it alive for ever.
        given, ended = options.get("on_version"), self._ended

        def on_version(result: PublishResult) -> None:
            ended.append(result)
            if given is not None:
                given(result)

        return {**options, "on_version": on_version}

    def published(self, result: PublishResult) -> None:
        """Count what ``publish`` returned."""
        if result.version is None:
            self._skipped += 1
        else:
            self._skipped_before[result.version], self._skipped = self._skipped, 0

    def report(self) -> None:
        """Log the versions that have become durable. The publisher's next call raises the error of one that failed."""
        while self._ended:
            result = self._ended.popleft()
            if not result.failed:
                self._report(result)

    def _report(self, result: PublishResult) -> None:
        skipped = self._skipped_before.pop(result.version or 0, self._skipped)
        metrics = result.metrics() | {f"{METRICS}skipped": skipped}
        if self._failure is not None:
            logger.warning("version %d is published: publishing works again", result.version)
            self._failure = None
        logger.info("%s", ", ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
        if self.trainer is not None:
            _log(self.trainer, metrics)

    def failed(self, error: DeltaSyncError) -> None:
        """Log that training continues without a version; once per kind of error until a version is published again."""
        if error.kind != self._failure:
            # Otherwise a store that is down would be logged at every step.
            self._failure = error.kind
            logger.error(
                "not published (%s), training continues; the next version that is published makes up for it: %s",
                error.kind, error,
            )  # fmt: skip


def _log(trainer: Any, metrics: dict[str, float]) -> None:
    """Call the Trainer's log, without the side effects of its own logging."""
    from transformers import Trainer

    # ``log`` clears the flag that requests logging, and the Trainer's own log of this step is still to come.
    wanted = trainer.control.should_log
    # Call the base class: subclasses such as TRL's average over the time since their last call.
    Trainer.log(trainer, metrics)
    trainer.control.should_log = wanted


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
        self._end: Deadline | None = None  # from the signal on
        self._before: Any = None  # as ``signal.getsignal`` returns it
        self._process: int | None = None  # where the handler is installed
        self._group: distributed.ProcessGroup | None = None
        self._vote: tuple[distributed.Work, torch.Tensor] | None = None
        if in_world():
            self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=WORK_SECONDS))
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)
            if self._before is not signal.SIG_IGN and self._before is not None:
                signal.signal(signal.SIGTERM, self._handle)
                self._process = os.getpid()

    @property
    def _installed(self) -> bool:
        # A process that the training has forked inherits the handler, and is to end as if there were none.
        return self._process == os.getpid()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._installed and self._end is None:
            self._end = Deadline(self._seconds)
        # Once this is closed, a handler that was installed later may still call it, or have put it back.
        if callable(self._before) and not (self._installed and self._before is signal.default_int_handler):
            self._before(number, frame)
        elif not self._installed:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def came(self) -> bool:
        """Return whether training is to end now, the same on every rank; to be called by all of them at each step.

        With several ranks it answers what was known at the call before, so that no rank waits for another.
        """
        if self._group is None:
            return self._end is not None
        vote, wanted = self._vote, False
        if vote is not None:
            vote[0].wait()
            wanted = bool(vote[1].item())
        flag = torch.tensor([int(self._end is not None)], dtype=torch.int32, device="cpu")
        work = distributed.all_reduce(flag, distributed.ReduceOp.MAX, group=self._group, async_op=True)
        self._vote = None if work is None else (work, flag)
        return wanted

    @property
    def left(self) -> float:
        """Seconds that this process may still work; without a signal, no limit."""
        return math.inf if self._end is None else self._end.left

    def close(self) -> None:
        """Put the former handler back."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)
        self._process = None
        group, self._group, self._vote = self._group, None, None
        leave(group)


class TrainingEnd(Deadline):
    """When the end of a training must be done: some seconds after it began, or earlier once SIGTERM has come."""

    def __init__(self, seconds: float, stop: StopSignal | None) -> None:
        super().__init__(seconds)
        self._stop = stop

    @property
    def left(self) -> float:
        return super().left if self._stop is None else min(super().left, self._stop.left)

    def __str__(self) -> str:
        came = self._stop is not None and self._stop.left < math.inf
        return "the time that SIGTERM leaves" if came else super().__str__()


class TrainingPublisher:
    """Publishes one training after another. Every process of a training has one, and calls it at the same points.

    Attributes:
        publisher: from ``open`` until ``close``, in processes that publish; else None.
        reports: of the present training.

    Args:
        bucket, options: as of ``Publisher``.
        stop_on_error: whether ``attempt`` raises every error. always_raised: kinds that it raises in any case.
        close_seconds: how long the end of a training may take. grace_seconds: the same after SIGTERM.

    Raises:
        UsageError: an option is invalid, or not one of ``Publisher``.
    """

    def __init__(
        self,
        bucket: str | Path | Bucket,
        options: dict[str, Any],
        stop_on_error: bool,
        close_seconds: float,
        grace_seconds: float,
        always_raised: tuple[type[DeltaSyncError], ...] = (),
    ) -> None:
        PublisherOptions(bucket, **options)
        # An error of these would come at the end only, and lose the last weights.
        Deadline(close_seconds, "close_seconds")
        Deadline(grace_seconds, "grace_seconds")
        self._bucket, self._options = bucket, options
        self._raised = (DeltaSyncError,) if stop_on_error else always_raised
        self._close_seconds, self._grace_seconds = close_seconds, grace_seconds
        self.publisher: Publisher | None = None
        self.reports = MetricReporter()
        self._waiting: ProcessGroup | None = None
        self._stop: StopSignal | None = None
        self._end: Deadline | None = None

    @property
    def waits(self) -> bool:
        """Whether the other processes wait for the one that publishes."""
        return self._waiting is not None

    @property
    def is_rank0(self) -> bool:
        """Whether this process is the one that the others wait for."""
        return self._waiting is not None and self._waiting.is_rank0

    @property
    def deadline(self) -> Deadline:
        """When the end of the training must be done; its time begins with the first use."""
        self._end = self._end or TrainingEnd(self._close_seconds, self._stop)
        return self._end

    def begin(self, one_publishes: bool) -> None:
        """Let SIGTERM end the training; if one process publishes for all, let the others wait in ``on_rank0``."""
        self._stop = StopSignal(self._grace_seconds)
        if one_publishes:
            self._waiting = ProcessGroup(WORK_SECONDS, alone=not in_world())

    def open(self, make: Callable[..., Publisher], reports: bool = True, **more: Any) -> None:
        """Make the publisher.

        Args:
            make: called with ``bucket=`` and the options. reports: whether this process reports.
            more: options that come before the others.

        Raises:
            DeltaSyncError: as ``Publisher``.
        """
        self.reports, self._end = MetricReporter(), None
        options = self.reports.listening(more | self._options)
        self.publisher = make(bucket=self._bucket, **options)
        if reports:
            self.reports.begin()

    def on_rank0(self, what: str, work: Callable[[], None]) -> None:
        """Do ``work`` in each process that publishes; where only one does, the others wait, and raise its error."""
        if self._waiting is None:
            work()
        else:
            self._waiting.from_rank0(what, work)

    def attempt(self, call: Callable[[], object]) -> None:
        """Make a call that publishes; errors that do not end the training are logged."""
        try:
            call()
        except self._raised:
            raise
        except ConflictError as error:
            if self.publisher is not None:  # otherwise the process that publishes says it, here and below
                logger.error("nothing more is published by this training, which continues: %s", error)
                self.close(finish=False)
        except DeltaSyncError as error:
            if self.publisher is not None:
                self.reports.failed(error)

    def finish(self) -> None:
        """Leave the run at the last weights, wait until they are durable, and report them."""
        if self.publisher is not None:
            self.publisher.finish(self.deadline)
            self.reports.report()

    def is_stopped(self, step: int) -> bool:
        """Return whether SIGTERM ends the training after this step, the same in every process; call it at each."""
        stopped = self._stop is not None and self._stop.came()
        if stopped:
            logger.warning("SIGTERM: training ends after step %d", step)
        return stopped

    def close(self, finish: bool) -> None:
        """Close the publisher; raises as ``Publisher.close``, after everything of it is released."""
        publisher, self.publisher = self.publisher, None
        if publisher is None:
            return
        try:
            publisher.close(self.deadline, finish=finish)
        finally:
            self.reports.report()

    def release(self) -> None:
        """Put the handler of SIGTERM back, and leave the group of waiting processes."""
        stop, waiting, self._stop, self._waiting = self._stop, self._waiting, None, None
        if stop is not None:
            stop.close()
        if waiting is not None:
            waiting.close()

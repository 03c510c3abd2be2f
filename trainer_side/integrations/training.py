"""``TrainingPublisher``: the publisher of one training, for the integration of any framework.

It makes the publisher, reports each version, keeps the other processes waiting while the store is slow, ends a training
at SIGTERM, and decides whether an error of publishing ends it too.
"""

import math
from collections.abc import Callable
from typing import Any

from trainer_side.integrations.reports import MetricReporter
from trainer_side.integrations.stop_signal import StopSignal
from trainer_side.model.sources import ModelLike
from trainer_side.options import PublisherOptions
from trainer_side.publisher import Publisher
from trainer_side.ranks.group import WORK_SECONDS, ProcessGroup, in_world
from trainer_side.result import Deadline
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import ConflictError, DeltaSyncError
from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger(__name__)


class TrainingPublisher:
    """Publishes one training after another. Every process of a training has one, and calls it at the same points.

    Attributes:
        publisher: from ``open`` until ``close``, in processes that publish; else None.
        reports: of the present training.

    Args:
        bucket, options: as of ``Publisher``.
        stop_on_error: whether ``attempt`` raises every error. always_raised: kinds that it raises in any case.
        receivers_lag: whether metrics have the lag of receivers.
        close_seconds: how long the end of a training may take. grace_seconds: the same after SIGTERM.

    Raises:
        UsageError: an option is invalid, or not one of ``Publisher``.
    """

    def __init__(
        self,
        bucket: str | Bucket,
        options: dict[str, Any],
        stop_on_error: bool,
        receivers_lag: bool,
        close_seconds: float,
        grace_seconds: float,
        always_raised: tuple[type[DeltaSyncError], ...] = (),
    ) -> None:
        PublisherOptions(bucket, **options)
        self._bucket, self._options = bucket, options
        self._raised = (DeltaSyncError,) if stop_on_error else always_raised
        self._report_lag = receivers_lag
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
    def seconds_left(self) -> float:
        """How long the end of the training may still take; it begins with the first use."""
        self._end = self._end or Deadline(self._close_seconds)
        return min(self._end.left or 0.0, math.inf if self._stop is None else self._stop.left)

    def begin(self, one_publishes: bool) -> None:
        """Let SIGTERM end the training; if one process publishes for all, let the others wait in ``on_rank0``."""
        self._stop = StopSignal(self._grace_seconds)
        if one_publishes:
            self._waiting = ProcessGroup(WORK_SECONDS, alone=not in_world())

    def open(self, model: ModelLike, reports: bool = True, **more: Any) -> None:
        """Make the publisher. Args: reports: whether this process reports. more: options that come before the others.

        Raises:
            DeltaSyncError: as ``Publisher``.
        """
        self.reports, self._end = MetricReporter(), None
        options = self.reports.listening(more | self._options)
        self.publisher = publisher = Publisher(model, self._bucket, **options)
        if reports:
            self.reports.begin(self._bucket, publisher, self._report_lag)

    def on_rank0(self, what: str, work: Callable[[], None]) -> None:
        """Do ``work`` in each process that publishes; where only one does, the others wait, and raise its error."""
        if self._waiting is None:
            work()
        else:
            self._waiting.from_rank0(what, work)

    def attempt(self, call: Callable[[], None]) -> None:
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
            self.publisher.finish(self.seconds_left)
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
            publisher.close(self.seconds_left, finish=finish)
        finally:
            self.reports.report()
            self.reports.close()

    def release(self) -> None:
        """Put the handler of SIGTERM back, and leave the group of waiting processes."""
        stop, waiting, self._stop, self._waiting = self._stop, self._waiting, None, None
        if stop is not None:
            stop.close()
        if waiting is not None:
            waiting.close()

"""``MetricReporter``: report a training's versions as metrics, to its Trainer and to this project's log.

``ReceiverLag`` measures, beside training, how far the receivers of a run are behind."""

import inspect
import sys
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from trainer_side.background_thread import BackgroundJob, BackgroundThread
from trainer_side.publisher import Publisher
from trainer_side.result import METRICS, PublishResult
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.fleet.fleet import Fleet
from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger(__name__)


REFRESH_SECONDS = 10.0
"""Heartbeats are read at most this often: each time one listing, and one small object for each new heartbeat."""


class ReceiverLag:
    """Reads heartbeats of receivers from time to time, in a thread.

    Args:
        bucket: URL of the run, or an open bucket, which the caller closes.
        newest: returns the number of the newest version; called in the thread.
        clock: seconds.
    """

    def __init__(
        self, bucket: str | Bucket, newest: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = bucket
        self._newest = newest
        self._clock = clock
        self._worker = BackgroundThread("delta-sync-receivers")
        self._job: BackgroundJob | None = None
        self._started = float("-inf")
        self._run: Run | None = None
        self._fleet: Fleet | None = None
        self._lag: int | None = None

    @property
    def lag(self) -> int | None:
        """Versions that the slowest live receiver was behind when last read; None if no heartbeat says it."""
        return self._lag

    def refresh(self) -> None:
        """Start reading the heartbeats, unless that is running or was done recently. Returns at once."""
        now = self._clock()
        if now - self._started < REFRESH_SECONDS or not (self._job is None or self._job.done):
            return
        if self._job is not None and self._job.error is not None:
            logger.warning("how far receivers are behind is not known: %r", self._job.error)
        self._started, self._job = now, BackgroundJob()
        self._worker.submit(self._job, self._refresh)

    def close(self) -> None:
        """Wait for a read that is running, then release thread and connections."""
        self._worker.close()
        if self._run is not None and not isinstance(self._bucket, Bucket):
            self._run.close()

    def _refresh(self) -> None:
        try:
            if self._fleet is None:
                self._run = Run(self._bucket) if isinstance(self._bucket, Bucket) else open_run(self._bucket)
                self._fleet = Fleet(self._run)
            self._fleet.poll()
        except DeltaSyncError as error:
            logger.debug("how far receivers are behind is not known: %s", error)
            self._lag = None
            return
        served = [live.heartbeat.served for live in self._fleet.live if live.heartbeat.served is not None]
        self._lag = max(0, self._newest() - min(served)) if served else None


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
        lag: if None, the lag of receivers is not reported.
    """

    def __init__(self) -> None:
        self.trainer: Any = None
        self.lag: ReceiverLag | None = None
        self._ended: SimpleQueue[PublishResult] = SimpleQueue()
        self._skipped = 0
        self._skipped_before: dict[int, int] = {}
        self._failure: str | None = None

    def begin(self, bucket: str | Bucket, publisher: Publisher, lag: bool) -> None:
        """Report to the Trainer that called, and measure the lag of receivers if ``lag``."""
        self.trainer = find_calling_trainer()
        if self.trainer is None:
            logger.warning("no Trainer is found among the callers: metrics go to this log only")
        if lag:
            self.lag = ReceiverLag(bucket, lambda: publisher.version)

    def listening(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return options of ``Publisher`` with an ``on_version`` that tells this reporter, and then the one given."""
        # Not this reporter, which knows the publisher: the publisher's thread would keep it alive for ever.
        given, ended = options.get("on_version"), self._ended

        def on_version(result: PublishResult) -> None:
            ended.put(result)
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
        while True:
            try:
                result = self._ended.get_nowait()
            except Empty:
                return
            if not result.failed:
                self._report(result)

    def _report(self, result: PublishResult) -> None:
        skipped = self._skipped_before.pop(result.version or 0, self._skipped)
        metrics = result.metrics() | {f"{METRICS}skipped": skipped}
        if self._failure is not None:
            logger.warning("version %d is published: publishing works again", result.version)
            self._failure = None
        if self.lag is not None:
            if self.lag.lag is not None:
                metrics[f"{METRICS}receivers_lag"] = self.lag.lag
            self.lag.refresh()
        logger.info("%s", ", ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
        if self.trainer is not None:
            _log(self.trainer, metrics)

    def failed(self, error: DeltaSyncError) -> None:
        """Log that training continues without a version; once per kind of error until a version is published again."""
        if error.kind != self._failure:
            # Otherwise a store that is down would be logged at every step.
            self._failure = error.kind
            logger.error(
                "not published (%s), training continues and the next version makes up for it: %s", error.kind, error
            )

    def close(self) -> None:
        """Release thread and connections."""
        if self.lag is not None:
            self.lag.close()


def _log(trainer: Any, metrics: dict[str, float]) -> None:
    """Call the Trainer's log, without the side effects of its own logging."""
    from transformers import Trainer

    # ``log`` clears the flag that requests logging, and the Trainer's own log of this step is still to come.
    wanted = trainer.control.should_log
    # Call the base class: subclasses such as TRL's average over the time since their last call.
    Trainer.log(trainer, metrics)
    trainer.control.should_log = wanted

"""``ReceiverLag``: measure, beside training, how far the receivers of a run are behind."""

import time
from collections.abc import Callable

from trainer_side.background_thread import BackgroundJob, BackgroundThread
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

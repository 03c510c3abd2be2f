"""Versions that are skipped because the store is slower than training: said once, not at every step."""

import time
from collections.abc import Callable

from trainer_side.result import PublishResult
from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger(__name__)


class SkipLog:
    """Says in the log that calls of ``publish`` are skipped, and why: once until a version is published again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._before: PublishResult | None = None
        self._count = 0

    def note(self, result: PublishResult) -> None:
        """Take note of what ``publish`` has returned."""
        if result.version is None:
            self._count += 1
            if self._count == 1 and self._before is not None and not self._before.done:
                self._say(result.step, self._before)
            return
        count, self._count = self._count, 0
        if count:
            logger.info("step %d: published again, after %d that were skipped", result.step, count)
        self._before, self._since = result, self._clock()

    def _say(self, step: int, before: PublishResult) -> None:
        logger.warning(
            "step %d is not published: encoding and upload of version %s (step %d) take %.1f s so far, longer than the "
            "steps since. What has changed goes out with the next version, and nothing queues up; publish less often, "
            "or to a faster store, if versions are wanted as often as this",
            step,
            before.version,
            before.step,
            self._clock() - self._since,
        )

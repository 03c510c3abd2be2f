"""The caller's side of publishing: compare, hand over to the background thread, and wait for it where that is due."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TypeVar

import torch

from trainer_side.background_thread import BackgroundThread
from trainer_side.committer import Committer
from trainer_side.diff.engine import Detector
from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.model.sources import LiveTensors
from trainer_side.options import Options, check_step
from trainer_side.result import PublishProgress, PublishResult, Stopwatch
from trainer_side.sidecars import Bytes, checked_sidecars
from trainer_side.skip_log import SkipLog
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.table import TensorTable

Weights = Iterable[tuple[str, torch.Tensor]]
Sidecars = Mapping[str, Bytes] | None
_Given = TypeVar("_Given")


class PublishSession:
    """One version after another. One caller at a time.

    Args:
        live: what is published. table: of the run.
        detector: compares. background: thread that makes versions durable with ``committer``.
    """

    def __init__(
        self,
        live: LiveTensors,
        table: TensorTable,
        options: Options,
        committer: Committer,
        detector: Detector,
        background: BackgroundThread,
    ) -> None:
        self._live, self._table, self._options = live, table, options
        self._committer, self._detector, self._background = committer, detector, background
        self._calls = 0
        self._patch: PendingDelta | None = None
        self._progress: PublishProgress | None = None
        self._called_off = False
        self._skips = SkipLog()

    def publish(
        self, step: int, wait: bool, weights: Weights | None, watch: Stopwatch, sidecars: Sidecars
    ) -> PublishResult:
        """See ``Publisher.publish``."""
        step, kept = check_step(step), checked_sidecars(sidecars)
        if weights is None and not self._live.held:
            raise UsageError("this publisher is handed its weights with each version: give weights=")
        if not self._busy:
            self.finish()
        self._calls += 1
        if self._calls % self._options.every:
            return self._skipped(step, watch)
        if self._busy and not wait:
            return self._skipped_for_another(step, watch)
        self.finish()
        watch.lap()
        return self._handed_over(step, self._diff(weights), watch, kept)

    def settle(self) -> None:
        """Wait until what was published is durable, before something else is done; raises as ``finish``."""
        self.finish()

    def finish(self) -> None:
        """Wait for the version under way; bring the baseline to a durable version.

        Raises:
            PublishError, ConflictError: what the background thread met, if nobody was told yet.
        """
        if self._progress is not None and not self._progress.delivered:
            self._progress.wait()
        committer, patch = self._committer, self._patch
        if committer.stopped is not None:
            raise type(committer.stopped)(committer.stopped.message)
        if (patch is not None and patch.open) or committer.suspect or self._called_off:
            # Also waits for what a caller who was interrupted has left under way.
            self._background.call(lambda: committer.tidy(patch))
            self._called_off = False

    def call(self, work: Callable[[], None]) -> None:
        """Have the background thread do something to the baseline; nothing else touches it before that has ended.

        Raises:
            PublishError, ConflictError: as ``settle``, which comes first. Else whatever ``work`` raises.
        """
        self.settle()
        self._called_off = True
        self._background.call(work)
        self._called_off = False

    def agreed(self, what: str, check: Callable[[], _Given]) -> _Given:
        """What ``check`` makes of a call's arguments, once all processes that publish together have made the same.

        Raises:
            UsageError: what ``check`` raised, in any of them.
        """
        return check()

    def led(self, what: str, work: Callable[[], str]) -> str:
        """What ``work`` gives, which is done once for all processes that publish together."""
        return work()

    @property
    def _busy(self) -> bool:
        return self._progress is not None and not self._progress.done

    def _diff(self, weights: Weights | None) -> PendingDelta:
        options = self._options
        patch = self._patch = PendingDelta(
            self._committer.baseline, options.base_codec, options.compression, self._detector
        )
        with ExitStack() as undo:
            undo.callback(self._background.call, patch.revert)
            patch.add_all(self._live.read() if weights is None else self._live.given(weights))
            undo.pop_all()
        return patch

    def _handed_over(
        self, step: int, patch: PendingDelta, watch: Stopwatch, sidecars: Mapping[str, bytes]
    ) -> PublishResult:
        progress = PublishProgress(sidecars)
        progress.seconds["diff"] = watch.lap()
        version = self._committer.newest.version + 1
        result = self._result(version, step, patch.changed, progress.seconds["diff"], progress)
        self._background.submit(progress, lambda: self._committer.work(patch, step, progress, watch))
        self._progress = progress
        self._skips.note(result)
        return result

    def _skipped_for_another(self, step: int, watch: Stopwatch) -> PublishResult:
        """The version before is still on its way: the store is slower than training."""
        result = self._skipped(step, watch)
        self._skips.note(result)
        return result

    def _skipped(self, step: int, watch: Stopwatch) -> PublishResult:
        return self._result(None, step, 0, watch.total, None)

    def _result(
        self, version: int | None, step: int, changed: int, diff_seconds: float, progress: PublishProgress | None
    ) -> PublishResult:
        return PublishResult(
            version=version, step=step, changed=changed, total=self._table.total, full_bytes=self._table.full_bytes,
            diff_seconds=diff_seconds, progress=progress,
        )  # fmt: skip

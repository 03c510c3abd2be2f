"""``PublishSession``: compare, hand over to the background thread, wait. ``build_publisher``: a publisher's parts."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import distributed

from trainer_side.background_thread import BackgroundThread
from trainer_side.committer import Committer
from trainer_side.diff.engine import Detector
from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.maintenance import BackgroundMaintenance
from trainer_side.model.sources import LiveTensors, ModelLike, live_tensors
from trainer_side.options import Options, SidecarData, check_step, checked_sidecars
from trainer_side.result import PublishProgress, PublishResult, Stopwatch
from trainer_side.run_files import collect_files
from trainer_side.takeover import OpenedRun, open_or_begin
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.redaction import guarded_logger

if TYPE_CHECKING:
    from trainer_side.ranks.group import RankGroups

logger = guarded_logger(__name__)

Weights = Iterable[tuple[str, torch.Tensor]]
Sidecars = Mapping[str, SidecarData] | None
_Value = TypeVar("_Value")
_Result = TypeVar("_Result")


class PublishSession:
    """Publishes one version after another, on the caller's side. One caller at a time.

    Args:
        live: tensors to publish. table: tensors of the run.
        detector: compares. background: thread in which ``committer`` makes versions durable.
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
        self._pending: PendingDelta | None = None
        self._progress: PublishProgress | None = None
        self._call_interrupted = False
        self._skip_log = SkipLog()

    def publish(
        self, step: int, wait: bool, weights: Weights | None, watch: Stopwatch, sidecars: Sidecars
    ) -> PublishResult:
        """See ``Publisher.publish``."""
        step, sidecar_bytes = check_step(step), checked_sidecars(sidecars)
        if weights is None and not self._live.has_values:
            raise UsageError("this publisher gets its weights with each version: give weights=")
        if not self._busy:
            self.finish()
        self._calls += 1
        if self._calls % self._options.every:
            return self._skipped_result(step, watch)
        if self._busy and not wait:
            return self._skip_while_busy(step, watch)
        self.finish()
        watch.lap()
        return self._hand_over(step, self._diff(weights), watch, sidecar_bytes)

    def wait_durable(self) -> None:
        """Wait until everything published is durable; raises as ``finish``."""
        self.finish()

    def finish(self) -> None:
        """Wait for the version under way; bring the baseline to a durable version.

        Raises:
            PublishError, ConflictError: the error of the background thread, unless it was raised before.
        """
        if self._progress is not None and not self._progress.error_raised:
            self._progress.wait()
        committer, pending = self._committer, self._pending
        if committer.stopped is not None:
            raise type(committer.stopped)(committer.stopped.message)
        if (pending is not None and pending.open) or committer.suspect or self._call_interrupted:
            # Also waits for a background call that an interrupted caller left running.
            self._background.call(lambda: committer.recover(pending))
            self._call_interrupted = False

    def call(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the baseline in the background thread; nothing else touches the baseline until it ends.

        Raises:
            PublishError, ConflictError: as ``wait_durable``, which runs first. Otherwise whatever ``work`` raises.
        """
        self.wait_durable()
        self._call_interrupted = True
        self._background.call(work)
        self._call_interrupted = False

    def check_same_arguments(self, what: str, check: Callable[[], _Value]) -> _Value:
        """Return the arguments as ``check`` returns them; of a sharded model, all ranks must return the same.

        Raises:
            UsageError: ``check`` raised it, on any rank.
        """
        return check()

    def run_once(self, what: str, work: Callable[[], str]) -> str:
        """Return the result of ``work``, which runs once for all ranks."""
        return work()

    @property
    def _busy(self) -> bool:
        return self._progress is not None and not self._progress.done

    def _diff(self, weights: Weights | None) -> PendingDelta:
        options = self._options
        pending = self._pending = PendingDelta(
            self._committer.baseline, options.base_codec, options.compression, self._detector
        )
        with ExitStack() as undo:
            undo.callback(self._background.call, pending.revert)
            pending.add_all(self._live.read() if weights is None else self._live.convert(weights))
            undo.pop_all()
        return pending

    def _hand_over(
        self, step: int, pending: PendingDelta, watch: Stopwatch, sidecars: Mapping[str, bytes]
    ) -> PublishResult:
        progress = PublishProgress(sidecars)
        progress.seconds["diff"] = watch.lap()
        version = self._committer.newest.version + 1
        result = self._result(version, step, pending.changed, progress.seconds["diff"], progress)
        self._background.submit(progress, lambda: self._committer.commit_version(pending, step, progress, watch))
        self._progress = progress
        self._skip_log.record(result)
        return result

    def _skip_while_busy(self, step: int, watch: Stopwatch) -> PublishResult:
        """Skip because the previous version is still under way: the store is slower than training."""
        result = self._skipped_result(step, watch)
        self._skip_log.record(result)
        return result

    def _skipped_result(self, step: int, watch: Stopwatch) -> PublishResult:
        return self._result(None, step, 0, watch.total, None)

    def _result(
        self, version: int | None, step: int, changed: int, diff_seconds: float, progress: PublishProgress | None
    ) -> PublishResult:
        return PublishResult(
            version=version, step=step, changed=changed, total=self._table.total, full_bytes=self._table.full_bytes,
            diff_seconds=diff_seconds, progress=progress,
        )  # fmt: skip


class SkipLog:
    """Logs that calls of ``publish`` are skipped, and why: once until a version is published again."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._last_published: PublishResult | None = None
        self._count = 0

    def record(self, result: PublishResult) -> None:
        """Record what ``publish`` returned."""
        if result.version is None:
            self._count += 1
            if self._count == 1 and self._last_published is not None and not self._last_published.done:
                self._log_skip(result.step, self._last_published)
            return
        count, self._count = self._count, 0
        if count:
            logger.info("step %d: published again, after %d that were skipped", result.step, count)
        self._last_published, self._since = result, time.monotonic()

    def _log_skip(self, step: int, last: PublishResult) -> None:
        logger.warning(
            "step %d is not published: encoding and upload of version %s (step %d) take %.1f s so far, longer than the "
            "steps since. What has changed goes out with the next version, and nothing queues up; publish less often, "
            "or to a faster store, to get a version of every call",
            step,
            last.version,
            last.step,
            time.monotonic() - self._since,
        )


@dataclass
class PublisherParts:
    """The parts of a publisher.

    Attributes:
        maintenance: None on ranks other than 0.
    """

    opened: OpenedRun
    committer: Committer
    session: PublishSession
    detector: Detector
    maintenance: BackgroundMaintenance | None


def build_publisher(
    model: ModelLike,
    bucket: Bucket,
    base: str | Path | None,
    files: str | Path | None,
    options: Options,
    background: BackgroundThread,
    ranks: "RankGroups | None",
    undo: ExitStack,
) -> PublisherParts:
    """Begin or take over the run, and start background maintenance; errors as ``Publisher``.

    Args:
        undo: receives what must be closed if a later step fails.
    """
    detector = Detector(options.diff_threads or torch.get_num_threads())
    undo.callback(detector.close)
    collected = partial(collect_files, model, files)
    if ranks is not None:
        from trainer_side.ranks.opening import build_sharded

        return build_sharded(model, bucket, base, collected, options, background, detector, ranks, undo)
    live = live_tensors(model)
    opened, base_location = open_or_begin(bucket, live, base, collected, options, background.call)
    maintenance = BackgroundMaintenance(bucket, base_location, options, opened.writer)
    undo.callback(maintenance.close)
    committer = Committer(bucket, opened, base_location, options, maintenance.offer)
    background.call(committer.begin)
    session = PublishSession(live, opened.baseline.table, options, committer, detector, background)
    return PublisherParts(opened, committer, session, detector, maintenance)


def ranks_of(model: ModelLike) -> "RankGroups | None":
    """Return the ranks that publish a model together; None if this process publishes it alone.

    Raises:
        PublishError: a rank does not take part.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    from trainer_side.ranks.shard_parts import needs_ranks

    if not needs_ranks(model):
        return None
    from trainer_side.ranks.group import RankGroups

    return RankGroups()


def on_every_rank(ranks: "RankGroups | None", what: str, work: Callable[[], _Result]) -> _Result:
    """Return what ``work`` returns here, after it succeeded on every rank; raise what it raised on any."""
    if ranks is None:
        return work()
    found: list[_Result] = []
    ranks.work.all_or_raise(what, lambda: found.append(work()))
    return found[0]


def agreed_options(ranks: "RankGroups | None", check: Callable[[bool], Options]) -> Options:
    """Return the options of a publisher.

    Args:
        check: makes them. Its argument says whether to load signing keys, which only rank 0 needs.

    Raises:
        UsageError, SettingsError: ``check`` raised it on any rank; or the ranks have different options.
    """
    if ranks is None:
        return check(True)
    from trainer_side.ranks.opening import agree_on_options

    return agree_on_options(ranks, check)


def skip_maintenance(manifest: Manifest) -> None:
    """Do nothing: rank 0 maintains the run."""

"""``PublishSession``: compare, hand over to the background thread, wait. ``agreed_options``: of all ranks."""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import distributed

from trainer_side.background_thread import BackgroundThread
from trainer_side.committer import Committer
from trainer_side.diff.engine import Detector
from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.model.sources import ModelLike
from trainer_side.options import Options, SidecarData, check_step, checked_sidecars
from trainer_side.ranks.group import Json, ProcessGroup, RankGroups, check_same
from trainer_side.result import PublishProgress, PublishResult, Stopwatch
from trainer_side.run_weights import RunWeights
from vllm_delta_sync.errors import DeltaSyncError, PublishError, UsageError
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.trust import Keyring

logger = guarded_logger(__name__)

Weights = Iterable[tuple[str, torch.Tensor]]
Sidecars = Mapping[str, SidecarData] | None
_Value = TypeVar("_Value")


class PublishSession:
    """Publishes one version after another, on the caller's side. One caller at a time.

    Every rank of a group calls each method at the same point of the program. If an error made one of them issue other
    collective calls than the rest, they would deadlock: before each collective step the ranks ask each other, once,
    which of them are busy and which have an error to raise, so that all compare or none.

    Args:
        weights: what is published, and of which run.
        detector: compares. background: thread in which ``committer`` makes versions durable.
        group: the ranks, for the caller's thread.
    """

    def __init__(
        self,
        weights: RunWeights,
        options: Options,
        committer: Committer,
        detector: Detector,
        background: BackgroundThread,
        group: ProcessGroup,
    ) -> None:
        self._live, self._table, self._options = weights.live, weights.table, options
        self._committer, self._detector, self._background = committer, detector, background
        self._group = group
        self._calls = 0
        self._pending: PendingDelta | None = None
        self._progress: PublishProgress | None = None
        self._call_interrupted = False
        self._skip_log = SkipLog()

    def publish(
        self,
        step: int,
        wait: bool,
        weights: Weights | None,
        watch: Stopwatch,
        sidecars: Sidecars,
        skips_equal: bool = False,
        exact: bool = False,
    ) -> PublishResult:
        """See ``Publisher.publish``."""
        # Count before any check can raise, so that the counts of all ranks stay equal.
        self._calls += 1
        sidecar_bytes: dict[str, bytes] = {}

        def checked() -> int:
            self._check_source(weights)
            if skips_equal and not self._group.alone:
                raise UsageError("skip_unchanged is set, and a rank of a sharded model sees its own changes only")
            sidecar_bytes.update(checked_sidecars(sidecars))
            return check_step(step)

        # Without a budget every version is exact.
        exact = exact and self._options.budget is not None
        if self._calls % self._options.every and not exact:
            step = checked()
            if self._group.alone and not self._busy:
                self.finish()  # raise an error that is known by now
            return self._skipped_result(step, watch)
        what = f"publish, call {self._calls}"
        if wait or exact:
            self._wait_under_way()
        # In this order: once it is not busy, neither of the others changes.
        own = [self._busy, (problem := self._unraised_error()) is not None, self._is_dirty()]
        busy, failed, dirty = self._group.reduce_on_rank0(what, lambda: [checked(), *own], _agreed)
        step = check_step(step)
        if busy:
            result = self._skipped_result(step, watch)
            self._skip_log.record(result)
            return result
        if self._recover(what, problem, failed, dirty):
            logger.warning("step %d is not published: rank %s raises an error first", step, _listed(failed))
            return self._skipped_result(step, watch)
        watch.lap()
        try:
            pending = self._diff(weights)
        except BaseException as error:  # including interrupts: other ranks would wait for this one
            if not self._group.alone:
                self._withdraw(error, step, watch)
            raise
        if skips_equal and not pending.changed:
            self._background.call(pending.revert)
            return self._skipped_result(step, watch)
        return self._hand_over(step, pending, watch, sidecar_bytes, exact)

    def publish_held_back(self) -> None:
        """Publish the live weights as an exact version if the newest version is this publisher's own and not exact.

        Raises:
            PublishError, ConflictError: it could not be made durable.
        """
        committer, newest = self._committer, self._committer.newest
        own = newest is committer.current and newest.epoch == committer.writer.epoch
        if newest.held_back is None or not own or self._options.budget is None:
            return
        if not self._live.has_values:
            logger.warning(
                "version %d, the last one, is not exact: %s. This publisher gets its weights with each call: give the "
                "last one exact=True", newest.version, newest.held_back.summary(),
            )  # fmt: skip
            return
        self.publish(newest.step, True, None, Stopwatch(), None, exact=True)
        self.wait_durable()

    def finish(self) -> None:
        """Wait for the version under way, without the other ranks; if there are none, as ``wait_durable``."""
        if self._group.alone:
            self.wait_durable()
            return
        self._wait_under_way()
        self._raise(self._unraised_error())

    def wait_durable(self) -> None:
        """Wait until everything published is durable; bring the baseline to a durable version.

        Raises:
            PublishError, ConflictError: the error of the background thread, unless it was raised before; or another
                rank raises its error first, see its log.
        """
        self._wait_under_way()
        problem = self._unraised_error()
        failed, dirty = self._group.ranks_where("settle: before", [problem is not None, self._is_dirty()])
        if self._recover("settle", problem, failed, bool(dirty)):
            raise PublishError(f"rank {_listed(failed)} could not continue, and raises its error; call this again")

    def call(self, work: Callable[[], _Value]) -> _Value:
        """Return what ``work`` does in the background thread; until it ends, nothing else touches the baseline."""
        self.wait_durable()
        self._call_interrupted = True
        result = self._background.call(work)
        self._call_interrupted = False
        return result

    def check_same_arguments(self, what: str, check: Callable[[], _Value]) -> _Value:
        """Return the arguments as ``check`` returns them; all ranks must return the same.

        Raises:
            UsageError: on every rank: ``check`` raised it on any of them, or their arguments differ.
        """
        found: list[_Value] = []

        def work() -> Json:
            found.append(check())
            return found[0]

        self._group.reduce_on_rank0(f"{what}: arguments", work, lambda reports: check_same(what, reports))
        return found[0]

    @property
    def _busy(self) -> bool:
        return self._progress is not None and not self._progress.done

    def _check_source(self, weights: Weights | None) -> None:
        """Raise UsageError unless the weights come from where this publisher can take them."""
        if weights is None and not self._live.has_values:
            raise UsageError("this publisher gets its weights with each version: give weights=")
        if weights is not None and not self._group.alone:
            raise UsageError(
                "weights= is given, and this publisher's model is sharded over ranks: publish the model, or make a "
                "publisher from a function that yields (checkpoint name, whole tensor), on one rank"
            )

    def _wait_under_way(self) -> None:
        if self._progress is not None:
            self._progress.join()

    def _is_dirty(self) -> bool:
        """Return whether the baseline may not be at a durable version."""
        pending = self._pending
        return (pending is not None and pending.open) or self._committer.suspect or self._call_interrupted

    def _recover(self, what: str, problem: DeltaSyncError | None, failed: list[int], dirty: bool) -> list[int]:
        """Have each rank raise its error, and bring all baselines to a durable version.

        Args:
            problem: the error of this rank. failed: which ranks have one. dirty: whether any baseline is dirty.

        Returns:
            On ranks without an error: the list of ranks that raise one.
        """
        self._raise(problem)
        if failed or not dirty:
            return failed
        pending = self._pending
        try:
            # Also waits for a background call that an interrupted caller left running.
            self._background.call(lambda: self._committer.recover(pending))
            self._call_interrupted = False
        except DeltaSyncError as error:
            problem = error
        (failed,) = self._group.ranks_where(f"{what}: tidied", [problem is not None])
        self._raise(problem)
        return failed

    def _unraised_error(self) -> DeltaSyncError | None:
        """Return the error of the background thread, unless it was raised before, or is not known yet."""
        progress, stopped = self._progress, self._committer.stopped
        if progress is not None and progress.done and not progress.error_raised and progress.failure is not None:
            return progress.failure
        return None if stopped is None else type(stopped)(stopped.message)

    def _raise(self, problem: DeltaSyncError | None) -> None:
        """Raise what ``_unraised_error`` returned, if anything."""
        if problem is not None:
            if self._progress is not None:
                self._progress.error_raised = True
            raise problem

    def _diff(self, weights: Weights | None) -> PendingDelta:
        options = self._options
        pending = self._pending = PendingDelta(
            self._committer.baseline, options.base_codec, options.compression, self._detector
        )
        with ExitStack() as undo:
            undo.callback(self._background.call, pending.revert)
            if weights is None:
                pending.add_all(self._live.read(), self._live.lasting)
            else:
                pending.add_all(self._live.convert(weights))
            undo.pop_all()
        return pending

    def _hand_over(
        self, step: int, pending: PendingDelta, watch: Stopwatch, sidecars: Mapping[str, bytes], exact: bool
    ) -> PublishResult:
        progress = PublishProgress(sidecars, exact)
        progress.seconds["diff"] = watch.lap()
        version = self._committer.newest.version + 1
        result = self._result(version, step, pending.changed, progress)
        self._background.submit(progress, lambda: self._committer.commit_version(pending, step, progress, watch))
        self._progress = progress
        self._skip_log.record(result)
        return result

    def _withdraw(self, error: BaseException, step: int, watch: Stopwatch) -> None:
        """Report to the other ranks, which continue publishing, that this one has nothing to publish."""
        pending = self._pending
        if pending is None:
            return
        progress = PublishProgress()
        progress.error_raised = True
        self._background.submit(progress, lambda: self._committer.commit_version(pending, step, progress, watch, error))
        self._progress = progress

    def _skipped_result(self, step: int, watch: Stopwatch) -> PublishResult:
        return self._result(None, step, 0, PublishProgress.skipped(watch.total))

    def _result(self, version: int | None, step: int, changed: int, progress: PublishProgress) -> PublishResult:
        return PublishResult(
            version=version, step=step, changed=changed, total=self._table.total, full_bytes=self._table.full_bytes,
            progress=progress,
        )  # fmt: skip


def _agreed(reports: list[Json]) -> Json:
    """Return whether any rank is busy, which ranks have an error to raise, and whether any baseline is dirty.

    Raises:
        UsageError: the ranks publish different steps.
    """
    steps, busy, failed, dirty = zip(*reports, strict=True)
    check_same("step", steps)
    return any(busy), [rank for rank, has_error in enumerate(failed) if has_error], any(dirty)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")


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


def ranks_of(model: ModelLike) -> RankGroups:
    """Return the ranks that publish a model together: those of the world, or this process alone."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return RankGroups(alone=True)
    from trainer_side.ranks.shard_parts import needs_ranks

    return RankGroups(alone=not needs_ranks(model))


# With other values ranks would encode or split differently, or reach their calls at other steps. For all other options
# rank 0's values count, or each rank's own.
_SAME_ON_ALL_RANKS = ("codec", "compression", "every", "shard_bytes")


def agreed_options(ranks: RankGroups, check: Callable[[bool], Options]) -> Options:
    """Return the options of a publisher.

    Args:
        check: makes them. Its argument says whether to load signing keys, which only rank 0 needs.

    Raises:
        UsageError, SettingsError: ``check`` raised it on any rank; or the ranks have different options; or options
            need whole tensors, and the model is sharded.
    """
    found: list[Options] = []

    def work() -> Json:
        found.append(check(ranks.is_rank0))
        if not ranks.alone:
            _check_sharded(found[0])
        return [getattr(found[0], name) for name in _SAME_ON_ALL_RANKS]

    def judge(reports: list[Json]) -> None:
        for name, values in zip(_SAME_ON_ALL_RANKS, zip(*reports, strict=True), strict=True):
            check_same(name, values)

    ranks.work.all_or_raise("options", work, judge)
    trusted = ranks.work.from_rank0("keys", lambda: sorted(found[0].keyring.trusted))
    if ranks.alone:
        return found[0]
    # ``auto`` would choose ``context`` for some versions. A rank that signs nothing trusts the keys that rank 0 trusts.
    keyring = found[0].keyring if ranks.is_rank0 else Keyring(trusted)
    return found[0].model_copy(update={"codec": found[0].base_codec, "keyring": keyring})


def _check_sharded(options: Options) -> None:
    if options.budget is not None:
        raise UsageError(
            "budget is set, and a budget chooses among the changes of whole tensors, of which each rank has a part; "
            "leave it out, or publish from one rank through a function that yields (checkpoint name, whole tensor)"
        )
    if options.gate is not None:
        raise UsageError(
            "gate is set, and a gate needs whole tensors, of which each rank has a part; leave it out, or publish "
            "from one rank through a function that yields (checkpoint name, whole tensor)"
        )
    if options.baseline == "disk":
        raise UsageError("baseline is 'disk', which is for whole tensors, of which each rank has a part; give 'host'")
    if options.codec == "context":
        raise UsageError(
            "codec is 'context', which encodes changes with the whole tensor, of which each rank has a part; give "
            "'packed' or 'auto'"
        )

"""``PublishSession``: compare, hand over to the background thread, wait. ``agreed_options``: of all ranks."""

import math
import operator
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from trainer_side.background_thread import BackgroundJob, BackgroundThread
from trainer_side.committer import Committer
from trainer_side.diff.engine import Detector
from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.model.module import ModelLike
from trainer_side.options import Budget, Gate, PublisherOptions
from trainer_side.ranks.group import Json, LostRankError, ProcessGroup, RankGroups, check_same, rank_in_world
from trainer_side.ranks.shard_parts import needs_ranks
from trainer_side.result import (
    NEVER,
    Deadline,
    OnVersion,
    PublisherStatus,
    PublishProgress,
    PublishResult,
    Stopwatch,
    as_publish_error,
)
from trainer_side.run_weights import RunWeights
from trainer_side.writer import UncertainError
from vllm_delta_sync.errors import DeltaSyncError, GateError, PublishError, PublishTimeoutError, StoreError, UsageError
from vllm_delta_sync.format.base_document import FILE_NAME
from vllm_delta_sync.format.limits import MAX_SIDECAR_BYTES, MAX_SIDECARS
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.units import listed

logger = guarded_logger(__name__)

Weights = Iterable[tuple[str, torch.Tensor]]
SidecarData = bytes | bytearray | memoryview
Sidecars = Mapping[str, SidecarData] | None
_Value = TypeVar("_Value")
_Job = TypeVar("_Job", bound=BackgroundJob)


def _handed(pairs: Weights, raised: list[Exception]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that come with a call; note in ``raised`` what the caller's iterator raises."""
    try:
        yield from pairs
    except Exception as error:
        raised.append(error)
        raise


@dataclass(frozen=True)
class LastCall:
    """The last call of ``publish``.

    Attributes:
        handed: whether its weights came with the call.
        version, progress: of the version it published; None while it has not published one.
        failure: why it has not. remedy: what to do next time, where its weights came with the call.
    """

    step: int
    handed: bool
    version: int | None = None
    progress: PublishProgress | None = None
    failure: str = "its call was skipped"
    remedy: str = "give the last call wait=True, and flush()"

    def is_published(self, newest: Manifest) -> bool:
        """Return whether the run has its weights. Ask once nothing is under way. Args: newest: durable version."""
        if self.progress is None or not self.progress.done:
            return False
        if isinstance(self.progress.error, UncertainError):
            return newest.version == self.version  # a recovery has found it in the bucket
        return self.progress.error is None


class PublishSession:
    """Publishes one version after another, on the caller's side. One caller at a time.

    The caller never waits for the store unless it asks to: all that needs the store is submitted to ``background``.

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
        options: PublisherOptions,
        committer: Committer,
        detector: Detector,
        background: BackgroundThread,
        group: ProcessGroup,
    ) -> None:
        self._live, self._table, self._options = weights.live, weights.table, options
        self._committer, self._detector, self._background = committer, detector, background
        self._group, self._on_version = group, options.on_version
        self._calls = 0
        self._last: LastCall | None = None
        self._pending: PendingDelta | None = None
        self._progress: PublishProgress | None = None
        # The last job submitted. The thread does one after another, so that all are done once this one is.
        self._under_way: BackgroundJob | None = None
        self._recovery: BackgroundJob | None = None
        # The job of a call that had not ended within its timeout.
        self._overdue: BackgroundJob | None = None
        self.record = PublishRecord(committer.newest)

    def publish(
        self,
        step: int,
        wait: bool,
        weights: Weights | None,
        watch: Stopwatch,
        sidecars: Sidecars,
        skips_equal: bool = False,
        exact: bool = False,
        deadline: Deadline = NEVER,
    ) -> PublishResult:
        """See ``Publisher.publish``."""
        # Count before any check can raise, so that the counts of all ranks stay equal.
        self._calls += 1
        sidecar_bytes: dict[str, bytes] = {}

        def checked() -> int:
            self._check_source(weights)
            if skips_equal and not self._group.alone:
                raise UsageError(
                    "skip_unchanged is set, and a rank of a sharded model sees only its own changes; leave it out"
                )
            sidecar_bytes.update(checked_sidecars(sidecars))
            return check_step(step)

        # Without a budget every version is exact.
        exact = bool(exact) and self._options.budget is not None
        if self._calls % self._options.every and not exact:
            self._last = LastCall(
                checked(),
                weights is not None,
                failure=f"every is {self._options.every}, and skipped its call",
                remedy="leave every out, and call publish only with what is to be published",
            )
            if self._group.alone and not self._busy:
                self._raise(self._unraised_error())
            return self._skipped_result(step, watch)
        what = f"publish, call {self._calls}"
        waits, before = bool(wait or exact), self._last
        while True:
            if waits:
                self._wait_idle(deadline)
            # In this order: once it is not busy, neither of the others changes.
            own = [exact, waits, self._busy, (problem := self._unraised_error()) is not None, self._is_dirty()]
            own.append(waits and deadline.passed)
            work = partial(lambda own: [checked(), *own], own)
            waits, busy, failed, dirty, late = self._group.reduce_on_rank0(what, work, _agreed)
            step = check_step(step)
            self._last = LastCall(step, weights is not None)
            if busy and late:
                raise _late(f"step {step} is not published", deadline)
            if busy and waits:
                continue
            if busy:
                self.record.log_early(step)
                return self._skipped_result(step, watch)
            self._raise(problem)
            if failed:
                logger.warning("step %d is not published: rank %s raises an error first", step, listed(failed, 8))
                return self._skipped_result(step, watch)
            if not dirty:
                break
            self._submit_recovery()
            if not waits:
                return self._skipped_result(step, watch)
        watch.lap()
        raised: list[Exception] = []
        try:
            pending = self._diff(None if weights is None else _handed(weights, raised))
        except BaseException as error:  # including interrupts: other ranks would wait for this one
            self.record.failed(error)
            if not self._group.alone:
                self._withdraw(error, step, watch)
            if weights is not None and (error in raised or isinstance(error, DeltaSyncError)):
                self._last = before  # the call is refused for what was handed over
                raise
            if not isinstance(error, Exception) or isinstance(error, DeltaSyncError):
                raise
            failure = PublishError(
                f"step {step} is not published, because the comparison failed unexpectedly: {error!r}; the baseline "
                "was reverted, and the next publish carries the changes"
            )
            self._last = LastCall(step, weights is not None, failure=failure.message)
            raise failure from error
        committer = self._committer
        if skips_equal and not pending.changed and committer.current.version == committer.newest.version:
            self._background.call(pending.revert)
            self._last = None  # the run has these weights
            return self._skipped_result(step, watch)
        result, progress = self._hand_over(step, pending, watch, sidecar_bytes, exact)
        self._last = LastCall(step, weights is not None, result.version, progress)
        return result

    def publish_last(self, deadline: Deadline) -> None:
        """Bring the run to the weights of the last call, and what a budget held back of them; wait until it is durable.

        A call that was skipped or has failed is made up for with the weights that the model has now. While the store
        fails, it is tried again.

        Raises:
            PublishError: not done in time, or it cannot be done; the message names the step, and the version
                that stays. GateError, ConflictError, ModelError, TensorMismatchError: the same for these reasons.
        """
        pause, attempts, told = 0.5, 0, False
        latest: DeltaSyncError | None = None
        while True:
            self._wait_idle(deadline)
            problem = self._unraised_error()
            latest = problem or latest
            wanted = self._is_last_wanted()
            # While it is not known whether a version was written, its weights may still be in the run.
            gone = wanted and self._last is not None and self._last.handed and not self._is_dirty()
            temporary = isinstance(problem, PublishError) and not isinstance(problem, GateError | LostRankError)
            final = problem is not None and (attempts == _ATTEMPTS or not temporary)
            flags = [self._busy, problem is not None, gone or final, self._is_dirty(), wanted, deadline.passed]
            busy, failed, ended, dirty, missing, late = self._group.ranks_where("closing", flags)
            if busy or ended or (late and (failed or dirty or missing)):
                raise self._not_published(latest, failed, deadline)
            if self._progress is not None:
                self._progress.error_raised = True
            self._recovery = self._overdue = None
            if problem is not None:
                if not told:
                    logger.warning("the last weights are not durable yet, trying again for %s: %s", deadline, problem)
                told = True
                attempts += not (isinstance(problem, UncertainError) or isinstance(problem.__cause__, StoreError))
                time.sleep(min(pause, deadline.left))
                pause = min(2 * pause, 10.0)
            if dirty:
                self._submit_recovery()
            elif missing:
                self._publish_again()
            elif not failed:
                if self._on_version is not None:
                    self._background.call(lambda: None)  # after this it has heard of the last version
                return

    def _publish_again(self) -> None:
        """Publish the live weights under the step of the last call; an error is left to ``_unraised_error``."""
        last, watch = self._last, Stopwatch()
        step = self._committer.newest.step if last is None else last.step
        try:
            pending = self._diff(None)
        except Exception as error:  # noqa: BLE001 - whatever it is, ``publish_last`` raises it on all ranks together
            self._withdraw(error, step, watch, raised=False)
            return
        result, progress = self._hand_over(step, pending, watch, {}, exact=True)
        self._last = LastCall(step, False, result.version, progress)

    def _is_last_wanted(self) -> bool:
        """Return whether the run lacks weights of the last call."""
        newest = self._committer.newest
        if self._last is not None and not self._last.is_published(newest):
            return True
        own = newest.version == self._committer.current.version and newest.epoch == self._committer.writer.epoch
        if newest.held_back is None or not own or self._options.budget is None:
            return False
        if self._live.has_values and not (self._last is not None and self._last.handed):
            return True
        logger.warning(
            "version %d, the last one, is not exact: %s. This publisher gets its weights with each call: give the "
            "last one exact=True, or the budget exact_every", newest.version, newest.held_back.summary(),
        )  # fmt: skip
        return False

    def _not_published(self, problem: DeltaSyncError | None, failed: list[int], deadline: Deadline) -> DeltaSyncError:
        """Return the error of a close that could not publish the last weights."""
        last = None if self._last is None or self._last.is_published(self._committer.newest) else self._last
        if problem is not None:
            reason = problem.message
        elif failed:
            reason = f"rank {listed(failed, 8)} could not publish, and raises its error"
        elif self._busy or deadline.passed:
            reason = f"the store has not answered within {deadline}"
            if (known := self.record.status().error) is not None:  # an earlier call may have raised it
                reason = f"it is not durable within {deadline}; the last error is {known}"
        else:
            reason = "the store has not answered" if last is None else last.failure
        if last is not None:
            reason = f"step {last.step}, the last one, is not published: {reason}"
            if last.handed:
                reason += f". Its weights came with the call and are gone: {last.remedy}"
        error = (PublishError if problem is None else type(problem))(f"{reason}; {self._served()}")
        error.__cause__ = None if problem is None else problem.__cause__
        return error

    def _served(self) -> str:
        newest = self._committer.newest
        return f"the last version of this publisher is {newest.version} (step {newest.step})"

    def finish_under_way(self, deadline: Deadline) -> None:
        """Wait for the version under way, publish nothing new, and log what is missing; without the other ranks."""
        self._wait_idle(deadline)
        problem = self._unraised_error()
        if self._busy:
            logger.error("the version under way has not become durable within %s; %s", deadline, self._served())
        elif problem is not None:
            logger.error("closing the publisher: %s; %s", problem, self._served())
        elif self._last is not None and not self._last.is_published(self._committer.newest):
            logger.warning(
                "step %d, of the last call, is not published, because an exception ends the training; %s",
                self._last.step, self._served(),
            )  # fmt: skip

    def wait_durable(self, deadline: Deadline = NEVER) -> None:
        """Wait until everything published is durable; bring the baseline to a durable version.

        Raises:
            PublishError, ConflictError: the error of the background thread, unless it was raised before; or another
                rank raises its error first, see its log. PublishTimeoutError: that is not so in time.
        """
        while True:
            self._wait_idle(deadline)
            flags = [self._busy, (problem := self._unraised_error()) is not None, self._is_dirty()]
            busy, failed, dirty = self._group.ranks_where("settle", flags)
            if busy:
                raise _late("the version under way is not durable yet", deadline)
            self._raise(problem)
            if failed:
                raise PublishError(
                    f"rank {listed(failed, 8)} could not continue, and raises its error; call this again"
                )
            if not dirty:
                return
            self._submit_recovery()

    def call(self, work: Callable[[], _Value], deadline: Deadline = NEVER) -> _Value:
        """Return what ``work`` does in the background thread; until it ends, nothing else touches the baseline.

        Raises:
            PublishTimeoutError: it has not ended in time; ``work`` goes on, later calls wait for it, and one
                raises its error.
        """
        self.wait_durable(deadline)
        found: list[_Value] = []
        job = self._submit(BackgroundJob(), lambda: found.append(work()))
        if not job.join(deadline.left):
            self._overdue = job
            raise _late("this call is not done", deadline)
        if job.error is not None:
            raise job.error
        return found[0]

    def check_same_arguments(self, what: str, check: Callable[[], _Value]) -> _Value:
        """Return the arguments as ``check`` returns them; all ranks must return the same.

        Raises:
            UsageError: on every rank: ``check`` raised it on any of them, or their arguments differ.
        """
        return self._group.on_every_rank(
            f"{what}: arguments", check, lambda value: value, lambda reports: check_same(what, reports)
        )

    @property
    def _busy(self) -> bool:
        return self._under_way is not None and not self._under_way.done

    def _submit(self, job: _Job, work: Callable[[], None]) -> _Job:
        self._background.submit(job, work)
        self._under_way = job
        return job

    def _wait_idle(self, deadline: Deadline) -> None:
        """Wait until nothing is under way, at most until the deadline, which may come nearer meanwhile."""
        while self._under_way is not None and not self._under_way.join(min(deadline.left, 1.0)) and not deadline.passed:
            pass

    def _check_source(self, weights: Weights | None) -> None:
        """Raise UsageError unless the weights come from where this publisher can take them."""
        if weights is None and not self._live.has_values:
            raise UsageError("this publisher gets its weights with each version: give weights=")
        if weights is not None and not self._group.alone:
            raise UsageError(
                "weights= is given, and this publisher's model is sharded over ranks: publish the model, or make a "
                "publisher from a function that yields (checkpoint name, whole tensor), on one rank"
            )

    def _is_dirty(self) -> bool:
        """Return whether the baseline may not be at a durable version."""
        pending = self._pending
        return (pending is not None and pending.open) or self._committer.baseline.suspect

    def _submit_recovery(self) -> None:
        """Begin to bring the baseline to a durable version, which may take requests to the store."""
        self._recovery = self._submit(BackgroundJob(), partial(self._committer.recover, self._pending))

    def _unraised_error(self) -> DeltaSyncError | None:
        """Return the error of the background thread, unless it was raised before, or is not known yet."""
        recovery, progress, stopped = self._recovery, self._progress, self._committer.stopped
        if stopped is None and recovery is not None and recovery.done and recovery.error is not None:
            return as_publish_error(recovery.error)
        overdue = self._overdue
        if stopped is None and overdue is not None and overdue.done and overdue.error is not None:
            error = PublishError(f"the call before, which was not done within its timeout, has failed: {overdue.error}")
            error.__cause__ = overdue.error
            return error
        if progress is not None and progress.done and not progress.error_raised and progress.failure is not None:
            return progress.failure
        return None if stopped is None else type(stopped)(stopped.message)

    def _raise(self, problem: DeltaSyncError | None) -> None:
        """Raise what ``_unraised_error`` returned, if anything."""
        if problem is not None:
            if self._progress is not None:
                self._progress.error_raised = True
            if self._recovery is not None and self._recovery.done:
                self._recovery = None
            if self._overdue is not None and self._overdue.done:
                self._overdue = None
            if isinstance(problem, GateError) and self._last is not None and self._last.handed:
                self._last = None  # refused for what was handed over, so it is not missed at the end
            raise problem

    def _diff(self, weights: Weights | None) -> PendingDelta:
        options = self._options
        pending = self._pending = PendingDelta(
            self._committer.baseline, options.delta_codec, options.compression, self._detector
        )
        with ExitStack() as undo:
            undo.callback(self._background.call, pending.revert)
            if weights is None:
                pending.add_all(self._live.read(), self._live.lasts)
            else:
                pending.add_all(self._live.convert(weights))
            self._committer.baseline.check_kept(pending.touched, self._live.excluded)
            undo.pop_all()
        return pending

    def _hand_over(
        self, step: int, pending: PendingDelta, watch: Stopwatch, sidecars: Mapping[str, bytes], exact: bool
    ) -> tuple[PublishResult, PublishProgress]:
        progress = PublishProgress(sidecars, exact)
        progress.seconds["diff"] = watch.lap()
        version = self._committer.newest.version + 1
        result = self._result(version, step, pending.changed, progress)
        self._progress = progress
        self._submit(progress, lambda: self._commit(pending, step, progress, watch))
        if self._on_version is not None:
            # A job of its own: by then the result is known, and reading it does not wait.
            self._background.submit(BackgroundJob(), partial(self._tell, self._on_version, result))
        self.record.handed_over(result)
        return result, progress

    def _commit(self, pending: PendingDelta, step: int, progress: PublishProgress, watch: Stopwatch) -> None:
        try:
            self._committer.commit_version(pending, step, progress, watch)
        except BaseException as error:  # the job keeps it, and the caller raises it
            self.record.failed(as_publish_error(error))
            raise
        self.record.durable(self._committer.newest)

    def _tell(self, on_version: OnVersion, result: PublishResult) -> None:
        try:
            on_version(result)
        except Exception:  # it is the user's code, and must not end publishing
            logger.exception("on_version failed for step %d", result.step)

    def _withdraw(self, error: BaseException, step: int, watch: Stopwatch, raised: bool = True) -> None:
        """Report to the other ranks, which continue publishing, that this one has nothing to publish."""
        pending = self._pending
        if pending is None:
            return
        progress = PublishProgress()
        progress.error_raised = raised
        self._progress = progress
        self._submit(progress, lambda: self._committer.commit_version(pending, step, progress, watch, error))

    def _skipped_result(self, step: int, watch: Stopwatch) -> PublishResult:
        self.record.skipped()
        return self._result(None, step, 0, PublishProgress.skipped(watch.total))

    def _result(self, version: int | None, step: int, changed: int, progress: PublishProgress) -> PublishResult:
        return PublishResult(
            version=version, step=step, changed=changed, total=self._table.total, full_bytes=self._table.full_bytes,
            progress=progress,
        )  # fmt: skip


_ATTEMPTS = 3
"""How often a close tries again what has failed for a reason other than the store."""


def _late(what: str, deadline: Deadline) -> PublishTimeoutError:
    within = deadline if deadline.passed else "the timeout of another rank"
    return PublishTimeoutError(
        f"{what} within {within}: the store has not answered yet; it goes on in the background, and the next call "
        "says if it fails"
    )


def _agreed(reports: list[Json]) -> Json:
    """Return whether any rank waits, any is busy, which have an error to raise, any is dirty, any has waited in vain.

    Raises:
        UsageError: the ranks publish different steps, or only some of them an exact version.
    """
    steps, exact, waits, busy, failed, dirty, late = zip(*reports, strict=True)
    check_same("step", steps)
    check_same("exact", exact)
    ranks = [rank for rank, has_error in enumerate(failed) if has_error]
    return any(waits), any(busy), ranks, any(dirty), any(late)


class PublishRecord:
    """Counts what becomes of calls and versions, from any thread, and logs calls that come too early.

    Args:
        newest: the version to begin with.
    """

    def __init__(self, newest: Manifest) -> None:
        self._lock = threading.Lock()
        self._durable_at = self._began_at = time.monotonic()
        self._status = PublisherStatus(newest.version, newest.step)
        self._last: PublishResult | None = None
        self._logged = False

    def status(self) -> PublisherStatus:
        """Return the status now; waits for nothing."""
        with self._lock:
            return replace(self._status, seconds=time.monotonic() - self._durable_at)

    def handed_over(self, result: PublishResult) -> None:
        """Count a call that publishes."""
        with self._lock:
            skipped, self._status = self._status.skipped, replace(self._status, skipped=0)
        if self._logged:
            logger.info("step %d: published again, after %d that were skipped", result.step, skipped)
        self._last, self._began_at, self._logged = result, time.monotonic(), False

    def skipped(self) -> None:
        """Count a call that publishes nothing."""
        with self._lock:
            self._status = replace(self._status, skipped=self._status.skipped + 1)

    def log_early(self, step: int) -> None:
        """Log that a call is skipped because a version is under way: once until a version is published again."""
        if self._logged or self._last is None or self._last.done:
            return
        self._logged = True
        logger.warning(
            "step %d is not published: encoding and upload of version %s (step %d) take %.1f s so far, longer than the "
            "steps since. What has changed goes out with the next version, and nothing queues up; publish less often, "
            "or to a faster store, to get a version of every call",
            step, self._last.version, self._last.step, time.monotonic() - self._began_at,
        )  # fmt: skip

    def failed(self, error: BaseException) -> None:
        """Count a call that raised, or a version that could not be made durable."""
        text = f"{error.kind}: {error.message}" if isinstance(error, DeltaSyncError) else repr(error)
        with self._lock:
            self._status = replace(self._status, failed=self._status.failed + 1, error=text)

    def durable(self, newest: Manifest) -> None:
        """Record that a version is durable."""
        with self._lock:
            before, self._durable_at = self._status, time.monotonic()
            self._status = PublisherStatus(
                newest.version, newest.step, before.skipped, payload_bytes=newest.payload_bytes,
                total_payload_bytes=before.total_payload_bytes + newest.payload_bytes,
            )  # fmt: skip


def ranks_of(model: ModelLike) -> RankGroups:
    """Return the ranks that publish a model together: those of the world, or this process alone."""
    alone = not needs_ranks(model)
    rank = rank_in_world()
    if alone and rank:
        logger.warning(
            "this is rank %d, which makes a publisher alone: if another rank publishes to the same URL, they take the "
            "run over from each other. Make the publisher on rank 0 only; or, of a model that is wrapped in "
            "DistributedDataParallel or sharded by fully_shard, on every rank, after init_process_group", rank,
        )  # fmt: skip
    return RankGroups(alone=alone)


# With other values ranks would encode or split differently, or reach their calls at other steps. For all other options
# rank 0's values count, or each rank's own.
_SAME_ON_ALL_RANKS = ("codec", "compression", "every", "shard_bytes", "expect_run", "gate", "budget")


def agreed_options(ranks: RankGroups, check: Callable[[bool], PublisherOptions]) -> PublisherOptions:
    """Return the options of a publisher.

    Args:
        check: makes them. Its argument says whether to load signing keys, which only rank 0 needs.

    Raises:
        UsageError, SettingsError: ``check`` raised it on any rank; or the ranks have different options; or the baseline
            is to be on disk, and the model is sharded.
    """

    def report(options: PublisherOptions) -> Json:
        if not ranks.alone and options.baseline == "disk":
            raise UsageError(
                "baseline is 'disk', which is for whole tensors, of which each rank has a part; give 'host'"
            )
        values = [getattr(options, name) for name in _SAME_ON_ALL_RANKS]
        return [asdict(value) if isinstance(value, Gate | Budget) else value for value in values]

    def judge(reports: list[Json]) -> None:
        for name, values in zip(_SAME_ON_ALL_RANKS, zip(*reports, strict=True), strict=True):
            check_same(name, values)

    options = ranks.work.on_every_rank("options", lambda: check(ranks.is_rank0), report, judge)
    trusted = ranks.work.from_rank0("keys", lambda: sorted(options.keyring.trusted))
    # A rank that signs nothing trusts the keys that rank 0 trusts.
    if not ranks.is_rank0:
        options.keyring = Keyring(trusted)
    return options


# Arguments


def check_step(step: int) -> int:
    """Return the optimizer step as an int; raise UsageError if it is invalid."""
    return _checked("step", step, 2**53, "the optimizer step as an integer from 0 to 2^53 - 1")


def check_version(version: int) -> int:
    """Return a version number as an int; raise UsageError if it is invalid."""
    return _checked("version", version, math.inf, "the number of a version")


def _checked(name: str, value: int, below: float, wanted: str) -> int:
    """Return the value of an integer of any kind, such as numpy's; raise UsageError for anything else."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < below:
        raise UsageError(f"{name} is {value!r}; give {wanted}")
    return number


def checked_sidecars(sidecars: Mapping[str, SidecarData] | None) -> dict[str, bytes]:
    """Return name → bytes, copied so that later writes by the caller have no effect."""
    if sidecars is None:
        return {}
    if not isinstance(sidecars, Mapping):
        raise UsageError(f"sidecars is a {type(sidecars).__name__}; give a mapping of names to bytes, or None")
    if len(sidecars) > MAX_SIDECARS:
        raise UsageError(f"sidecars has {len(sidecars)} entries; give at most {MAX_SIDECARS}, and join small ones")
    found: dict[str, bytes] = {}
    for name, data in sidecars.items():
        if not isinstance(name, str) or not re.fullmatch(FILE_NAME, name):
            raise UsageError(
                f"sidecar name {str(name)[:120]!r} is invalid; give 1 to 100 of A-Z a-z 0-9 . _ -, beginning with a "
                "letter or a digit"
            )
        if not isinstance(data, SidecarData):
            raise UsageError(f"sidecar {name!r} is a {type(data).__name__}; give bytes, such as torch.save writes")
        size = memoryview(data).nbytes
        if size > MAX_SIDECAR_BYTES:
            raise UsageError(
                f"sidecar {name!r} has {size:,} bytes; give at most {MAX_SIDECAR_BYTES:,} each, and keep larger data "
                "in checkpoints of your own"
            )
        found[name] = bytes(data)
    return found

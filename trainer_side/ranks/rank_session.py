"""``RankPublishSession``: the part of ``publish`` in the caller's thread on each rank; all ranks compare or none.

If an error made one rank issue different collective calls from the rest, they would deadlock. So before each collective
step the ranks ask each other which of them are busy and which have an error to raise.
"""

from collections.abc import Callable
from typing import TypeVar

from trainer_side.background_thread import BackgroundThread
from trainer_side.diff.engine import Detector
from trainer_side.model.sources import LiveTensors
from trainer_side.options import Options, check_step, checked_sidecars
from trainer_side.ranks.group import Json, RankGroups, check_same
from trainer_side.ranks.rank_committer import RankCommitter
from trainer_side.result import PublishProgress, PublishResult, Stopwatch
from trainer_side.session import PublishSession, Sidecars, Weights
from vllm_delta_sync.errors import DeltaSyncError, PublishError, UsageError
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger(__name__)

_Value = TypeVar("_Value")


class RankPublishSession(PublishSession):
    """Publishes one version after another; every rank calls each method at the same point of the program."""

    def __init__(
        self,
        live: LiveTensors,
        table: TensorTable,
        options: Options,
        committer: RankCommitter,
        detector: Detector,
        background: BackgroundThread,
        ranks: RankGroups,
    ) -> None:
        super().__init__(live, table, options, committer, detector, background)
        self._rank_committer = committer
        self._ranks = ranks

    def publish(
        self, step: int, wait: bool, weights: Weights | None, watch: Stopwatch, sidecars: Sidecars
    ) -> PublishResult:
        """See ``Publisher.publish``."""
        # Count before any check can raise, so that the counts of all ranks stay equal.
        self._calls += 1
        sidecar_bytes: dict[str, bytes] = {}

        def checked() -> int:
            _refuse_weights(weights)
            sidecar_bytes.update(checked_sidecars(sidecars))
            return check_step(step)

        if self._calls % self._options.every:
            return self._skipped_result(checked(), watch)
        what = f"publish, call {self._calls}"
        if wait:
            self._wait_under_way()
        busy = self._ranks.caller.reduce_on_rank0(what, lambda: [checked(), self._busy], _busy_at_one_step)
        step = check_step(step)
        if busy:
            return self._skip_while_busy(step, watch)
        failed = self._recover_together(what)
        if failed:
            logger.warning("step %d is not published: rank %s raises an error first", step, _listed(failed))
            return self._skipped_result(step, watch)
        watch.lap()
        try:
            pending = self._diff(None)
        except BaseException as error:  # including interrupts: the others would wait for this one
            self._withdraw(error, step, watch)
            raise
        return self._hand_over(step, pending, watch, sidecar_bytes)

    def finish(self) -> None:
        """Wait for the version under way, without the other ranks.

        Raises:
            PublishError, ConflictError: its error, unless it was raised before.
        """
        self._wait_under_way()
        problem = self._pending_error()
        if problem is not None:
            raise problem

    def wait_durable(self) -> None:
        """As ``PublishSession.wait_durable``.

        Raises:
            PublishError: another rank raises an error first, see its log. Other errors as
                ``PublishSession.wait_durable``.
        """
        self._wait_under_way()
        failed = self._recover_together("settle")
        if failed:
            raise PublishError(f"rank {_listed(failed)} could not continue, and raises its error; call this again")

    def check_same_arguments(self, what: str, check: Callable[[], _Value]) -> _Value:
        """As ``PublishSession.check_same_arguments``; raises on every rank, even if the ranks' arguments differ."""
        found: list[_Value] = []

        def work() -> Json:
            found.append(check())
            return found[0]

        self._ranks.caller.reduce_on_rank0(f"{what}: arguments", work, lambda reports: check_same(what, reports))
        return found[0]

    def run_once(self, what: str, work: Callable[[], str]) -> str:
        """Return the result of ``work`` on rank 0, on every rank."""
        found: str = self._ranks.caller.from_rank0(what, work)
        return found

    def _wait_under_way(self) -> None:
        if self._progress is not None:
            self._progress.join()

    def _recover_together(self, what: str) -> list[int]:
        """Have each rank raise its pending error, and bring all baselines to a durable version.

        Returns:
            On ranks without an error: the list of ranks that raise one.
        """
        problem = self._pending_error()
        pending, committer = self._pending, self._committer
        dirty = (pending is not None and pending.open) or committer.suspect or self._call_interrupted
        failed, dirty_ranks = self._ranks.caller.ranks_where(f"{what}: before", [problem is not None, dirty])
        if problem is not None:
            raise problem
        if failed or not dirty_ranks:
            return failed
        try:
            # Also waits for a background call that an interrupted caller left running.
            self._background.call(lambda: committer.recover(pending))
            self._call_interrupted = False
        except DeltaSyncError as error:
            problem = error
        (failed,) = self._ranks.caller.ranks_where(f"{what}: tidied", [problem is not None])
        if problem is not None:
            raise problem
        return failed

    def _pending_error(self) -> DeltaSyncError | None:
        """Return the error of the background thread, unless it was raised before."""
        stopped = self._committer.stopped
        try:
            if self._progress is not None and not self._progress.error_raised:
                self._progress.wait()
        except DeltaSyncError as error:
            return error
        return None if stopped is None else type(stopped)(stopped.message)

    def _withdraw(self, error: BaseException, step: int, watch: Stopwatch) -> None:
        """Report to the other ranks, which continue publishing, that this one has nothing to publish."""
        pending = self._pending
        if pending is None:
            return
        progress = PublishProgress()
        progress.error_raised = True
        self._background.submit(
            progress, lambda: self._rank_committer.commit_version(pending, step, progress, watch, error)
        )
        self._progress = progress


def _refuse_weights(weights: Weights | None) -> None:
    if weights is not None:
        raise UsageError(
            "weights= is given, and this publisher's model is sharded over ranks: publish the model, or make a "
            "publisher from a function that yields (checkpoint name, whole tensor), on one rank"
        )


def _busy_at_one_step(reports: list[Json]) -> bool:
    """Return whether a version is under way on any rank; raise UsageError if the ranks publish different steps."""
    check_same("step", [step for step, _ in reports])
    return any(busy for _, busy in reports)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")

"""The caller's side of publishing on each of many ranks: all of them compare, or none.

What one rank has met must not lead it elsewhere than the others, or they would wait for each other. So before anything
is done that all have to do, they ask each other who is still busy, and who has something to say first.
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

_Given = TypeVar("_Given")


class RankPublishSession(PublishSession):
    """One version after another, on every rank; each method is called by all of them, at the same places."""

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
        self._together = committer
        self._ranks = ranks

    def publish(
        self, step: int, wait: bool, weights: Weights | None, watch: Stopwatch, sidecars: Sidecars
    ) -> PublishResult:
        """See ``Publisher.publish``."""
        # Counted before anything is refused, so that the ranks count alike.
        self._calls += 1
        kept: dict[str, bytes] = {}

        def checked() -> int:
            _refuse_weights(weights)
            kept.update(checked_sidecars(sidecars))
            return check_step(step)

        if self._calls % self._options.every:
            return self._skipped(checked(), watch)
        what = f"publish, call {self._calls}"
        if wait:
            self._join()
        busy = self._ranks.calls.agree(what, lambda: [checked(), self._busy], _busy_at_one_step)
        step = check_step(step)
        if busy:
            return self._skipped_for_another(step, watch)
        failed = self._agree(what)
        if failed:
            logger.warning("step %d is not published: rank %s has to be heard first", step, _listed(failed))
            return self._skipped(step, watch)
        watch.lap()
        try:
            patch = self._diff(None)
        except BaseException as error:  # an interrupt too: the others publish, and wait for this rank
            self._withdraw(error, step, watch)
            raise
        return self._handed_over(step, patch, watch, kept)

    def finish(self) -> None:
        """Wait for the version under way, without the other ranks.

        Raises:
            PublishError, ConflictError: what became of it, if nobody was told yet.
        """
        self._join()
        problem = self._untold()
        if problem is not None:
            raise problem

    def settle(self) -> None:
        """As ``Course.settle``.

        Raises:
            PublishError: another rank has something to say first, as its log shows. Else as ``Course.settle``.
        """
        self._join()
        failed = self._agree("settle")
        if failed:
            raise PublishError(f"rank {_listed(failed)} could not go on, and says why; call this again")

    def agreed(self, what: str, check: Callable[[], _Given]) -> _Given:
        """As ``Course.agreed``; raises on every rank, also where they were not given the same."""
        found: list[_Given] = []

        def work() -> Json:
            found.append(check())
            return found[0]

        self._ranks.calls.agree(f"{what}: arguments", work, lambda told: check_same(what, told))
        return found[0]

    def led(self, what: str, work: Callable[[], str]) -> str:
        """What ``work`` gives on rank 0, on every rank."""
        found: str = self._ranks.calls.first(what, work)
        return found

    def _join(self) -> None:
        if self._progress is not None:
            self._progress.join()

    def _agree(self, what: str) -> list[int]:
        """Have each rank raise what it has not told yet, and bring all baselines to a durable version.

        Returns:
            the ranks that raise something, on those that do not.
        """
        problem = self._untold()
        patch, committer = self._patch, self._committer
        untidy = (patch is not None and patch.open) or committer.suspect or self._called_off
        failed, untidied = self._ranks.calls.who(f"{what}: before", [problem is not None, untidy])
        if problem is not None:
            raise problem
        if failed or not untidied:
            return failed
        try:
            # Also waits for what a caller who was interrupted has left under way.
            self._background.call(lambda: committer.tidy(patch))
            self._called_off = False
        except DeltaSyncError as error:
            problem = error
        (failed,) = self._ranks.calls.who(f"{what}: tidied", [problem is not None])
        if problem is not None:
            raise problem
        return failed

    def _untold(self) -> DeltaSyncError | None:
        """What the background thread has met, if nobody was told yet."""
        stopped = self._committer.stopped
        try:
            if self._progress is not None and not self._progress.delivered:
                self._progress.wait()
        except DeltaSyncError as error:
            return error
        return None if stopped is None else type(stopped)(stopped.message)

    def _withdraw(self, error: BaseException, step: int, watch: Stopwatch) -> None:
        """Tell the other ranks, who go on to publish, that this one has nothing to give."""
        patch = self._patch
        if patch is None:
            return
        progress = PublishProgress()
        progress.delivered = True
        self._background.submit(progress, lambda: self._together.work(patch, step, progress, watch, error))
        self._progress = progress


def _refuse_weights(weights: Weights | None) -> None:
    if weights is not None:
        raise UsageError(
            "weights= is given, and this publisher's model is sharded over ranks: publish the model, or make a "
            "publisher from a function that yields (checkpoint name, whole tensor), on one rank"
        )


def _busy_at_one_step(told: list[Json]) -> bool:
    """Whether a version is under way on any rank; raises UsageError where they publish different steps."""
    check_same("step", [step for step, _ in told])
    return any(busy for _, busy in told)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")

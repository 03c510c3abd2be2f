"""``WeightUpdater`` changes an engine's weights: stage, commit, roll back, repair. It also detects external writes.

Each change is one log line.
"""

import logging
from collections.abc import Callable, Iterator
from typing import NoReturn

from vllm_delta_sync.engine.commit.interrupts import postpone_interrupts
from vllm_delta_sync.engine.commit.transaction import (
    EnginePort,
    FingerprintMismatchError,
    Transaction,
    all_hold,
    describe_ranks,
)
from vllm_delta_sync.engine.compat.write_hooks import WAKE
from vllm_delta_sync.engine.follow.rank_group import RankGroup
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.model.weight_memory import ASLEEP
from vllm_delta_sync.engine.observe import metrics
from vllm_delta_sync.engine.observe.states import Answer, State
from vllm_delta_sync.engine.observe.status import StatusBoard
from vllm_delta_sync.engine.planning.run_history import History, WeightPosition
from vllm_delta_sync.engine.planning.update_planner import NOTHING_READ, UpdatePlan, UpdatePlanner
from vllm_delta_sync.engine.protocol import ClearExternalWrite, Commit, Confirm, RankState, Revert, unwrap
from vllm_delta_sync.errors import (
    BusyError,
    ChainError,
    DeltaSyncError,
    DigestError,
    EngineError,
    FingerprintError,
    FormatError,
    ModelError,
    WeightsLostError,
)
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.logs import about
from vllm_delta_sync.settings import Settings
from vllm_delta_sync.units import rounded

MAX_REPAIRS = 3
"""Number of repairs with a wrong result after which the updater gives up."""

PHASES = {**metrics.PHASES, "pause": "paused"}
"""``pause`` is the sum of the phases after ``rescan``."""
MIN_SHOWN_MS = 0.05
"""Phases shorter than this are left out of the line."""


class WeightUpdater:
    """Moves all ranks of an engine from version to version of one run.

    Attributes:
        rescans: yields which tensors to rescan beside each staging.
    """

    def __init__(
        self,
        port: EnginePort,
        settings: Settings,
        board: StatusBoard,
        history: History,
        planner: UpdatePlanner,
        ranks: RankGroup,
    ) -> None:
        self._port = port
        self._settings = settings
        self._board = board
        self._history = history
        self._planner = planner
        self._ranks = ranks
        self._pause_state: State = "draining" if settings.pause_mode == "wait" else "committing"
        self.rescans = rescan_batches([], 0)
        self._failed_repairs = 0
        self._confirmed = True
        self._keeps_undo = True

    def verify(self, served: Manifest) -> Answer:
        """Hash all weights and compare them with a version, per tensor and in total."""
        before = self._board.state
        self._board.enter("verifying")
        try:
            measured, mismatched = self._ranks.scan(list(range(len(self._history.run.table))))
        finally:
            self._board.enter(before)
        found = "" if measured is None else measured.hex()
        return {
            "verdict": found == served.fingerprint and not mismatched,
            "version": served.version,
            "fingerprint": found,
            "expected": served.fingerprint,
            "mismatched": mismatched,
        }

    def invalidate(self, error: DeltaSyncError) -> None:
        """Record that the weights are no version, in the status and in spans, until they are identified again.

        The caller raises the error, or passes it to ``Receiver.fail``, which counts it.
        """
        if isinstance(error, FingerprintError) and self._board.served is not None:
            self._failed_repairs = 0
            self._board.set(repair_target=self._board.served)
        self._board.set(served=None, undo=[], invalidated=True)
        self._board.report_error(error, "refused", is_failure=False)
        try:
            self._port.label(None, None)
        except EngineError as unset:
            logger.warning(
                "outputs still carry the old version label; each poll tries again to clear it: %s", unset.message
            )

    def repair(self, target: Manifest) -> None:
        """Restore the weights to a version after an external write, and verify them.

        Raises:
            BusyError: the engine is asleep. FingerprintError: the result is not that version.
        """
        self.check_awake()
        self._board.enter("repairing")
        timings = self._ranks.repair(target).ms
        # Outputs must not carry the version's label before the weights are verified.
        transaction = Transaction(
            self._port, Commit(target.version), None, target.run, matches=self._ranks.matches_declared, label=None
        )
        transaction.commit()
        timings = timings | transaction.resume()
        outcome = self.verify(target)
        if not outcome["verdict"]:
            self._failed_repairs += 1
            if self._failed_repairs >= MAX_REPAIRS:
                self._board.set(repair_target=None)
            raise mismatch_error(target, outcome["mismatched"])
        self._port.label(target.version, target.run)
        self._board.set(served=target, invalidated=False, repair_target=None)
        self._record("repair", target, timings, "weights that were changed from outside are repaired")

    def check_awake(self) -> list[RankState]:
        """Return what each rank holds; the status shows whether the engine sleeps, which is no failure.

        Raises:
            BusyError: it does.
        """
        ranks = self._ranks.describe()
        asleep = any(rank.asleep for rank in ranks)
        if asleep != self._board.asleep:
            self._board.set(asleep=asleep)
        if asleep:
            raise BusyError(ASLEEP)
        return ranks

    def check_external_writes(self, repairs: bool = False) -> None:
        """Rescan if the ranks report a possible external write: are the weights still the served version?

        Args:
            repairs: whether to rebuild weights that a sleep has lost.

        Raises:
            BusyError: the engine is asleep. FingerprintError: the weights were changed. Errors as ``repair``.
        """
        ranks = self.check_awake()
        reasons = sorted({rank.external_writer for rank in ranks if rank.external_writer is not None})
        served = self._board.served
        if served is None:
            return
        if not reasons:
            self._check_claims(ranks, served)
            return
        outcome = self.verify(served)
        if not outcome["verdict"]:
            error = mismatch_error(served, outcome["mismatched"])
            changed = FingerprintError(f"{error.message}: changed from outside ({', '.join(reasons)})")
            self.invalidate(changed)
            # Sleep at level 2 gives up the weights: no fault, so what was asked for need not fail once.
            if repairs and reasons == [WAKE]:
                self.repair(served)
                self._board.settle(error=None)
                return
            raise changed
        logger.info("weights are still version %d after %s", served.version, ", ".join(reasons))
        unwrap(self._port.call(ClearExternalWrite([rank.external_writes for rank in ranks])))

    def still_holds_no_version(self) -> bool:
        """Return whether nothing has written the ranks' weights since they were found to be no version of the run."""
        ranks = self._ranks.describe()
        return all(rank.version is None and rank.external_writer is None and not rank.asleep for rank in ranks)

    def _check_claims(self, ranks: list[RankState], served: Manifest) -> None:
        """Check that ranks hold the served version; confirm the last commit again if that call was lost."""
        if not all_hold(ranks, served.version):
            raise WeightsLostError(f"version {served.version} should be served, but {describe_ranks(ranks)}")
        if not all(rank.confirmed for rank in ranks):
            self._confirm()

    def commit_next(
        self, position: WeightPosition | None, target: int, overruled: Callable[[], bool] = lambda: False
    ) -> None:
        """Stage and commit the next part of the update to a version; all of it, if the version is older.

        Args:
            position: what the ranks hold; None means weights that are no known version.
            overruled: checked once it is staged. If True, it is not committed, unless no version is served yet.
        """
        if not self._confirmed:
            self._confirm()
        if not self._confirmed:
            # If the next pause expired, the watchdog would revert this commit too, which is served.
            raise EngineError(
                f"version {self._board.served_version} is served, but could not be confirmed on every rank yet"
            )
        while True:
            plan = self._planner.plan_towards(position, target, self._settings.stage_bytes)
            try:
                staged, elements = self._stage(plan, position)
                break
            except ModelError as error:
                self.invalidate(error)
                raise
            except DeltaSyncError as error:
                self._check_decoded_against(plan, position, error)
                # Invalid weights are not the version's fault.
                if self._board.invalidated or not self._planner.feedback.exclude(plan, error):
                    raise
        if self._board.served is not None and overruled():
            logger.info("version %d is staged and not served: another order came meanwhile", plan.target.version)
            return
        timings = self._commit(plan, position, staged)
        if timings is not None:
            self._committed(plan, timings, elements)

    def _check_decoded_against(self, plan: UpdatePlan, position: WeightPosition | None, error: DeltaSyncError) -> None:
        """Rescan if a delta does not decode: either its bytes are damaged, or the weights it was decoded against.

        Raises:
            FingerprintError: the weights are.
        """
        undecoded = isinstance(error, FormatError) and not isinstance(error, DigestError)
        if position is None or not (undecoded and plan.needs_base_bits):
            return
        if not self.verify(position.manifest)["verdict"]:
            self._raise_changed(error)

    def _raise_changed(self, error: DeltaSyncError) -> NoReturn:
        """Raise FingerprintError: an update failed by ``error``, because the weights held are no version any more."""
        changed = FingerprintError(f"{error.message}: the weights held were changed from outside")
        self.invalidate(changed)
        raise changed from error

    def _stage(self, plan: UpdatePlan, position: WeightPosition | None) -> tuple[dict[str, float], int]:
        """Stage on all ranks; returns the slowest rank's timings, and the elements that all ranks will write."""
        self._board.enter("staging")
        rescan = [] if position is None else next(self.rescans)
        staged = self._ranks.stage(plan, self._board.served_version, rescan)
        self._board.set(rank_store_use=staged.store)
        if staged.mismatching and position is not None:
            error = mismatch_error(position.manifest, staged.mismatching)
            self.invalidate(error)
            raise error
        return staged.ms, staged.elements

    def _commit(
        self, plan: UpdatePlan, position: WeightPosition | None, timings: dict[str, float]
    ) -> dict[str, float] | None:
        """Commit what is staged; returns all timings, or None if the commit was reverted."""
        self._board.enter(self._pause_state)
        target, served = plan.target, self._board.served
        transaction = Transaction(
            self._port,
            Commit(target.version),
            self._board.served_version,
            target.run,
            matches=self._ranks.matches_declared,
            on_paused=self._show_paused,
        )
        try:
            transaction.commit()
        except FingerprintMismatchError as error:
            self._diagnose_mismatch(plan, position, error)
            return None
        if served is not None:
            self._history.undo_manifests[served.version] = served
        return timings | self._resume(transaction, target)

    def _committed(self, plan: UpdatePlan, timings: dict[str, float], elements: int) -> None:
        """Confirm, record and log a commit, after generation has resumed."""
        target = plan.target
        left = max((version for version in self._history.undo_manifests if version > target.version), default=None)
        # After going back, the undo log's entries would lead forward again, so they are dropped.
        self._keeps_undo = self._keeps_undo and left is None
        self._planner.feedback.record_commit(target.version)
        if avoided := [key for _, key in self._planner.feedback.bad]:
            logger.warning("version %d was reached without %s", target.version, ", ".join(avoided[:4]))
        if left is None:
            self._record("forward", target, timings, _describe(plan, elements), plan.read())
        else:
            self._record("rollback", target, timings, f"rolled back from version {left}", plan.read())

    def _record(
        self, move: str, target: Manifest, timings: dict[str, float], what: str, read: dict[str, int] = NOTHING_READ
    ) -> None:
        """Confirm a change of the served weights, after generation has resumed, and show it in status, metrics and log.

        Args:
            move: of ``metrics.MOVES``. what: it did, in the words of the line. read: as ``UpdatePlan.read``.
        """
        self._confirm()
        timings = {phase: timings[phase] for phase in PHASES if phase in timings}
        self._board.record_commit(move, target, timings, read)
        shown = ", ".join(f"{PHASES[phase]} {rounded(ms)} ms" for phase, ms in timings.items() if ms >= MIN_SHOWN_MS)
        logger.log(
            logging.WARNING if move == "repair" else logging.INFO,
            "version %d (step %d) served: %s; %s", target.version, target.step, what, shown,
            extra=about(
                metrics.MOVES[move],
                version=target.version,
                step=target.step,
                run=target.run,
                payload_bytes=read["payload_bytes"],
                changed=read["changed"],
                timings_ms=timings,
            ),
        )  # fmt: skip

    def _show_paused(self) -> None:
        if self._pause_state == "draining":
            self._board.enter("committing")

    @postpone_interrupts()  # a version that generation continues with is shown as served
    def _resume(self, transaction: Transaction, target: Manifest) -> dict[str, float]:
        """Resume generation with a new version; returns the timings."""
        # Marked as served only now: if the pause expired meanwhile, the engine has reverted the commit.
        try:
            timings = transaction.resume()
        except WeightsLostError:
            self._mark_served(target)
            raise
        self._mark_served(target)
        return timings

    def _mark_served(self, target: Manifest) -> None:
        # An earlier error is resolved by this version.
        self._board.set(served=target, invalidated=False, ahead_of_target=False, error=None)

    def _confirm(self) -> None:
        """Confirm the last commit, after generation has resumed: until then its undo data may be needed.

        A failure is logged only. The next check of the ranks confirms again.
        """
        self._confirmed = False
        try:
            ranks = unwrap(self._port.call(Confirm(self._settings.undo_bytes if self._keeps_undo else 0)))
        except DeltaSyncError as error:
            logger.warning("could not confirm the last commit on every rank, or read the undo logs: %s", error.message)
            return
        self._confirmed = self._keeps_undo = True
        common = set.intersection(*(set(rank.undo) for rank in ranks))
        undo_manifests = self._history.undo_manifests
        kept = [version for version in ranks[0].undo if version in common and version in undo_manifests]
        self._history.undo_manifests = {version: undo_manifests[version] for version in kept}
        self._board.set(undo=kept)

    def _diagnose_mismatch(
        self, plan: UpdatePlan, position: WeightPosition | None, error: FingerprintMismatchError
    ) -> None:
        """Find out by a rescan why a commit was reverted: a wrong version, or wrong weights before it."""
        if position is not None and self.verify(position.manifest)["verdict"]:
            wrong = f"{error.message}: it was made against other weights than version {position.version}"
            self._planner.feedback.record_mismatch(plan, wrong)
            return
        self._raise_changed(error)

    def rollback_to(self, version: int, served: Manifest) -> None:
        """Revert to a version in the undo log, and hold it. Raises ChainError: the log does not reach it."""
        target = self._history.undo_manifests.get(version)
        if target is None or any(version not in rank.undo for rank in self._ranks.describe()):
            known = ", ".join(map(str, self._board.undo)) or "none"
            raise ChainError(
                f"version {version} is not in the undo log, which holds {known}. It does not hold versions that were "
                "merged into one commit, or that exceeded undo_bytes"
            )
        self._board.enter(self._pause_state)
        transaction = Transaction(
            self._port, Revert(version), self._board.served_version, target.run, on_paused=self._show_paused
        )
        try:
            transaction.commit()
        except FingerprintError as error:
            self.invalidate(error)
            raise
        timings = self._resume(transaction, target)
        self._board.set(holding=True, undo=[known for known in self._board.undo if known < version])
        self._record("rollback", target, timings, f"rolled back from version {served.version}")


def mismatch_error(served: Manifest, names: list[str]) -> FingerprintError:
    """Return the error for weights that are not the served version; names: tensors that differ, may be empty."""
    shown = ", ".join(names[:3]) or "the sum"
    return FingerprintError(f"served weights are not version {served.version}: {shown} differ")


def rescan_batches(sizes: list[int], limit: int) -> Iterator[list[int]]:
    """Yield tensor ids to rescan, all tensors again and again, each at most once in a batch.

    Args:
        sizes: bytes per tensor id. limit: bytes in a batch, but at least one tensor; 0: no tensors.
    """
    position = 0
    while True:
        found: list[int] = []
        room = limit
        while room > 0 and len(found) < len(sizes):
            found.append(position)
            room -= max(1, sizes[position])
            position = (position + 1) % len(sizes)
        yield found


def _describe(plan: UpdatePlan, elements: int) -> str:
    """Say what a commit forward took; ``elements``: that it wrote, over all ranks."""
    read = f"{rounded(plan.payload_bytes / 1e6)} MB"
    if plan.steps and plan.versions > 1:
        # A sum over the versions would count most elements several times.
        return f"{plan.versions} versions in one commit, {elements:,} elements written, {read}"
    if plan.steps:
        return f"{rounded(100 * plan.changed / max(1, plan.target.total))} % changed, {read}"
    return "rebuilt whole" if plan.rebuild else f"taken whole, {read}"

"""``Receiver`` follows a run with one engine: poll, plan, stage, commit, report.

It knows the engine only as an ``EnginePort``, so the vLLM server and the offline ``LLM`` share it. One thread drives
it; ``status`` may be called from any thread.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_delta_sync.engine.commit.transaction import EnginePort, LabelKeepingPort
from vllm_delta_sync.engine.follow.identify import WeightIdentifier
from vllm_delta_sync.engine.follow.rank_group import RankGroup
from vllm_delta_sync.engine.follow.standing_orders import StandingOrder, StandingOrderStore
from vllm_delta_sync.engine.follow.updater import WeightUpdater, mismatch_error, rescan_batches
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe.states import ACTING, STATES, Answer
from vllm_delta_sync.engine.observe.status import StatusBoard
from vllm_delta_sync.engine.planning.run_history import History, WeightPosition
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.engine.planning.update_planner import UpdatePlanner
from vllm_delta_sync.errors import (
    BusyError,
    ChainError,
    DataError,
    DeltaSyncError,
    FingerprintError,
    NotFoundError,
    UsageError,
    WeightsLostError,
)
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.run.service_policy import ServicePolicy
from vllm_delta_sync.settings import HEAD, Settings


class Receiver:
    """Keeps an engine on the version that the settings, and requests at run time, ask for.

    Args:
        orders: where standing orders are stored; if None, they end with this process.

    Raises:
        SettingsError: a file of ``trusted_keys`` cannot be read, or ``state_dir`` cannot be written.

    Attributes:
        settings: with the target in force.
        history, planner: of the run followed.
        target_unavailable: whether the target named no version that can be served when last resolved.
        goal_version: the version that the running update leads to; None when idle.
        server_fields: returns what the API server that leads adds to the status.
        announced_version: the version that a notice named, prefetched by the next poll; None if no notice came.
    """

    def __init__(self, port: EnginePort, settings: Settings, orders: StandingOrderStore | None = None) -> None:
        self.port = LabelKeepingPort(port)
        self._configured = settings
        self._orders = orders
        order = None if orders is None else orders.load()
        target = order.target if order is not None and order.target is not None else settings.target
        self.settings = settings.model_copy(update={"target": target})
        self.board = StatusBoard(settings.policy, target, settings.max_lag)
        self.board.trust = lambda: self.history.trusted_head.document()
        self.board.set(receiver=settings.receiver_id, holding=order is not None and order.holding)
        self.goal_version: int | None = None
        self.announced_version: int | None = None
        self.target_unavailable = False
        self.server_fields: Callable[[], Answer] = dict
        keyring = settings.keyring()
        policy = ServicePolicy.of_settings(settings)
        trusted_head = TrustedHead(settings, keyring)
        self.history = History(settings.bucket, keyring, trusted_head, settings.store(), policy)
        self.planner = UpdatePlanner(self.history, policy)
        ranks = RankGroup(self.port)
        self._updater = WeightUpdater(self.port, settings, self.board, self.history, self.planner, ranks)
        self._identifier = WeightIdentifier(settings, self.board, self.history, ranks, self._updater.invalidate)
        # The standing order whose version is not served yet; set only after a restart.
        self._pending_order = order if order is not None and order.version is not None else None
        # The run that the weights were compared with and do not match. Comparing again would hash the whole model.
        self._unmatched_run: str | None = None
        # The newest quarantined version that was logged as skipped.
        self._last_skipped = -1

    # What is followed and served

    @property
    def served_version(self) -> int | None:
        """The version that answers now; None until the weights are identified as a version."""
        return self.board.served_version

    @property
    def served_run(self) -> str | None:
        """The run of ``served_version``."""
        served = self.board.served
        return None if served is None else served.run

    @property
    def run_id(self) -> str | None:
        """The run followed; None until it was opened."""
        return self.board.run

    @property
    def has_pending_order(self) -> bool:
        """Whether a standing order from before a restart names a version that is not served yet."""
        return self._pending_order is not None

    @property
    def wanted_version(self) -> int | None:
        """The version that is being gone to, or that a standing order from before a restart names."""
        order = self._pending_order
        if self.goal_version is None and order is not None and order.run == self.run_id:
            return order.version
        return self.goal_version

    @property
    def can_repair(self) -> bool:
        """Whether weights were changed from outside and can be restored."""
        return self.board.repair_target is not None

    def status(self) -> Answer:
        """Return the body of ``GET /delta_sync/status``."""
        return {**self.board.document(), **self.server_fields()}

    # Following

    def advance(
        self,
        version: int | None = None,
        until: Callable[[], bool] = lambda: False,
        overruled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Bring the engine to a version in as few commits as possible.

        Args:
            version: None means the version that the setting ``target`` names.
            until: checked between two commits; if True, the rest waits for the next call.
            overruled: see ``WeightUpdater.commit_next``; True only if ``until`` is.

        Raises:
            DeltaSyncError: the first failure; ``served_version`` says what is served then.
        """
        stopped_by = self._poll()
        self._restore_served()
        if version is not None:
            self._check_requested(version, self.served_version)
        elif self._pending_order is not None:
            self._resume_pending_order(until)
            return
        elif self.board.holding and self.served_version is not None:
            raise BusyError(
                f"this server is held at version {self.served_version}; POST /delta_sync/release to follow again"
            )
        before = self.board.served
        # A hold that came before any version was served keeps the first version that is.
        stays, explicit = self.board.holding and version is None, version is not None or self.settings.target != HEAD
        try:
            with self._reporting_errors():
                self.goal_version = self._newest_allowed() if version is None else version
                position = self._ensure_position()
                target = self._resolve_followed_target() if version is None else version
                if self.served_version is None or (self.served_version < target and not stays and not until()):
                    self._move_to(position, target, lambda: stays or until(), overruled, explicit)
                if version is None:
                    self._check_served_in_bucket()
                if stopped_by is not None and not explicit:
                    raise stopped_by
            if version is not None:
                self._pending_order = None
            self._mark_healthy()
        finally:
            # Also after a failure: a hold stays at what is served now, the first version or one on the way.
            if version is not None and self.board.served is not before:
                self._pending_order = None
            self._save_order()

    def observe(self) -> None:
        """Poll the bucket and check what is served without moving it; policy ``manual`` does this between requests.

        Raises:
            DeltaSyncError: the failure that the next ``advance`` would meet too.
        """
        stopped_by = self._poll()
        with self._reporting_errors(may_sleep=True):
            if self.served_version is not None:
                self._updater.check_external_writes()
            elif self._unmatched_run != self.run_id:
                self._identify()
                self._save_order()
            self._check_served_in_bucket()
            if stopped_by is not None:
                raise stopped_by
        self._mark_healthy()

    def check_served(self) -> None:
        """Check for external writes to the weights that are served; for times in which no version is committed."""
        self._require_usable()
        with self._reporting_errors(may_sleep=True):
            self._updater.check_external_writes()

    def repair(self) -> None:
        """Restore the version served before, held or not, if weights were changed from outside (``can_repair``)."""
        self._poll()
        if self._restore_served():
            self.board.settle(error=None)

    # Requests

    def hold(self) -> None:
        """Stay at the version served until ``release``."""
        self.board.set(holding=True)
        if self.board.state == "idle":
            self.board.settle()
        self._save_order()

    def release(self) -> None:
        """End a hold and drop a pending order."""
        self.board.set(holding=False)
        self._pending_order = None
        if self.board.state == "held":
            self.board.settle()
        self._save_order()

    def rollback(self, version: int) -> None:
        """Serve an older version and hold it, in one commit.

        The undo log is used if it reaches the version, without the bucket. Otherwise the version is staged from the
        bucket like any other.

        Raises:
            NotFoundError: the version is not published, or no longer retained. ChainError: it is newer than the served
                one, or no update leads there. DeltaSyncError: what failed; see ``served_version``.
        """
        self._require_usable()
        served = self.board.served
        if served is None:
            raise BusyError("no version is served yet; there is nothing to roll back from")
        if version in self.board.undo and version < served.version:
            with self._reporting_errors():
                # If it rebuilds the weights, the undo log is empty.
                self._updater.check_external_writes(repairs=True)
        if version in self.board.undo and version < served.version:
            with self._reporting_errors():
                self._updater.rollback_to(version, served)
        elif version != served.version:
            self._rollback_through_bucket(version)
        self._pending_order = None
        self.hold()

    def _rollback_through_bucket(self, version: int) -> None:
        self._poll()
        self._restore_served()
        served = self.served_version
        if served is None:
            raise ChainError(
                f"another run, {self.run_id}, is in the place of the one served, so nothing was rolled back; POST "
                f'/delta_sync/sync {{"version": {version}}} serves that version of it'
            )
        self._check_requested(version, None)
        if version > served:
            raise ChainError(
                f'version {version} is newer than the served version {served}; POST /delta_sync/sync {{"version": '
                f"{version}}} goes forward"
            )
        with self._reporting_errors():
            self._move_to(self._ensure_position(), version)
        self._mark_healthy()

    def target(self, named: str) -> None:
        """Follow another target from now on, newer or older; ends a hold.

        Args:
            named: head, a version, or tag:NAME.

        Raises:
            NotFoundError: there is no such version or tag. DeltaSyncError: what failed. The old target stays in force
                unless a commit towards the new one was made; then the new target stays, and the status shows the error.
        """
        chosen = self._configured.model_copy(update={"target": named})
        self._require_usable()
        self._poll()
        self._restore_served()
        target = self.history.resolve_target(named)
        if named == HEAD:
            target = max(target, self.served_version or 0)
        before, served = self.settings, self.board.served
        try:
            with self._reporting_errors():
                self.goal_version = target
                position = self._ensure_position()
                self.settings = chosen
                self._move_to(position, target)
            self._mark_healthy()
        except BaseException as error:
            # The head stays the target, because it can be reached later. A version that cannot be served does not, nor
            # does anything while nothing is served: the caller gets an error.
            moved = self.board.served is not served
            stays = self.settings is chosen and self.board.served is not None and (moved or named == HEAD)
            if not stays:
                self.settings = before
            if not stays or not isinstance(error, DeltaSyncError) or (chosen == before and not moved):
                raise
        self.board.set(target=named, ahead_of_target=False)
        self.release()

    def verify(self) -> Answer:
        """Rescan every rank's weights: ``verdict`` is True only if they are the served version's, bit for bit.

        ``chain`` says whether the bucket still holds the served version unchanged; None if that is unknown. Where it is
        None or False, ``reason`` says why. ``chain`` has no influence on what is served.
        """
        self._require_usable()
        served = self.board.served
        if served is None:
            raise BusyError("no version is served yet; there is nothing to verify against")
        outcome = self._updater.verify(served)
        if not outcome["verdict"]:
            error = mismatch_error(served, outcome["mismatched"])
            self._updater.invalidate(error)
            self.fail(error)
        chain, reason = self.history.compare_with_bucket(served)
        return {**outcome, "chain": chain, "reason": reason}

    # Polling

    def _poll(self) -> DeltaSyncError | None:
        self._require_usable()
        try:
            return self._read_head()
        except DeltaSyncError as error:
            self.fail(error)
            raise

    def _read_head(self) -> DeltaSyncError | None:
        """Open the run if it is new, and find the newest good manifest; returns what is wrong with the one after it."""
        self.board.set(polls=self.board.polls + 1)
        with self.history.prefetching(self.announced_version):
            if self.history.is_replaced():
                self._open_run()
            if self.board.state == "waiting_for_run":
                self.board.enter("identifying")
            stopped_by = self.history.poll(self.board.served)
        self.planner.refresh()
        self.board.set(head=self.history.head, goal=self.history.goal, polled_at=time.monotonic())
        self._log_skipped()
        return stopped_by

    def _check_served_in_bucket(self) -> None:
        """Raise ChainError if the head has the number of the served version and other weights: a restored backup."""
        served, head = self.board.served, self.history.head
        if served is None or head is None or (head.run, head.version) != (served.run, served.version):
            return
        if head.fingerprint != served.fingerprint:
            raise ChainError(
                f"version {served.version} is {served.digest} here and {head.digest} in the bucket: the history was "
                "rewritten, for example by a backup that was restored. Restart this server to follow it as it is now"
            )

    def _log_skipped(self) -> None:
        """Log the quarantined versions up to the head in one line, each version once."""
        head, goal = self.history.head, self.board.goal
        if head is None or head.quarantine is None or head.version <= self._last_skipped:
            return
        if goal == head.version or self.settings.target != HEAD:
            return
        first = max(self._last_skipped, -1 if goal is None else goal) + 1
        self._last_skipped = head.version
        skipped = f"versions {first} to {head.version}" if first < head.version else f"version {first}"
        logger.warning("quarantined and skipped: %s: %s", skipped, head.quarantine.summary())

    def _open_run(self) -> None:
        before = self.run_id
        run = self.history.open()
        self.planner.reset()
        self._updater.rescans = rescan_batches([spec.nbytes for spec in run.table], self.settings.rescan_bytes)
        self._last_skipped = -1
        if before is not None:
            logger.warning("run %s was replaced by run %s in the same place", before, run.info.run)
        known = self.board.served is not None
        # Before the label is cleared, which may fail: the weights served are no version of this run. A refusal
        # concerned the other run. This one may not be complete yet.
        self.board.enter(
            "waiting_for_run",
            run=run.info.run,
            served=None,
            head=None,
            goal=None,
            undo=[],
            invalidated=False,
            repair_target=None,
        )
        if known:
            self.port.label(None, None)

    def _newest_allowed(self) -> int | None:
        """Return the newest version that may be served while none is served yet; None allows any."""
        if self.served_version is not None or self.settings.target == HEAD:
            return None
        try:
            return self._resolve_followed_target()
        except DataError:
            # Raised again by ``advance``, once the weights are identified.
            return None

    def _check_requested(self, version: int, served: int | None) -> None:
        """Raise if a request names an invalid version; the status does not record this as the last error."""
        unpublished = self.history.unpublished(version)
        if unpublished is not None:
            raise unpublished
        if served is not None and version < served:
            raise ChainError(f"version {version} precedes the served version {served}; use rollback")

    def _resolve_followed_target(self) -> int:
        """Return the version that the target in force names now.

        Raises:
            NotFoundError: it is not published yet. ChainError: it is older than the served version.
        """
        served, target = self.served_version, self.settings.target
        self.board.set(ahead_of_target=False)
        self.target_unavailable = self.history.head is not None
        version = self.history.resolve_target(target, served)
        if served is not None and version < served:
            self.board.set(ahead_of_target=True)
            raise ChainError(
                f"the target ({target}) is version {version}, and version {served} is served; a server does not "
                f'roll back by itself: POST /delta_sync/rollback {{"version": {version}}}, or POST it as target'
            )
        self.target_unavailable = False
        return version

    # Identifying and moving

    def _require_usable(self) -> None:
        """Raise if nothing can be done with this engine now; set a label that could not be set before."""
        if self.board.state == "lost":
            raise WeightsLostError(STATES["lost"])
        self.port.set_pending_label()

    def _ensure_position(self) -> WeightPosition | None:
        """Return what the ranks hold: identified if unknown, otherwise checked for external writes."""
        served = self._served_position()
        if served is None:
            unmatched = self._unmatched_run == self.run_id and not self.board.invalidated
            return None if unmatched and self._updater.still_holds_no_version() else self._identify()
        self._updater.check_external_writes(repairs=True)
        return served

    def _served_position(self) -> WeightPosition | None:
        served = self.board.served
        return None if served is None else WeightPosition(self.history.run, served)

    def _identify(self) -> WeightPosition | None:
        """Find out what the engine holds; None means weights that an anchor may replace."""
        newest, order = self.goal_version, self._pending_order

        def is_due(position: WeightPosition) -> bool:
            # Only the version that is to be held, and nothing newer than requested, not even in between.
            if order is not None and newest in (None, order.version):
                return position.version == order.version
            # Weights that are quarantined by now are served on: a server that skips them never goes back by itself.
            return newest is None or position.version <= newest

        self._updater.check_awake()
        position = self._identifier.identify(is_due)
        self._unmatched_run = self.run_id if position is None else None
        if position is not None and self.history.is_followed_run(position) and is_due(position):
            self.port.label(position.version, position.run.info.run)
            self.board.set(served=position.manifest, invalidated=False, error=None)
        return position

    def _move_to(
        self,
        position: WeightPosition | None,
        target: int,
        until: Callable[[], bool] = lambda: False,
        overruled: Callable[[], bool] = lambda: False,
        explicit: bool = True,
    ) -> None:
        """Go to a version, forward or back.

        Args:
            until, overruled: see ``advance``; ``until`` is checked after each commit.
            explicit: whether the version was named, so that it may be quarantined.
        """
        self.goal_version = target
        self.planner.requested_version = target if explicit else None
        while self.served_version != target:
            if self.served_version is None or self.served_version < target:
                self.history.check_fresh()
            self._updater.commit_next(position, target, overruled)
            position = self._served_position() or position
            if until():
                return

    # Restoring

    def _restore_served(self) -> bool:
        """Repair changed weights; returns whether it repaired."""
        if self.board.repair_target is None:
            return False
        with self._reporting_errors():
            self._repair_weights(self.board.repair_target)
        self._save_order()
        return True

    def _repair_weights(self, changed: Manifest) -> None:
        """Restore the version that was changed; the head instead, if that version is no longer retained."""
        goal = self.board.goal
        try:
            self._updater.repair(changed)
        except FingerprintError:
            raise
        except (DataError, UsageError):
            follows = self.settings.target == HEAD and not self.board.holding
            if not follows or goal is None or goal <= changed.version:
                raise
            newer = self.history.manifest(goal)
            self.history.check_in_history(newer)
            self.history.check_fresh()
            self._updater.repair(newer)

    # Standing orders

    def _resume_pending_order(self, until: Callable[[], bool]) -> None:
        """Go to the version of an order from before the restart; nothing newer is served in between."""
        order = self._pending_order
        if order is None or order.version is None:
            return
        with self._reporting_errors():
            if order.run != self.history.run.info.run:
                self._pending_order = None
                raise ChainError(
                    f"the standing order holds version {order.version} of run {order.run}, but the bucket now has run "
                    f"{self.history.run.info.run}: this server holds what it started with"
                )
            if self.history.unpublished(order.version) is not None:
                raise NotFoundError(
                    f"the standing order from before the restart holds version {order.version}, which is not "
                    "published; POST /delta_sync/release to follow, or give another order"
                )
            self.goal_version = order.version
            self._move_to(self._ensure_position(), order.version, until)
            if self.served_version != order.version:
                return
            self._pending_order = None
        self._mark_healthy()

    def _save_order(self) -> None:
        """Store the target and the hold in force, so that they survive a restart."""
        if self._orders is None:
            return
        configured, target, order = self._configured.target, self.settings.target, self._pending_order
        held = (self.board.served or self.board.repair_target) if self.board.holding else None
        run, version = (None, None) if held is None else (held.run, held.version)
        if order is not None and self.board.holding:
            run, version = order.run, order.version
        self._orders.save(
            StandingOrder(
                setting=configured,
                target=None if target == configured else target,
                holding=self.board.holding,
                run=run,
                version=version,
            )
        )

    # Reporting

    def only_waits(self, error: DeltaSyncError) -> bool:
        """Return whether an error is no failure: nothing is published yet, or not what the target names; the target is
        older than the served version; or the engine sleeps."""
        match error:
            case NotFoundError():
                return self.board.head is None or (self.target_unavailable and self.served_version is not None)
            case ChainError():
                return self.board.ahead_of_target
            case BusyError():
                return self.board.asleep
        return False

    def fail(self, error: DeltaSyncError) -> None:
        """Show an error in the status until something succeeds; end the engine if its weights are unknown."""
        if not isinstance(error, WeightsLostError):
            self.board.report_error(error, is_failure=not self.only_waits(error))
        elif self.board.state != "lost":
            self.board.report_error(error, "lost")
            logger.critical("%s: %s", error.kind, error.message)
            try:
                self.port.end(error.message)
            except DeltaSyncError as second:
                logger.critical("%s: %s", second.kind, second.message)

    def _mark_healthy(self) -> None:
        """Clear the last error; an expired head stays visible, even where no new version comes."""
        self.board.settle(error=None)
        if self.history.expired is not None:
            self.board.report_error(self.history.expired)

    @contextmanager
    def _reporting_errors(self, may_sleep: bool = False) -> Iterator[None]:
        """Show an error raised in the block in the status, and settle the state at its end.

        Args:
            may_sleep: whether the block just ends where the engine is asleep.
        """
        try:
            yield
        except DeltaSyncError as error:
            if may_sleep and isinstance(error, BusyError):
                self.board.settle(error=None)
                return
            self.fail(error)
            raise
        finally:
            self.goal_version = None
            if self.board.state in ACTING:
                self.board.settle()

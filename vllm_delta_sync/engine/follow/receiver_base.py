"""What keeps an engine on a run: looking into the bucket, proving, moving, putting right; and what is shown of it."""

import time
from collections.abc import Callable

from vllm_delta_sync.engine.commit.transaction import Answer, EnginePort, LabelKeepingPort
from vllm_delta_sync.engine.follow.rank_group import RankGroup
from vllm_delta_sync.engine.follow.run_session import RunSession
from vllm_delta_sync.engine.follow.standing_orders import StandingOrder, StandingOrderStore, chosen_by
from vllm_delta_sync.engine.follow.updater import WeightUpdater
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe.status import STATES, StatusBoard
from vllm_delta_sync.engine.planning.commit_plan import WeightPosition
from vllm_delta_sync.engine.planning.planner import UpdatePlanner
from vllm_delta_sync.engine.planning.run_history import History
from vllm_delta_sync.errors import (
    DeltaSyncError,
    EngineError,
    FingerprintError,
    StoreError,
    WeightsLostError,
)
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.settings import HEAD, Settings

STAGE_SECONDS = 1800.0
"""Longest that staging or a scan may take before the receiver says that it hangs."""


class ReceiverBase:
    """An engine, the run that it follows, and what stands between.

    Args:
        orders: where orders that outlive this process are kept; None: nowhere.

    Raises:
        SettingsError: a file of ``trusted_keys`` cannot be read, or ``state_dir`` cannot be written.

    Attributes:
        aim: the version on the way to; None at rest.
        expected: a version that somebody has told of, for the next look.
    """

    def __init__(
        self,
        port: EnginePort,
        settings: Settings,
        stage_seconds: float = STAGE_SECONDS,
        orders: StandingOrderStore | None = None,
    ) -> None:
        self.port = LabelKeepingPort(port)
        self._configured = settings
        self._orders = orders
        order = None if orders is None else orders.load()
        chosen = settings if order is None else chosen_by(settings, order)
        self.board = StatusBoard(settings.policy, chosen.target, settings.max_lag)
        self.board.set(holding=order is not None and order.holding)
        self.aim: int | None = None
        self.expected: int | None = None
        self._ranks = RankGroup(self.port, stage_seconds)
        self._followed = RunSession(self.port, chosen, self.board, self._ranks)
        # The order whose version is still to come to; only after a restart.
        self._owed = order if order is not None and order.version is not None else None
        # Whether the ranks were asked about another run than the one followed.
        self._strayed = False
        # The run that the weights were compared with, and are no version of; it costs a pass over the whole model.
        self._in_vain: str | None = None

    @property
    def settings(self) -> Settings:
        """With the bucket and the target that are in force."""
        return self._followed.settings

    @property
    def history(self) -> History:
        """Of the run followed."""
        return self._followed.history

    @property
    def ways(self) -> UpdatePlanner:
        """In the run followed."""
        return self._followed.ways

    @property
    def _mover(self) -> WeightUpdater:
        return self._followed.mover

    @property
    def owes(self) -> bool:
        """Whether an order of before a restart names a version that is not served yet."""
        return self._owed is not None

    @property
    def served_version(self) -> int | None:
        """The version that answers now; None until the weights are proven to be one."""
        served = self.board.served
        return None if served is None else served.version

    @property
    def run_id(self) -> str | None:
        """The run followed, once known."""
        return self.board.run

    @property
    def served_run(self) -> str | None:
        """The run that ``served_version`` counts in."""
        served = self.board.served
        return None if served is None else served.run

    def status(self) -> Answer:
        """The body of ``GET /delta_sync/status``."""
        return {**self.board.document(), "trust": self.history.witness.document()}

    def _rest_well(self) -> None:
        """Nothing failed; but a head that has run out is shown even where nothing new comes."""
        self.board.rest(error=None)
        if self.history.expired is not None:
            self.board.show_error(self.history.expired)

    def _go(self, place: WeightPosition | None, target: int, until: Callable[[], bool] = lambda: False) -> None:
        """To a version that somebody named, forward or back."""
        self.aim = self.ways.named = target
        while self.served_version != target:
            ahead = self.served_version is None or self.served_version < target
            if ahead:
                self.history.check_fresh()
            self._mover.step(place, target, until)
            place = self._served_place() or place
            if until():
                return

    def _place(self) -> WeightPosition | None:
        """What the ranks hold, proven if it is not known, and looked after if it is."""
        served = self._served_place()
        if served is None:
            return self._prove(self._followed)
        self._mover.check_touched()
        return served

    def _served_place(self) -> WeightPosition | None:
        served = self.board.served
        return None if served is None else WeightPosition(self.history.run, served)

    def _restore(self) -> bool:
        """Put right weights that somebody changed, or that may not be believed any more; whether it was done."""
        with self._failing():
            self._followed.leaving.leave()
            if self._mover.damaged is None:
                return False
            try:
                self._repair(self._mover.damaged)
            except DeltaSyncError as error:
                raise self._followed.leaving.hopeless(error) from error
        self._keep()
        return True

    def _repair(self, damaged: Manifest) -> None:
        """Make the weights what they were; the head, if what they were is kept no more."""
        goal = self.board.goal
        try:
            self._mover.repair(damaged)
        except (StoreError, EngineError, FingerprintError):
            raise
        except DeltaSyncError:
            follows = self.settings.target == HEAD and not self.board.holding
            if not follows or goal is None or goal <= damaged.version:
                raise
            newer = self.history.manifest(goal)
            self.history.check_ours(newer)
            self.history.check_fresh()
            self._mover.repair(newer)

    def _look(self) -> DeltaSyncError | None:
        self._begin()
        try:
            return self._refresh()
        except DeltaSyncError as error:
            told = self._followed.leaving.blocked(error)
            self.fail(told)
            if told is error:
                raise
            raise told from error

    def is_replaced(self) -> bool:
        """Whether another run lies at the URL than the one known. Raises DeltaSyncError if that cannot be read."""
        return self.history.is_replaced()

    @property
    def can_repair(self) -> bool:
        """Whether weights were changed from outside and can be brought back to the version served before."""
        return self._mover.damaged is not None

    def fail(self, error: DeltaSyncError) -> None:
        """Show an error in status until something succeeds; end an engine that cannot tell its weights."""
        if not isinstance(error, WeightsLostError):
            self.board.show_error(error)
        elif self.board.state != "lost":
            self.board.show_error(error, "lost")
            logger.critical("%s: %s", error.kind, error.message)
            try:
                self.port.end(error.message)
            except DeltaSyncError as second:
                logger.critical("%s: %s", second.kind, second.message)

    def _failing(self) -> "_Failing":
        return _Failing(self)

    def _begin(self) -> None:
        if self.board.state == "lost":
            raise WeightsLostError(STATES["lost"])
        self.port.set_pending_label()
        if self._strayed:
            with self._failing():
                self._come_home()

    def _refresh(self) -> DeltaSyncError | None:
        """Open the run, notice if it was replaced, find the newest good manifest; returns what is wrong beyond it."""
        self.board.set(looks=self.board.looks + 1)
        with self.history.looking(self.expected):
            if self.is_replaced():
                before = self.run_id
                self._followed.open()
                run = self.history.run
                if before is not None:
                    logger.warning("run %s was replaced by run %s in the same place", before, run.info.run)
                known = self.board.served is not None
                # Before the label, which may fail: what is served is no version of this run.
                self.board.set(run=run.info.run, served=None, head=None, goal=None, undo=[], broken=False)
                # What was refused was the other run; this one may not be whole yet.
                self.board.set(state="waiting_for_run")
                if known:
                    self.port.label(None)
            if self.board.state == "waiting_for_run":
                self.board.set(state="proving" if self.board.served is None else "idle")
            stopped_by = self.history.look(self.board.served)
        self._ranks.keys = self.history.keys
        self.ways.refresh()
        self.board.set(head=self.history.head, goal=self._followed.goal, looked=time.monotonic())
        self._followed.tell_skipped()
        return stopped_by

    def _prove(self, followed: RunSession) -> WeightPosition | None:
        """Establish what the engine holds; None: something that an anchor can replace."""
        newest, owed = self.aim, self._owed

        def shown(place: WeightPosition) -> bool:
            # Nothing but the version that is to be held, and nothing newer than was asked for, not even on the way.
            if owed is not None and newest in (None, owed.version):
                return place.version == owed.version
            return newest is None or place.version <= newest

        place = followed.prover.prove(shown)
        if place is not None and followed.history.is_own(place) and shown(place):
            self.port.label(place.version)
            followed.mover.show(place.manifest)
        return place

    def _keep(self) -> None:
        """Have what is in force outlive this process."""
        if self._orders is None:
            return
        set_to, chosen, owed = self._configured, self.settings, self._owed
        held = (self.board.served or self._mover.damaged) if self.board.holding else None
        run, version = (None, None) if held is None else (held.run, held.version)
        if owed is not None and self.board.holding:
            run, version = owed.run, owed.version
        self._orders.save(
            StandingOrder(
                setting=set_to.target,
                target=None if chosen.target == set_to.target else chosen.target,
                bucket=None if chosen.bucket == set_to.bucket else chosen.bucket,
                holding=self.board.holding,
                run=run,
                version=version,
            )
        )

    def _come_home(self) -> None:
        """Have the ranks prove again that they hold what is served, after they were asked about another run."""
        served = self.board.served
        place = self._followed.prover.prove(lambda place: True)
        self._strayed = False
        if served is None:
            return
        if place is None or place.manifest.digest != served.digest or not self.history.is_own(place):
            changed = FingerprintError(
                f"served weights are not version {served.version}: they were changed from outside"
            )
            self._mover.distrust(changed)
            raise changed
        self.port.label(served.version)
        self._mover.show(served)


class _Failing:
    """Whatever is raised inside is shown in status, and the state comes to rest."""

    def __init__(self, course: ReceiverBase) -> None:
        self._course = course

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DeltaSyncError):
            self._course.fail(error)
        self._course.aim = None
        if self._course.board.state in ("proving", "staging", "draining", "committing", "verifying", "repairing"):
            self._course.board.rest()

"""The receiver's logic: follow a run through whatever engine it is given, forward and back, and on to another run.

Knows buckets and manifests, and an engine only as an ``EnginePort``; so the vLLM server and the offline ``LLM`` share
it. One thread drives it; ``status`` may be called from any.
"""

import time
from collections.abc import Callable

from vllm_delta_sync.engine.commit.transaction import Answer, EnginePort, LabelKeepingPort
from vllm_delta_sync.engine.follow.rank_group import RankGroup
from vllm_delta_sync.engine.follow.run_session import RunSession
from vllm_delta_sync.engine.follow.standing_orders import StandingOrder, StandingOrderStore, chosen_by, sibling
from vllm_delta_sync.engine.follow.updater import WeightUpdater, not_served
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe.status import STATES, StatusBoard
from vllm_delta_sync.engine.planning.commit_plan import WeightPosition
from vllm_delta_sync.engine.planning.run_history import History
from vllm_delta_sync.engine.planning.update_planner import UpdatePlanner
from vllm_delta_sync.errors import (
    BusyError,
    ChainError,
    DeltaSyncError,
    EngineError,
    FingerprintError,
    NotFoundError,
    StoreError,
    WeightsLostError,
)
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.settings import HEAD, Settings

STAGE_SECONDS = 1800.0
"""Longest that staging or a scan may take before the receiver says that it hangs."""


class Receiver:
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
        self.port.set_due_label()
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

    @property
    def waits(self) -> bool:
        """Whether the last look found that the target names nothing to go to: nothing failed."""
        return self._followed.waits

    def advance(self, version: int | None = None, until: Callable[[], bool] = lambda: False) -> None:
        """Bring the engine to a version; versions in between are folded into few commits.

        Args:
            version: None: what the setting ``target`` says.
            until: asked between two commits; if True, what is left waits for the next call.

        Raises:
            DeltaSyncError: the first thing that failed; what is served then is ``served_version``.
        """
        stopped_by = self._look()
        self._restore()
        if version is not None:
            self._followed.check_asked(version, self.served_version)
        elif self._owed is not None:
            self._pay(until)
            return
        elif self.board.holding and self.served_version is not None:
            raise BusyError(
                f"this server is held at version {self.served_version}; POST /delta_sync/release to follow again"
            )
        with self._failing():
            self.aim = self._wanted(stopped_by) if version is None else version
            place = self._place()
            target = self._followed.named(stopped_by) if version is None else version
            # A hold that came before anything was served keeps the first version that is.
            stays = self.board.holding and version is None
            self.aim = target
            self.ways.named = target if version is not None or self.settings.target != HEAD else None
            if self.served_version is None or (self.served_version < target and not stays):
                self.history.check_fresh()
            while self.served_version is None or (self.served_version < target and not stays and not until()):
                self._mover.step(place, target, until)
                place = self._served_place() or place
            if version is None and self.settings.target == HEAD and stopped_by is not None:
                raise stopped_by
        if version is not None:
            self._owed = None
        self._rest_well()
        self._keep()

    def _wanted(self, stopped_by: DeltaSyncError | None) -> int | None:
        """The newest version that may be shown, where none is served yet; None: any."""
        if self.served_version is not None or self.settings.target == HEAD:
            return None
        try:
            return self._followed.named(stopped_by)
        except StoreError:
            raise
        except DeltaSyncError:
            # Said once it is known what is served meanwhile.
            return None

    def _pay(self, until: Callable[[], bool]) -> None:
        """Come to the version of an order of before the restart; nothing newer is shown on the way."""
        owed, head = self._owed, self.history.head
        if owed is None or owed.version is None:
            return
        with self._failing():
            if owed.run != self.history.run.info.run:
                self._owed = None
                raise ChainError(
                    f"this server was to hold version {owed.version} of run {owed.run}, and run "
                    f"{self.history.run.info.run} lies there now: it holds what it started with"
                )
            if head is None or owed.version > head.version:
                raise NotFoundError(
                    f"this server is to hold version {owed.version}, as it was told before its restart, and that is "
                    "not published; POST /delta_sync/release to follow, or give another order"
                )
            self.aim = owed.version
            self._go(self._place(), owed.version, until)
            if self.served_version != owed.version:
                return
            self._owed = None
        self._rest_well()

    def mend(self) -> None:
        """Bring weights that somebody changed back to the version served before, held or not; see ``can_repair``."""
        self._look()
        if self._restore():
            self.board.rest(error=None)

    def rollback(self, version: int) -> None:
        """Go back to an older version, then hold: by the undo log, without the bucket; or, where that does not reach,
        through the chain, staged like any other. One commit either way.

        Raises:
            NotFoundError: it is not published, or not kept any more. ChainError: it is newer than what is served, or
                nothing leads there. DeltaSyncError: what failed; what is served then is ``served_version``.
        """
        self._begin()
        served = self.board.served
        if served is None:
            raise EngineError("no version is served yet; there is nothing to go back from")
        if version in self.board.undo and version < served.version:
            with self._failing():
                self._mover.check_touched()
                self._mover.go_back(version, served)
        elif version != served.version:
            self._go_back(version)
        self._owed = None
        self.hold()

    def _go_back(self, version: int) -> None:
        self._look()
        self._restore()
        served = self.served_version
        self._followed.check_asked(version, None)
        if served is not None and version > served:
            raise ChainError(
                f'version {version} follows version {served}, which is served; POST /delta_sync/sync {{"version": '
                f"{version}}} goes forward"
            )
        with self._failing():
            self._go(self._place(), version)
        self._rest_well()

    def target(self, named: str, bucket: str | None = None) -> None:
        """Follow something else from now on, newer or older; a hold ends.

        Args:
            named: head, a version, or tag:NAME. bucket: URL of a run beside the configured one; None: the run followed.

        Raises:
            UsageError: the bucket is no such run. NotFoundError: there is no such run, version or tag. ChainError: the
                run has other tensors or another base. DeltaSyncError: what failed. What is followed stays, unless some
                of the way was made: then it goes on, and the status says what is in the way.
        """
        url = self.settings.bucket if bucket is None else sibling(self._configured.bucket, bucket)
        chosen = self._configured.model_copy(update={"target": named, "bucket": url})
        was, served = self.settings, self.board.served
        self._begin()
        try:
            if url != self.settings.bucket:
                self._switch(chosen)
            else:
                self._turn_to(chosen)
        except DeltaSyncError:
            moved = self.settings != was or self.board.served is not served
            if not moved or self.settings != chosen or self.board.served is None:
                raise
        self.board.set(target=named)
        self.release()

    def _turn_to(self, chosen: Settings) -> None:
        stopped_by = self._look()
        self._restore()
        target = self._followed.meant(chosen.target, stopped_by, self.served_version or 0)
        was, served = self.settings, self.board.served
        with self._failing():
            self.aim = target
            place = self._place()
            self._followed.settings = chosen
            try:
                self._go(place, target)
            except BaseException:
                # The head is followed all the same, when it can be; a version that cannot be served is no target.
                if chosen.target != HEAD and (self.board.served is served or self.board.served is None):
                    self._followed.settings = was
                raise
        self._rest_well()

    def _switch(self, chosen: Settings) -> None:
        """Follow another run. What is served stays, under its own run's name, until the first commit of the new one."""
        home, served = self._followed, self.board.served
        there = RunSession(self.port, chosen, self.board, self._ranks)
        there.open()
        stopped_by = there.history.look()
        target = there.meant(chosen.target, stopped_by)
        if served is None:
            self._begin_with(there)
            return
        there.check_kin(home, served.version)
        run = there.history.run.info.run
        with self._failing():
            self._mover.check_touched()
            self._strayed, self._ranks.keys = True, there.history.keys
            self.aim = target
            try:
                there.history.check_fresh()
                place = self._prove(there)
                while self.board.served is not None and self.board.served.run != run:
                    there.ways.named = target
                    there.mover.step(place, target)
            except BaseException as error:
                if self.board.served is None or self.board.served.run != run:
                    self._give_up(there, error)
                    raise
            self._followed, self._strayed = there, False
            logger.info("run %s is followed from now on, in place of run %s", run, served.run)
            self._go(self._served_place(), target)
        self._rest_well()

    def _give_up(self, there: RunSession, error: BaseException) -> None:
        if there.mover.damaged is not None:
            self._mover.damaged = there.mover.damaged
        self._ranks.keys = self.history.keys
        if isinstance(error, WeightsLostError):
            return
        try:
            self._come_home()
        except DeltaSyncError as second:
            # Whatever is done next tries it again first.
            logger.warning("what is served could not be proven again yet: %s", second.message)

    def _begin_with(self, there: RunSession) -> None:
        """Nothing is served of the run followed, so there is nothing to be kept until the other one is."""
        self._followed = there
        self.board.set(run=there.history.run.info.run, head=None, goal=None, undo=[], broken=False)
        self.board.set(holding=False, target=there.settings.target)
        self._owed = None
        self.advance()

    def check(self) -> None:
        """Look after what is served, where no new version makes that happen: did anybody else write weights?"""
        self._begin()
        try:
            with self._failing():
                self._mover.check_touched()
        except BusyError:
            # Asleep: nothing is wanted of it now.
            self.board.rest(error=None)

    def observe(self) -> None:
        """Look into the bucket and at what is served, and move nothing: what policy ``manual`` does until it is asked.

        Raises:
            DeltaSyncError: what the next ``advance`` would fail with too.
        """
        stopped_by = self._look()
        try:
            with self._failing():
                if self.served_version is not None:
                    self._mover.check_touched()
                elif self._in_vain != self.run_id:
                    self._in_vain = None if self._prove(self._followed) else self.run_id
                if stopped_by is not None:
                    raise stopped_by
        except BusyError:
            # Asleep: nothing is wanted of it now.
            self.board.rest(error=None)
            return
        self._rest_well()

    def hold(self) -> None:
        """Keep what is served, whatever is published, until ``release``."""
        self.board.set(holding=True)
        if self.board.state == "idle":
            self.board.rest()
        self._keep()

    def release(self) -> None:
        """Follow again."""
        self.board.set(holding=False)
        self._owed = None
        if self.board.state == "held":
            self.board.rest()
        self._keep()

    def verify(self) -> Answer:
        """Rescan every rank's weights: ``verdict`` is True only if they are the served version's, bit for bit.

        ``chain`` says whether the bucket still holds the served version as it was served; None if that cannot be told,
        and then, as where it is False, ``reason`` says why. It has no influence on what is served.
        """
        self._begin()
        served = self.board.served
        if served is None:
            raise EngineError("no version is served yet; there is nothing to verify against")
        outcome = self._mover.rescan(served)
        if not outcome["verdict"]:
            self._mover.distrust(not_served(served, outcome["mismatched"]))
        chain, reason = self.history.confirms(served)
        return {**outcome, "chain": chain, "reason": reason}


class _Failing:
    """Whatever is raised inside is shown in status, and the state comes to rest."""

    def __init__(self, course: Receiver) -> None:
        self._course = course

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DeltaSyncError):
            self._course.fail(error)
        self._course.aim = None
        if self._course.board.state in ("proving", "staging", "draining", "committing", "verifying", "repairing"):
            self._course.board.rest()

"""The receiver's logic: follow a run through whatever engine it is given, forward and back, and on to another run.

Knows buckets and manifests, and an engine only as an ``EnginePort``; so the vLLM server and the offline ``LLM`` share
it. One thread drives it; ``status`` may be called from any.
"""

from collections.abc import Callable

from vllm_delta_sync.engine.commit.transaction import Answer
from vllm_delta_sync.engine.follow.receiver_base import STAGE_SECONDS as STAGE_SECONDS
from vllm_delta_sync.engine.follow.receiver_base import ReceiverBase
from vllm_delta_sync.engine.follow.run_session import RunSession
from vllm_delta_sync.engine.follow.standing_orders import sibling
from vllm_delta_sync.engine.follow.updater import not_served
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import (
    BusyError,
    ChainError,
    DeltaSyncError,
    EngineError,
    NotFoundError,
    StoreError,
    WeightsLostError,
)
from vllm_delta_sync.settings import HEAD, Settings


class Receiver(ReceiverBase):
    """Follows a run with one engine, and does what it is told: by the setting, and by requests.

    Raises:
        SettingsError: as ``Course``.
    """

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

"""The receiver's logic: follow a run through whatever engine it is given, forward by commits, back by the undo log.

Knows buckets and manifests, and an engine only as an ``EnginePort``; so the vLLM server and the offline ``LLM`` share
it. One thread drives it; ``status`` may be called from any.
"""

import logging
from collections.abc import Callable

from vllm_delta_sync.chain.documents import TAG_PREFIX
from vllm_delta_sync.config import HEAD, Settings
from vllm_delta_sync.engine.history import History
from vllm_delta_sync.engine.leaving import Leaving
from vllm_delta_sync.engine.legs import Place
from vllm_delta_sync.engine.mover import Mover, not_served
from vllm_delta_sync.engine.proving import Prover
from vllm_delta_sync.engine.ranks import Ranks
from vllm_delta_sync.engine.rotation import Rotation
from vllm_delta_sync.engine.status import STATES, Board, spelled
from vllm_delta_sync.engine.transaction import Answer, EnginePort
from vllm_delta_sync.engine.ways import Ways
from vllm_delta_sync.engine.witness import Witness
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
from vllm_delta_sync.wire.manifest import Manifest

# A child of vLLM's logger, the only one that vLLM gives a handler.
logger = logging.getLogger("vllm.delta_sync")

STAGE_SECONDS = 1800.0
"""Longest that staging or a scan may take before the receiver says that it hangs."""


class Receiver:
    """Follows one run URL with one engine.

    Raises:
        SettingsError: a file of ``trusted_keys`` cannot be read, or ``state_dir`` cannot be written.

    Attributes:
        waits: whether the last look found that the setting ``target`` names nothing to go to: nothing failed.
        aim: the version on the way to; None at rest.
    """

    def __init__(self, port: EnginePort, settings: Settings, stage_seconds: float = STAGE_SECONDS) -> None:
        self.port = port
        self.settings = settings
        keyring = settings.keyring()
        self.history = History(settings.bucket, keyring, Witness(settings, keyring), settings.store())
        self.ways = Ways(self.history, settings.quarantined == "serve")
        self.board = Board(settings.policy, settings.target)
        self.waits = False
        self.aim: int | None = None
        self._skipped = -1
        self._ranks = Ranks(port, stage_seconds)
        self._mover = Mover(port, settings, self.board, self.history, self.ways, self._ranks)
        self._leaving = Leaving(settings, self.board, self.history, self._mover)
        self._prover = Prover(settings, self.board, self.history, self._ranks, self._mover.distrust)

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
            self._check_asked(version)
        elif self.board.holding and self.served_version is not None:
            raise BusyError(
                f"this server is held at version {self.served_version}; POST /delta_sync/release to follow again"
            )
        with self._failing():
            place = self._place()
            target = self._named(stopped_by) if version is None else version
            # A hold that came before anything was served keeps the first version that is.
            stays = self.board.holding and version is None
            self.aim = target
            self.ways.named = target if version is not None or self.settings.target != HEAD else None
            if self.served_version is None or (self.served_version < target and not stays):
                self.history.check_fresh()
            while self.served_version is None or (self.served_version < target and not stays and not until()):
                self._mover.step(place, target)
                place = self._served_place() or place
            if version is None and self.settings.target == HEAD and stopped_by is not None:
                raise stopped_by
        self._rest_well()

    def _rest_well(self) -> None:
        """Nothing failed; but a head that has run out is shown even where nothing new comes."""
        self.board.rest(error=None)
        if self.history.expired is not None:
            self.board.show_error(self.history.expired)

    def _place(self) -> Place | None:
        """What the ranks hold, proven if it is not known, and looked after if it is."""
        served = self._served_place()
        if served is None:
            return self._prove()
        self._mover.check_touched()
        return served

    def _served_place(self) -> Place | None:
        served = self.board.served
        return None if served is None else Place(self.history.run, served)

    def _restore(self) -> bool:
        """Put right weights that somebody changed, or that may not be believed any more; whether it was done."""
        with self._failing():
            self._leaving.leave()
            if self._mover.damaged is None:
                return False
            try:
                self._repair(self._mover.damaged)
            except DeltaSyncError as error:
                raise self._leaving.hopeless(error) from error
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

    def mend(self) -> None:
        """Bring weights that somebody changed back to the version served before, held or not; see ``can_repair``."""
        self._look()
        if self._restore():
            self.board.rest(error=None)

    def _look(self) -> DeltaSyncError | None:
        self._refuse_lost()
        try:
            return self._refresh()
        except DeltaSyncError as error:
            told = self._leaving.blocked(error)
            self.fail(told)
            if told is error:
                raise
            raise told from error

    def rollback(self, version: int) -> None:
        """Go back to a version in the undo log, in the time of one commit and without the bucket; then hold.

        Raises:
            ChainError: no commit ended at that version, or it fell out of the log. DeltaSyncError: what failed.
        """
        self._refuse_lost()
        served = self.board.served
        if served is None:
            raise EngineError("no version is served yet; there is nothing to go back from")
        if version != served.version:
            with self._failing():
                self._mover.check_touched()
                self._mover.go_back(version, served)
        self.hold()

    def check(self) -> None:
        """Look after what is served, where no new version makes that happen: did anybody else write weights?"""
        self._refuse_lost()
        try:
            with self._failing():
                self._mover.check_touched()
        except BusyError:
            # Asleep: nothing is wanted of it now.
            self.board.rest(error=None)

    def hold(self) -> None:
        """Keep what is served, whatever is published, until ``release``."""
        self.board.set(holding=True)
        if self.board.state == "idle":
            self.board.rest()

    def release(self) -> None:
        """Follow again."""
        self.board.set(holding=False)
        if self.board.state == "held":
            self.board.rest()

    def verify(self) -> Answer:
        """Rescan every rank's weights: ``verdict`` is True only if they are the served version's, bit for bit.

        ``chain`` says whether the bucket still holds the served version as it was served; None if that cannot be told,
        and then, as where it is False, ``reason`` says why. It has no influence on what is served.
        """
        self._refuse_lost()
        served = self.board.served
        if served is None:
            raise EngineError("no version is served yet; there is nothing to verify against")
        outcome = self._mover.rescan(served)
        if not outcome["verdict"]:
            self._mover.distrust(not_served(served, outcome["mismatched"]))
        chain, reason = self.history.confirms(served)
        return {**outcome, "chain": chain, "reason": reason}

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

    def _refuse_lost(self) -> None:
        if self.board.state == "lost":
            raise WeightsLostError(STATES["lost"])

    def _check_asked(self, version: int) -> None:
        """Raise if a version cannot be asked for. What the caller got wrong is not recorded as the last error."""
        head, served = self.history.head, self.served_version
        if head is None or version > head.version:
            newest = "nothing is published yet" if head is None else f"the head is {head.version}"
            raise NotFoundError(f"version {version} is not published; {newest}")
        if served is not None and version < served:
            raise ChainError(f"version {version} precedes the served version {served}; go back with rollback")

    def _named(self, stopped_by: DeltaSyncError | None) -> int:
        """The version that the setting ``target`` means now.

        Raises:
            NotFoundError: it is not published yet. ChainError: it lies behind what is served.
        """
        head, served, named = self.history.head, self.served_version or 0, self.settings.target
        self.board.set(beyond=False)
        self.waits = False
        if head is None:
            raise NotFoundError(f"no version is published at {self.settings.bucket!r} yet")
        if named == HEAD:
            goal = self.board.goal
            if goal is None and self.served_version is None:
                self.waits = True
                raise NotFoundError(
                    f"every version of the run at {self.settings.bucket!r} is quarantined; publish a sound one, or ask "
                    "for one by its number"
                )
            # What is served may be newer than the newest manifest that can still be read, or quarantined.
            return max(served if goal is None else goal, served)
        self.waits = True
        if named.startswith(TAG_PREFIX):
            target = self.history.run.resolve(named).version
        else:
            target = int(named)
            if target > max(head.version, served):
                raise stopped_by or NotFoundError(
                    f"the setting target is version {target}, which is not published yet; the head is {head.version}"
                )
        if target < served:
            self.board.set(beyond=True)
            raise ChainError(
                f"the setting target ({named}) is version {target}, and version {served} is served; a server does not "
                f'go back by itself: POST /delta_sync/rollback {{"version": {target}}} while `undo` has it, or start '
                "it again"
            )
        self.waits = False
        return target

    def _refresh(self) -> DeltaSyncError | None:
        """Open the run, notice if it was replaced, find the newest good manifest; returns what is wrong beyond it."""
        self.board.set(looks=self.board.looks + 1)
        if self.is_replaced():
            before = self.run_id
            run = self.history.open()
            if before is not None:
                logger.warning("run %s was replaced by run %s in the same place", before, run.info.run)
            known = self.board.served is not None
            self.ways.forget()
            self._mover.rotation = Rotation([spec.nbytes for spec in run.table], self.settings.rescan_bytes)
            self._mover.damaged = None
            # Before the label, which may fail: what is served is no version of this run.
            self.board.set(run=run.info.run, served=None, head=None, goal=None, undo=[], broken=False)
            self._skipped = -1
            if known:
                self.port.label(None)
        if self.board.state == "waiting_for_run":
            self.board.set(state="proving" if self.board.served is None else "idle")
        stopped_by = self.history.look(self.board.served)
        self._ranks.keys = self.history.keys
        self.ways.refresh()
        head = self.history.head
        serves_any = self.settings.quarantined == "serve"
        self.board.set(head=head, goal=None if head is None else head.version if serves_any else head.sound)
        self._tell_skipped()
        return stopped_by

    def _tell_skipped(self) -> None:
        """One line for the quarantined versions at the end of the chain, each named once."""
        head, goal = self.history.head, self.board.goal
        if head is None or head.quarantine is None or head.version <= self._skipped:
            return
        if goal == head.version or self.settings.target != HEAD:
            return
        first = max(self._skipped, -1 if goal is None else goal) + 1
        self._skipped = head.version
        logger.warning(
            "version%s %s quarantined and skipped: %s",
            f" {first}" if first == head.version else f"s {first} to {head.version}",
            "is" if first == head.version else "are",
            spelled(head.quarantine),
        )

    def _prove(self) -> Place | None:
        """Establish what the engine holds; None: something that an anchor can replace."""
        place = self._prover.prove()
        if place is not None and self.history.is_own(place):
            self.port.label(place.version)
            self.board.set(served=place.manifest, broken=False)
        return place


class _Failing:
    """Whatever is raised inside is shown in status, and the state comes to rest."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DeltaSyncError):
            self._receiver.fail(error)
        self._receiver.aim = None
        if self._receiver.board.state in ("proving", "staging", "committing", "verifying", "repairing"):
            self._receiver.board.rest()

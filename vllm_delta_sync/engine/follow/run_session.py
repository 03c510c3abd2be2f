"""One run as it is followed: what is known of it, and what moves the engine along it."""

from vllm_delta_sync.engine.commit.transaction import EnginePort
from vllm_delta_sync.engine.follow.identify import WeightIdentifier
from vllm_delta_sync.engine.follow.rank_group import RankGroup
from vllm_delta_sync.engine.follow.revocation import RevocationHandler
from vllm_delta_sync.engine.follow.updater import RescanCursor, WeightUpdater
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe.status import StatusBoard
from vllm_delta_sync.engine.planning.lineage import RunVersion, across, line
from vllm_delta_sync.engine.planning.run_history import History
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.engine.planning.update_planner import UpdatePlanner
from vllm_delta_sync.errors import ChainError, DeltaSyncError, NotFoundError
from vllm_delta_sync.run.documents import TAG_PREFIX
from vllm_delta_sync.settings import HEAD, Settings


class RunSession:
    """A run, for one engine.

    Args:
        settings: with the bucket and the target that are in force.

    Attributes:
        waits: whether the last look found that the target names nothing to go to: nothing failed.

    Raises:
        SettingsError: a file of ``trusted_keys`` cannot be read, or ``state_dir`` cannot be written.
    """

    def __init__(self, port: EnginePort, settings: Settings, board: StatusBoard, ranks: RankGroup) -> None:
        keyring = settings.keyring()
        self.settings = settings
        self._board = board
        self.waits = False
        self._skipped = -1
        self.history = History(settings.bucket, keyring, TrustedHead(settings, keyring), settings.store())
        self.ways = UpdatePlanner(self.history, self.serves_any)
        self.mover = WeightUpdater(port, settings, board, self.history, self.ways, ranks)
        self.leaving = RevocationHandler(settings, board, self.history, self.mover)
        self.prover = WeightIdentifier(settings, board, self.history, ranks, self._refuse)

    @property
    def serves_any(self) -> bool:
        """Whether quarantined versions are served like others."""
        return self.settings.quarantined == "serve"

    @property
    def goal(self) -> int | None:
        """Newest version that following the head leads to; None if there is none."""
        head = self.history.head
        return None if head is None else head.version if self.serves_any else head.sound

    def open(self) -> None:
        """Open whatever run is at the URL now. Errors as ``History.open``."""
        run = self.history.open()
        self.ways.forget()
        self.mover.rotation = RescanCursor([spec.nbytes for spec in run.table], self.settings.rescan_bytes)
        self.mover.damaged = None
        self._skipped = -1

    def meant(self, named: str, stopped_by: DeltaSyncError | None, served: int = 0) -> int:
        """The version that somebody means who asks for a target now, older than what is served or not.

        Args:
            served: what is served of this run, 0 if nothing is.

        Raises:
            NotFoundError: there is none. Else as ``Run.resolve``.
        """
        head, goal = self.history.head, self.goal
        if head is None:
            raise NotFoundError("no version of that run is published yet")
        if named.startswith(TAG_PREFIX):
            return self.history.run.resolve(named).version
        if named != HEAD:
            if int(named) > head.version:
                raise stopped_by or NotFoundError(f"version {named} is not published; the head is {head.version}")
            return int(named)
        if goal is None:
            raise NotFoundError("every version of that run is quarantined; ask for one by its number")
        # What is served may be newer than the newest manifest that can still be read, or quarantined.
        return max(goal, served)

    def check_kin(self, home: "RunSession", served: int) -> None:
        """Raise ChainError unless weights of another run lead to this one's.

        Args:
            home: the other one. served: the version of it that is served.
        """
        own, other = self.history.run, home.history.run
        if own.table.digest != other.table.digest:
            raise ChainError(
                f"run {own.info.run} has other tensors than run {other.info.run}, which is followed; what is served "
                "stays"
            )
        if across(line(other, served), [RunVersion(own, 0), *self.history.origins()]) is None:
            raise ChainError(
                f"run {own.info.run} neither branches from run {other.info.run}, which is followed, nor begins with "
                "the same weights; what is served stays"
            )

    def check_asked(self, version: int, served: int | None) -> None:
        """Raise if a version cannot be asked for. What the caller got wrong is not recorded as the last error."""
        head = self.history.head
        if head is None or version > head.version:
            newest = "nothing is published yet" if head is None else f"the head is {head.version}"
            raise NotFoundError(f"version {version} is not published; {newest}")
        if served is not None and version < served:
            raise ChainError(f"version {version} precedes the served version {served}; go back with rollback")

    def named(self, stopped_by: DeltaSyncError | None) -> int:
        """The version that the target means now.

        Raises:
            NotFoundError: it is not published yet. ChainError: it lies behind what is served.
        """
        head, named = self.history.head, self.settings.target
        held = self._board.served
        served = 0 if held is None else held.version
        self._board.set(beyond=False)
        self.waits = False
        if head is None:
            raise NotFoundError(f"no version is published at {self.settings.bucket!r} yet")
        if named == HEAD:
            goal = self._board.goal
            if goal is None and held is None:
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
                    f"the target is version {target}, which is not published yet; the head is {head.version}"
                )
        if target < served:
            self._board.set(beyond=True)
            raise ChainError(
                f"the target ({named}) is version {target}, and version {served} is served; a server does not "
                f'go back by itself: POST /delta_sync/rollback {{"version": {target}}}, or POST it as target'
            )
        self.waits = False
        return target

    def tell_skipped(self) -> None:
        """One line for the quarantined versions at the end of the chain, each named once."""
        head, goal = self.history.head, self._board.goal
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
            head.quarantine.summary(),
        )

    def _refuse(self, error: DeltaSyncError) -> None:
        served = self._board.served
        # Weights that are no version of this run may well be the other one's that is served.
        if served is None or served.run == self.history.run.info.run:
            self.mover.distrust(error)

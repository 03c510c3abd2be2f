"""``RunSession`` holds the parts that follow one run: history, planner, updater, identifier."""

from vllm_delta_sync.engine.commit.transaction import EnginePort
from vllm_delta_sync.engine.follow.identify import WeightIdentifier
from vllm_delta_sync.engine.follow.rank_group import RankGroup
from vllm_delta_sync.engine.follow.updater import RescanCursor, WeightUpdater
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe.status import StatusBoard
from vllm_delta_sync.engine.planning.lineage import RunVersion, ancestry, connect_runs
from vllm_delta_sync.engine.planning.run_history import History
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.engine.planning.update_planner import UpdatePlanner
from vllm_delta_sync.errors import ChainError, DeltaSyncError
from vllm_delta_sync.run.service_policy import ServicePolicy
from vllm_delta_sync.settings import HEAD, Settings


class RunSession:
    """One run, followed by one engine.

    Args:
        settings: with the bucket and the target in force.

    Attributes:
        target_unavailable: whether the target named no version that can be served when last resolved.

    Raises:
        SettingsError: a file of ``trusted_keys`` cannot be read, or ``state_dir`` cannot be written.
    """

    def __init__(self, port: EnginePort, settings: Settings, board: StatusBoard, ranks: RankGroup) -> None:
        keyring = settings.keyring()
        self.settings = settings
        self._board = board
        self.target_unavailable = False
        self._last_skipped = -1
        policy = ServicePolicy.of_settings(settings.quarantined, settings.require_exact)
        trusted_head = TrustedHead(settings, keyring)
        self.history = History(settings.bucket, keyring, trusted_head, settings.store(), policy)
        self.planner = UpdatePlanner(self.history, policy)
        self.updater = WeightUpdater(port, settings, board, self.history, self.planner, ranks)
        self.identifier = WeightIdentifier(settings, board, self.history, ranks, self._refuse)

    def open(self) -> None:
        """Open the run that is at the URL now. Errors as ``History.open``."""
        run = self.history.open()
        self.planner.reset()
        self.updater.rescan_cursor = RescanCursor([spec.nbytes for spec in run.table], self.settings.rescan_bytes)
        self.updater.repair_target = None
        self._last_skipped = -1

    def check_related(self, current: "RunSession", served: int) -> None:
        """Raise ChainError unless deltas can lead from the run followed so far to this one.

        Args:
            current: the run followed so far. served: the version of it that is served.
        """
        own, other = self.history.run, current.history.run
        if own.table.digest != other.table.digest:
            raise ChainError(
                f"run {own.info.run} has other tensors than run {other.info.run}, which is followed; the served "
                "version stays"
            )
        if connect_runs(ancestry(other, served), [RunVersion(own, 0), *self.history.origins()]) is None:
            raise ChainError(
                f"run {own.info.run} neither branches from run {other.info.run}, which is followed, nor begins with "
                "the same weights; the served version stays"
            )

    def check_requested(self, version: int, served: int | None) -> None:
        """Raise if a request names an invalid version; the status does not record this as the last error."""
        unpublished = self.history.unpublished(version)
        if unpublished is not None:
            raise unpublished
        if served is not None and version < served:
            raise ChainError(f"version {version} precedes the served version {served}; use rollback")

    def resolve_followed_target(self) -> int:
        """Return the version that the target in force names now.

        Raises:
            NotFoundError: it is not published yet. ChainError: it is older than the served version.
        """
        held, target = self._board.served, self.settings.target
        self._board.set(ahead_of_target=False)
        self.target_unavailable = self.history.head is not None
        version = self.history.resolve_target(target, None if held is None else held.version)
        if held is not None and version < held.version:
            self._board.set(ahead_of_target=True)
            raise ChainError(
                f"the target ({target}) is version {version}, and version {held.version} is served; a server does not "
                f'roll back by itself: POST /delta_sync/rollback {{"version": {version}}}, or POST it as target'
            )
        self.target_unavailable = False
        return version

    def log_skipped(self) -> None:
        """Log the quarantined versions up to the head in one line, each version once."""
        head, goal = self.history.head, self._board.goal
        if head is None or head.quarantine is None or head.version <= self._last_skipped:
            return
        if goal == head.version or self.settings.target != HEAD:
            return
        first = max(self._last_skipped, -1 if goal is None else goal) + 1
        self._last_skipped = head.version
        logger.warning(
            "version%s %s quarantined and skipped: %s",
            f" {first}" if first == head.version else f"s {first} to {head.version}",
            "is" if first == head.version else "are",
            head.quarantine.summary(),
        )

    def _refuse(self, error: DeltaSyncError) -> None:
        served = self._board.served
        # If another run's version is served, the weights may well be that.
        if served is None or served.run == self.history.run.info.run:
            self.updater.invalidate(error)

"""Away from a version whose signer's word holds no more: by the undo log, or to one rebuilt from the bucket."""

from vllm_delta_sync.engine.follow.updater import WeightUpdater
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe.status import StatusBoard
from vllm_delta_sync.engine.planning.run_history import History
from vllm_delta_sync.errors import BusyError, DeltaSyncError, NotFoundError, SignatureError, WeightsLostError
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.run.documents import TAG_PREFIX
from vllm_delta_sync.settings import HEAD, Settings

MEND = (
    "the weights that generate are still its, and are not named as any version's. Publish a version, or make readable "
    "what the bucket holds of those before, and they are replaced; or start this server again"
)


class RevocationHandler:
    """Decides what takes the place of weights that may not be believed any more."""

    def __init__(self, settings: Settings, board: StatusBoard, history: History, mover: WeightUpdater) -> None:
        self._serves_any = settings.quarantined == "serve"
        self._board = board
        self._history = history
        self._mover = mover
        self._reason: SignatureError | None = None

    def leave(self) -> None:
        """If what is served, or was and is to be restored, has fallen: go back to a version that has not, or choose
        one to be restored in its place.

        Raises:
            SignatureError: there is none; what it is that is served is said no more. BusyError, WeightsLostError,
                StoreError: see ``WeightUpdater.go_back``.
        """
        if self._mover.damaged is None:
            self._reason = None
        held = self._board.served or self._mover.damaged
        fallen = None if held is None else self._history.fallen(held)
        if held is None or fallen is None:
            return
        logger.warning("%s: %s", fallen.kind, fallen.message)
        goal = self._choose()
        if self._board.served is not None and self._go_back(held, goal):
            return
        if self._board.served is not None:
            self._mover.distrust(fallen)
        self._reason = fallen
        if isinstance(goal, DeltaSyncError):
            # It stays what is to be restored, is found fallen at each look, and so never is.
            self._mover.damaged = held
            raise self.hopeless(goal)
        self._mover.damaged = goal

    def blocked(self, error: DeltaSyncError) -> DeltaSyncError:
        """What it means that a look failed: if what is served has fallen, that nothing takes its place."""
        served = self._board.served
        try:
            fallen = None if served is None else self._history.fallen(served)
        except DeltaSyncError:
            return error
        if fallen is None:
            return error
        before = ", ".join(map(str, self._board.undo)) or "none"
        return SignatureError(
            f"{fallen.message}; and nothing in the bucket can take its place ({error.kind}: {error.message}). Go back "
            f"with POST /delta_sync/rollback to a version that you trust (`undo` has {before}), or start this server "
            "from one"
        )

    def hopeless(self, error: DeltaSyncError) -> DeltaSyncError:
        """What it means that weights could not be restored: if they have fallen, that they generate still."""
        if self._reason is None or isinstance(error, BusyError | WeightsLostError):
            return error
        return SignatureError(
            f"{self._reason.message}; nothing could take its place yet ({error.kind}: {error.message}): {MEND}"
        )

    def _choose(self) -> Manifest | DeltaSyncError:
        """What is to be served instead, or why nothing can be."""
        try:
            goal = self._history.manifest(self._nearest())
            self._history.check_ours(goal)
        except DeltaSyncError as error:
            return error
        return goal

    def _nearest(self) -> int:
        """The version that the setting ``target`` names; the newest there is where it is not published yet.

        Raises:
            NotFoundError: every version is quarantined, or there is no such tag. Else as ``Run.resolve``.
        """
        head, goal, named = self._history.head, self._board.goal, self._board.target
        if named.startswith(TAG_PREFIX):
            return self._history.run.resolve(named).version
        if named != HEAD and head is not None and int(named) <= head.version:
            return int(named)
        if goal is None:
            raise NotFoundError(f"every version of run {self._history.run.info.run} is quarantined")
        return goal

    def _go_back(self, held: Manifest, goal: Manifest | DeltaSyncError) -> bool:
        """To the newest version in the undo log that is part of the history; False if that cannot be."""
        newest = goal if isinstance(goal, Manifest) else self._history.head
        undo = [] if newest is None else [version for version in self._board.undo if version <= newest.version]
        back = next((version for version in undo if self._is_sound(version)), None)
        if back is None:
            return False
        holding = self._board.holding
        try:
            self._mover.check_touched()
            self._mover.go_back(back, held)
        except (BusyError, WeightsLostError):
            raise
        except DeltaSyncError as error:
            logger.warning("version %d could not be gone back to: %s", back, error.message)
            return False
        finally:
            # That nobody asked for.
            self._board.set(holding=holding)
        return True

    def _is_sound(self, version: int) -> bool:
        behind = self._history.behind.get(version)
        if behind is None:
            return False
        if behind.quarantine is not None and not self._serves_any:
            return False
        try:
            self._history.check_ours(behind)
        except DeltaSyncError:
            return False
        return True

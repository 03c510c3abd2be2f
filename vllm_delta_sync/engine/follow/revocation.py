"""``RevocationHandler`` leaves a served version whose signature a key revocation made invalid."""

from vllm_delta_sync.engine.follow.updater import WeightUpdater
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe.status import StatusBoard
from vllm_delta_sync.engine.planning.run_history import History
from vllm_delta_sync.errors import BusyError, DeltaSyncError, SignatureError, WeightsLostError
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.settings import HEAD, Settings

REMEDY = (
    "its weights still generate, without a version label. Publish a version, or make an earlier one in the bucket "
    "readable, and it replaces them; or restart this server"
)


class RevocationHandler:
    """Chooses the version that replaces one with a revoked signature: from the undo log, or rebuilt from the bucket."""

    def __init__(self, settings: Settings, board: StatusBoard, history: History, updater: WeightUpdater) -> None:
        self._serves_quarantined = settings.quarantined == "serve"
        self._require_exact = settings.require_exact
        self._board = board
        self._history = history
        self._updater = updater
        self._reason: SignatureError | None = None

    def handle(self) -> None:
        """Roll back, or set another repair target, if the version served or to be repaired has a revoked signature.

        Raises:
            SignatureError: no version can replace it; its label is cleared.
            BusyError, WeightsLostError, StoreError: see ``WeightUpdater.rollback_to``.
        """
        if self._updater.repair_target is None:
            self._reason = None
        held = self._board.served or self._updater.repair_target
        revoked_signature = None if held is None else self._history.revoked_signature(held)
        if held is None or revoked_signature is None:
            return
        logger.warning("%s: %s", revoked_signature.kind, revoked_signature.message)
        goal = self._choose()
        if self._board.served is not None and self._rollback(held, goal):
            return
        if self._board.served is not None:
            self._updater.invalidate(revoked_signature)
        self._reason = revoked_signature
        if isinstance(goal, DeltaSyncError):
            # It stays the repair target, and every poll finds it revoked, so it is never restored.
            self._updater.repair_target = held
            raise self.explain_hopeless(goal)
        self._updater.repair_target = goal

    def explain_blocked(self, error: DeltaSyncError) -> DeltaSyncError:
        """Return a failed poll's error: if the served signature is revoked, it says that no version can take over."""
        served = self._board.served
        try:
            revoked_signature = None if served is None else self._history.revoked_signature(served)
        except DeltaSyncError:
            return error
        if revoked_signature is None:
            return error
        before = ", ".join(map(str, self._board.undo)) or "none"
        return SignatureError(
            f"{revoked_signature.message}; nothing in the bucket can take its place ({error.kind}: {error.message}). "
            f"Roll back to a version that you trust with POST /delta_sync/rollback (`undo` has {before}), or start "
            "this server from one"
        )

    def explain_hopeless(self, error: DeltaSyncError) -> DeltaSyncError:
        """Return a failed repair's error: if the signature is revoked, it says that these weights still generate."""
        if self._reason is None or isinstance(error, BusyError | WeightsLostError):
            return error
        return SignatureError(
            f"{self._reason.message}; nothing could take its place yet ({error.kind}: {error.message}): {REMEDY}"
        )

    def _choose(self) -> Manifest | DeltaSyncError:
        """Return the version to serve instead, or the error that says why there is none."""
        try:
            goal = self._history.manifest(self._nearest())
            self._history.check_in_history(goal)
        except DeltaSyncError as error:
            return error
        return goal

    def _nearest(self) -> int:
        """Return the version that the target names; the newest one if it is not published yet.

        Raises:
            NotFoundError: every version is quarantined, or there is no such tag. Other errors as ``Run.resolve``.
        """
        target = self._board.target
        if target.isdecimal() and self._history.unpublished(int(target)) is not None:
            target = HEAD
        return self._history.resolve_target(target)

    def _rollback(self, held: Manifest, goal: Manifest | DeltaSyncError) -> bool:
        """Roll back to the newest good version in the undo log; False if that is impossible."""
        newest = goal if isinstance(goal, Manifest) else self._history.head
        undo = [] if newest is None else [version for version in self._board.undo if version <= newest.version]
        back = next((version for version in undo if self._is_sound(version)), None)
        if back is None:
            return False
        holding = self._board.holding
        try:
            self._updater.check_external_writes()
            self._updater.rollback_to(back, held)
        except (BusyError, WeightsLostError):
            raise
        except DeltaSyncError as error:
            logger.warning("could not roll back to version %d: %s", back, error.message)
            return False
        finally:
            # ``rollback_to`` sets a hold, which nothing requested here.
            self._board.set(holding=holding)
        return True

    def _is_sound(self, version: int) -> bool:
        manifest = self._history.undo_manifests.get(version)
        if manifest is None:
            return False
        if manifest.quarantine is not None and not self._serves_quarantined:
            return False
        if manifest.held_back is not None and self._require_exact:
            return False
        try:
            self._history.check_in_history(manifest)
        except DeltaSyncError:
            return False
        return True

"""Moves an engine from version to version: stages, commits, goes back, repairs; and finds out who else moved it."""

import functools
from collections.abc import Callable
from typing import Any

from vllm_delta_sync.engine.commit.transaction import (
    Answer,
    EnginePort,
    FingerprintMismatchError,
    Transaction,
    brief,
    raise_if_error,
)
from vllm_delta_sync.engine.follow.pause_slot_client import PauseSlotClient
from vllm_delta_sync.engine.follow.rank_group import RankGroup
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe import log_lines, metrics
from vllm_delta_sync.engine.observe.status import State, StatusBoard
from vllm_delta_sync.engine.planning.commit_plan import UpdatePlan, WeightPosition
from vllm_delta_sync.engine.planning.run_history import History
from vllm_delta_sync.engine.planning.update_planner import UpdatePlanner
from vllm_delta_sync.errors import (
    BusyError,
    ChainError,
    DeltaSyncError,
    DigestError,
    EngineError,
    FingerprintError,
    FormatError,
    MemoryLimitError,
    ModelError,
    WeightsLostError,
)
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.settings import Settings

REPAIRS = 3
"""How often weights are repaired that are then found to be wrong still, before that is given up."""


class WeightUpdater:
    """Everything that changes weights.

    Attributes:
        rotation: which tensors to look at beside each staging.
        damaged: what was served when the weights were found to be changed from outside; None once repaired.
    """

    def __init__(
        self,
        port: EnginePort,
        settings: Settings,
        board: StatusBoard,
        history: History,
        ways: UpdatePlanner,
        ranks: RankGroup,
    ) -> None:
        self._port = port
        self._settings = settings
        self._board = board
        self._history = history
        self._ways = ways
        self._ranks = ranks
        self._pausing: State = "draining" if settings.pause_mode == "wait" else "committing"
        self.rotation = RescanCursor([], 0)
        self.damaged: Manifest | None = None
        self._repairs = 0
        self._confirmed = True
        self._keeps = True
        self._turns = PauseSlotClient(settings, board, history)

    @property
    def _served_version(self) -> int | None:
        """What is served of the run followed; None if that is no version, or another run's."""
        served = self._board.served
        return served.version if served is not None and served.run == self._history.run.info.run else None

    def rescan(self, served: Manifest) -> Answer:
        before: State = self._board.state
        self._board.set(state="verifying")
        try:
            measured, mismatched = self._ranks.scan(list(range(len(self._history.run.table))))
        finally:
            self._board.set(state=before)
        found = "" if measured is None else measured.hex()
        return {
            "verdict": found == served.fingerprint and not mismatched,
            "version": served.version,
            "fingerprint": found,
            "expected": served.fingerprint,
            "mismatched": mismatched,
        }

    def distrust(self, error: DeltaSyncError) -> None:
        """The weights are no version any more: say so in status and spans until they are proven again."""
        if isinstance(error, FingerprintError) and self._board.served is not None:
            self.damaged, self._repairs = self._board.served, 0
        self._board.set(served=None, undo=[], broken=True)
        self._board.show_error(error, "refused")
        try:
            self._port.label(None)
        except EngineError as unset:
            logger.warning("outputs still carry the old label, which is set anew at each poll: %s", unset.message)

    def repair(self, target: Manifest) -> None:
        """Make the weights the version again that was served before somebody changed them, and prove it."""
        self._board.set(state="repairing")
        timings = self._ranks.repair(target)["ms"]
        # Outputs must not claim the version before it is proven.
        transaction = Transaction(self._port, target.version, None, matches=self._ranks.matches, label=None)
        transaction.commit()
        timings = timings | transaction.resume()
        outcome = self.rescan(target)
        if not outcome["verdict"]:
            self._repairs += 1
            if self._repairs >= REPAIRS:
                self.damaged = None
            raise not_served(target, outcome["mismatched"])
        self._port.label(target.version)
        self.damaged = None
        self._board.set(served=target, broken=False)
        self._trim()
        metrics.count_move("repair", timings)
        logger.warning("%s", log_lines.repaired(target, timings))

    def check_touched(self) -> None:
        """If somebody else wrote, or may have written, weights, find out whether they are still what is served."""
        ranks = self._ranks.describe()
        asleep = any(answer["asleep"] for answer in ranks)
        if asleep != self._board.asleep:
            self._board.set(asleep=asleep)
        if asleep:
            raise BusyError("the engine is asleep and its weights are not in memory; wake it up (POST /wake_up)")
        reasons = sorted({answer["touched"] for answer in ranks if answer["touched"] is not None})
        served = self._board.served
        if served is None:
            return
        if not reasons:
            self._check_notes(ranks, served)
            return
        outcome = self.rescan(served)
        if not outcome["verdict"]:
            error = not_served(served, outcome["mismatched"])
            changed = FingerprintError(f"{error.message}: changed from outside ({', '.join(reasons)})")
            self.distrust(changed)
            raise changed
        logger.info("weights are still version %d after %s", served.version, ", ".join(reasons))
        self._ranks.trust([answer["touches"] for answer in ranks])

    def _check_notes(self, ranks: list[Answer], served: Manifest) -> None:
        """What ranks hold is what is served; and the last commit is confirmed, if that call was lost."""
        if any(answer["version"] != served.version or not answer["intact"] for answer in ranks):
            raise WeightsLostError(f"version {served.version} should be served, but {brief(ranks)}")
        if not all(answer["confirmed"] for answer in ranks):
            self._trim()

    def step(self, place: WeightPosition | None, target: int, until: Callable[[], bool] = lambda: False) -> None:
        """Stage and commit as much of the way to a version as fits; all of it, if it leads back.

        Args:
            place: what the ranks hold; None: weights that are no version of any run known.
            until: asked while others have their turn to pause; if True, what is staged is not committed.
        """
        if not self._confirmed:
            self._trim()
        if not self._confirmed:
            # A pause that is lost would take back the commit before, which is served.
            raise EngineError(f"version {self._served_version} is served, but could not be confirmed on every rank yet")
        while True:
            leg = self._ways.towards(place, target, self._settings.stage_bytes)
            try:
                staged, elements = self._stage(leg, place)
                break
            except ModelError as error:
                self.distrust(error)
                raise
            except (BusyError, WeightsLostError):
                raise
            except DeltaSyncError as error:
                self._check_decoded_against(leg, place, error)
                # Broken: not a bad version, but the weights are not what they should be.
                hopeless = isinstance(error, EngineError) and not isinstance(error, MemoryLimitError)
                if self._board.broken or hopeless or not self._ways.lessons.without(leg, error):
                    raise
        with self._turns.turn(leg.target.version, until) as waited:
            timings = None if waited is None else self._commit(leg, place, staged | {"turn": waited})
        if timings is not None:
            self._committed(leg, timings, elements)

    def _check_decoded_against(self, leg: UpdatePlan, place: WeightPosition | None, error: DeltaSyncError) -> None:
        """A stream that does not decode may be damaged, or the weights that it was decoded against: a rescan tells.

        Raises:
            FingerprintError: it is the weights.
        """
        undecoded = isinstance(error, FormatError) and not isinstance(error, DigestError)
        if place is not None and leg.needs_weights and undecoded and not self.rescan(place.manifest)["verdict"]:
            changed = FingerprintError(f"{error.message}: the weights held were changed from outside")
            self.distrust(changed)
            raise changed from error

    def _stage(self, leg: UpdatePlan, place: WeightPosition | None) -> tuple[dict[str, float], int]:
        """Stage on all ranks: the slowest rank's timings, and the elements that all of them will write."""
        self._board.set(state="staging")
        rescan = [] if place is None else self.rotation.next()
        staged, differing = self._ranks.stage(leg, self._served_version, rescan)
        self._board.set(used=staged["store"])
        if differing and place is not None:
            error = not_served(place.manifest, differing)
            self.distrust(error)
            raise error
        return staged["ms"], staged["elements"]

    def _commit(
        self, leg: UpdatePlan, place: WeightPosition | None, timings: dict[str, float]
    ) -> dict[str, float] | None:
        """Make what is staged what is served; all timings, or None if it was taken back."""
        self._board.set(state=self._pausing)
        target, served = leg.target, self._board.served
        transaction = self._transaction(target.version, matches=self._ranks.matches)
        try:
            transaction.commit()
        except FingerprintMismatchError as error:
            self._judge(leg, place, error)
            return None
        if served is not None and served.run == target.run:
            self._history.behind[served.version] = served
        return timings | self._go_on(transaction, target)

    def _committed(self, leg: UpdatePlan, timings: dict[str, float], elements: int) -> None:
        """Generation goes on with a new version: what is left to do, others may pause meanwhile."""
        target = leg.target
        left = max((version for version in self._history.behind if version > target.version), default=None)
        # What the log holds was committed before what was left, and would lead there again.
        self._keeps = self._keeps and left is None
        self._ways.lessons.committed(target.version)
        self._trim()
        self._board.committed(leg, timings)
        if self._ways.avoided:
            logger.warning("version %d was reached without %s", target.version, ", ".join(self._ways.avoided[:4]))
        move = "forward" if left is None else "rollback"
        metrics.count_move(move, timings, leg.versions, leg.payload_bytes, leg.changed)
        line = log_lines.forward(leg, timings, elements) if left is None else log_lines.back(target, left, timings)
        logger.info("%s", line)

    def _transaction(self, target: int, **options: Any) -> Transaction:
        if self._pausing == "draining":
            options["paused"] = functools.partial(self._board.set, state="committing")
        return Transaction(self._port, target, self._served_version, **options)

    def _go_on(self, transaction: Transaction, target: Manifest) -> dict[str, float]:
        """Let generation go on with a new version; the timings."""
        # Not shown before: the pause may have run out meanwhile, and then the engine has gone back.
        try:
            timings = transaction.resume()
        except WeightsLostError:
            self.show(target)
            raise
        self.show(target)
        return timings

    def show(self, target: Manifest) -> None:
        """A version is served from now on, of the run followed before or of another one."""
        head = self._history.head
        if head is None or self._board.run == target.run:
            # Whatever was in the way of this version is no more.
            self._board.set(served=target, broken=False, error=None)
            return
        # All at once: from here on it is another run that is followed.
        goal = head.version if self._settings.quarantined == "serve" else head.sound
        self._board.set(run=target.run, served=target, head=head, goal=goal, broken=False, error=None)

    def _trim(self) -> None:
        """Confirm the last commit. Only once generation goes on: until then, the undo data is the way back.

        If that fails, nothing is lost: the next look at the ranks does it again.
        """
        self._confirmed = False
        try:
            answers = self._port.call("trim", {"undo_bytes": self._settings.undo_bytes if self._keeps else 0})
            for answer in answers:
                raise_if_error(answer)
        except DeltaSyncError as error:
            logger.warning("the undo log could not be looked at: %s", error.message)
            return
        self._confirmed = self._keeps = True
        common = set.intersection(*(set(answer["undo"]) for answer in answers))
        behind = self._history.behind
        kept = [version for version in answers[0]["undo"] if version in common and version in behind]
        self._history.behind = {version: behind[version] for version in kept}
        self._board.set(undo=kept)

    def _judge(self, leg: UpdatePlan, place: WeightPosition | None, error: FingerprintMismatchError) -> None:
        """A commit was taken back: was a version wrong, or the weights held? A rescan tells."""
        if place is not None and self.rescan(place.manifest)["verdict"]:
            wrong = f"{error.message}: it was made against other weights than version {place.version}"
            self._ways.lessons.mismatched(leg, wrong)
            return
        changed = FingerprintError(f"{error.message}: the weights held were changed from outside")
        self.distrust(changed)
        raise changed from error

    def go_back(self, version: int, served: Manifest) -> None:
        target = self._history.behind.get(version)
        if target is None or any(version not in answer["undo"] for answer in self._ranks.describe()):
            known = ", ".join(map(str, self._board.undo)) or "none"
            raise ChainError(
                f"version {version} cannot be gone back to; the undo log holds {known}. Versions that were folded into "
                "one commit, or fell out of undo_bytes, are not in it"
            )
        self._board.set(state=self._pausing)
        transaction = self._transaction(version, method="revert")
        try:
            transaction.commit()
        except FingerprintError as error:
            self.distrust(error)
            raise
        timings = self._go_on(transaction, target)
        self._board.set(holding=True, undo=[known for known in self._board.undo if known < version])
        self._trim()
        metrics.count_move("rollback", timings)
        logger.info("%s", log_lines.back(target, served.version, timings))


def not_served(served: Manifest, names: list[str]) -> FingerprintError:
    shown = ", ".join(names[:3]) or "the sum"
    return FingerprintError(f"served weights are not version {served.version}: {shown} differ")


class RescanCursor:
    """Walks over tensors again and again.

    Args:
        sizes: bytes per tensor id. limit: bytes to hand out at a time; 0: none. At least one tensor otherwise.
    """

    def __init__(self, sizes: list[int], limit: int) -> None:
        self._sizes = sizes
        self._limit = limit
        self._position = 0

    def next(self) -> list[int]:
        """The next tensor ids, each at most once."""
        found: list[int] = []
        room = self._limit
        while room > 0 and len(found) < len(self._sizes):
            found.append(self._position)
            room -= max(1, self._sizes[self._position])
            self._position = (self._position + 1) % len(self._sizes)
        return found

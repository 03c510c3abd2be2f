"""``Transaction`` moves all ranks from one version to another: pause, move everywhere or nowhere, resume.

Whatever fails, it ends in one of three states: every rank has the new version and generation continues; every rank has
the old version, under its old label, and generation continues; or the weights are unknown, and the engine must be
restarted (WeightsLostError).
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeVar

from vllm_delta_sync.engine.commit.interrupts import postpone_interrupts
from vllm_delta_sync.engine.protocol import A, Commit, Describe, RankFailure, RankRequest, RankState, Revert, unwrap
from vllm_delta_sync.errors import BusyError, DeltaSyncError, EngineError, FingerprintError, WeightsLostError

TRIES = 3
WAIT_S = 0.2
T = TypeVar("T")
Ranks = Sequence[RankState | RankFailure]
"""What each rank of an engine holds, in the order of ranks."""


class EngineStopped(BaseException):
    """The engine was shut down on purpose, the event loop that leads to it is closed, or following it was ended.

    Like asyncio.CancelledError it is no failure and no Exception: nothing retries or reports it, and the thread that
    follows ends.
    """


class EnginePort(Protocol):
    """The engine, as the receiver uses it. Methods raise EngineError when the engine fails or does not answer."""

    def call(self, request: RankRequest[A]) -> list[A | RankFailure]:
        """Make a call to every rank; answers in the order of ranks."""

    def pause(self) -> None:
        """Stop generation between two steps, for at most as long as a commit may take."""

    def resume(self) -> bool:
        """Continue generation; harmless if it runs. True if the pause had expired and the engine resumed itself."""

    def label(self, version: int | None, run: str | None) -> None:
        """Set the version label of outputs from now on; None if the weights are no known version of a run."""

    def label_paused(self, version: int | None, run: str | None) -> None:
        """Do ``label``, only during our pause. Raises EngineError if it expired: the weights may have changed."""

    def end(self, reason: str) -> None:
        """End the engine, whose weights are unknown, so that its supervisor restarts it."""


class LabelKeepingPort:
    """An ``EnginePort`` that remembers a label that could not be set, until that label or another one is set.

    All but labels goes to the port itself, so that calls to the ranks take no step here.
    """

    def __init__(self, port: EnginePort) -> None:
        self._port = port
        self._pending_label: list[tuple[int | None, str | None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def label(self, version: int | None, run: str | None) -> None:
        """See EnginePort."""
        self._pending_label = [(version, run)]
        self._port.label(version, run)
        self._pending_label = []

    def label_paused(self, version: int | None, run: str | None) -> None:
        """See EnginePort."""
        self._port.label_paused(version, run)
        self._pending_label = []

    def set_pending_label(self) -> None:
        """Retry the label that could not be set before, if there is one. Raises EngineError: it still fails."""
        for version, run in self._pending_label:
            self.label(version, run)


class FingerprintMismatchError(FingerprintError):
    """The commit did not change the weights as declared and was taken back."""


class PauseExpiredError(EngineError):
    """A pause expired before its controller ended it; the engine took the commit back and resumed."""

    kind = "pause_expired"


class DrainError(BusyError):
    """With ``pause_mode`` wait: requests in flight took longer than ``wait_seconds``; generation continues."""

    kind = "drain"


class Transaction:
    """Moves every rank from version ``current`` (None: no version) to the version of a request.

    Args:
        request: ``Commit``: the version is staged on every rank. ``Revert``: every rank's undo log reaches it.
        run: run id of both versions.
        matches: whether what the ranks measured in a commit is what the version declares; for a revert, always.
        label: the label of outputs afterwards, if it is not the version.
        on_paused: called once the engine is paused.
    """

    def __init__(
        self,
        port: EnginePort,
        request: Commit | Revert,
        current: int | None,
        run: str,
        *,
        matches: Callable[[list[Any]], bool] = lambda answers: True,
        label: int | Literal["target"] | None = "target",
        on_paused: Callable[[], None] = lambda: None,
    ) -> None:
        self._port = port
        self._request = request
        self._target = request.version
        self._current = current
        self._run = run
        self._matches = matches
        self._label = self._target if label == "target" else label
        self._on_paused = on_paused
        self._times: list[float] = []

    def commit(self) -> None:
        """Pause and move. The engine is still paused on return, and runs again if this raises.

        Raises:
            FingerprintMismatchError: the weights were not those that the version was made against.
            WeightsLostError: the weights of the ranks are unknown.
            DeltaSyncError: the commit failed; the weights are the old ones.
        """
        self._mark_time()
        try:
            self._port.pause()
            self._mark_time()
            self._on_paused()
            answers = self._port.call(self._request)
            self._mark_time()
            if not self._matches(unwrap(answers)):
                raise FingerprintMismatchError(
                    f"version {self._target} did not change the weights as declared, so it was taken back"
                )
            self._port.label_paused(self._label, self._run)
        except BaseException as error:  # an interrupt, even a second one, must not leave the engine paused
            with postpone_interrupts():
                reached_target = self._converge(error)
            if not reached_target or not isinstance(error, Exception):
                raise
            # Phases that were cut short count as 0 ms.
            self._times += [time.monotonic()] * (3 - len(self._times))

    @postpone_interrupts()  # one must not leave the engine paused
    def resume(self) -> dict[str, float]:
        """Continue generation; returns the timings in ms.

        Raises:
            PauseExpiredError: the engine resumed itself, with the old version.
            WeightsLostError: the engine does not resume, or resumed with other weights.
        """
        if self._resume("generation does not resume"):
            # The engine's watchdog may have come first. It takes back what was not confirmed yet.
            ranks = self._describe("the pause expired")
            if all_hold(ranks, self._current):
                raise PauseExpiredError(
                    f"the pause for version {self._target} expired before its controller ended it; the engine took it "
                    f"back and serves version {self._current}"
                )
            if not all_hold(ranks, self._target):
                raise self._lost(f"the pause expired, and {describe_ranks(ranks)}")
        self._mark_time()
        spans = [1e3 * (end - start) for start, end in pairwise(self._times)]
        return {"wait": spans[0], "commit": spans[1], "resume": spans[2], "pause": sum(spans)}

    def _mark_time(self) -> None:
        self._times.append(time.monotonic())

    def _with_retries(self, call: Callable[[int], T], reason: str) -> T:
        """Make a call, given the number of the attempt, until it succeeds. Raises WeightsLostError."""
        for attempt in range(TRIES):
            try:
                return call(attempt)
            except DeltaSyncError as error:
                reason = f"{reason}; {error.message}"
                time.sleep(WAIT_S * attempt)
        raise self._lost(reason)

    def _describe(self, reason: str) -> Ranks:
        return self._with_retries(lambda _: self._port.call(Describe()), reason)

    def _resume(self, reason: str) -> bool:
        """Resume generation. True if the engine may have resumed itself before, or in a failed attempt."""
        return self._with_retries(lambda attempt: self._port.resume() or attempt > 0, reason)

    def _converge(self, error: BaseException) -> bool:
        """Bring every rank, the label and generation back to the old version.

        Returns:
            True if all ranks reached the target of a revert nevertheless, which is kept then.
        """
        if isinstance(error, WeightsLostError):
            raise self._lost(error.message) from error
        reason = str(error)
        for _ in range(2):
            try:
                self._restore()
                if self._resume(reason):
                    ranks = self._describe(reason)
                    if not all_hold(ranks, self._current):
                        raise WeightsLostError(f"the pause expired, and {describe_ranks(ranks)}")
                return False
            except WeightsLostError as later:
                raise self._lost(f"{error}; then {later.message}") from error
            except DeltaSyncError as later:
                reason = f"{reason}; then {later.message}"
            # The target of a revert was served before, so its weights are proven; the target of a commit is not.
            if isinstance(self._request, Revert) and all_hold(self._describe(reason), self._target):
                self._port.label(self._label, self._run)
                self._resume(reason)
                return True
        raise self._lost(reason) from error

    def _restore(self) -> None:
        ranks = self._port.call(Describe())
        if any(isinstance(rank, RankFailure) or rank.version != self._current for rank in ranks):
            unwrap(self._port.call(Revert(self._current)))
            ranks = self._port.call(Describe())
        if not all_hold(ranks, self._current):
            raise WeightsLostError(describe_ranks(ranks))
        self._port.label(self._current, self._run)

    def _lost(self, reason: str) -> WeightsLostError:
        return WeightsLostError(
            f"the commit of version {self._target} could not be brought to an end; the engine must be started again "
            f"({reason})"
        )


def all_hold(ranks: Ranks, version: int | None, *, confirmed: bool = False) -> bool:
    """Return whether every rank holds that version, intact; with ``confirmed``: and its commit was confirmed."""
    return all(
        isinstance(rank, RankState) and rank.intact and rank.version == version and (rank.confirmed or not confirmed)
        for rank in ranks
    )


def common_version(ranks: Ranks) -> int | None:
    """Return the version that all ranks can have: the one they have, else the newest each has or can revert to.

    An unconfirmed version does not count, because the controller has not found it right on all ranks.

    Raises:
        WeightsLostError: a rank's weights are unknown, or there is no such version.
    """
    reachable: set[int | None] | None = None
    held: set[int | None] = set()
    for index, rank in enumerate(ranks):
        if isinstance(rank, RankFailure) or not rank.intact:
            raise WeightsLostError(f"the weights of rank {index} are unknown: {rank}")
        held.add(rank.version)
        own = {*rank.undo, rank.version} if rank.confirmed else set(rank.undo)
        reachable = own if reachable is None else reachable & own
    if not reachable:
        raise WeightsLostError(f"there is no version that every rank has or can revert to: {ranks}")
    if len(held) == 1 and held <= reachable:
        return held.pop()
    return max(reachable, key=lambda version: -1 if version is None else version)


def describe_ranks(ranks: Ranks) -> str:
    """Return the version of each rank, for messages."""
    return ", ".join(
        f"rank {index} holds version {rank.version}"
        if isinstance(rank, RankState) and rank.intact
        else f"rank {index} holds version {getattr(rank, 'version', None)} or cannot tell"
        for index, rank in enumerate(ranks)
    )

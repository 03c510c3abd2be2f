"""This server's turn to pause, where the setting ``fleet_pauses`` says how many of a run may at once."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe import metrics
from vllm_delta_sync.engine.observe.status import StatusBoard
from vllm_delta_sync.engine.planning.run_history import History
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.fleet.pause_slots import PauseSlot, PauseSlots
from vllm_delta_sync.settings import Settings

END_SECONDS = 5.0
"""How long the end of the turn before is waited for, so that two are not written at once."""


class PauseSlotClient:
    """Waits for turns, between staging and pause. Without the setting there is nothing to wait for."""

    def __init__(self, settings: Settings, board: StatusBoard, history: History) -> None:
        self._settings, self._board, self._history = settings, board, history
        self._ending: threading.Thread | None = None
        self._open: PauseSlot | None = None
        self._failed = ""
        board.set(fleet={"receiver": settings.receiver_id, "pauses": settings.fleet_pauses})

    @contextmanager
    def turn(self, version: int, until: Callable[[], bool]) -> Iterator[float | None]:
        """Within the block this server may pause; how long that was waited for in ms, or None if ``until`` came first.

        Only what comes forward by itself takes turns: somebody waits for a server that is told to go back or to
        another run, and one that serves no version yet does not count. Where the store fails, or lets nobody write, the
        server goes on without a turn: two at a time are better than one that stays behind for ever.
        """
        slots, receiver = self._settings.fleet_pauses, self._settings.receiver_id
        if slots is None or receiver is None or not self._comes_forward(version):
            yield 0.0
            return
        began = time.monotonic()
        turns = PauseSlots(self._history.run, receiver, slots, self._longest_pause())
        held, given_up = self._taken(turns, version, until)
        waited = time.monotonic() - began
        metrics.observe_turn(waited)
        if given_up:
            yield None
            return
        try:
            yield 1e3 * waited
        finally:
            if held is not None:
                self._end(turns, held)

    def _comes_forward(self, version: int) -> bool:
        served = self._board.served
        return served is not None and served.run == self._history.run.info.run and version > served.version

    def _longest_pause(self) -> float:
        waits = self._settings.wait_seconds if self._settings.pause_mode == "wait" else 0.0
        return waits + self._settings.pause_seconds

    def _taken(self, turns: PauseSlots, version: int, until: Callable[[], bool]) -> tuple[PauseSlot | None, bool]:
        """The turn, None where turns cannot be had; and whether something else comes first."""
        if self._ending is not None:
            self._ending.join(END_SECONDS)
        if self._open is not None:
            # Or this server would wait for a turn of its own.
            with suppress(DeltaSyncError):
                turns.release(self._open)
                self._open = None
        self._board.set(waiting=True)
        try:
            held = turns.acquire(version, until)
        except DeltaSyncError as error:
            if self._failed != error.kind:
                self._failed = error.kind
                logger.warning(
                    "taking versions without a turn, so more than fleet_pauses = %d servers may be paused at once: %s",
                    self._settings.fleet_pauses,
                    error.message,
                )
            return None, False
        finally:
            self._board.set(waiting=False)
        if held is not None and self._failed:
            self._failed = ""
            logger.info("turns can be taken again")
        return held, held is None

    def _end(self, turns: PauseSlots, held: PauseSlot) -> None:
        """Beside what follows: a store that is slow, or down, must not keep a commit from being confirmed."""
        self._open = held

        def end() -> None:
            try:
                turns.release(held)
                self._open = None
            except DeltaSyncError as error:
                logger.info("a turn ends when its time is over, others may wait for that: %s", error.message)

        self._ending = threading.Thread(target=end, name="delta-sync-turn", daemon=True)
        self._ending.start()

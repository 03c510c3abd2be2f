"""``PauseSlotClient`` takes a pause slot before a commit; setting ``fleet_pauses`` limits a run's concurrent pauses."""

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

END_WAIT_SECONDS = 5.0
"""Longest wait for the release of the previous slot, so that two writes do not overlap."""


class PauseSlotClient:
    """Acquires a slot between staging and pause, and releases it after the commit. Without the setting: nothing."""

    def __init__(self, settings: Settings, board: StatusBoard, history: History) -> None:
        self._settings, self._board, self._history = settings, board, history
        self._end_thread: threading.Thread | None = None
        self._unended: PauseSlot | None = None
        self._failed = ""
        board.set(fleet={"receiver": settings.receiver_id, "pauses": settings.fleet_pauses})

    @contextmanager
    def slot(self, version: int, until: Callable[[], bool]) -> Iterator[float | None]:
        """Hold a slot in the block; yield the wait in ms, or None if ``until`` became True first.

        Only background updates wait for a slot. A rollback or a change of runs was requested by an operator who waits,
        and a server that serves no version yet does not count. If the store fails or is read-only, the server commits
        without a slot: two concurrent pauses are better than a server that stays behind.
        """
        limit, receiver = self._settings.fleet_pauses, self._settings.receiver_id
        if limit is None or receiver is None or not self._moves_forward(version):
            yield 0.0
            return
        began = time.monotonic()
        slots = PauseSlots(self._history.run, receiver, limit, self._longest_pause())
        held, given_up = self._acquire(slots, version, until)
        waited = time.monotonic() - began
        metrics.observe_slot_wait(waited)
        if given_up:
            yield None
            return
        try:
            yield 1e3 * waited
        finally:
            if held is not None:
                self._end(slots, held)

    def _moves_forward(self, version: int) -> bool:
        served = self._board.served
        return served is not None and served.run == self._history.run.info.run and version > served.version

    def _longest_pause(self) -> float:
        drain = self._settings.wait_seconds if self._settings.pause_mode == "wait" else 0.0
        return drain + self._settings.pause_seconds

    def _acquire(self, slots: PauseSlots, version: int, until: Callable[[], bool]) -> tuple[PauseSlot | None, bool]:
        """Return the slot, None without one; and whether the wait ended because ``until`` became True."""
        if self._end_thread is not None:
            self._end_thread.join(END_WAIT_SECONDS)
        if self._unended is not None:
            # This server would otherwise wait for its own slot.
            with suppress(DeltaSyncError):
                slots.release(self._unended)
                self._unended = None
        self._board.set(waiting_for_slot=True)
        try:
            held = slots.acquire(version, until)
        except DeltaSyncError as error:
            if self._failed != error.kind:
                self._failed = error.kind
                logger.warning(
                    "committing without a pause slot, so more than fleet_pauses = %d servers may be paused at once: %s",
                    self._settings.fleet_pauses,
                    error.message,
                )
            return None, False
        finally:
            self._board.set(waiting_for_slot=False)
        if held is not None and self._failed:
            self._failed = ""
            logger.info("pause slots are available again")
        return held, held is None

    def _end(self, slots: PauseSlots, held: PauseSlot) -> None:
        """Release the slot in a thread: a slow or failing store must not delay the confirmation of the commit."""
        self._unended = held

        def end() -> None:
            try:
                slots.release(held)
                self._unended = None
            except DeltaSyncError as error:
                logger.info("could not release the pause slot, so others wait until it expires: %s", error.message)

        self._end_thread = threading.Thread(target=end, name="delta-sync-slot", daemon=True)
        self._end_thread.start()

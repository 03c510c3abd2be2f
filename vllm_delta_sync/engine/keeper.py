"""Tell retention what this server serves and may go back to: one small object in the bucket, written again and again.

It is a hint. A server that may not write, or whose clock or disk fails, follows the run all the same.
"""

import logging
import threading
import time

from vllm_delta_sync.engine.receiver import Receiver
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.upkeep.leases import write_lease
from vllm_delta_sync.wire.limits import MAX_LEASE_PINS

# A child of vLLM's logger, the only one that vLLM gives a handler.
logger = logging.getLogger("vllm.delta_sync")

LEASE_SECONDS = 300
"""How long retention takes note of a server that is gone. Each is written again after a third of it."""

Said = tuple[str, int | None, int | None, list[int]]


class LeaseKeeper:
    """Writes the lease of one receiver. ``keep`` runs in a thread of its own: a commit may take longer than a lease."""

    def __init__(self, receiver: Receiver, receiver_id: str, seconds: int = LEASE_SECONDS) -> None:
        self._receiver = receiver
        self._id = receiver_id
        self._seconds = seconds
        self._nudged = threading.Event()
        self._said: Said | None = None
        self._due = 0.0
        self._failed = False

    def nudge(self) -> None:
        """What is served may have changed."""
        self._nudged.set()

    def keep(self, stop: threading.Event) -> None:
        """Write whenever it is due, until ``stop`` is set and ``nudge`` was called."""
        while not stop.is_set():
            self.write_if_due()
            self._nudged.wait(max(0.0, self._due - time.monotonic()))
            self._nudged.clear()

    def write_if_due(self) -> None:
        """Write if what there is to say has changed, or was said too long ago."""
        try:
            said = self._now()
            if said == self._said and time.monotonic() < self._due:
                return
            self._due = time.monotonic() + self._seconds / 3
            _, served, target, pins = said
            write_lease(self._receiver.history.run, self._id, served, target, pins, self._seconds)
        except DeltaSyncError as error:
            self._due = time.monotonic() + self._seconds / 3
            if not self._failed:
                self._failed = True
                logger.warning("retention does not hear what %r serves: %s", self._id, error.message)
            return
        self._said, self._failed = said, False

    def _now(self) -> Said:
        receiver = self._receiver
        run = receiver.history.run.info.run
        if receiver.served_run != run:
            return run, None, receiver.aim, []
        return run, receiver.served_version, receiver.aim, list(receiver.board.undo[:MAX_LEASE_PINS])

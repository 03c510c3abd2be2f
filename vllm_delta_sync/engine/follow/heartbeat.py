"""Tell in the bucket what this server serves and how it does: one small object, written again and again.

It is a hint, for retention, for whoever waits for a version, and for people. A server that may not write, or whose
clock or disk fails, follows the run all the same.
"""

import contextlib
import threading
import time
from typing import Any

from vllm_delta_sync.client import Run
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.observe.log_lines import RepeatedErrors
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.fleet.heartbeats import LEFT, write_heartbeat
from vllm_delta_sync.format.limits import MAX_LEASE_PINS, MAX_LEASE_TEXT
from vllm_delta_sync.format.manifest import timestamp

LEASE_SECONDS = 60
"""How long what was said holds. It is said again after a third of it."""
SPACING_SECONDS = 1.0
"""Between two writes: what changes more often than that is said once."""

Said = tuple[Run, dict[str, Any]]


class Heartbeat:
    """Writes the lease of one receiver. ``keep`` runs in a thread of its own: a commit may take longer than a lease."""

    def __init__(self, receiver: Receiver, receiver_id: str, seconds: int = LEASE_SECONDS) -> None:
        self._receiver = receiver
        self._id = receiver_id
        self._seconds = seconds
        self._started_at = timestamp()
        self._nudged = threading.Event()
        self._said: Said | None = None
        self._due = 0.0
        self._failed = False
        self._throttle = RepeatedErrors()

    def nudge(self) -> None:
        """What there is to say may have changed."""
        self._nudged.set()

    def keep(self, stop: threading.Event) -> None:
        """Write whenever it is due, until ``stop`` is set and ``nudge`` was called; then say that this server ends."""
        while True:
            # In this order: ``stop`` is set before the nudge that says so.
            self._nudged.clear()
            if stop.is_set():
                break
            try:
                if self.write_if_due():
                    stop.wait(self._spacing())
            except Exception:  # the thread must outlive any bug, or the heartbeat would end without a word
                self._due = time.monotonic() + self._seconds / 3
                if self._throttle.is_due("unexpected"):
                    logger.exception("the heartbeat of %r failed unexpectedly; it is tried again", self._id)
                stop.wait(SPACING_SECONDS)
            self._nudged.wait(max(0.0, self._due - time.monotonic()))
        # Whatever keeps it from knowing the last state, that it ends is written all the same.
        with contextlib.suppress(Exception):
            last = self._now()
            if self._said is not None and self._said[0] is last[0]:
                self._said = last
        self._leave()

    def _spacing(self) -> float:
        return max(SPACING_SECONDS, self._receiver.history.run.bucket.overwrite_seconds)

    def write_if_due(self) -> bool:
        """Write if what there is to say has changed, or was said too long ago; whether that was done."""
        if self._receiver.run_id is None:
            # Nothing to say yet, and nowhere to say it.
            self._due = time.monotonic() + self._seconds / 3
            return False
        try:
            said = self._now()
            if said == self._said and time.monotonic() < self._due:
                return False
            self._due = time.monotonic() + self._seconds / 3
            if self._said is not None and self._said[0] is not said[0]:
                self._leave()
            self._write(*said, self._seconds)
        except DeltaSyncError as error:
            self._due = time.monotonic() + self._seconds / 3
            if not self._failed:
                self._failed = True
                logger.warning("the bucket is not told what %r serves: %s", self._id, error.message)
            return False
        self._said, self._failed = said, False
        return True

    def _leave(self) -> None:
        """Tell the run that was followed that it is not any more."""
        if self._said is None:
            return
        run, said = self._said
        ended: dict[str, Any] = {"target": None, "pins": [], "state": LEFT, "waiting": False, "paused": False}
        self._said = None
        try:
            self._write(run, said | ended, 1)
        except DeltaSyncError as error:
            logger.info("the bucket is not told that %r has ended: %s", self._id, error.message)

    def _write(self, run: Run, said: dict[str, Any], seconds: int) -> None:
        write_heartbeat(run, self._id, seconds=seconds, started_at=self._started_at, **said)

    def _now(self) -> Said:
        """The run, and what there is to say in it."""
        receiver = self._receiver
        followed = receiver.history.run
        run = followed.info.run
        shown = receiver.board.document()
        ours = receiver.served_run == run and shown["served"] is not None
        said: dict[str, Any] = {
            "served": shown["served"]["version"] if ours else None,
            "step": shown["served"]["step"] if ours else None,
            "target": receiver.aim,
            "pins": shown["undo"][:MAX_LEASE_PINS] if ours else [],
            "head": None if shown["head"] is None else shown["head"]["version"],
            "lag": shown["lag"] if ours else None,
            "state": shown["state"],
            "following": shown["target"],
            "holding": shown["holding"],
            "waiting": shown["fleet"]["waiting"],
            "paused": shown["state"] in ("draining", "committing"),
            "error": None if shown["last_error"] is None else _brief(shown["last_error"]),
            "pause_ms": shown["timings_ms"].get("pause"),
        }
        return followed, said


def _brief(error: dict[str, str]) -> dict[str, str]:
    return {"kind": error["kind"], "message": error["message"][:MAX_LEASE_TEXT]}

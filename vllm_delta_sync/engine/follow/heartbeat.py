"""``HeartbeatWriter`` writes what this server serves to the bucket: one small object, rewritten periodically.

It informs garbage collection, clients that wait for a version, and operators. Following does not depend on it: a server
that may not write, or whose clock or disk fails, still follows the run.
"""

import threading
import time
from typing import Any

from vllm_delta_sync.client import Run
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.fleet.heartbeats import LEFT, write_heartbeat
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.limits import MAX_HEARTBEAT_PINS, MAX_HEARTBEAT_TEXT
from vllm_delta_sync.logs import LogThrottle

HEARTBEAT_SECONDS = 60
"""Lifetime of a heartbeat, which is renewed after a third of it."""
SPACING_SECONDS = 1.0
"""Minimum seconds between two writes."""


class HeartbeatWriter:
    """Writes the heartbeat of one receiver. ``run`` has its own thread: a commit may outlast a heartbeat."""

    def __init__(self, receiver: Receiver, receiver_id: str, seconds: int = HEARTBEAT_SECONDS) -> None:
        self._receiver = receiver
        self._id = receiver_id
        self._seconds = seconds
        self._started_at = timestamp()
        self._notified = threading.Event()
        # The run, and the fields for ``write_heartbeat``.
        self._last_content: tuple[Run, dict[str, Any]] | None = None
        self._due = 0.0
        self._failed = False
        self._throttle = LogThrottle(logger)

    def notify(self) -> None:
        """Wake ``run``: the content may have changed."""
        self._notified.set()

    def run(self, stop: threading.Event) -> None:
        """Write whenever due, until ``stop`` is set and ``notify`` was called; then write that this server has left."""
        while True:
            # Cleared before ``stop`` is read, because ``stop`` is set before ``notify`` is called.
            self._notified.clear()
            if stop.is_set():
                break
            try:
                if self.write_if_due() or self._failed:
                    stop.wait(max(SPACING_SECONDS, self._receiver.history.run.bucket.overwrite_seconds))
            except Exception:  # the thread must survive any bug, or the heartbeat would end unnoticed
                self._due = time.monotonic() + self._seconds / 3
                if self._throttle.is_due("unexpected"):
                    logger.exception("writing the heartbeat of %r failed unexpectedly; it will be retried", self._id)
                stop.wait(SPACING_SECONDS)
            self._notified.wait(max(0.0, self._due - time.monotonic()))
        self._write_ended()

    def write_if_due(self) -> bool:
        """Write if the content changed or the last heartbeat is old; returns whether it wrote."""
        if self._receiver.run_id is None:
            # No run is known yet.
            self._due = time.monotonic() + self._seconds / 3
            return False
        counts_from = time.monotonic()
        try:
            content = self._content()
            if content == self._last_content and not self._failed and time.monotonic() < self._due:
                return False
            # Before the write: one that fails may have reached the bucket, and must be ended too.
            self._last_content = content
            write_heartbeat(content[0], self._id, seconds=self._seconds, **content[1])
            self._failed = False
        except DeltaSyncError as error:
            if not self._failed:
                logger.warning("could not write the heartbeat of %r: %s", self._id, error.message)
            self._failed = True
            # Not tried again at once where the store takes long to fail.
            counts_from = time.monotonic()
        self._due = counts_from + self._seconds / 3
        return not self._failed

    def _write_ended(self) -> None:
        """Write that this server no longer follows the run."""
        if self._last_content is None:
            return
        run, content = self._last_content
        ended: dict[str, Any] = {"target": None, "pins": [], "state": LEFT, "paused": False}
        self._last_content = None
        try:
            write_heartbeat(run, self._id, seconds=1, **content | ended)
        except DeltaSyncError as error:
            logger.info("could not write the end of %r to its heartbeat: %s", self._id, error.message)

    def _content(self) -> tuple[Run, dict[str, Any]]:
        """Return the run followed, and what the heartbeat says now."""
        receiver = self._receiver
        followed = receiver.history.run
        run = followed.info.run
        shown = receiver.board.document()
        ours, error = receiver.served_run == run and shown["served"] is not None, shown["last_error"]
        content: dict[str, Any] = {
            "served": shown["served"]["version"] if ours else None,
            "step": shown["served"]["step"] if ours else None,
            "target": receiver.wanted_version,
            "pins": shown["undo"][:MAX_HEARTBEAT_PINS] if ours else [],
            "head": None if shown["head"] is None else shown["head"]["version"],
            "lag": shown["lag"] if ours else None,
            "state": shown["state"],
            "following": shown["target"],
            "holding": shown["holding"],
            "paused": shown["state"] in ("draining", "committing"),
            "error": error and {"kind": error["kind"], "message": error["message"][:MAX_HEARTBEAT_TEXT]},
            "pause_ms": shown["timings_ms"].get("pause"),
            "started_at": self._started_at,
        }
        return followed, content

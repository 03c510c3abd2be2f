"""Done beside publishing and never in its way: anchors, folded ranges, and a HEAD.json that does not run out."""

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from trainer_side.head_renewal import HeadRenewal
from trainer_side.options import Options
from trainer_side.writer import RunWriter
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.redaction import guarded_logger

logger = guarded_logger(__name__)

THREAD_NAME = "delta-sync-upkeep"
_POLL_SECONDS = 1.0
_NICE = 10


class BackgroundMaintenance:
    """One thread looks after the newest version it was told of, one thing at a time; older versions it skips.

    Another renews HEAD of a signed run.

    A failure only warns: a run reads correctly without any of this.
    """

    def __init__(self, bucket: Bucket, base: str | Path | None, options: Options, writer: RunWriter) -> None:
        self._bucket = bucket
        self._base = base
        self._options = options
        self._queue: SimpleQueue[Manifest | int | None] = SimpleQueue()
        self._closing = False
        self._run: Run | None = None
        self._thread = threading.Thread(target=self._serve, name=THREAD_NAME)
        self._thread.start()
        self._renewal = HeadRenewal(writer, options.keyring.has_signing_key)

    def offer(self, manifest: Manifest) -> None:
        """A version is durable; returns at once."""
        self._queue.put(manifest)

    def milestone(self, version: int) -> None:
        """A version is to have an anchor; returns at once."""
        self._queue.put(version)

    def close(self) -> None:
        """Stop what is under way, and end the threads. May be called twice."""
        self._closing = True
        self._queue.put(None)
        self._thread.join()
        self._renewal.close()

    def _stop(self) -> bool:
        return self._closing or not threading.main_thread().is_alive()

    def _serve(self) -> None:
        _lower_priority()
        while not self._stop():
            newest, milestones = self._next()
            for version in milestones:
                self._try(f"version {version} gets no anchor yet", partial(self._anchor, version))
            if newest is not None:
                self._try(f"no upkeep after version {newest.version}", partial(self._look_after, newest))

    def _next(self) -> tuple[Manifest | None, list[int]]:
        """What there is to do: for the newest version, and for milestones."""
        newest: Manifest | None = None
        milestones: list[int] = []
        try:
            item = self._queue.get(timeout=_POLL_SECONDS)
            while True:
                if isinstance(item, Manifest):
                    newest = item
                elif item is not None:
                    milestones.append(item)
                item = self._queue.get_nowait()
        except Empty:
            return newest, milestones

    def _try(self, failure: str, work: Callable[[], object]) -> None:
        if self._stop():
            return
        try:
            work()
        except DeltaSyncError as error:
            if not self._stop():
                logger.warning("%s, later versions mend that: %s", failure, error)
        except Exception:  # publishing must not depend on maintenance
            logger.exception("%s", failure)

    def _look_after(self, manifest: Manifest) -> None:
        from vllm_delta_sync.maintenance.compact import maintain

        options = self._options
        maintain(
            self._reader,
            manifest,
            base=self._base,
            anchor_every=options.anchor_every,
            merge=options.fold,
            stop=self._stop,
        )

    def _anchor(self, version: int) -> None:
        from vllm_delta_sync.maintenance.compact import make_anchor

        make_anchor(self._reader, version, self._base, stop=self._stop)

    @property
    def _reader(self) -> Run:
        if self._run is None:
            self._run = Run(self._bucket, self._options.keyring)
        return self._run


def _lower_priority() -> None:
    """Let training and publishing go first, where the system knows priorities of threads."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    except (OSError, AttributeError):
        pass

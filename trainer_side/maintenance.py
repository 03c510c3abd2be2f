"""``BackgroundMaintenance``: write anchors and merged deltas, and renew a signed HEAD.json, beside publishing.

``RebaseTag`` retains a version that the publisher rebased to.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from queue import Empty, SimpleQueue

from trainer_side.encode.encoder import RecentDeltas
from trainer_side.options import PublisherOptions
from trainer_side.writer import RunWriter
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import DeltaSyncError, NotFoundError
from vllm_delta_sync.format.codecs import BASE_CODECS
from vllm_delta_sync.format.documents import TAGS_PREFIX, tag_of_key
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.maintenance.anchor_writer import make_anchor
from vllm_delta_sync.maintenance.compact import maintain
from vllm_delta_sync.maintenance.rolling_weights import StoppedError
from vllm_delta_sync.maintenance.tags import delete_tag, rebase_epoch, rebase_tag, set_tag

logger = guarded_logger(__name__)

THREAD_NAME, HEAD_THREAD_NAME = "delta-sync-maintenance", "delta-sync-head"
_POLL_SECONDS = 1.0
_NICE = 10


class BackgroundMaintenance:
    """A thread that maintains the newest durable version, one task at a time; it skips older versions.

    A second thread writes the HEAD of a signed run again each time a third of its lifetime has passed. A failure only
    warns: a run reads correctly without maintenance.

    Args:
        alone: whether no other rank publishes.

    Attributes:
        recent: the newest versions' deltas in codec ``plain``, if their own codec cannot be merged without base bits.
    """

    def __init__(
        self, bucket: Bucket, base: str | Path | None, options: PublisherOptions, writer: RunWriter, alone: bool
    ) -> None:
        self._bucket = bucket
        self._base = base
        self._options = options
        self._queue: SimpleQueue[Manifest | int | None] = SimpleQueue()
        self._closing = False
        self._ended = threading.Event()
        self._unmade: list[int] = []  # milestones whose anchor is asked for and not begun, or was stopped
        # Only a process that publishes alone has all changes; of the others, ``delta-sync compact`` merges.
        self.recent = RecentDeltas() if options.merge and options.delta_codec in BASE_CODECS and alone else None
        self._threads = [threading.Thread(target=self._serve, name=THREAD_NAME)]
        if options.keyring.has_signing_key:
            # A daemon, which does not keep the process alive: an expired HEAD shows that the publisher has ended.
            renewal = partial(self._renew_head, writer)
            self._threads.append(threading.Thread(target=renewal, name=HEAD_THREAD_NAME, daemon=True))
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # an interrupt too: the caller gets no object to close, and one thread would stay
            self.close()
            raise

    def offer(self, manifest: Manifest) -> None:
        """Maintain a version that became durable; returns at once."""
        self._queue.put(manifest)

    def milestone(self, version: int) -> None:
        """Write an anchor of a version; returns at once."""
        self._queue.put(version)

    def close(self) -> None:
        """Stop the running task, and end the threads. May be called twice."""
        self._closing = True
        self._queue.put(None)
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()
            # HEAD is renewed until the first thread has ended: what that has under way may take longer than HEAD lives.
            self._ended.set()
        unmade, self._unmade = self._unmade + self._next(0)[1], []
        for version in unmade:
            # Asked for, and nothing else says so: at the end of a training no later version follows.
            logger.warning(
                "version %d, a milestone, has no anchor yet: the next publisher of the run makes it after its next "
                "version, or delta-sync compact --anchor %d",
                version,
                version,
            )

    def _stop(self) -> bool:
        return self._closing or not threading.main_thread().is_alive()

    def _renew_head(self, writer: RunWriter) -> None:
        seconds = writer.renew_head()
        while seconds is not None and not self._ended.wait(seconds):
            seconds = writer.renew_head()

    def _serve(self) -> None:
        _lower_priority()
        while not self._stop():
            newest, milestones = self._next(_POLL_SECONDS)
            self._unmade += milestones
            for version in milestones:
                if self._try(f"version {version} gets no anchor yet", partial(self._anchor, version)):
                    self._unmade.remove(version)
            if newest is not None:
                self._try(f"no maintenance after version {newest.version}", partial(self._look_after, newest))

    def _next(self, seconds: float) -> tuple[Manifest | None, list[int]]:
        """Return the newest version to maintain, if any, and versions that need an anchor; wait so long for one."""
        newest: Manifest | None = None
        milestones: list[int] = []
        try:
            item = self._queue.get(timeout=seconds)
            while True:
                if isinstance(item, Manifest):
                    newest = item
                elif item is not None:
                    milestones.append(item)
                item = self._queue.get_nowait()
        except Empty:
            return newest, milestones

    def _try(self, failure: str, work: Callable[[], object]) -> bool:
        """Do the work; return whether it ended, well or with a failure that is logged, and was not stopped."""
        if self._stop():
            return False
        try:
            work()
        except StoppedError:
            return False
        except DeltaSyncError as error:
            if self._stop():
                return False
            logger.warning("%s, later versions repair that: %s", failure, error)
        except Exception:  # publishing must not depend on maintenance
            logger.exception("%s", failure)
        return True

    def _look_after(self, manifest: Manifest) -> None:
        options = self._options
        maintain(
            self._reader,
            manifest,
            base=self._base,
            anchor_every=options.anchor_every,
            merge=options.merge,
            stop=self._stop,
            plain_objects=None if self.recent is None else self.recent.of,
        )

    def _anchor(self, version: int) -> None:
        make_anchor(self._reader, version, self._base, stop=self._stop)

    @cached_property
    def _reader(self) -> Run:
        return Run(self._bucket, self._options.keyring)


def _lower_priority() -> None:
    """Let training and publishing run first, on systems with thread priorities."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class RebaseTag:
    """The tag that retains a version this writer rebased to, until the next version builds on it. At most one.

    Args:
        run: returns the run. epoch: of its writer.
    """

    def __init__(self, run: Callable[[], Run], epoch: int) -> None:
        self._run = run
        self._epoch = epoch
        self._name: str | None = None
        self._swept = epoch == 0

    @contextmanager
    def keeping(self, version: int) -> Iterator[None]:
        """Tag a version in place of the one tagged before; if the block fails, keep the tag before instead."""
        name = rebase_tag(self._epoch, version)
        set_tag(self._run(), name, version, rebase=True)
        before, self._name = self._name, name
        try:
            yield
        except BaseException:  # an interrupted rebase leaves the version before checked out
            before, self._name = name, before
            raise
        finally:
            self._drop(before)

    def release(self) -> None:
        """Delete the tag; a failure only warns."""
        name, self._name = self._name, None
        self._drop(name)

    def sweep(self) -> None:
        """Delete rebase tags that former writers of the run left; only the first call does so.

        Call it only after a commit: until then the last version of such a writer may appear, which builds on a tagged
        version.
        """
        if self._swept:
            return
        self._swept = True
        try:
            names = [tag_of_key(item.key) for item in self._run().bucket.list(TAGS_PREFIX + "rebase-")]
        except DeltaSyncError as error:
            logger.warning("whether former writers have left tags is not known: %s", error)
            return
        for name in names:
            epoch = None if name is None else rebase_epoch(name)
            if epoch is not None and epoch < self._epoch:
                self._drop(name)

    def _drop(self, name: str | None) -> None:
        try:
            if name is not None:
                delete_tag(self._run(), name)
        except NotFoundError:
            return
        except DeltaSyncError as error:
            logger.warning("tag %r is left in the run; delete it (delta-sync tag rm): %s", name, error)

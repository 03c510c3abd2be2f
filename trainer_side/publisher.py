"""``Publisher``: publish a model's weights while it trains."""

import math
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Self

import torch

from trainer_side.background_thread import BackgroundJob, BackgroundThread
from trainer_side.committer import Committer
from trainer_side.diff.engine import Detector
from trainer_side.diff.pending_delta import prepare_devices
from trainer_side.maintenance import BackgroundMaintenance
from trainer_side.memory import PublisherMemory, publisher_memory
from trainer_side.model.live_tensors import read_to_end
from trainer_side.model.module import ModelLike, live_tensors
from trainer_side.options import (
    MakeOptions,
    PublisherOptions,
    set_log_format,
    takes_options,
)
from trainer_side.ranks.coordinator import RankCoordinator
from trainer_side.ranks.given_parts import GivenParts
from trainer_side.result import NEVER, Deadline, PublisherStatus, PublishResult, Stopwatch
from trainer_side.run_files import check_folder, collect_files
from trainer_side.run_weights import RunWeights, WholeWeights
from trainer_side.session import PublishSession, SidecarData, agreed_options, check_version, ranks_of
from trainer_side.takeover import open_or_begin
from trainer_side.writer import RunWriter
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.errors import PublishTimeoutError, UsageError
from vllm_delta_sync.fleet.fleet import Fleet, Replica
from vllm_delta_sync.format.documents import Tag, tag_key
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.maintenance.tags import set_tag
from vllm_delta_sync.notice.publisher import NoticePublisher, open_notices
from vllm_delta_sync.run.model_files import read_file
from vllm_delta_sync.tensors.changes import Bits

logger = guarded_logger(__name__)

CLOSE_SECONDS = 600.0
"""How long ``close`` tries to publish the last weights: longer than most outages of a store."""


class Publisher:
    """Writes one run: version 0 on construction, then one version per ``publish``; or continues an existing run.

    ``publish`` compares the weights with the last published version and returns. Encoding and upload run in one
    background thread, one version at a time. A version holds the exact bits at the moment of the call, even if
    training continues immediately. If a version cannot be made durable, the baseline is reverted and its changes go
    out with the next version. Another thread writes anchors and merged deltas of durable versions.

    A module that is sharded or replicated over the ranks of a ``torch.distributed`` world is published by all of them:
    every rank constructs a publisher and calls its methods at the same points of the program (docs/sharded.md).

    Threads: any thread may call any method; calls are serialized. Do not call from signal handlers or after
    ``os.fork``. Use it as a context manager, or ``close`` it: a publisher that is dropped instead finishes the version
    under way, releases everything, and logs a warning.

    Attributes:
        run: id of the run, 32 hex digits.
        url: the run's URL.
        began: whether this publisher began the run, with version 0; otherwise it took the run over.
        memory: bytes that it takes, at rest and for the largest version; logged at construction.
    """

    @takes_options(PublisherOptions)
    def __init__(self, model: ModelLike, make_options: MakeOptions) -> None:
        """Begin a run with the current weights as version 0, or take over the run at the URL.

        Taking over publishes nothing: the newest version is read back from the bucket, and the next ``publish`` writes
        a delta against it. Everything is read and checked first, on every rank; then the run is claimed, which fences
        its previous writer. Only if the newest version cannot be rebuilt because of damage in the bucket, the current
        weights are committed after it as a full snapshot. One line of the log says beforehand what is read and written.

        Args:
            model: a module, an iterable of (checkpoint name, tensor) pairs that can be read repeatedly, or a function
                without arguments that returns one. Left out with ``parts``.
            options: the arguments of ``PublisherOptions``, by position or name.

        Raises:
            UsageError: an argument is invalid, or ``expect_run`` is given and there is no run.
            SettingsError: a key file or another setting cannot be used.
            SignatureError: the existing run is unsigned or signed by an untrusted key, or the signing key may not sign.
            ModelError, TensorMismatchError: the named tensor cannot be published, or does not fit the run.
            NotFoundError, FormatError: the base of a new run cannot be read.
            BaseUnavailableError: the base of an existing run is missing, unreadable or another one.
            ConflictError: the URL holds part of a run; or a run, and ``resume`` is False, or it is not ``expect_run``.
            StoreError: the store failed. PublishError: version 0 may have been written; the URL stays claimed.
        """

        def check(signs: bool) -> PublisherOptions:
            set_log_format()
            options = make_options()
            if signs:  # rank 0, which begins the run; other machines may not have the folder or the keys
                check_folder(options.files)
                options.load_keys()
            return options

        self._lock = threading.RLock()
        self._closed = False
        self._handled = id(sys.exc_info()[1])
        with ExitStack() as undo:
            ranks = self._ranks = ranks_of(model)
            undo.callback(ranks.close)
            options = agreed_options(ranks, check)
            bucket = options.bucket
            # Only in the main thread can a signal handler interrupt work that must not be left half done.
            self._background = BackgroundThread("delta-sync-publisher")
            undo.callback(self._background.close)
            self._bucket = ranks.work.on_every_rank(
                "bucket", lambda: bucket if isinstance(bucket, Bucket) else open_bucket(bucket)
            )
            if not isinstance(bucket, Bucket):
                undo.callback(self._bucket.close)

            def notice_publisher() -> NoticePublisher | None:
                if options.notice is None or not ranks.is_rank0:
                    return None
                return open_notices(options.notice, options.notice_key, options.notice_allowed, options.keyring)

            self._notice = ranks.work.on_every_rank("notice", notice_publisher)
            if self._notice is not None:
                undo.callback(self._notice.close)
            self._threads = torch.get_num_threads()
            self._detector = Detector(self._threads)
            undo.callback(self._detector.close)

            def hold_weights() -> RunWeights:
                if ranks.alone and not isinstance(model, GivenParts):
                    live = live_tensors(model, options.selection)
                    return WholeWeights(live, self._bucket, options, self._background)
                return RankCoordinator(model, self._bucket, options, ranks.work)

            weights = ranks.work.on_every_rank("model", hold_weights)
            opening = partial(
                open_or_begin, self._bucket, weights, partial(collect_files, model, options.files), options,
                ranks.work, self._background,
            )  # fmt: skip
            # Alone it runs in this thread: reading the live tensors may be interrupted.
            opened = opening() if ranks.alone else self._background.call(opening)
            self._maintenance: BackgroundMaintenance | None = None
            if ranks.is_rank0:
                self._maintenance = BackgroundMaintenance(
                    self._bucket, weights.base, options, opened.writer, ranks.alone
                )
                undo.callback(self._maintenance.close)
            self._committer = Committer(self._bucket, opened, options, ranks.work, self._maintenance)
            self._table = weights.table
            self.run, self.url, self.began = opened.writer.run, self._bucket.url, opened.began
            self._background.call(self._committer.begin)
            prepare = partial(prepare_devices, self._detector, weights.live, self._committer.baseline)
            ranks.work.on_every_rank("devices", prepare)
            self._session = PublishSession(
                weights, options, self._committer, self._detector, self._background, ranks.caller
            )
            if self._notice is not None:
                opened.writer.use_notice(self._notice)
            self._options = options
            logger.info("memory of the publisher of %s: %s", self.run, self.memory)
            self._resources = undo.pop_all()
            self._unclosed = weakref.finalize(self, _end_unclosed, self._background, opened.writer, self._resources)
            self._unclosed.atexit = False

    @property
    def memory(self) -> PublisherMemory:
        """What this publisher takes in this process, at rest and for the largest version."""
        keeps_deltas = self._maintenance is not None and self._maintenance.recent is not None
        return publisher_memory(self._committer.baseline, self._options, self._threads, keeps_deltas)

    @property
    def notice_address(self) -> str | None:
        """Address that notices are sent on, with the real port; None without notices."""
        return None if self._notice is None else self._notice.address

    @property
    def version(self) -> int:
        """Number of the newest durable version."""
        return self._committer.newest.version

    def status(self) -> PublisherStatus:
        """Return how publishing goes, see ``PublisherStatus``; waits for nothing."""
        return self._session.record.status()

    def publish(
        self,
        step: int,
        wait: bool = False,
        weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | None = None,
        sidecars: Mapping[str, SidecarData] | None = None,
        skip_unchanged: bool = False,
        exact: bool = False,
        timeout: float | None = None,
    ) -> PublishResult:
        """Publish the current weights as the next version.

        Without ``wait`` it never waits for the store: what needs the store is done in the background, and a call
        meanwhile is skipped. Calls of several threads take turns: it waits for one that waits.

        Args:
            step: optimizer step, at least 0; it may repeat or decrease.
            wait: if the previous version is still being uploaded, wait for it; otherwise this call is skipped and its
                changes go out with the next version.
            weights: (checkpoint name, tensor) pairs, or a mapping, to publish instead of the model given at
                construction. Tensors that are absent keep the bits published last. Always read to its end, even if the
                call is skipped.
            sidecars: name → bytes to commit with this version, such as a small training state; at most 16 of 16 MiB.
                Read back by ``Run.sidecar``. Sidecars of a call that is skipped or fails are dropped. Where ranks
                publish together, those of rank 0 are committed.
            skip_unchanged: skip the call if no bits differ from the newest version; otherwise a version without changes
                is published. Not for sharded models.
            exact: send all changes, also those that the ``budget`` held back; waits like ``wait``, and ignores
                ``every``. Elements of tensors that ``weights`` lacks stay held back. Without a budget it changes
                nothing: every version is exact. Ranks that publish together give the same.
            timeout: maximum seconds to ``wait``, and for calls of other threads; None means no limit.

        Returns:
            The result, after the comparison; reading some of its fields waits for the background thread.

        Raises:
            PublishError: the previous version could not be made durable (GateError: the gate refused it), or the
                comparison failed, for example for lack of memory; this call did nothing, and the next one makes up for
                it. PublishTimeoutError: ``timeout`` has passed.
            ConflictError: another writer has taken over the run; every later call raises it too.
            TensorMismatchError: a tensor is unknown, or has another shape or dtype; nothing is published.
            ModelError: a tensor cannot be read. UsageError: the publisher is closed, step is invalid, or a sidecar is
                too large or has an invalid name.
        """
        watch = Stopwatch()
        try:
            pairs = None if weights is None else iter(weights.items() if isinstance(weights, Mapping) else weights)
        except TypeError as error:
            raise UsageError(
                f"weights= is a {type(weights).__name__}; give a mapping, or pairs of checkpoint names and tensors"
            ) from error
        with read_to_end(() if pairs is None else pairs), self._open(timeout) as (session, deadline):
            return session.publish(step, wait, pairs, watch, sidecars, skip_unchanged, exact, deadline)

    def published_bits(self, tensor: int) -> Bits:
        """Return the (numel,) bits of a tensor of the run, by its id there, as they were published last; read only.

        For iterators that ``publish`` reads as ``weights``: until a tensor is yielded, its bits stay as they are.

        Raises:
            UsageError: this publisher has parts of the run's tensors, as each rank of a sharded model has.
        """
        baseline = self._committer.baseline
        if baseline.table is not self._table:
            raise UsageError("this publisher has parts of the run's tensors; read them from the run (open_run)")
        return baseline.read(tensor)

    @property
    def table(self) -> TensorTable:
        """The run's tensors."""
        return self._table

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published is durable.

        Calls that were skipped are not made up for; ``finish`` and ``close`` do that.

        Raises:
            PublishError, ConflictError: a version could not be made durable.
            PublishTimeoutError: that is not known after ``timeout`` seconds; it goes on in the background.
        """
        with self._open(timeout) as (session, deadline):
            session.wait_durable(deadline)

    def finish(self, timeout: float | Deadline | None = CLOSE_SECONDS) -> None:
        """Leave the run at the weights of the last ``publish``, as ``close`` does, and stay open.

        Raises:
            PublishError, GateError, ConflictError: as ``close``.
        """
        with self._open(timeout) as (session, deadline):
            session.publish_last(deadline)

    def rebase(self, version: int, timeout: float | None = None) -> None:
        """Build the next version on an older one instead of the newest; version numbers continue.

        Waits until everything published is durable, and reads the version back from the bucket. Until the next
        publish, only a tag that retains the version shows in the bucket. Rebasing to the newest version undoes it.

        Raises:
            NotFoundError: there is no such version. UsageError: the number is invalid, or the publisher is closed.
            PublishError, ConflictError: as ``flush``. DeltaSyncError: the version cannot be rebuilt; the next publish
                builds on the same version as before this call.
        """
        with self._open(timeout) as (session, deadline):
            number = session.check_same_arguments("version", lambda: check_version(version))
            session.call(lambda: self._committer.rebase(number), deadline)

    def rescan(self, timeout: float | None = None) -> list[str]:
        """Compare the whole baseline in memory with what was published, and repair differences from the bucket.

        Waits until everything published is durable.

        Returns:
            Names of the tensors that were damaged and have been repaired.

        Raises:
            PublishError: they cannot be repaired now. Other errors as ``flush``.
        """
        with self._open(timeout) as (session, deadline):
            return session.call(self._committer.rescan, deadline)

    def anchor(self, timeout: float | None = None) -> int:
        """Write a standalone anchor from memory: it helps readers, and replaces what the bucket has lost.

        Waits until everything published and the anchor are durable.

        Returns:
            The version of the anchor: the newest, or the one rebased to.

        Raises:
            StoreError: it could not be stored. PublishError: the baseline is damaged. Other errors as ``flush``.
        """
        with self._open(timeout) as (session, deadline):
            return session.call(self._committer.write_anchor, deadline)

    def tag(self, name: str, version: int | None = None, milestone: bool = False, timeout: float | None = None) -> Tag:
        """Give a version a name; retention keeps it. An existing tag of that name is moved.

        Args:
            version: None for the newest, once everything published is durable.
            milestone: write an anchor of the version, in the background. ``close`` does not wait for it, and logs
                that it is not made.
            timeout: maximum seconds until everything published is durable; None means no limit.

        Raises:
            NotFoundError: there is no such version. UsageError: the name is not valid for a tag.
            ConflictError: a run branches at the tag of that name; or as ``flush``. StoreError: the store failed.
        """

        def checked_arguments() -> list[str | int | bool | None]:
            return [tag_key(name), None if version is None else check_version(version), bool(milestone)]

        with self._open(timeout) as (session, deadline):
            session.check_same_arguments("tag", checked_arguments)
            session.wait_durable(deadline)
            number = self.version if version is None else check_version(version)
            run = self._committer.run
            text: str = self._ranks.caller.from_rank0(
                "tag", lambda: set_tag(run, name, number, milestone).to_bytes().decode()
            )
            if milestone and self._maintenance is not None:
                self._maintenance.milestone(number)
        return Tag.from_bytes(text.encode())

    def wait_served(self, version: int | None = None, replicas: int = 1, timeout: float = 60.0) -> list[Replica]:
        """Wait until all servers that follow the run and have a ``receiver_id`` serve a version: see ``Fleet.wait``.

        Other threads may publish meanwhile.

        Args:
            version: None for the newest that is not quarantined, once everything published is durable.
            timeout: maximum seconds until everything published is durable, and again until it is served.

        Returns:
            All servers at that moment, including those that have ended.

        Raises:
            FleetLateError: the timeout passed; the message names the servers that lag. StoreError: the store failed.
            UsageError: a number is invalid, or the publisher is closed. Other errors as ``flush``.
        """
        with self._open(timeout) as (session, deadline):
            if version is None:
                session.wait_durable(deadline)
            newest = self._committer.newest
            # Servers skip a quarantined version, so waiting for it would only end in an error.
            sound = newest.version if newest.sound is None else newest.sound
            wanted = sound if version is None else check_version(version)
            run = self._committer.run
        return Fleet(run).wait(wanted, replicas, timeout)

    def file(self, name: str) -> bytes:
        """Return one of the small files that the run keeps (``files``), such as ``config.json``; see ``Run.file``."""
        with self._open():
            return read_file(self._committer.run, name)

    def close(self, timeout: float | Deadline = CLOSE_SECONDS, *, finish: bool | None = None) -> None:
        """Leave the run at the weights of the last ``publish``, and release everything. May be called twice.

        If the last call was skipped or its version failed, or a ``budget`` held back part of it, the weights that the
        model has now are published as an exact version with the step of that call. While the store fails, this is tried
        again.

        Without ``finish`` nothing new is published: the version under way is finished, and errors are logged. This is
        how a ``with`` block closes if it ends by an exception, which may have come in the middle of a step.

        Args:
            timeout: maximum seconds until the last weights are durable. Threads end after that, once the request to the
                store that is under way has ended; where ranks publish together, that of every rank.
            finish: None means yes, unless an exception is being handled. Ranks that publish together close together,
                and give the same.

        Raises:
            PublishError: the last weights are not durable after ``timeout``, or cannot be published; the message names
                their step and the last durable version. ConflictError: another publisher has taken over the run.
                GateError: the gate refuses them. Everything is released in any case, except after a
                UsageError: ``timeout`` is no number, or the same thread is in another call of this publisher.
        """
        if finish is None:
            finish = sys.exc_info()[1] is None or id(sys.exc_info()[1]) == self._handled
        with self._exclusive(NEVER):
            if self._closed:
                return
            deadline = Deadline.of(timeout)  # an error of it closes nothing
            self._closed = True
            self._unclosed.detach()
            with self._resources as last:
                # Before what ``__init__`` put there: the version under way ends first, and HEAD is written last.
                last.callback(self._committer.close)
                if self._maintenance is not None:
                    last.callback(self._maintenance.close)
                last.callback(self._committer.baseline.close)
                last.callback(self._background.close)
                if finish:
                    self._session.publish_last(deadline)
                    # All ranks wait until rank 0 is done: a collective call of training that follows has a timeout.
                    self._ranks.caller.from_rank0("closed", self._close_on_rank0)
                else:
                    self._session.finish_under_way(deadline)

    def _close_on_rank0(self) -> None:
        if self._maintenance is not None:
            self._maintenance.close()
        self._committer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close(finish=True)
            return
        try:
            self.close(finish=False)
        except Exception as failure:  # noqa: BLE001 - whatever it is, it must not replace the exception of the block
            logger.error("closing the publisher after %s: %s", type(error).__name__, failure)

    @contextmanager
    def _open(self, timeout: float | Deadline | None = None) -> Iterator[tuple[PublishSession, Deadline]]:
        """Take the lock for one call, whose deadline begins now.

        Raises:
            UsageError: the publisher is closed. PublishTimeoutError: a call of another thread has not ended in time.
        """
        deadline = Deadline.of(timeout)
        with self._exclusive(deadline):
            if self._closed:
                raise UsageError("the publisher is closed; make a new one, which continues the run")
            yield self._session, deadline

    @contextmanager
    def _exclusive(self, deadline: Deadline) -> Iterator[None]:
        """Hold the lock. Raises as ``_open``, also within another call of the same thread, as of a signal handler."""
        if self._background.is_current:  # the thread that holds the lock may wait for this one
            raise UsageError("this call is made in on_version, which may only call status; make it in another thread")
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise UsageError(
                "this call is made during another call of this publisher, by the same thread; make it later"
            )
        # Ranks that publish together would wait for one that gave up.
        left = deadline.left if self._ranks.alone else math.inf
        try:
            if not self._lock.acquire(timeout=-1 if left == math.inf else left):
                raise PublishTimeoutError(
                    f"a call of another thread has not ended within {deadline}; this one did nothing"
                )
            yield
        finally:
            # An interrupt may come right after ``acquire``, so that only the lock knows whether it is held. No call
            # before this one, since an interrupt may come after each.
            try:
                self._lock.release()
            except RuntimeError:  # this thread does not hold it
                pass


def _end_unclosed(background: BackgroundThread, writer: RunWriter, resources: ExitStack) -> None:
    """End the threads of a publisher that was dropped without ``close``, after the version under way.

    Garbage collection may call this anywhere, so it waits for nothing.
    """

    def release() -> None:
        newest = writer.newest
        logger.warning(
            "the publisher of run %s was dropped without close(): the run ends at version %s, and later changes of the "
            "weights are not published; use `with Publisher(…) as publisher:`, or call close()",
            writer.run,
            None if newest is None else newest.version,
        )
        resources.close()

    background.submit(BackgroundJob(), release)

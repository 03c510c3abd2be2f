"""Publish a model's weights while it trains: ``Publisher``."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import torch

from trainer_side.changes import Patch
from trainer_side.committer import Committer
from trainer_side.detection import Detector
from trainer_side.detection_held import Place
from trainer_side.gate import Gate
from trainer_side.naming import ModelLike, live_tensors
from trainer_side.options import RESCAN_BYTES, check_step, check_version, checked
from trainer_side.result import Progress, PublishResult, Stopwatch
from trainer_side.resume import open_or_begin
from trainer_side.upkeep import Upkeep
from trainer_side.versions import SHARD_BYTES
from trainer_side.worker import Worker
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.errors import ConflictError, DeltaSyncError, UsageError
from vllm_delta_sync.notice.publisher import try_announcing
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.trust.head import HEAD_SECONDS
from vllm_delta_sync.wire.compression import Compression

if TYPE_CHECKING:
    from vllm_delta_sync.chain.fleet import Replica
    from vllm_delta_sync.wire.documents import Tag

logger = guarded_logger(__name__)


class Publisher:
    """Writes one run: version 0 when it is made, one version per ``publish``; or goes on with one that is there.

    ``publish`` compares the weights with the last published version and returns; encoding and upload run in
    one background thread, one version at a time. What is published are the exact bits at the moment of the
    call, however soon training goes on. A version that cannot be made durable is taken back, and its changes
    go out with the next. Another thread makes anchors and folded ranges of what is durable.

    Threads: any may call any method; calls take turns. Not from signal handlers, and not across ``os.fork``.

    Attributes:
        run: id of the run, 32 hex digits. url: where it is.
    """

    def __init__(
        self,
        model: ModelLike,
        bucket: str | Bucket,
        base: str | Path | None = None,
        every: int = 1,
        codec: Literal["auto", "packed", "context", "raw"] = "auto",
        compression: Compression = "zstd",
        notice: str | None = None,
        *,
        notice_key: str | Path | None = None,
        notice_allowed: str | Path | None = None,
        resume: bool = True,
        anchor_every: int | None = None,
        fold: bool = True,
        read_back: bool = False,
        rescan_bytes: int = RESCAN_BYTES,
        shard_bytes: int = SHARD_BYTES,
        gate: Gate | None = None,
        signing_key: str | Path | None = None,
        trusted_keys: str | Sequence[str | Path] | None = None,
        head_seconds: int = HEAD_SECONDS,
        baseline: Place = "host",
        diff_threads: int | None = None,
        receiver_bytes_per_second: float | None = None,
    ) -> None:
        """Begin a run with the weights of this moment as version 0, or take over the one that is at the URL.

        Taking over publishes nothing: the newest version is read back from the bucket, and the next ``publish`` is
        a delta against it. Whoever wrote the run before is stopped. Only if the newest version cannot be rebuilt,
        the weights of this moment are committed as a full snapshot behind it.

        Args:
            model: a module, (checkpoint name, tensor) pairs that can be iterated again and again, or a
                function without arguments that returns them.
            bucket: URL of a run (or an open bucket, which the caller closes).
            base: checkpoint directory that servers start from, or public model as ``org/name@revision``. It decides
                names and dtypes, and if the weights have its bits, version 0 is a reference to it and uploads nothing.
                Otherwise version 0 is a full snapshot. For a run that is there already: where the checkpoint of its
                version 0 lies, if not at the recorded place; names and dtypes are the run's.
            every: publish at every k-th call only.
            codec: ``packed``: fast. ``context``: smaller, slower, and versions cannot be taken back. ``auto``: one of
                them for each version, by the speed of uploads; the log says why. ``raw``: values, readable by others.
            compression: ``zstd`` or ``none``.
            notice: where to announce versions: ``tcp://*:5555`` binds, ``connect:tcp://HOST:PORT`` goes to a broker.
            notice_key, notice_allowed: own secret CURVE certificate; public ones of who may listen, or the broker's.
            resume: False refuses a run that is there already.
            anchor_every: each k-th version gets an anchor; None: when replaying has become dearer than an anchor.
            fold: keep folded ranges, so that whoever is far behind catches up with few objects.
            read_back: read each object and manifest back and compare before a version counts as durable.
            rescan_bytes: at each version, compare so many bytes of the baseline in memory with what was published,
                tensors in turn; 0 for none.
            shard_bytes: bytes of tensors in one object of a full snapshot; a delta that is larger than that decoded
                is parted too. Objects of one version go up side by side.
            gate: what versions have to be like, and what becomes of one that is not; None: anything goes.
            signing_key: private key file (``delta-sync keygen``); the whole run is signed from its beginning, or not.
            trusted_keys: public key files, whose word counts in a run that is taken over; None: that of the key.
            head_seconds: how long a signed HEAD.json holds; it is written again before, as long as this lives.
            baseline: where the bits published last are kept of tensors on a device: in ``host`` memory (pinned, for
                CUDA), or on the ``device``, where they take as many bytes as the model in the served dtypes.
            diff_threads: threads that compare large tensors on the host; None: as many as torch computes with.
            receiver_bytes_per_second: how fast receivers download, for codec ``auto``; None: as uploads go from here.

        Raises:
            UsageError: an argument is not understood. SettingsError: a key file cannot be used.
            SignatureError: the run that is there is not signed by who is trusted, or by nobody, or the key may not.
            ModelError, TensorMismatchError: a tensor, which is named, cannot be published, or does not fit the run.
            NotFoundError, FormatError: the base cannot be read.
            ConflictError: there is a part of a run at the URL; or a run, and ``resume`` is False.
            StoreError: the store failed. PublishError: so that version 0 may have been written; the URL stays claimed.
        """
        self._options = checked(
            codec, compression, every=every, resume=resume, read_back=read_back, rescan_bytes=rescan_bytes,
            anchor_every=anchor_every, fold=fold, shard_bytes=shard_bytes, gate=gate,
            signing_key=signing_key, trusted_keys=trusted_keys, head_seconds=head_seconds,
            baseline=baseline, diff_threads=diff_threads, receiver_bytes_per_second=receiver_bytes_per_second,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False
        self._patch: Patch | None = None
        self._progress: Progress | None = None
        self._called_off = False
        # Never the main thread: only there can a signal handler interrupt what must not be left half done.
        self._background = Worker("delta-sync-publisher")
        with ExitStack() as undo:
            undo.callback(self._background.close)
            self._own_bucket = not isinstance(bucket, Bucket)
            self._bucket = bucket if isinstance(bucket, Bucket) else undo.enter_context(open_bucket(bucket))
            self._live = live_tensors(model)
            self._notice = None
            if notice is not None:
                self._notice = try_announcing(notice, notice_key, notice_allowed, self._options.keyring)
            if self._notice is not None:
                undo.callback(self._notice.close)
            opened, place = open_or_begin(self._bucket, self._live, base, self._options, self._background.call)
            self._table = opened.baseline.table
            self._detector = Detector(self._options.diff_threads)
            undo.callback(self._detector.close)
            self._upkeep = Upkeep(self._bucket, place, self._options, opened.writer)
            undo.callback(self._upkeep.close)
            self._committer = Committer(self._bucket, opened, place, self._options, self._upkeep.offer)
            self._background.call(self._committer.begin)
            if self._notice is not None:
                opened.writer.use_notice(self._notice)
            undo.pop_all()

    @property
    def run(self) -> str:
        return self._committer.writer.run

    @property
    def url(self) -> str:
        return self._bucket.url

    @property
    def notice_address(self) -> str | None:
        """Address that notices are sent on, with the real port; None without notices."""
        return None if self._notice is None else self._notice.address

    @property
    def version(self) -> int:
        """Number of the newest durable version."""
        return self._committer.newest.version

    def publish(
        self, step: int, wait: bool = False, weights: Iterable[tuple[str, torch.Tensor]] | None = None
    ) -> PublishResult:
        """Publish the weights of this moment as the next version.

        Args:
            step: optimizer step, at least 0; may repeat or go back.
            wait: if the version before is still on its way, wait for it; without, this call is skipped and
                its changes go out with the next.
            weights: (checkpoint name, tensor) pairs to publish instead of the model given at construction.
                Tensors that are absent keep the bits published last. Always read to its end, even when the
                call is skipped.

        Returns:
            The result, after the comparison; some of its fields wait for the background thread.

        Raises:
            PublishError: the version before could not be made durable (GateError: was refused by the gate), or the
                weights changed in a way that cannot be compared; nothing was done for this call.
            ConflictError: another writer has taken the run; every later call raises it too.
            TensorMismatchError: a tensor is unknown, or has another shape or dtype; nothing is published.
            ModelError: a tensor cannot be read. UsageError: the publisher is closed, or step is no step.
        """
        watch = Stopwatch()
        given = None if weights is None else iter(weights.items() if isinstance(weights, Mapping) else weights)
        interrupted = False
        try:
            with self._lock:
                return self._publish(check_step(step), wait, given, watch)
        except (KeyboardInterrupt, SystemExit):
            interrupted = True
            raise
        finally:
            # Frameworks gather each tensor on all ranks together: one that stops reading hangs the others.
            if given is not None and not interrupted:
                for _ in given:
                    pass

    def flush(self) -> None:
        """Wait until everything published is durable.

        Raises:
            PublishError, ConflictError: it could not be made durable.
        """
        with self._lock:
            self._settled()

    def rebase(self, version: int) -> None:
        """Build the next version on an older one instead of the newest; numbers go on as before.

        Waits until everything published is durable, and reads the version back from the bucket. Until the next
        publish only a tag that keeps the version is seen of it from outside. Back to the newest version undoes it.

        Raises:
            NotFoundError: there is no such version. UsageError: it is no number, or the publisher is closed.
            PublishError, ConflictError: as ``flush``. DeltaSyncError: the version cannot be rebuilt; the next publish
                builds on what it would have built on before.
        """
        number = check_version(version)
        with self._lock:
            self._settled()
            self._call(lambda: self._committer.rebase(number))

    def rescan(self) -> list[str]:
        """Compare the whole baseline in memory with what was published, and fetch what differs from the bucket.

        Waits until everything published is durable.

        Returns:
            Names of the tensors that were damaged, and are restored.

        Raises:
            PublishError: they cannot be restored now. Else as ``flush``.
        """
        names: list[str] = []
        with self._lock:
            self._settled()
            self._call(lambda: names.extend(self._committer.mend()))
        return names

    def anchor(self) -> int:
        """Write a full snapshot beside the chain from memory: it helps readers, and repairs what the bucket has lost.

        Waits until everything published is durable, and until the snapshot is.

        Returns:
            The version it is of: the newest, or the one rebased to.

        Raises:
            StoreError: it could not be stored. PublishError: the baseline is damaged. Else as ``flush``.
        """
        done: list[int] = []
        with self._lock:
            self._settled()
            self._call(lambda: done.append(self._committer.write_anchor()))
        return done[0]

    def tag(self, name: str, version: int | None = None, milestone: bool = False) -> "Tag":
        """Give a version a name; retention keeps it. A tag of that name is moved.

        Args:
            version: None for the newest, once everything published is durable.
            milestone: have an anchor made of it, in the background.

        Raises:
            NotFoundError: there is no such version. UsageError: the name cannot be a tag's.
            ConflictError: a run branches at the tag of that name; or as ``flush``. StoreError: the store failed.
        """
        from vllm_delta_sync.upkeep.tagging import set_tag

        number = None if version is None else check_version(version)
        with self._lock:
            self._settled()
            number = self.version if number is None else number
            tag = set_tag(self._committer.run, name, number, milestone)
            if milestone:
                self._upkeep.milestone(number)
        return tag

    def wait_served(self, version: int | None = None, replicas: int = 1, timeout: float = 60.0) -> "list[Replica]":
        """Wait until all servers that follow the run, and have a ``receiver_id``, serve a version: see ``Fleet.wait``.

        Other threads may publish meanwhile.

        Args:
            version: None for the newest, once everything published is durable. timeout: seconds, from then on.

        Returns:
            all servers, those that have ended included, as they were then.

        Raises:
            FleetLateError: they do not, in that time; the message names who lags. StoreError: the store failed.
            UsageError: a number makes no sense, or the publisher is closed. Else as ``flush``.
        """
        from vllm_delta_sync.chain.fleet import Fleet

        with self._lock:
            self._refuse_closed()
            if version is None:
                self._settled()
            wanted = self.version if version is None else check_version(version)
            run = self._committer.run
        return Fleet(run).wait(wanted, replicas, timeout)

    def close(self) -> None:
        """Flush, and give back threads, sockets and connections. May be called twice.

        Raises:
            PublishError, ConflictError: as ``flush``; everything is given back all the same.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with ExitStack() as last:
                if self._own_bucket:
                    last.callback(self._bucket.close)
                if self._notice is not None:
                    last.callback(self._notice.close)
                last.callback(self._committer.writer.leave_head)
                last.callback(self._committer.release)
                last.callback(self._upkeep.close)
                last.callback(self._detector.close)
                last.callback(self._background.close)
                self._finish_previous()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except DeltaSyncError as failure:
            logger.error("closing the publisher after %s: %s", type(error).__name__, failure)

    # The caller's thread

    def _publish(
        self, step: int, wait: bool, weights: Iterable[tuple[str, torch.Tensor]] | None, watch: Stopwatch
    ) -> PublishResult:
        self._refuse_closed()
        busy = self._progress is not None and not self._progress.done
        if not busy:
            self._finish_previous()
        self._calls += 1
        if self._calls % self._options.every or (busy and not wait):
            return self._result(None, step, 0, watch.total, None)
        self._finish_previous()
        watch.lap()
        patch = self._diff(weights)
        progress = Progress()
        progress.seconds["diff"] = watch.lap()
        result = self._result(self.version + 1, step, patch.changed, progress.seconds["diff"], progress)
        self._background.submit(progress, lambda: self._committer.work(patch, step, progress, watch))
        self._progress = progress
        return result

    def _diff(self, weights: Iterable[tuple[str, torch.Tensor]] | None) -> Patch:
        options = self._options
        patch = self._patch = Patch(self._committer.baseline, options.base_codec, options.compression, self._detector)
        with ExitStack() as undo:
            undo.callback(self._background.call, patch.revert)
            patch.add_all(self._live.read() if weights is None else weights)
            undo.pop_all()
        return patch

    def _settled(self) -> None:
        """Refuse a closed publisher, and wait until what was published is durable."""
        self._refuse_closed()
        self._finish_previous()

    def _call(self, work: Callable[[], None]) -> None:
        """Have the background thread do something to the baseline; nothing else touches it before that has ended."""
        self._called_off = True
        self._background.call(work)
        self._called_off = False

    def _finish_previous(self) -> None:
        """Wait for the version under way; bring the baseline to a durable version.

        Raises:
            PublishError, ConflictError: what the background thread met, if nobody was told yet.
        """
        if self._progress is not None and not self._progress.delivered:
            self._progress.wait()
        committer, patch = self._committer, self._patch
        if committer.stopped is not None:
            raise ConflictError(committer.stopped.message)
        if (patch is not None and patch.open) or committer.suspect or self._called_off:
            # Also waits for what a caller who was interrupted has left under way.
            self._background.call(lambda: committer.tidy(patch))
            self._called_off = False

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError("the publisher is closed; make a new one with a new run URL")

    def _result(
        self, version: int | None, step: int, changed: int, diff_seconds: float, progress: Progress | None
    ) -> PublishResult:
        return PublishResult(
            version=version, step=step, changed=changed, total=self._table.total, full_bytes=self._table.full_bytes,
            diff_seconds=diff_seconds, progress=progress,
        )  # fmt: skip

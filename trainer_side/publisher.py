"""Publish a model's weights while it trains: ``Publisher``."""

import logging
import operator
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Literal, Self

import torch

from trainer_side import versions
from trainer_side.baseline import Baseline
from trainer_side.changes import Patch, compile_kernels
from trainer_side.naming import ModelLike, live_tensors
from trainer_side.result import Progress, PublishResult, Stopwatch
from trainer_side.worker import Worker
from trainer_side.writer import RunWriter, UncertainError
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.errors import (
    ChainError,
    ConflictError,
    DeltaSyncError,
    PublishError,
    TensorMismatchError,
    UsageError,
)
from vllm_delta_sync.wire.changes import Changes
from vllm_delta_sync.wire.compression import Compression
from vllm_delta_sync.wire.delta import CODECS, Codec, DeltaContext, encode
from vllm_delta_sync.wire.manifest import Manifest

logger = logging.getLogger(__name__)

_Drain = Callable[[], None]


class Publisher:
    """Writes one run: version 0 when it is made, one version per ``publish``.

    ``publish`` compares the weights with the last published version and returns; encoding and upload run in
    one background thread, one version at a time. What is published are the exact bits at the moment of the
    call, however soon training goes on. A version that cannot be made durable is taken back, and its changes
    go out with the next.

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
        codec: Literal["auto", "packed", "raw"] = "auto",
        compression: Compression = "zstd",
        notice: str | None = None,
    ) -> None:
        """Capture the weights and commit version 0.

        Args:
            model: a module, (checkpoint name, tensor) pairs that can be iterated again and again, or a
                function without arguments that returns them.
            bucket: URL of a new run (or an open bucket, which the caller closes).
            base: checkpoint directory that servers start from. It decides names and dtypes, and if the
                weights have its bits, version 0 is a reference to it and uploads nothing. Otherwise version 0
                is a full snapshot.
            every: publish at every k-th call only.
            codec: ``packed`` (``auto``) or ``raw``. compression: ``zstd`` or ``none``.
            notice: ZeroMQ address to announce versions on, such as ``tcp://*:5555``.

        Raises:
            UsageError: an argument is not understood.
            ModelError, TensorMismatchError: a tensor cannot be published; the message names it.
            NotFoundError, FormatError: the base cannot be read.
            ConflictError: there is a run at the URL already, or a part of one.
            StoreError: the store failed. PublishError: and nobody knows whether version 0 was written; the URL
                stays claimed.
        """
        self._codec, self._compression, self._every = _check_options(codec, compression, every)
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False
        self._stopped: ConflictError | None = None
        self._uncertain: Manifest | None = None
        self._patch: Patch | None = None
        self._progress: Progress | None = None
        # Never the main thread: only there can a signal handler interrupt what must not be left half done.
        self._background = Worker("delta-sync-publisher")
        with ExitStack() as undo:
            undo.callback(self._background.close)
            self._own_bucket = not isinstance(bucket, Bucket)
            self._bucket = bucket if isinstance(bucket, Bucket) else undo.enter_context(open_bucket(bucket))
            self._live = live_tensors(model)
            self._baseline = Baseline(self._live, base)
            self._table = self._baseline.table
            self._background.call(lambda: compile_kernels(self._table))
            self._background.call(self._baseline.scan)
            # The codec's own check of the table, now rather than at the first version.
            encode(Changes(), self._table, self._codec, self._compression, DeltaContext("", 1, 0))
            self._writer = RunWriter(self._bucket, self._table)
            self._writer.refuse_existing()
            if notice is not None:
                self._writer.open_notice(notice)
                undo.callback(self._writer.close)
            self._commit_first(base)
            undo.pop_all()

    @property
    def run(self) -> str:
        return self._writer.run

    @property
    def url(self) -> str:
        return self._bucket.url

    @property
    def notice_address(self) -> str | None:
        """Address that notices are sent on, with the real port; None without notices."""
        return self._writer.notice_address

    @property
    def version(self) -> int:
        """Number of the newest durable version."""
        newest = self._writer.newest
        return 0 if newest is None else newest.version

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
            PublishError: the version before could not be made durable, or the weights changed in a way that
                cannot be compared; nothing was done for this call.
            ConflictError: another writer has taken the run; every later call raises it too.
            TensorMismatchError: a tensor is unknown, or has another shape or dtype; nothing is published.
            ModelError: a tensor cannot be read. UsageError: the publisher is closed, or step is no step.
        """
        watch = Stopwatch()
        given = None if weights is None else iter(weights.items() if isinstance(weights, Mapping) else weights)
        interrupted = False
        try:
            with self._lock:
                return self._publish(_check_step(step), wait, given, watch)
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
            self._refuse_closed()
            self._finish_previous()

    def close(self) -> None:
        """Flush, and give back threads, sockets and connections. May be called twice.

        Raises:
            PublishError, ConflictError: as ``flush``; everything is given back all the same.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._finish_previous()
            finally:
                self._background.close()
                self._writer.close()
                if self._own_bucket:
                    self._bucket.close()

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
        if self._calls % self._every or (busy and not wait):
            return self._result(None, step, 0, watch.total, None)
        self._finish_previous()
        watch.lap()
        patch = self._diff(weights)
        version = self.version + 1
        progress = Progress()
        progress.seconds["diff"] = watch.lap()
        result = self._result(version, step, patch.changed, progress.seconds["diff"], progress)
        self._background.submit(progress, lambda: self._work(patch, version, step, progress, watch))
        self._progress = progress
        return result

    def _diff(self, weights: Iterable[tuple[str, torch.Tensor]] | None) -> Patch:
        patch = self._patch = Patch(self._baseline, self._codec, self._compression)
        owners: dict[int, str] = {}
        complete = False
        try:
            source = self._live.read() if weights is None else weights
            for name, tensor, bits in self._baseline.current(source):
                changed = patch.add(tensor, bits)
                if owners.setdefault(tensor, name) != name and changed:
                    raise _tied_apart(name, owners[tensor])
            complete = True
        finally:
            if not complete:
                self._background.call(patch.revert)
        return patch

    def _finish_previous(self) -> None:
        """Wait for the version under way; bring the baseline to the newest durable version.

        Raises:
            PublishError, ConflictError: what the background thread met, if nobody was told yet.
        """
        if self._progress is not None and not self._progress.delivered:
            self._progress.wait()
        if self._stopped is not None:
            raise ConflictError(self._stopped.message)
        patch = self._patch
        if patch is not None and patch.open:
            self._background.call(lambda: self._tidy(patch))

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError("the publisher is closed; make a new one with a new run URL")

    def _result(
        self, version: int | None, step: int, changed: int, diff_seconds: float, progress: Progress | None
    ) -> PublishResult:
        return PublishResult(
            version=version,
            step=step,
            changed=changed,
            total=self._table.total,
            full_bytes=self._table.full_bytes,
            diff_seconds=diff_seconds,
            progress=progress,
        )

    def _commit_first(self, base: str | Path | None) -> None:
        difference = self._baseline.first_difference
        if base is not None and difference is None:
            self._writer.start(versions.reference(self.run, self._baseline, base), None)
            return
        if base is not None:
            logger.warning(
                "the model's weights are not those of base %s (first difference in tensor %s): version 0 is "
                "a full snapshot",
                base,
                difference,
            )
        with TemporaryDirectory(prefix="delta-sync-") as folder:
            path, ref = versions.anchor_file(Path(folder), self._baseline)
            self._writer.start(versions.anchor(self.run, self._baseline, ref), path)

    # The background thread

    def _work(self, patch: Patch, version: int, step: int, progress: Progress, watch: Stopwatch) -> None:
        try:
            self._make_durable(patch, version, step, progress, watch)
            self._writer.announce()
            progress.seconds["upload"] = watch.lap()
            progress.seconds["total"] = watch.total
        except DeltaSyncError as error:
            logger.error("version %d: %s", version, error)
            raise
        finally:
            if patch.open and self._uncertain is None:
                patch.revert()

    def _make_durable(self, patch: Patch, version: int, step: int, progress: Progress, watch: Stopwatch) -> None:
        try:
            watch.lap()
            changes = patch.changes()
            context = DeltaContext(self.run, version, version - 1)
            data = encode(changes, self._table, self._codec, self._compression, context) if patch.changed else None
            progress.seconds["encode"] = watch.lap()
            objects = [] if data is None else [self._writer.put_object(data)]
            parent = self._writer.newest
            if parent is None or parent.version != version - 1:
                raise ChainError(f"version {version} does not follow the newest durable one, {parent}")
            coding = (self._codec, self._compression)
            manifest = versions.delta(parent, step, coding, objects, changes.changed, patch.fingerprint)
            progress.payload_bytes = manifest.payload_bytes
            self._commit(manifest, patch)
        except (ConflictError, UncertainError):
            raise
        except DeltaSyncError as error:
            raise PublishError(
                f"version {version} (step {step}) could not be made durable: {error}; the next publish "
                "carries its changes"
            ) from error

    def _commit(self, manifest: Manifest, patch: Patch) -> None:
        try:
            self._writer.commit(manifest)
        except ConflictError as error:
            self._stopped = error
            raise
        except UncertainError:
            self._uncertain = manifest
            raise
        patch.settle()

    def _tidy(self, patch: Patch) -> None:
        """Bring the baseline to the newest durable version after a failure or an interrupt."""
        # An interrupt may have kept the caller from seeing that this call was no longer needed.
        if not patch.open:
            return
        manifest = self._uncertain
        if manifest is not None and self._writer.holds(manifest):
            self._writer.adopt(manifest)
            patch.settle()
        else:
            patch.revert()
        self._uncertain = None


def _check_options(codec: str, compression: str, every: int) -> tuple[Codec, Compression, int]:
    if codec not in ("auto", *CODECS):
        raise UsageError(f"codec is {codec!r}; give 'auto' or one of {', '.join(map(repr, CODECS))}")
    if compression not in ("zstd", "none"):
        raise UsageError(f"compression is {compression!r}; give 'zstd' or 'none'")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"every is {every!r}; give a number of calls, at least 1")
    return "raw" if codec == "raw" else "packed", "zstd" if compression == "zstd" else "none", every


def _check_step(step: int) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 2**53:
        raise UsageError(f"step is {step!r}; give the optimizer step as an integer from 0 to 2^53 - 1")
    return number


def _tied_apart(name: str, owner: str) -> TensorMismatchError:
    return TensorMismatchError(f"tensor {name!r} is tied to {owner!r} but has other values; nothing was published")

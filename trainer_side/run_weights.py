"""``RunWeights``: the published weights of a run as one process holds them. ``WholeWeights`` holds all of them.
``put_shards`` stores them as an anchor.

``ranks.coordinator.RankCoordinator`` holds the parts of one rank.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, Self, TypeVar

import numpy as np

from trainer_side.background_thread import BackgroundThread
from trainer_side.diff.baseline import Baseline, base_config, run_config
from trainer_side.diff.engine import compile_kernels
from trainer_side.diff.pending_delta import PendingDelta, VersionChanges
from trainer_side.encode.budget_selection import check_dtypes
from trainer_side.encode.update_gate import nonfinite_by_tensor
from trainer_side.model.live_tensors import LiveTensors
from trainer_side.model.quantized import quantized, to_quantize
from trainer_side.options import PublisherOptions
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.threads import start_call, wait_for_call
from vllm_delta_sync.client import Run
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.format.safetensors_file import shard_tables, write_anchor
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.process_folders import ProcessFolder
from vllm_delta_sync.run.restore import check_base_bits, locate_base, restore
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, Changes
from vllm_delta_sync.tensors.checkpoint import Checkpoint
from vllm_delta_sync.tensors.state import AllocateBits, ModelState

_Result = TypeVar("_Result")


Put = Callable[[ObjectRef, Path], None]

PARALLEL_UPLOADS = 2
"""Shards that upload at once, while the next one is written to disk."""


@dataclass(frozen=True)
class FullState:
    """All weights of a version: its tensors, and the fingerprint of each in table order."""

    table: TensorTable
    fingerprints: list[Fingerprint]

    @property
    def by_name(self) -> dict[str, str]:
        """Tensor name → fingerprint as documents write it."""
        return {spec.name: value.hex() for spec, value in zip(self.table, self.fingerprints, strict=True)}


class Shards:
    """Files of an anchor: each is written to a temporary folder, and stored while the next one is written.

    Leaving the context waits until all are stored.

    Args:
        put: stores one file; called from other threads, ``PARALLEL_UPLOADS`` at once.

    Raises:
        StoreError: the disk is full or not writable. Otherwise whatever ``put`` raises, after all uploads have ended.
    """

    def __init__(self, put: Put) -> None:
        self._put = put
        self._uploads: deque[Future[None]] = deque()
        self._count = 0
        # After an interrupt, files may be removed while they are uploaded: the threads end with the process.
        self._folder = ProcessFolder()

    def add(self, table: TensorTable, tensors: Iterable[tuple[str, Bits]]) -> ObjectRef:
        """Write one file and begin to store it; ``tensors`` as in ``write_anchor``."""
        path = self._folder.path / f"{self._count}.safetensors"
        self._count += 1
        write_anchor(path, table, tensors)
        ref = ObjectRef.of(path)
        if len(self._uploads) == PARALLEL_UPLOADS:
            wait_for_call(self._uploads[0])
            self._uploads.popleft().result()

        def store() -> None:
            self._put(ref, path)
            path.unlink()

        try:
            self._uploads.append(start_call(store))
        except RuntimeError:  # there are too many threads
            store()
        return ref

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # No upload may outlive the block, except after an interrupt, which must not wait.
        with self._folder:
            if error is None or isinstance(error, Exception):
                for upload in self._uploads:
                    wait_for_call(upload)
            if error is None:
                for upload in self._uploads:
                    upload.result()


def put_shards(baseline: Baseline, shard_bytes: int, put: Put) -> list[ObjectRef]:
    """Store all tensors as an anchor's objects."""
    with Shards(put) as files:
        return [files.add(table, baseline.tensors(table)) for table in shard_tables(baseline.table, shard_bytes)]


class RunWeights(Protocol):
    """The weights of a run's current version, or this rank's parts of them.

    Attributes:
        live: the model, or this rank's parts of it. base: location of version 0, for reading versions back.
        baseline: from ``begin`` or ``fit`` on, as the next two: bits that live tensors are compared with, of whole
            tensors, or of parts under names of their own.
        table: the run's tensors.
        places: for each tensor of ``baseline`` its tensor's id in ``table``, and its box there.
    """

    live: LiveTensors
    base: str | Path | None
    baseline: Baseline
    table: TensorTable
    places: Sequence[tuple[int, Box]]
    _bucket: Bucket
    _options: PublisherOptions

    @cached_property
    def run(self) -> Run:
        """The run, for reading."""
        return Run(self._bucket, self._options.keyring)

    def begin(self) -> tuple[FullState, str | None]:
        """Capture the weights of a new run, and compare them with ``base``; every rank calls it.

        Returns:
            On rank 0 the state of all weights, and the first tensor that differs from the base; None if none does.
        """

    def run_on_rank0(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Return the result of ``work``, done on rank 0, on every rank.

        Within ``work`` the methods below, to ``put_shards``, act on the weights of all ranks.
        """

    def fit(self, run: Run) -> None:
        """Find out which tensors of an existing run the model has."""

    def check_base(self) -> None:
        """Check that ``base`` holds version 0; see ``run.restore.check_base_bits``. Every rank reads its own copy."""

    def capture(self, fallback: Checkpoint | None) -> None:
        """Copy the current values of the model; tensors that it lacks come from ``fallback``."""

    def checkout(self, manifest: Manifest) -> None:
        """Replace all bits by those of a version.

        Raises:
            BaseUnavailableError: the base of any rank is needed, and missing, damaged or another one.
            FingerprintError: they do not have the manifest's fingerprint; nothing was replaced.
            PublishError: only another rank cannot rebuild its parts.
        """

    def nonfinite(self) -> dict[int, int]:
        """Return the number of elements that are NaN or infinite, by id in ``table`` of the tensors that have some."""

    def put_shards(self, put: Put) -> tuple[FullState, list[ObjectRef]]:
        """Store all weights as an anchor's objects; return their state and the objects."""

    def restore(self, manifest: Manifest) -> list[Bits]:
        """Return (numel,) bits per tensor of ``baseline`` at a version, from the bucket."""

    def changes(self, pending: PendingDelta) -> VersionChanges:
        """Return the changes of a pending delta in terms of ``table``; valid as ``PendingDelta.changes``."""

    def base_tensor(self, tensor: int) -> BaseTensor:
        """Return what the baseline has of a tensor of ``table``, which are the bits after the changes."""

    def keep(self, changes: Mapping[int, Fingerprint]) -> None:
        """Record that changes are durable. Args: changes: id in ``table`` → what was added to its fingerprint."""


def prepare(baseline: Baseline, table: TensorTable, options: PublisherOptions) -> None:
    """Compile kernels, and run the codec's and the budget's check of the table now, not at the first version."""
    if options.budget is not None:
        check_dtypes(table)
    baseline.location = options.baseline
    compile_kernels(baseline.table)
    none = BaseTensor(np.empty(0, np.uint8))
    encode(Changes(), table, options.delta_codec, options.compression, DeltaContext("", 1, 0), lambda tensor: none)


class WholeWeights(RunWeights):
    """The weights of a process that publishes alone.

    Live tensors are read in the calling thread, which an interrupt may end; the rest is done in ``background``.
    """

    def __init__(
        self, live: LiveTensors, bucket: Bucket, options: PublisherOptions, background: BackgroundThread
    ) -> None:
        self.live = live
        self.base: str | Path | None = None
        self._bucket, self._options, self._background = bucket, options, background

    def _hold(self, baseline: Baseline) -> None:
        self.baseline, self.table = baseline, baseline.table
        self.places = [(tensor, Box.all_of(spec.shape)) for tensor, spec in enumerate(baseline.table)]
        self._background.call(lambda: prepare(baseline, baseline.table, self._options))

    def run_on_rank0(self, what: str, work: Callable[[], _Result]) -> _Result:
        return work()

    def begin(self) -> tuple[FullState, str | None]:
        if self.base is not None and (config := base_config(self.base)):
            self.live = quantized(self.live, Checkpoint(self.base).specs, config, Path(self.base))
        self._hold(Baseline.captured(self.live, self.base, self._options.baseline))
        self._background.call(self.baseline.scan)
        return self._state, self.baseline.first_difference

    def fit(self, run: Run) -> None:
        self.run = run
        specs = {spec.name: spec for spec in run.table}
        if to_quantize(self.live, specs) and (config := run_config(run)):
            self.live = quantized(self.live, specs, config, self._unproven_base(run))
        self._hold(Baseline.of_run(self.live, run))

    def _unproven_base(self, run: Run) -> Path | None:
        """Return the base that the first weights to come have to be proven on; None if others were."""
        if self.live.has_values:
            return None  # proven when the run began
        try:
            head = run.head()
        except DeltaSyncError:
            return None  # some version was there, and a takeover says what is wrong with it
        return locate_base(head, self.base) if head.kind == "reference" else None

    def check_base(self) -> None:
        check_base_bits(self.run, self.base)

    def capture(self, fallback: Checkpoint | None) -> None:
        self.baseline.capture(self.live, fallback)
        self._background.call(self.baseline.scan)

    def checkout(self, manifest: Manifest) -> None:
        # At a takeover the baseline has no values yet, and keeps the arrays.
        state = self._restored(manifest, None if self.baseline.fingerprints else self.baseline.room)
        self.baseline.replace(state.bits, manifest.model_fingerprint)

    def nonfinite(self) -> dict[int, int]:
        return nonfinite_by_tensor(self.baseline, self.places)

    def put_shards(self, put: Put) -> tuple[FullState, list[ObjectRef]]:
        return self._state, put_shards(self.baseline, self._options.shard_bytes, put)

    @property
    def _state(self) -> FullState:
        return FullState(self.table, self.baseline.fingerprints)

    def restore(self, manifest: Manifest) -> list[Bits]:
        return self._restored(manifest).bits

    def _restored(self, manifest: Manifest, room: AllocateBits | None = None) -> ModelState:
        in_memory = False if self._options.baseline == "disk" else None
        return restore(self.run, manifest, self.base, in_memory, room=room).state

    def base_tensor(self, tensor: int) -> BaseTensor:
        return BaseTensor(self.baseline.read(tensor), after=True)

    def changes(self, pending: PendingDelta) -> VersionChanges:
        return pending.changes()

    def keep(self, changes: Mapping[int, Fingerprint]) -> None:
        """Do nothing: the pending delta adds them to the fingerprints of the baseline."""

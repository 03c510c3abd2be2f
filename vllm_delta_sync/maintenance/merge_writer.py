"""``make_merged_delta`` writes one delta that leads from one version to a later one, from the bucket alone.

The steps are planned like a reader's: the next shorter merged deltas where they exist, else the versions' own deltas.
Objects are fetched to scratch files and mapped, tensors are merged in ascending order, and the result is written as it
is produced, so memory is bounded by a batch of elements or by one tensor. If codec ``context`` is read or written, the
merge also reads the weights at the first version, and carries copies of a few tensors through the versions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.verified import has_object
from vllm_delta_sync.codec.delta_object import DeltaContext, required_features
from vllm_delta_sync.codec.delta_reader import LazyDelta
from vllm_delta_sync.codec.merge import RollingBase, merge_lazily
from vllm_delta_sync.codec.merge_spool import DeltaSpool
from vllm_delta_sync.errors import (
    ChainError,
    ConflictError,
    DataError,
    DeltaSyncError,
    FingerprintError,
    UnsupportedError,
    UsageError,
)
from vllm_delta_sync.format.codecs import BASE_CODECS, RelativeCodec
from vllm_delta_sync.format.documents import MergedDelta, merged_delta_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, ObjectRef, timestamp
from vllm_delta_sync.maintenance.rolling_weights import OBJECT_BYTES, RollingWeights, Stop, check_stop, never_stop
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.run.checks import check_document_size
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.objects import declared_change, needs_base_bits, open_step_objects, scratch_folder
from vllm_delta_sync.run.read_plan import ReadPlanner, Step
from vllm_delta_sync.run.restore import check_step
from vllm_delta_sync.tensors.changes import Full, Sparse
from vllm_delta_sync.tensors.state import ModelState

logger = guarded_logger(__name__)

Written = Sequence[tuple[ObjectRef, Path]]


class RawCodecError(UnsupportedError):
    """Versions of codec ``raw`` cannot be merged."""


def make_merged_delta(
    run: RunDocuments,
    first: int,
    last: int,
    *,
    replace: bool = False,
    scratch: str | Path | None = None,
    object_bytes: int = OBJECT_BYTES,
    stop: Stop = never_stop,
    codec: RelativeCodec = "packed",
    weights: RollingWeights | None = None,
) -> MergedDelta:
    """Write the merged delta from version ``first`` to ``last``, unless the bucket has it.

    Its objects are put before the document that names them, and again after it if they are missing.

    Args:
        replace: write it even if there is one, for example with damaged objects.
        scratch: folder for temporary files of about twice the size of the deltas; None for the system's.
        object_bytes: size at which an object is full.
        stop: polled during the work; True stops it.
        codec: of the merged delta. ``context`` takes fewer bytes and cannot be reverted.
        weights: source of the weights at ``first``, needed if codec ``context`` is read or written.

    Returns:
        the document in the bucket, which another writer may have written.

    Raises:
        RawCodecError: a version in between has codec ``raw``.
        UnsupportedError: a version in between has codec ``context``, and ``weights`` is None.
        ChainError (GapError): no remaining deltas lead from ``first`` to ``last``, or an anchor lies between.
        FingerprintError: the objects do not lead from one version's fingerprint to the next.
        StoreError: the store failed, or there is no room for the scratch files. StoppedError: ``stop`` returned True.
        UsageError: ``first`` is not before ``last``. NotFoundError: a version does not exist.
    """
    if not 0 <= first < last:
        raise UsageError(f"a merged delta leads from a version to a later one, not from {first} to {last}")
    planner = ReadPlanner(run)
    ends = planner.manifest(first), planner.manifest(last)
    found = None if replace else existing_merged_delta(run, *ends)
    if found is not None:
        return found
    avoid = {merged_delta_key(first, last)} if replace or last - first > 1 else set()
    return _MergeBuilder(run, ends, avoid, object_bytes, stop, codec, weights).make(scratch, replace)


def write_merged_delta(
    run: RunDocuments,
    ends: tuple[Manifest, Manifest],
    pieces: Iterator[Sparse | Full],
    fingerprints: dict[int, Fingerprint],
    object_bytes: int = OBJECT_BYTES,
) -> MergedDelta:
    """Write the merged delta between two versions piece by piece, replacing one that exists.

    Args:
        ends: manifests of the first and the last version.
        pieces: distances, or full tensors: by dtype, tensors ascending, each tensor once.
        fingerprints: tensor id → change of its fingerprint; must contain a tensor by the time its piece is yielded.
        object_bytes: size at which an object is full.

    Raises:
        StoreError: the store failed, or there is no room for the scratch files.
    """
    builder = _MergeBuilder(run, ends, set(), object_bytes, never_stop, "packed", None)
    purpose = f"the merged delta of versions {ends[0].version} to {ends[1].version}"
    # The size is not known in advance; a full disk is reported during the write.
    with scratch_folder(None, purpose, 0) as folder:
        spool = partial(DeltaSpool, folder, run.table, builder.context, "zstd", "packed", None)
        return builder._publish(builder._write(pieces, fingerprints, folder, spool), replace=True)


def existing_merged_delta(run: RunDocuments, first: Manifest, last: Manifest) -> MergedDelta | None:
    """Return the merged delta in the bucket if it is valid and of these two versions, else None."""
    try:
        found = run.merged_delta(first.version, last.version)
    except UnsupportedError:
        raise
    except DataError:
        return None
    return found if (found.first_manifest, found.last_manifest) == (first.digest, last.digest) else None


@dataclass
class _MergeBuilder:
    """Builds one merged delta.

    Attributes:
        ends: manifests of the first and the last version. avoid: keys of documents not to use.
    """

    run: RunDocuments
    ends: tuple[Manifest, Manifest]
    avoid: set[str]
    object_bytes: int
    stop: Stop
    codec: RelativeCodec
    weights: RollingWeights | None

    @property
    def context(self) -> DeltaContext:
        return DeltaContext(self.run.info.run, self.ends[1].version, self.ends[0].version)

    def make(self, scratch: str | Path | None, replace: bool) -> MergedDelta:
        first_error: DeltaSyncError | None = None
        while True:
            try:
                steps = self._steps()
            except ChainError as error:
                raise first_error or error from error
            payload = sum(step.payload_bytes for step in steps)
            purpose = f"merging versions {self.context.base_version} to {self.context.version}"
            state = self._weights_if_needed(steps)
            rolling = None if state is None else RollingBase(state.base_tensor)
            with scratch_folder(scratch, purpose, 2 * payload + min(payload, self.object_bytes)) as folder:
                deltas = self._open(steps, folder, rolling)
                if isinstance(deltas, DeltaSyncError):
                    first_error = first_error or deltas
                    continue
                fingerprints = _sum_fingerprints(deltas)
                old = None if state is None else state.base_tensor
                spool = partial(DeltaSpool, folder, self.run.table, self.context, "zstd", self.codec, old)
                written = self._write(merge_lazily(deltas, self.run.table, rolling), fingerprints, folder, spool)
                if first_error is not None:
                    logger.warning("%s used other documents, because one is damaged: %s", purpose, first_error)
                return self._publish(written, replace)

    def _steps(self) -> list[Step]:
        planner = ReadPlanner(self.run, self.avoid)
        planner.add_manifests(*self.ends)
        steps = planner.path(self.ends[0].version, self.ends[1].version)
        if any(step.backwards for step in steps):
            raise ChainError(
                f"version {self.ends[1].version} does not build on version {self.ends[0].version}: a rebase dropped "
                "versions between them"
            )
        for step in steps:
            if isinstance(step.document, Manifest) and step.document.codec == "raw" and step.objects:
                raise RawCodecError(
                    f"version {step.high} has codec 'raw', which stores new values instead of distances, so it cannot "
                    "be merged; publish with codec 'packed' or 'context'"
                )
        return steps

    def _weights_if_needed(self, steps: list[Step]) -> ModelState | None:
        """Return the weights at the first version, if codec ``context`` is read or written."""
        needing = next((step for step in steps if needs_base_bits(step.document)), None)
        if needing is None and self.codec not in BASE_CODECS:
            return None
        if self.weights is None:
            raise UnsupportedError(
                f"merging versions {self.context.base_version} to {self.context.version} needs the weights of the "
                f"first: {'the merged delta is' if needing is None else needing.key + ' is'} of codec 'context'; use "
                "`delta-sync compact`"
            )
        return self.weights.at(self.ends[0])

    def _open(self, steps: list[Step], folder: Path, rolling: RollingBase | None) -> list[LazyDelta] | DeltaSyncError:
        """Open every object of the steps, in order. Returns the error if one is damaged, and avoids its document."""
        deltas: list[LazyDelta] = []
        reached = self.ends[0].model_fingerprint
        for step in steps:
            check_stop(self.stop)
            try:
                opened = open_step_objects(step, folder, rolling)
                reached = check_step(step, reached, declared_change(opened))
            except UnsupportedError:
                raise
            except DataError as error:
                self.avoid.add(step.key)
                return error
            deltas += opened
        return deltas

    def _write(
        self,
        pieces: Iterator[Sparse | Full],
        fingerprints: dict[int, Fingerprint],
        folder: Path,
        make: Callable[[], DeltaSpool],
    ) -> "_WrittenObjects":
        """Write the pieces into as many objects as needed, as files of ``folder``."""
        result = _WrittenObjects([], 0, self.codec not in BASE_CODECS)
        carried: set[int] = set()
        more = True
        while more:
            more = False
            with ExitStack() as stack:
                spool = make()
                stack.callback(spool.close)
                for piece in pieces:
                    check_stop(self.stop)
                    spool.add(piece)
                    if spool.bytes >= self.object_bytes:
                        more = True
                        break
                if spool.tensors:
                    path = folder / f"merged-{len(result.written)}"
                    result.written.append((spool.finish(path, fingerprints), path))
                result.changed += spool.changed
                result.reversible &= not spool.full
                carried |= spool.tensors
        lost = [tensor for tensor, value in fingerprints.items() if tensor not in carried and value != Fingerprint()]
        if lost:
            raise FingerprintError(
                f"tensor {self.run.table[min(lost)].name!r} ends unchanged, but its versions declare a change"
            )
        return result

    def _publish(self, result: "_WrittenObjects", replace: bool) -> MergedDelta:
        first, last = self.ends
        document = MergedDelta(
            requires=required_features(self.codec, "zstd") if result.written else [],
            run=self.run.info.run,
            first=first.version,
            last=last.version,
            first_manifest=first.digest,
            last_manifest=last.digest,
            first_fingerprint=first.fingerprint,
            last_fingerprint=last.fingerprint,
            objects=[ref for ref, _ in result.written],
            changed=result.changed,
            payload_bytes=sum(ref.bytes for ref, _ in result.written),
            reversible=result.reversible,
            created_at=timestamp(),
        )
        document = self.run.keyring.signed(document)
        bucket = self.run.bucket
        key = merged_delta_key(first.version, last.version)
        check_document_size(document, self.run.document_limit, key)
        put_objects(bucket, result.written)
        try:
            bucket.put(key, document.to_bytes(), if_absent=not replace)
        except ConflictError:
            theirs = existing_merged_delta(self.run, first, last)
            if theirs is not None:
                return theirs
            # The existing document is damaged, lacks a valid signature, or is of replaced versions: readers skip it.
            bucket.put(key, document.to_bytes())
        put_missing(bucket, result.written)
        return document


@dataclass
class _WrittenObjects:
    """Objects written, their number of elements, and whether they hold distances only."""

    written: list[tuple[ObjectRef, Path]]
    changed: int
    reversible: bool


def _sum_fingerprints(deltas: list[LazyDelta]) -> dict[int, Fingerprint]:
    sums: dict[int, Fingerprint] = {}
    for part in deltas:
        for tensor, change in part.fingerprints.items():
            sums[tensor] = sums.get(tensor, Fingerprint()) + change
    return sums


def put_objects(bucket: Bucket, written: Written) -> None:
    for ref, path in written:
        bucket.put(ref.key, path)


def put_missing(bucket: Bucket, written: Written) -> None:
    """Put objects again that a collection removed before the document named them."""
    for ref, path in written:
        if not has_object(bucket, ref):
            bucket.put(ref.key, path)

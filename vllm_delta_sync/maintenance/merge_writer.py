"""``make_merged_delta`` writes one delta that leads from one version to a later one, from the bucket alone.

The steps are planned like a reader's: the next shorter merged deltas where they exist, else the versions' own deltas.
Objects are fetched to scratch files and mapped, tensors are merged in ascending order, and the result is written as it
is produced, so memory is bounded by a batch of elements or by one tensor. If codec ``tiled`` is read or written, the
merge also reads the weights at the first version, and carries copies of a few tensors through the versions.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from vllm_delta_sync.bucket.base import has_object
from vllm_delta_sync.codec.delta_object import DeltaContext, required_features
from vllm_delta_sync.codec.delta_reader import DeltaReader
from vllm_delta_sync.codec.merge import RollingBase, merge
from vllm_delta_sync.codec.merge_spool import DeltaSpool
from vllm_delta_sync.errors import ChainError, DataError, DeltaSyncError, FingerprintError, UnsupportedError, UsageError
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.codecs import BASE_CODECS, RelativeCodec
from vllm_delta_sync.format.documents import MergedDelta, merged_delta_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.maintenance.anchor_writer import existing, put_document
from vllm_delta_sync.maintenance.rolling_weights import OBJECT_BYTES, RollingWeights, Stop, check_stop, never_stop
from vllm_delta_sync.run.decode import declared_changes, open_objects
from vllm_delta_sync.run.objects import declared_change, needs_base_bits, open_step_objects, read_steps, scratch_folder
from vllm_delta_sync.run.read_plan import ReadPlanner, Step
from vllm_delta_sync.run.restore import check_step
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.changes import BaseLookup, Full, Sparse
from vllm_delta_sync.tensors.state import ModelState

logger = guarded_logger(__name__)


PlainObjects = Callable[[int], list[bytes] | None]
"""Version → its objects in codec ``plain``, or None."""


class RawCodecError(UnsupportedError):
    """Versions of codec ``raw`` cannot be merged."""


def make_merged_delta(
    run: RunReader,
    first: int,
    last: int,
    *,
    replace: bool = False,
    scratch: str | Path | None = None,
    stop: Stop = never_stop,
    codec: RelativeCodec = "plain",
    weights: RollingWeights | None = None,
    plain_objects: PlainObjects | None = None,
) -> MergedDelta:
    """Write the merged delta from version ``first`` to ``last``, unless the bucket has it.

    Its objects are put before the document that names them, and again after it if they are missing.

    Args:
        replace: write it even if there is one, for example with damaged objects.
        scratch: folder for temporary files of about twice the size of the deltas; None for the system's.
        stop: polled during the work; True stops it.
        codec: of the merged delta. ``tiled`` takes fewer bytes and cannot be reverted.
        weights: source of the weights at ``first``, needed if codec ``tiled`` is read or written.
        plain_objects: returns the objects of a version in codec ``plain``, if they are at hand; read in place of those
            of codec ``tiled``.

    Returns:
        the document in the bucket, which another writer may have written.

    Raises:
        RawCodecError: a version in between has codec ``raw``.
        UnsupportedError: a version in between has codec ``tiled``, and ``weights`` is None.
        ChainError (GapError): no remaining deltas lead from ``first`` to ``last``, or an anchor lies between.
        FingerprintError: the objects do not lead from one version's fingerprint to the next.
        StoreError: the store failed, or there is no room for the scratch files. StoppedError: ``stop`` returned True.
        UsageError: ``first`` is not before ``last``. NotFoundError: a version does not exist.
    """
    if not 0 <= first < last:
        raise UsageError(f"a merged delta leads from a version to a later one, not from {first} to {last}")
    planner = ReadPlanner(run)
    ends = planner.manifest(first), planner.manifest(last)
    key = merged_delta_key(first, last)
    found = None if replace else existing(run, MergedDelta, key, *ends)
    if found is not None:
        return found
    avoid = {key} if replace or last - first > 1 else set()
    return _MergeBuilder(run, ends, avoid, stop, codec, weights, plain_objects).make(scratch, replace)


@dataclass
class _MergeBuilder:
    """Builds one merged delta.

    Attributes:
        ends: manifests of the first and the last version. avoid: keys of documents not to use.
    """

    run: RunReader
    ends: tuple[Manifest, Manifest]
    avoid: set[str]
    stop: Stop
    codec: RelativeCodec
    weights: RollingWeights | None
    plain_objects: PlainObjects | None

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
            old = None if state is None else state.base_tensor
            rolling = None if old is None else RollingBase(old)
            with scratch_folder(scratch, purpose, 2 * payload + min(payload, OBJECT_BYTES)) as folder:
                deltas = self._open(steps, folder, rolling)
                if isinstance(deltas, DeltaSyncError):
                    first_error = first_error or deltas
                    continue
                pieces = merge(deltas, self.run.table, rolling)
                changes = declared_changes(reader for readers in deltas for reader in readers)
                written = self._write(pieces, changes, folder, old)
                if first_error is not None:
                    logger.warning("%s used other documents, because one is damaged: %s", purpose, first_error)
                return self._publish(*written, replace)

    def _steps(self) -> list[Step]:
        planner = ReadPlanner(self.run, self.avoid)
        planner.add_manifests(*self.ends)
        steps = planner.path(self.ends[0].version, self.ends[1].version)
        if any(step.backwards for step in steps):
            raise ChainError(
                f"only reverts lead from version {self.ends[0].version} to {self.ends[1].version}: a rebase dropped "
                "versions between them, or their documents are lost"
            )
        for step in steps:
            if isinstance(step.document, Manifest) and step.document.codec == "raw" and step.objects:
                raise RawCodecError(
                    f"version {step.high} has codec 'raw', which stores new values instead of distances, so it cannot "
                    "be merged; publish with codec 'plain' or 'tiled'"
                )
        return steps

    def _weights_if_needed(self, steps: list[Step]) -> ModelState | None:
        """Return the weights at the first version, if codec ``tiled`` is read or written."""
        needing = next((step for step in steps if needs_base_bits(step.document) and self._plain(step) is None), None)
        if needing is None and self.codec not in BASE_CODECS:
            return None
        if self.weights is None:
            raise UnsupportedError(
                f"merging versions {self.context.base_version} to {self.context.version} needs the weights of the "
                f"first: {'the merged delta is' if needing is None else needing.key + ' is'} of codec 'tiled'; use "
                "`delta-sync compact`"
            )
        return self.weights.at(self.ends[0])

    def _plain(self, step: Step) -> list[bytes] | None:
        """Return a step's objects in codec ``plain``, if it is a version and they are at hand."""
        own = isinstance(step.document, Manifest) and needs_base_bits(step.document)
        return self.plain_objects(step.high) if own and self.plain_objects is not None else None

    def _open(
        self, steps: list[Step], folder: Path, rolling: RollingBase | None
    ) -> list[list[DeltaReader]] | DeltaSyncError:
        """Open every object of the steps, in order. Returns the error if one is damaged, and avoids its document."""
        deltas: list[list[DeltaReader]] = []
        reached = self.ends[0].model_fingerprint
        plains = [self._plain(step) for step in steps]
        others = [step for step, plain in zip(steps, plains, strict=True) if plain is None]
        stored = read_steps(others, None, lambda: folder, map_all=True)
        for step, plain in zip(steps, plains, strict=True):
            check_stop(self.stop)
            try:
                if plain is None:
                    opened = open_step_objects(step, folder, rolling, next(stored))
                else:
                    opened = open_objects(step.document, self.run.table, plain)
                reached = check_step(step, reached, declared_change(opened))
            except UnsupportedError:
                raise
            except DataError as error:
                self.avoid.add(step.key)
                return error
            deltas.append(opened)
        return deltas

    def _write(
        self,
        pieces: Iterator[Sparse | Full],
        fingerprints: dict[int, Fingerprint],
        folder: Path,
        old: BaseLookup | None,
    ) -> tuple[list[tuple[ObjectRef, Path]], int, bool]:
        """Write the pieces into as many objects as needed, as files of ``folder``.

        Args:
            pieces: distances, or full tensors: by dtype, tensors ascending, each tensor once.
            fingerprints: tensor id → change of its fingerprint.
            old: the bits at the first version, which codec ``tiled`` needs.

        Returns:
            The objects, the elements in them, and whether they can be reverted.
        """
        written: list[tuple[ObjectRef, Path]] = []
        changed, reversible = 0, True
        carried: set[int] = set()
        more = True
        while more:
            more = False
            with closing(DeltaSpool(folder, self.run.table, self.context, "zstd", self.codec, old)) as spool:
                for piece in pieces:
                    check_stop(self.stop)
                    spool.add(piece)
                    if spool.bytes >= OBJECT_BYTES:
                        more = True
                        break
                if spool.tensors:
                    path = folder / f"merged-{len(written)}"
                    written.append((spool.finish(path, fingerprints), path))
                changed += spool.changed
                reversible &= not spool.full
                carried |= spool.tensors
        lost = [tensor for tensor, value in fingerprints.items() if tensor not in carried and value != Fingerprint()]
        if lost:
            raise FingerprintError(
                f"tensor {self.run.table[min(lost)].name!r} ends unchanged, but its versions declare a change"
            )
        return written, changed, reversible and not (written and self.codec in BASE_CODECS)

    def _publish(
        self, written: list[tuple[ObjectRef, Path]], changed: int, reversible: bool, replace: bool
    ) -> MergedDelta:
        """Put the objects, then the document that names them."""
        first, last = self.ends
        document = MergedDelta(
            requires=required_features(self.codec, "zstd") if written else [],
            run=self.run.info.run,
            first=first.version,
            last=last.version,
            first_manifest=first.digest,
            last_manifest=last.digest,
            first_fingerprint=first.fingerprint,
            last_fingerprint=last.fingerprint,
            objects=[ref for ref, _ in written],
            changed=changed,
            payload_bytes=sum(ref.bytes for ref, _ in written),
            reversible=reversible,
            created_at=timestamp(),
        )
        document = self.run.keyring.signed(document)
        for ref, path in written:
            self.run.bucket.put(ref.key, path)
        key = merged_delta_key(first.version, last.version)
        stored = put_document(self.run, key, document, replace, first, last)
        if stored is document:
            for ref, path in written:
                # A collection may have removed it before the document named it.
                if not has_object(self.run.bucket, ref):
                    self.run.bucket.put(ref.key, path)
        return stored

"""Make a folded range: what leads from one version to a later one, as one delta, from the bucket alone.

The way is planned as a reader plans it: through the next shorter folded ranges where there are any, else through the
versions. Objects are fetched to scratch files and mapped, tensors are walked once in ascending order, and the result
is written as it comes, so that memory is bounded by a batch of elements, or by one tensor. Where codec ``context`` is
read or written, the weights at the first version are looked at, and copies of a few tensors go through the versions.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vllm_delta_sync.codec.delta_object import DeltaContext, required_features
from vllm_delta_sync.codec.delta_reader import LazyDelta
from vllm_delta_sync.codec.merge import RollingBase, merge_lazily
from vllm_delta_sync.codec.merge_spool import DeltaSpool
from vllm_delta_sync.errors import (
    ChainError,
    ConflictError,
    DeltaSyncError,
    FingerprintError,
    StoreError,
    UnsupportedError,
    UsageError,
)
from vllm_delta_sync.format.codecs import BASE_CODECS, RelativeCodec
from vllm_delta_sync.format.documents import MergedDelta, merged_delta_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, ObjectRef, timestamp
from vllm_delta_sync.maintenance.compact_uploads import OBJECT_BYTES, Stop, check_stop, never, put_missing, put_objects
from vllm_delta_sync.maintenance.rolling_weights import RollingWeights
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.run.checks import check_document_size
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.lazy_objects import open_step, scratch_folder
from vllm_delta_sync.run.objects import declared, needs_weights
from vllm_delta_sync.run.plan import Planner, Step
from vllm_delta_sync.tensors.changes import Full, Sparse
from vllm_delta_sync.tensors.state import ModelState

logger = guarded_logger(__name__)


class RawCodecError(UnsupportedError):
    """Versions of codec ``raw`` cannot be folded."""


def make_fold(
    run: RunDocuments,
    first: int,
    last: int,
    *,
    replace: bool = False,
    scratch: str | Path | None = None,
    object_bytes: int = OBJECT_BYTES,
    stop: Stop = never,
    codec: RelativeCodec = "packed",
    weights: RollingWeights | None = None,
) -> MergedDelta:
    """Write the folded range from version ``first`` to ``last``, unless it is there.

    Its objects are put before the document that names them, and looked for again after it.

    Args:
        replace: make it anew where there is one, for instance with damaged objects.
        scratch: folder for temporary files of about twice the parts' size; None for the system's.
        object_bytes: when to begin another object.
        stop: asked now and then; True ends it.
        codec: of what is written. ``context`` takes fewer bytes, and cannot be taken back.
        weights: where those of ``first`` come from, if codec ``context`` is read or written.

    Returns:
        the document that is in the bucket, which another writer may have made.

    Raises:
        RawCodecError: a version in between has codec ``raw``.
        UnsupportedError: one in between has codec ``context``, and there are no weights.
        ChainError (GapError): nothing that is left leads from ``first`` to ``last``, or an anchor lies between.
        FingerprintError: the objects do not lead from one version's fingerprint to the next.
        StoreError: the store failed, or there is no room for the scratch files. StoppedError: ``stop`` said so.
        UsageError: the range is none. NotFoundError: a version is not there.
    """
    if not 0 <= first < last:
        raise UsageError(f"a folded range leads from a version to a later one, not from {first} to {last}")
    planner = Planner(run)
    ends = planner.manifest(first), planner.manifest(last)
    found = None if replace else existing_fold(run, *ends)
    if found is not None:
        return found
    avoid = {merged_delta_key(first, last)} if replace or last - first > 1 else set()
    return _Fold(run, ends, avoid, object_bytes, stop, codec, weights).make(scratch, replace)


def write_fold(
    run: RunDocuments,
    ends: tuple[Manifest, Manifest],
    pieces: Iterator[Sparse | Full],
    fingerprints: dict[int, Fingerprint],
    object_bytes: int = OBJECT_BYTES,
) -> MergedDelta:
    """Write the folded range between two versions, piece by piece, over whatever stands there.

    Args:
        ends: manifests of the first and the last version.
        pieces: distances, or tensors in full: by dtype, tensors ascending, each once.
        fingerprints: change per tensor id; it has to hold a tensor's by the time that its piece comes.
        object_bytes: when to begin another object.

    Raises:
        StoreError: the store failed, or there is no room for the scratch files.
    """
    fold = _Fold(run, ends, set(), object_bytes, never, "packed", None)
    purpose = f"the range from version {ends[0].version} to {ends[1].version}"
    # How much it takes is not known before it is written; a disk that is full is reported then.
    with scratch_folder(None, purpose, 0) as folder:
        spool = partial(DeltaSpool, folder, run.table, fold.context, "zstd", "packed", None)
        return fold._publish(fold._write(pieces, fingerprints, folder, spool), replace=True)


def existing_fold(run: RunDocuments, first: Manifest, last: Manifest) -> MergedDelta | None:
    """The folded range that is there, if it is of these two versions; one that may not be believed counts as none."""
    try:
        found = run.folded(first.version, last.version)
    except (StoreError, UnsupportedError):
        raise
    except DeltaSyncError:
        return None
    return found if (found.first_manifest, found.last_manifest) == (first.digest, last.digest) else None


@dataclass
class _Fold:
    """One folded range in the making.

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
        reason: DeltaSyncError | None = None
        while True:
            try:
                steps = self._steps()
            except StoreError:
                raise
            except ChainError as error:
                raise reason or error from error
            payload = sum(step.payload_bytes for step in steps)
            purpose = f"folding versions {self.context.base_version} to {self.context.version}"
            state = self._state(steps)
            moving = None if state is None else RollingBase(state.base_tensor)
            with scratch_folder(scratch, purpose, 2 * payload + min(payload, self.object_bytes)) as folder:
                parts = self._open(steps, folder, moving)
                if isinstance(parts, DeltaSyncError):
                    reason = reason or parts
                    continue
                fingerprints = _summed(parts)
                old = None if state is None else state.base_tensor
                spool = partial(DeltaSpool, folder, self.run.table, self.context, "zstd", self.codec, old)
                written = self._write(merge_lazily(parts, self.run.table, moving), fingerprints, folder, spool)
                if reason is not None:
                    logger.warning("%s, around what cannot be read: %s", purpose, reason)
                return self._publish(written, replace)

    def _steps(self) -> list[Step]:
        planner = Planner(self.run, self.avoid)
        planner.know(*self.ends)
        steps = planner.path(self.ends[0].version, self.ends[1].version)
        if any(step.backwards for step in steps):
            raise ChainError(
                f"version {self.ends[1].version} does not come from version {self.ends[0].version}: versions between "
                "them were left behind by a rebase"
            )
        for step in steps:
            if isinstance(step.document, Manifest) and step.document.codec == "raw" and step.objects:
                raise RawCodecError(
                    f"version {step.high} has codec 'raw', which holds new values and no distances: only versions of "
                    "codec 'packed' can be folded into an object"
                )
        return steps

    def _state(self, steps: list[Step]) -> ModelState | None:
        """The weights at the first version, if they are needed."""
        lacking = next((step for step in steps if needs_weights(step.document)), None)
        if lacking is None and self.codec not in BASE_CODECS:
            return None
        if self.weights is None:
            raise UnsupportedError(
                f"versions {self.context.base_version} to {self.context.version} are folded with the weights of the "
                f"first at hand: {'the range is to be' if lacking is None else lacking.key + ' is'} of codec "
                "'context'; `delta-sync compact` does that"
            )
        return self.weights.at(self.ends[0])

    def _open(self, steps: list[Step], folder: Path, moving: RollingBase | None) -> list[LazyDelta] | DeltaSyncError:
        """Every object of the steps, in order; what is wrong with one of them, and then its document is avoided."""
        parts: list[LazyDelta] = []
        reached = self.ends[0].model_fingerprint
        for step in steps:
            check_stop(self.stop)
            try:
                opened = open_step(step, folder, moving)
                reached += sum((declared(part) for part in opened), Fingerprint())
                if reached != step.high_fingerprint:
                    raise FingerprintError(
                        f"{step.key}: objects lead to fingerprint {reached.hex()}, it says "
                        f"{step.high_fingerprint.hex()}"
                    )
            except (StoreError, UnsupportedError):
                raise
            except DeltaSyncError as error:
                self.avoid.add(step.key)
                return error
            parts += opened
        return parts

    def _write(
        self,
        pieces: Iterator[Sparse | Full],
        fingerprints: dict[int, Fingerprint],
        folder: Path,
        make: Callable[[], DeltaSpool],
    ) -> "_Result":
        """Fold into as many objects as needed, as files of ``folder``."""
        result = _Result([], 0, self.codec not in BASE_CODECS)
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
                    path = folder / f"folded-{len(result.written)}"
                    result.written.append((spool.finish(path, fingerprints), path))
                result.changed += spool.changed
                result.reversible &= not spool.full
                carried |= spool.tensors
        lost = [tensor for tensor, value in fingerprints.items() if tensor not in carried and value != Fingerprint()]
        if lost:
            raise FingerprintError(
                f"tensor {self.run.table[min(lost)].name!r} ends as it began, and its versions declare that it changed"
            )
        return result

    def _publish(self, result: "_Result", replace: bool) -> MergedDelta:
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
            theirs = existing_fold(self.run, first, last)
            if theirs is not None:
                return theirs
            # It is damaged, signed by nobody who is trusted, or of versions that are no longer: readers pass it over.
            bucket.put(key, document.to_bytes())
        put_missing(bucket, result.written)
        return document


@dataclass
class _Result:
    """Objects written, elements in them, and whether they hold distances only."""

    written: list[tuple[ObjectRef, Path]]
    changed: int
    reversible: bool


def _summed(parts: list[LazyDelta]) -> dict[int, Fingerprint]:
    sums: dict[int, Fingerprint] = {}
    for part in parts:
        for tensor, change in part.fingerprints.items():
            sums[tensor] = sums.get(tensor, Fingerprint()) + change
    return sums

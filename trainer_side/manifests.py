"""Manifests of the three kinds of version, and the files of an anchor."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from hashlib import file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Protocol, Self

from trainer_side.diff.baseline import Baseline
from vllm_delta_sync.bucket.parallel import begun, ended
from vllm_delta_sync.bucket.thread_pool import SLICE_SECONDS
from vllm_delta_sync.codec.delta_object import required_features
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import LimitError, StoreError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.codecs import BASE_CODECS, RELATIVE_CODECS, Codec
from vllm_delta_sync.format.documents import Anchor
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Base, Break, Manifest, ObjectRef, Quarantine, Sidecar, object_key, timestamp
from vllm_delta_sync.format.safetensors_file import shard_tables, write_anchor
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.bits import Bits

SHARD_BYTES = 1024**3
"""Bytes of tensors in one object of an anchor; a larger tensor has an object of its own."""


Put = Callable[[ObjectRef, Path], None]

UPLOADS = 2
"""Shards on their way at once: while these go up, the next one is written to disk."""


class FullState(Protocol):
    """All weights of a version: its tensors, and the fingerprint of each in the order of the table."""

    @property
    def table(self) -> TensorTable: ...
    @property
    def fingerprints(self) -> list[Fingerprint]: ...
    @property
    def fingerprint(self) -> Fingerprint: ...


class DeltaContents(Protocol):
    """What the objects of a delta carry; ``tensors.changes.Changes`` is one."""

    @property
    def changed(self) -> int: ...
    @property
    def fingerprint(self) -> Fingerprint: ...
    @property
    def reversible(self) -> bool: ...


class Shards:
    """Files of an anchor: written one at a time to a temporary folder, and stored while the next is written.

    Leaving waits until all are stored.

    Args:
        put: stores one file; called from other threads, ``UPLOADS`` at once.

    Raises:
        StoreError: the disk is full or not writable. Else whatever ``put`` raises; all have ended then.
    """

    def __init__(self, put: Put) -> None:
        self._put = put
        self._going: set[Future[None]] = set()
        self._count = 0
        # After an interrupt files are removed under uploads that go on: their threads are given up with the process.
        try:
            self._folder = TemporaryDirectory(prefix="delta-sync-", ignore_cleanup_errors=True)
        except OSError as error:
            raise StoreError(
                f"no temporary folder can be made: {error}; free space there, or set TMPDIR to another folder"
            ) from error

    def add(self, table: TensorTable, tensors: Iterable[tuple[str, Bits]]) -> ObjectRef:
        """Write one file and begin to store it; ``tensors`` as in ``write_anchor``."""
        path = Path(self._folder.name) / f"{self._count}.safetensors"
        self._count += 1
        write_anchor(path, table, tensors)
        with path.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        ref = ObjectRef(key=object_key(digest), bytes=path.stat().st_size, sha256=digest)
        self._going = _ended(self._going, UPLOADS - 1)
        self._going.add(begun(_put_away, self._put, ref, path))
        return ref

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._folder:
            try:
                if error is None:
                    _ended(self._going, 0)
            finally:
                # Nothing goes on behind the caller's back; but an interrupt waits for nobody.
                if error is None or isinstance(error, Exception):
                    for upload in self._going:
                        ended(upload)


def put_shards(baseline: Baseline, shard_bytes: int, put: Put) -> list[ObjectRef]:
    """Store all tensors as an anchor's objects; arguments and errors as in ``Shards``."""
    with Shards(put) as files:
        return [files.add(table, baseline.tensors(table)) for table in shard_tables(baseline.table, shard_bytes)]


def _put_away(put: Put, ref: ObjectRef, path: Path) -> None:
    put(ref, path)
    path.unlink()


def _ended(going: set[Future[None]], most: int) -> set[Future[None]]:
    """Wait until at most so many go on; raises what one of the others has raised."""
    while True:
        done = {upload for upload in going if upload.done()}
        for upload in done:
            upload.result()
        going = going - done
        if len(going) <= most:
            return going
        wait(going, SLICE_SECONDS, FIRST_COMPLETED)


def reference(run: str, whole: FullState, base: Base) -> Manifest:
    """Version 0 that uploads nothing, because the weights are those of ``base``."""
    return Manifest(kind="reference", base=base, changed=0, payload_bytes=0, **_whole(run, whole))


def anchor(run: str, whole: FullState, objects: list[ObjectRef]) -> Manifest:
    """Version 0 with all tensors in ``objects``."""
    return Manifest(kind="anchor", **_carried(whole, objects), **_whole(run, whole))


def anchor_behind(
    run: str,
    whole: FullState,
    objects: list[ObjectRef],
    place: tuple[int, str],
    known: Manifest | None,
    epoch: int,
    reasons: Sequence[str] = (),
) -> Manifest:
    """A version that begins anew behind others that cannot be read.

    Args:
        place: its number, and the digest of the version before it, as that is stored.
        known: the newest version whose manifest is good. reasons: why it is quarantined, if it is.
    """
    version, parent = place
    breaks = _with_break([] if known is None else known.breaks, version, None)
    members = _whole(run, whole) | {
        "version": version,
        "step": 0 if known is None else known.step,
        "parent": parent,
        "epoch": epoch,
        "breaks": breaks,
        "quarantine": _quarantine(reasons, known),
    }
    return Manifest(kind="anchor", **_carried(whole, objects), **members)


def check_breaks(breaks: list[Break]) -> None:
    """Raise LimitError if a run with these can have no break more."""
    if len(breaks) >= limits.MAX_BREAKS:
        raise LimitError(f"the run has {len(breaks)} breaks (MAX_BREAKS); branch it, or start a new run")


def _with_break(breaks: list[Break], version: int, base_version: int | None) -> list[Break]:
    check_breaks(breaks)
    return [*breaks, Break(version=version, base_version=base_version)]


def _quarantine(reasons: Sequence[str], before: Manifest | None) -> Quarantine | None:
    sound = None if before is None else before.sound
    return Quarantine(reasons=list(reasons), sound=sound) if reasons else None


def _carried(whole: FullState, objects: list[ObjectRef]) -> dict[str, Any]:
    return {"objects": objects, "changed": whole.table.total, "payload_bytes": sum(ref.bytes for ref in objects)}


def _whole(run: str, whole: FullState) -> dict[str, Any]:
    return {
        "run": run,
        "version": 0,
        "step": 0,
        "total": whole.table.total,
        "full_bytes": whole.table.full_bytes,
        "fingerprint": whole.fingerprint.hex(),
        "tensor_fingerprints": _by_name(whole),
        "created_at": timestamp(),
    }


def _by_name(whole: FullState) -> dict[str, str]:
    fingerprints = zip(whole.table, whole.fingerprints, strict=True)
    return {spec.name: value.hex() for spec, value in fingerprints}


def anchor_beside(manifest: Manifest, whole: FullState, objects: list[ObjectRef]) -> Anchor:
    """The document of an anchor beside the chain, of a version with these weights."""
    return Anchor.of(manifest, _by_name(whole), objects)


def delta(
    parent: Manifest,
    held: Manifest,
    step: int,
    coding: tuple[Codec, Compression],
    objects: list[ObjectRef],
    changes: DeltaContents,
    epoch: int,
    reasons: Sequence[str] = (),
    sidecars: Sequence[Sidecar] = (),
) -> Manifest:
    """The version after ``parent``.

    Args:
        held: the version that the objects change; another than ``parent`` makes a break.
        coding: of the objects.
        objects: none if nothing changed. changes: what they carry together.
        reasons: why it is quarantined, if it is. sidecars: stored beside it.

    Raises:
        LimitError: the run has too many breaks.
    """
    codec, compression = coding
    version, breaks = parent.version + 1, parent.breaks
    if held.version != parent.version:
        breaks = _with_break(breaks, version, held.version)
    return Manifest(
        run=parent.run,
        version=version,
        step=step,
        kind="delta",
        base_version=held.version,
        parent=parent.digest,
        breaks=breaks,
        # Codec context is decoded with the bits of before, which is what taking it back would have to come to.
        reversible=changes.reversible and not (objects and codec in BASE_CODECS),
        epoch=epoch,
        quarantine=_quarantine(reasons, parent),
        codec=codec if objects else None,
        compression=(compression if codec in RELATIVE_CODECS else "none") if objects else None,
        requires=required_features(codec, compression) if objects else [],
        objects=objects,
        sidecars=list(sidecars),
        changed=changes.changed,
        total=parent.total,
        payload_bytes=sum(ref.bytes for ref in objects),
        full_bytes=parent.full_bytes,
        fingerprint=(held.model_fingerprint + changes.fingerprint).hex(),
        created_at=timestamp(),
    )

"""Manifests of the three kinds of version, and the files of an anchor."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from hashlib import file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer_side.baseline import Baseline
from vllm_delta_sync.bucket.calls import begun, ended
from vllm_delta_sync.bucket.crew import SLICE_SECONDS
from vllm_delta_sync.errors import LimitError
from vllm_delta_sync.wire import limits
from vllm_delta_sync.wire.anchor import shard_tables, write_anchor
from vllm_delta_sync.wire.changes import Changes
from vllm_delta_sync.wire.compression import Compression
from vllm_delta_sync.wire.delta import Codec, required_features
from vllm_delta_sync.wire.documents import Anchor
from vllm_delta_sync.wire.manifest import Base, Break, Manifest, ObjectRef, Quarantine, object_key, timestamp

SHARD_BYTES = 1024**3
"""Bytes of tensors in one object of an anchor; a larger tensor has an object of its own."""


UPLOADS = 2
"""Shards on their way at once: while these go up, the next one is written to disk."""


def put_shards(baseline: Baseline, shard_bytes: int, put: Callable[[ObjectRef, Path], None]) -> list[ObjectRef]:
    """Write all tensors to files of a temporary folder, and store them as an anchor's objects.

    Args:
        put: stores one file; called from other threads, ``UPLOADS`` at once.

    Raises:
        StoreError: the disk is full or not writable. Else whatever ``put`` raises; all have ended then.
    """
    refs: list[ObjectRef] = []
    going: set[Future[None]] = set()
    # After an interrupt files are removed under uploads that go on: their threads are given up with the process.
    with TemporaryDirectory(prefix="delta-sync-", ignore_cleanup_errors=True) as folder:
        try:
            for number, table in enumerate(shard_tables(baseline.table, shard_bytes)):
                path = Path(folder) / f"{number}.safetensors"
                write_anchor(path, table, baseline.tensors(table))
                with path.open("rb") as file:
                    digest = file_digest(file, "sha256").hexdigest()
                refs.append(ObjectRef(key=object_key(digest), bytes=path.stat().st_size, sha256=digest))
                going = _ended(going, UPLOADS - 1)
                going.add(begun(_put_away, put, refs[-1], path))
            _ended(going, 0)
        except Exception:  # whatever it is, nothing goes on behind the caller's back; an interrupt waits for nobody
            for upload in going:
                ended(upload)
            raise
    return refs


def _put_away(put: Callable[[ObjectRef, Path], None], ref: ObjectRef, path: Path) -> None:
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


def reference(run: str, baseline: Baseline, base: Base) -> Manifest:
    """Version 0 that uploads nothing, because the weights are those of ``base``."""
    return Manifest(kind="reference", base=base, changed=0, payload_bytes=0, **_whole(run, baseline))


def anchor(run: str, baseline: Baseline, objects: list[ObjectRef]) -> Manifest:
    """Version 0 with all tensors in ``objects``."""
    return Manifest(kind="anchor", **_carried(baseline, objects), **_whole(run, baseline))


def anchor_behind(
    run: str,
    baseline: Baseline,
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
    whole = _whole(run, baseline) | {
        "version": version,
        "step": 0 if known is None else known.step,
        "parent": parent,
        "epoch": epoch,
        "breaks": breaks,
        "quarantine": _quarantine(reasons, known),
    }
    return Manifest(kind="anchor", **_carried(baseline, objects), **whole)


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


def _carried(baseline: Baseline, objects: list[ObjectRef]) -> dict[str, Any]:
    return {"objects": objects, "changed": baseline.table.total, "payload_bytes": sum(ref.bytes for ref in objects)}


def _whole(run: str, baseline: Baseline) -> dict[str, Any]:
    return {
        "run": run,
        "version": 0,
        "step": 0,
        "total": baseline.table.total,
        "full_bytes": baseline.table.full_bytes,
        "fingerprint": baseline.fingerprint.hex(),
        "tensor_fingerprints": _by_name(baseline),
        "created_at": timestamp(),
    }


def _by_name(baseline: Baseline) -> dict[str, str]:
    fingerprints = zip(baseline.table, baseline.fingerprints, strict=True)
    return {spec.name: value.hex() for spec, value in fingerprints}


def anchor_beside(manifest: Manifest, baseline: Baseline, objects: list[ObjectRef]) -> Anchor:
    """The document of an anchor beside the chain, of the version that the baseline holds."""
    return Anchor.of(manifest, _by_name(baseline), objects)


def delta(
    parent: Manifest,
    held: Manifest,
    step: int,
    coding: tuple[Codec, Compression],
    objects: list[ObjectRef],
    changes: Changes,
    epoch: int,
    reasons: Sequence[str] = (),
) -> Manifest:
    """The version after ``parent``.

    Args:
        held: the version that the objects change; another than ``parent`` makes a break.
        coding: of the objects.
        objects: none if nothing changed. changes: what they carry.
        reasons: why it is quarantined, if it is.

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
        reversible=changes.reversible and not (objects and codec == "context"),
        epoch=epoch,
        quarantine=_quarantine(reasons, parent),
        codec=codec if objects else None,
        compression=("none" if codec == "raw" else compression) if objects else None,
        requires=required_features(codec, compression) if objects else [],
        objects=objects,
        changed=changes.changed,
        total=parent.total,
        payload_bytes=sum(ref.bytes for ref in objects),
        full_bytes=parent.full_bytes,
        fingerprint=(held.model_fingerprint + changes.fingerprint).hex(),
        created_at=timestamp(),
    )

"""Manifests of the three kinds of version, and the file of an anchor."""

from datetime import UTC, datetime
from hashlib import file_digest
from pathlib import Path
from typing import Any

from trainer_side.baseline import Baseline
from vllm_delta_sync.wire.anchor import write_anchor
from vllm_delta_sync.wire.compression import Compression
from vllm_delta_sync.wire.delta import Codec, required_features
from vllm_delta_sync.wire.fingerprint import Fingerprint
from vllm_delta_sync.wire.manifest import Base, Manifest, ObjectRef, object_key


def timestamp() -> str:
    """Now, in UTC, as manifests spell it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def anchor_file(folder: Path, baseline: Baseline) -> tuple[Path, ObjectRef]:
    """Write all tensors to a file in ``folder``.

    Raises:
        StoreError: the disk is full or not writable.
    """
    path = folder / "anchor.safetensors"
    write_anchor(path, baseline.table, baseline.snapshot())
    with path.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    return path, ObjectRef(key=object_key(digest), bytes=path.stat().st_size, sha256=digest)


def reference(run: str, baseline: Baseline, base: str | Path) -> Manifest:
    """Version 0 that uploads nothing, because the weights are those of ``base``."""
    return Manifest(
        kind="reference",
        base=Base(location=str(Path(base).resolve())),
        changed=0,
        payload_bytes=0,
        **_first(run, baseline),
    )


def anchor(run: str, baseline: Baseline, ref: ObjectRef) -> Manifest:
    """Version 0 with all tensors in one object."""
    first = _first(run, baseline)
    return Manifest(kind="anchor", objects=[ref], changed=baseline.table.total, payload_bytes=ref.bytes, **first)


def _first(run: str, baseline: Baseline) -> dict[str, Any]:
    fingerprints = zip(baseline.table, baseline.fingerprints, strict=True)
    return {
        "run": run,
        "version": 0,
        "step": 0,
        "total": baseline.table.total,
        "full_bytes": baseline.table.full_bytes,
        "fingerprint": baseline.fingerprint.hex(),
        "tensor_fingerprints": {spec.name: value.hex() for spec, value in fingerprints},
        "created_at": timestamp(),
    }


def delta(
    parent: Manifest,
    step: int,
    coding: tuple[Codec, Compression],
    objects: list[ObjectRef],
    carried: int,
    change: Fingerprint,
) -> Manifest:
    """The version after ``parent``.

    Args:
        coding: of the objects.
        objects: none if nothing changed.
        carried: elements in the objects.
        change: fingerprint of the model after minus before.
    """
    codec, compression = coding
    return Manifest(
        run=parent.run,
        version=parent.version + 1,
        step=step,
        kind="delta",
        base_version=parent.version,
        parent=parent.digest,
        codec=codec if objects else None,
        compression=("none" if codec == "raw" else compression) if objects else None,
        requires=required_features(codec, compression) if objects else [],
        objects=objects,
        changed=carried,
        total=parent.total,
        payload_bytes=sum(ref.bytes for ref in objects),
        full_bytes=parent.full_bytes,
        fingerprint=(parent.model_fingerprint + change).hex(),
        created_at=timestamp(),
    )

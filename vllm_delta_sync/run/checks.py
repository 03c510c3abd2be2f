"""Checks that raise unless a manifest fits its parent, its objects, the tensor table and the weights."""

import os
from collections.abc import Iterator
from pathlib import Path

from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.errors import FingerprintError, LimitError, NotFoundError, TensorMismatchError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import Document
from vllm_delta_sync.format.documents import Anchor, MergedDelta
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.safetensors_file import Buffer, aligned, read_anchor
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.tensors.checkpoint import names_model

PLAUSIBLE_RANKS = 4096
"""Maximum number of ranks of a trainer; each may write one object per version."""


def object_limit(table: TensorTable) -> int:
    """Return the maximum bytes of an object of this model: twice the model, plus headers."""
    return 2 * table.full_bytes + 4096 * len(table) + (1 << 20)


def document_limit(table: TensorTable) -> int:
    """Return the maximum bytes of the document of a version, an anchor or a merged delta of this model.

    Leaves room for a fingerprint of each tensor, and for as many objects as a writer could need: one shard per
    tensor, one object per GiB, and one for each of ``PLAUSIBLE_RANKS``.
    """
    objects = min(limits.MAX_OBJECTS_PER_VERSION, len(table) + (table.full_bytes >> 30) + PLAUSIBLE_RANKS)
    # A quote or backslash in a name takes two bytes in JSON.
    names = sum(2 * len(spec.name.encode()) + 64 for spec in table)
    return min(limits.MAX_JSON_BYTES, (1 << 20) + names + 256 * objects)


def check_document_size(document: Document, limit: int, what: str) -> None:
    """Raise LimitError if a document to be written is larger than ``limit``, which is ``document_limit`` of its run."""
    size = len(document.to_bytes())
    if size > limit:
        raise LimitError(
            f"{what} would have {size} bytes, and readers of this model accept {limit} (document_limit); write fewer, "
            "larger objects (shard_bytes)"
        )


def check_tensor_fingerprints(manifest: Manifest | Anchor, table: TensorTable) -> None:
    """Raise unless ``tensor_fingerprints``, if present, names the table's tensors and adds up to the fingerprint.

    Raises:
        TensorMismatchError: a tensor is missing or not in the table. FingerprintError: the sum differs.
    """
    declared = manifest.tensor_fingerprints
    if declared is None:
        return
    unpaired = next((spec.name for spec in table if spec.name not in declared), None)
    unpaired = unpaired or next((name for name in declared if name not in table), None)
    if unpaired is not None:
        raise TensorMismatchError(
            f"version {manifest.version}: tensor {unpaired[:120]!r} is in only one of tensor_fingerprints and the table"
        )
    total = sum((Fingerprint.from_hex(value) for value in declared.values()), Fingerprint())
    if total != manifest.model_fingerprint:
        raise FingerprintError(
            f"version {manifest.version}: tensor_fingerprints add up to {total.hex()}, but fingerprint is "
            f"{manifest.fingerprint}"
        )


def check_tensor(manifest: Manifest | Anchor, name: str, measured: Fingerprint) -> None:
    """Raise FingerprintError unless ``measured`` is what an anchor or a reference declares for a tensor."""
    declared = (manifest.tensor_fingerprints or {}).get(name)
    if declared != measured.hex():
        raise FingerprintError(
            f"version {manifest.version}: tensor {name!r} has fingerprint {measured.hex()}, the manifest says "
            f"{declared}"
        )


def check_bits(manifest: Manifest | Anchor, spec: TensorSpec, bits: Bits) -> None:
    """Raise unless a tensor's flat (numel,) bits are those that an anchor or a reference declares.

    Raises:
        TensorMismatchError: they have another size or dtype. FingerprintError: they have other values.
    """
    if bits.dtype != spec.element.uint or bits.size != spec.numel:
        raise TensorMismatchError(f"tensor {spec.name!r} has {bits.size} elements of {bits.dtype}, not {spec}")
    check_tensor(manifest, spec.name, fingerprint_tensor(spec.name, bits))


def check_base_exists(base: str | Path | None) -> None:
    """Raise NotFoundError if ``base`` is given and is not a directory, URL or public model, even if not needed."""
    if base is None or "://" in str(base) or names_model(base) or os.path.isdir(base):
        return
    raise NotFoundError(
        f"base {str(base)[:200]!r} is not a directory here; pass the checkpoint that the run started from, or leave "
        "base out to use the recorded one"
    )


def read_shard(data: Buffer, table: TensorTable, what: str) -> Iterator[tuple[str, Bits]]:
    """Yield (name, flat bits) of each tensor in one shard of an anchor. Errors as ``read_anchor``."""
    container = read_anchor(data, table, what)
    for name in container.entries:
        yield name, aligned(container.bits(name))


def delta_context(document: Manifest | MergedDelta | Anchor) -> DeltaContext | None:
    """Return what the delta objects of a document must declare about themselves; None if they hold whole tensors."""
    if isinstance(document, MergedDelta):
        return DeltaContext(document.run, document.last, document.first, document.changed)
    if isinstance(document, Anchor) or document.base_version is None:
        return None
    return DeltaContext(document.run, document.version, document.base_version, document.changed)


def describe_document(document: Manifest | MergedDelta | Anchor) -> str:
    """Return the name of a document in messages."""
    if isinstance(document, MergedDelta):
        return f"merged delta {document.first} to {document.last}"
    return f"{'anchor of ' if isinstance(document, Anchor) else ''}version {document.version}"

"""What has to hold between a manifest, its parent, its objects and the weights; whatever does not is raised."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_delta_sync.bucket import store_of
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.errors import (
    ChainError,
    FingerprintError,
    FormatError,
    LimitError,
    NotFoundError,
    TensorMismatchError,
)
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import Anchor, MergedDelta
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Document, Manifest
from vllm_delta_sync.format.safetensors_file import Buffer, aligned, read_anchor
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.bits import BaseLookup, BaseTensor, Bits
from vllm_delta_sync.tensors.changes import Changes, Full
from vllm_delta_sync.tensors.checkpoint import names_model
from vllm_delta_sync.tensors.state import ModelState

PLAUSIBLE_RANKS = 4096
"""Ranks of one trainer, each of which may write an object of its own."""


def object_limit(table: TensorTable) -> int:
    """Bytes that an object of this model may have: twice the model plus headers; a larger one makes no sense."""
    return 2 * table.full_bytes + 4096 * len(table) + (1 << 20)


def document_limit(table: TensorTable) -> int:
    """Bytes that a manifest, an anchor's or a folded range's document of this model may have.

    That is room for a fingerprint of each tensor, and for as many objects as writers of it could have a use for: a
    shard for each tensor, one object for each GiB, and one for each of ``PLAUSIBLE_RANKS``.
    """
    objects = min(limits.MAX_OBJECTS_PER_VERSION, len(table) + (table.full_bytes >> 30) + PLAUSIBLE_RANKS)
    # A quote or backslash of a name takes two bytes.
    names = sum(2 * len(spec.name.encode()) + 64 for spec in table)
    return min(limits.MAX_JSON_BYTES, (1 << 20) + names + 256 * objects)


def check_document_size(document: Document, limit: int, what: str) -> None:
    """Raise LimitError if a document that is about to be written is larger than ``document_limit``."""
    size = len(document.to_bytes())
    if size > limit:
        raise LimitError(
            f"{what} would have {size} bytes, and readers of this model take {limit} (document_limit): list fewer, "
            "larger objects (shard_bytes)"
        )


def check_same_store(run: str, url: str, source: str) -> None:
    """Raise ChainError unless the run that a run at ``url`` says it branches from lies in the same store."""
    if store_of(source) != store_of(url):
        raise ChainError(
            f"run {run} says that it branches from {source[:200]!r}, which is not of the store {store_of(url)!r} that "
            "it lies in: give its location yourself"
        )


def check_follows(parent: Manifest, manifest: Manifest, digest: str | None = None) -> None:
    """Raise ChainError unless ``manifest`` is the version after ``parent`` and names it by digest.

    Args:
        digest: of the manifest before, if a damaged one lies between ``parent`` and ``manifest``.
    """
    digest = digest or parent.digest
    if manifest.parent != digest:
        raise ChainError(
            f"version {manifest.version} names parent {manifest.parent}, the version before is {digest}: "
            "the history was rewritten"
        )
    if manifest.epoch < parent.epoch:
        raise ChainError(
            f"version {manifest.version} was written in epoch {manifest.epoch}, version {parent.version} before it in "
            f"epoch {parent.epoch}: its publisher had lost the run to another"
        )


def check_tensor_fingerprints(manifest: Manifest | Anchor, table: TensorTable) -> None:
    """Raise unless the fingerprints per tensor, where a manifest has them, are the table's tensors and add up.

    Raises:
        TensorMismatchError: a tensor is missing or not in the table. FingerprintError: the sum is another.
    """
    declared = manifest.tensor_fingerprints
    if declared is None:
        return
    odd = next((spec.name for spec in table if spec.name not in declared), None)
    odd = odd or next((name for name in declared if name not in table), None)
    if odd is not None:
        raise TensorMismatchError(
            f"version {manifest.version}: tensor {odd[:120]!r} is in only one of tensor_fingerprints and the table"
        )
    total = sum((Fingerprint.from_hex(value) for value in declared.values()), Fingerprint())
    if total != manifest.model_fingerprint:
        raise FingerprintError(
            f"version {manifest.version}: tensor_fingerprints add up to {total.hex()}, fingerprint says "
            f"{manifest.fingerprint}"
        )


def check_fingerprint(manifest: Manifest, measured: Fingerprint) -> None:
    """Raise FingerprintError unless ``measured`` is the manifest's."""
    if measured != manifest.model_fingerprint:
        raise FingerprintError(
            f"version {manifest.version}: weights have fingerprint {measured.hex()}, the manifest says "
            f"{manifest.fingerprint}"
        )


def check_tensors(manifest: Manifest | Anchor, state: ModelState) -> None:
    """Raise FingerprintError unless each tensor has the fingerprint that an anchor or a reference gives it."""
    for spec, value in zip(state.table, state.fingerprints, strict=True):
        check_tensor(manifest, spec.name, value)


def check_tensor(manifest: Manifest | Anchor, name: str, measured: Fingerprint) -> None:
    """Raise FingerprintError unless ``measured`` is what an anchor or a reference gives a tensor."""
    declared = (manifest.tensor_fingerprints or {}).get(name)
    if declared != measured.hex():
        raise FingerprintError(
            f"version {manifest.version}: tensor {name!r} has fingerprint {measured.hex()}, the manifest says "
            f"{declared}"
        )


def check_base(base: str | Path | None) -> None:
    """Raise NotFoundError if a base is given that is no directory, URL or public model, be it needed or not."""
    if base is None or "://" in str(base) or names_model(base) or Path(base).is_dir():
        return
    raise NotFoundError(
        f"base {str(base)!r} is not a directory here; pass the checkpoint that the run started from, or leave it "
        "out for the recorded one"
    )


class _Asked:
    """An ``Old``, and whether it held any tensor that was asked for in part only."""

    def __init__(self, old: BaseLookup) -> None:
        self._old = old
        self.in_part = False

    def __call__(self, tensor: int) -> BaseTensor:
        found = self._old(tensor)
        self.in_part |= found.rectangles is not None
        return found


def decode_objects(
    document: Manifest | MergedDelta | Anchor,
    table: TensorTable,
    objects: Sequence[Buffer],
    old: BaseLookup | None = None,
) -> Changes:
    """Decode the objects (already checked by digest) that a document lists into one Changes.

    Args:
        old: the bits that the document builds on. Objects of codec ``context`` need it; of tensors that it holds in
            part, those elements alone are decoded.

    Raises:
        FormatError: counts differ from the document, or an anchor lacks a tensor; also what ``decode`` raises.
    """
    context, what = context_of(document), name_of(document)
    merged = Changes()
    asked = None if old is None else _Asked(old)
    for ref, data in zip(document.objects, objects, strict=True):
        if context is None:
            merged.full += [Full(table.index(name), bits) for name, bits in read_shard(data, table, ref.key)]
            continue
        part = decode(data, table, context, asked)
        merged.sparse += part.sparse
        merged.full += part.full
        for tensor, change in part.fingerprints.items():
            merged.fingerprints[tensor] = merged.fingerprints.get(tensor, Fingerprint()) + change
    if (
        not isinstance(document, MergedDelta)
        and is_whole(document)
        and sorted(full.id for full in merged.full) != list(range(len(table)))
    ):
        raise FormatError(f"anchor of version {document.version} does not hold each of {len(table)} tensors once")
    in_full = Counter(full.id for full in merged.full)
    twice = set(in_full) & {tensor for group in merged.sparse for tensor in group.ids.tolist()}
    twice |= {tensor for tensor, times in in_full.items() if times > 1}
    if twice:
        raise FormatError(f"{what}: tensor {table[min(twice)].name!r} is carried in full and once more")
    if isinstance(document, Anchor) or (asked is not None and asked.in_part and merged.changed < document.changed):
        return merged
    if merged.changed != document.changed:
        raise FormatError(f"{what}: objects carry {merged.changed} elements, the manifest says {document.changed}")
    return merged


def read_shard(data: Buffer, table: TensorTable, what: str) -> Iterator[tuple[str, Bits]]:
    """(name, flat bits) of the tensors of one shard of an anchor. Errors as ``read_anchor``."""
    container = read_anchor(data, table, what)
    for name in container.entries:
        yield name, aligned(container.bits(name))


def context_of(document: Manifest | MergedDelta | Anchor) -> DeltaContext | None:
    """What the delta objects of a document say of themselves; None for whole tensors."""
    if isinstance(document, MergedDelta):
        return DeltaContext(document.run, document.last, document.first, document.changed)
    if isinstance(document, Anchor) or document.base_version is None:
        return None
    return DeltaContext(document.run, document.version, document.base_version, document.changed)


def is_whole(document: Manifest | MergedDelta | Anchor) -> bool:
    """Whether the document's objects together hold each tensor once."""
    return isinstance(document, Anchor) or (isinstance(document, Manifest) and document.kind == "anchor")


def name_of(document: Manifest | MergedDelta | Anchor) -> str:
    """What messages call a document."""
    if isinstance(document, MergedDelta):
        return f"folded range {document.first} to {document.last}"
    return f"{'anchor of ' if isinstance(document, Anchor) else ''}version {document.version}"

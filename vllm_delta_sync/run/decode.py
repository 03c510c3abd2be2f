"""Decode the objects that a document lists: ``open_objects`` tensor by tensor, ``decode_objects`` all at once."""

from collections import Counter
from collections.abc import Iterable, Sequence

from vllm_delta_sync.codec.delta_reader import DeltaReader
from vllm_delta_sync.errors import ChainError, FormatError
from vllm_delta_sync.format.documents import Anchor, MergedDelta
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.safetensors_file import Buffer
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.run.checks import delta_context, describe_document, read_shard
from vllm_delta_sync.tensors.changes import BaseLookup, Changes, Full


def open_objects(
    document: Manifest | MergedDelta,
    table: TensorTable,
    objects: Iterable[Buffer],
    old: BaseLookup | None = None,
    backwards: bool = False,
) -> list[DeltaReader]:
    """Open the objects that a document lists for reading tensor by tensor. Their digests must have been checked.

    Args:
        objects: in the document's order. old, backwards: see ``DeltaReader``.

    Raises:
        ChainError: the document holds whole tensors.
        FormatError: they contradict the document, or carry a tensor in full and once more.
        DeltaSyncError: as ``DeltaReader``.
    """
    context, what = delta_context(document), describe_document(document)
    if context is None:
        raise ChainError(f"{what} holds whole tensors, not changes")
    parts = [DeltaReader(data, table, context, old, backwards) for data in objects]
    times = Counter(tensor for part in parts for tensor in part.full)
    sparse = {int(tensor) for part in parts for ids, _ in part.directory.values() for tensor in ids}
    twice = (times.keys() & sparse) | {tensor for tensor, count in times.items() if count > 1}
    if twice:
        raise FormatError(f"{what}: tensor {table[min(twice)].name!r} is carried in full and once more")
    changed = sum(part.changed for part in parts)
    if changed != document.changed:
        raise FormatError(f"{what}: objects carry {changed} elements, it declares {document.changed}")
    return parts


def decode_objects(
    document: Manifest | MergedDelta | Anchor,
    table: TensorTable,
    objects: Sequence[Buffer],
    old: BaseLookup | None = None,
    backwards: bool = False,
) -> Changes:
    """Decode the objects that a document lists into one ``Changes``. Their digests must have been checked.

    Args:
        old: the base bits of the document. Objects of codec ``tiled`` need it; where a tensor is available in part
            only, just that part is decoded.
        backwards: see ``DeltaReader``.

    Raises:
        FormatError: an anchor lacks a tensor. DeltaSyncError: as ``open_objects`` and ``DeltaReader.take``.
    """
    if delta_context(document) is not None and not isinstance(document, Anchor):
        merged = Changes()
        readers = open_objects(document, table, objects, old, backwards)
        for reader in readers:
            part = reader.rest()
            merged.sparse += part.sparse
            merged.full += part.full
        merged.fingerprints = declared_changes(readers)
        return merged
    full = [
        Full(table.index(name), bits)
        for ref, data in zip(document.objects, objects, strict=True)
        for name, bits in read_shard(data, table, ref.key)
    ]
    is_whole = isinstance(document, Anchor) or (isinstance(document, Manifest) and document.kind == "anchor")
    if is_whole and sorted(found.id for found in full) != list(range(len(table))):
        raise FormatError(f"{describe_document(document)} does not hold each of {len(table)} tensors once")
    changes = Changes([], full)
    if isinstance(document, Manifest) and changes.changed != document.changed:
        raise FormatError(
            f"{describe_document(document)}: objects carry {changes.changed} elements, it declares {document.changed}"
        )
    return changes


def declared_changes(readers: Iterable[DeltaReader]) -> dict[int, Fingerprint]:
    """Return tensor id → change of its fingerprint that objects declare together, in the direction they are read in."""
    sums: dict[int, Fingerprint] = {}
    for reader in readers:
        for tensor, change in reader.fingerprints.items():
            sums[tensor] = sums.get(tensor, Fingerprint()) + change
    return sums

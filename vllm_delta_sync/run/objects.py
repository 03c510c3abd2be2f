"""The objects of one document, opened: read tensor by tensor, or only asked what they carry."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_delta_sync.codec.delta_reader import LazyDelta
from vllm_delta_sync.errors import ChainError, FormatError
from vllm_delta_sync.format.codecs import BASE_CODECS
from vllm_delta_sync.format.documents import MergedDelta
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.safetensors_file import Buffer
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.run.checks import context_of, decode_objects, name_of
from vllm_delta_sync.tensors.bits import BaseLookup
from vllm_delta_sync.tensors.changes import Changes


def needs_weights(document: Manifest | MergedDelta) -> bool:
    """Whether its objects are read with the weights at hand that they build on."""
    return not BASE_CODECS.isdisjoint(document.requires)


def open_parts(
    document: Manifest | MergedDelta, table: TensorTable, objects: Iterable[Buffer], old: BaseLookup | None = None
) -> list[LazyDelta]:
    """The objects (already checked by digest) that a document lists, to be read tensor by tensor.

    Args:
        objects: in the document's order. old: see ``LazyDelta``.

    Raises:
        UnsupportedError: one has codec ``raw``. ChainError: the document holds whole tensors.
        FormatError: they are not what the document says, or carry a tensor in full and once more.
    """
    context, what = context_of(document), name_of(document)
    if context is None:
        raise ChainError(f"{what} holds whole tensors, and no changes")
    parts = [LazyDelta(data, table, context, old) for data in objects]
    changed = sum(part.changed for part in parts)
    if changed != document.changed:
        raise FormatError(f"{what}: objects carry {changed} elements, it says {document.changed}")
    _refuse_twice(what, parts, table)
    return parts


def _refuse_twice(what: str, parts: list[LazyDelta], table: TensorTable) -> None:
    full = Counter(tensor for part in parts for tensor in part.full)
    sparse = {int(tensor) for part in parts for ids, _ in part.directory.values() for tensor in ids}
    twice = {tensor for tensor, times in full.items() if times > 1 or tensor in sparse}
    if twice:
        raise FormatError(f"{what}: tensor {table[min(twice)].name!r} is carried in full and once more")


def declared(part: LazyDelta) -> Fingerprint:
    """What an object declares that it adds to the model's fingerprint."""
    return sum(part.fingerprints.values(), Fingerprint())


@dataclass(frozen=True)
class Outline:
    """What a document changes, without the changes.

    Attributes:
        counts: elements carried, by tensor id. full: tensors in full. fingerprints: declared changes, by tensor id.
    """

    counts: dict[int, int]
    full: frozenset[int]
    fingerprints: dict[int, Fingerprint]

    @property
    def changes(self) -> Changes:
        """What is declared of them."""
        return Changes(fingerprints=self.fingerprints)


def outline(document: Manifest | MergedDelta, table: TensorTable, objects: Sequence[Buffer]) -> Outline:
    """What a document changes, for whoever has not the weights that it builds on.

    Everything is checked that can be: all, or, where objects have codec ``context``, all but their streams.

    Args:
        objects: already checked by digest.

    Raises:
        DeltaSyncError: see ``decode_objects`` and ``open_parts``.
    """
    counts: Counter[int] = Counter()
    if not needs_weights(document):
        changes = decode_objects(document, table, objects)
        for group in changes.sparse:
            counts.update(dict(zip(group.ids.tolist(), group.counts.tolist(), strict=True)))
        counts.update({full.id: full.bits.size for full in changes.full})
        return Outline(counts, frozenset(full.id for full in changes.full), changes.fingerprints)
    sums: dict[int, Fingerprint] = {}
    parts = open_parts(document, table, objects)
    for part in parts:
        part.check()
        for ids, sizes in part.directory.values():
            counts.update(dict(zip(ids.tolist(), sizes.tolist(), strict=True)))
        counts.update({tensor: table[tensor].numel for tensor in part.full})
        for tensor, change in part.fingerprints.items():
            sums[tensor] = sums.get(tensor, Fingerprint()) + change
    return Outline(counts, frozenset(tensor for part in parts for tensor in part.full), sums)

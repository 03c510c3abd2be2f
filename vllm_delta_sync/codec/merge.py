"""``merge_changes`` merges consecutive deltas into one; ``merge_lazily`` does so in bounded memory.

A receiver that is several versions behind thus commits once. Per element, in the order of the deltas: distances add up
modulo 2^width, new bits replace earlier changes, and later distances move new bits. Per tensor, changes before a tensor
in full are dropped, and later ones are applied to a copy. The deltas' own arrays are never written.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.codec.delta_object import batch_starts, sizes_by_tensor
from vllm_delta_sync.codec.delta_reader import LazyDelta, batch_stops
from vllm_delta_sync.errors import ChainError
from vllm_delta_sync.format.codecs import BASE_CODECS
from vllm_delta_sync.format.dtypes import DType
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.bits import BaseLookup, BaseTensor, Bits, Positions, apply_distances, order_masks
from vllm_delta_sync.tensors.changes import Changes, Full, Sparse

BATCH_ELEMENTS = 4 * 1024 * 1024
"""Tensors are merged in batches of about this many elements, or of one larger tensor. An element takes 16 bytes of
scratch memory."""

Counts = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint32]


def merge_changes(parts: Sequence[Changes], table: TensorTable) -> Changes:
    """Return changes with exactly the effect of applying ``parts`` in order.

    Time and memory are O(changed elements) for any number of parts, plus one check of each part per 4096 consecutive
    elements of the model that contain a change.

    Args:
        parts: decoded against ``table``; each starts where the one before ends. None may be an anchor, whose tensors in
            full declare no change of fingerprint: merge the parts after the last anchor.

    Returns:
        per dtype at most one relative and one absolute group, ids ascending. A tensor may be in both, with no
        position in common. Distances that add up to 0 are omitted, and so are tensors without other changes. New bits
        are kept, since the old ones are unknown. ``full`` ascends by id. ``fingerprints`` are the sums. Arrays may be
        shared with ``parts``.

    Raises:
        ChainError: a part is an anchor.
    """
    fingerprints = _summed(parts, table)
    last_full = np.full(len(table), -1, np.int64)
    fulls: dict[int, Full] = {}
    layers: dict[str, list[Sparse]] = {}
    for number, part in enumerate(parts):
        for group in part.sparse:
            layers.setdefault(group.dtype, []).append(group)
        for full in part.full:
            last_full[full.id], fulls[full.id] = number, full
    merged = Changes(full=_merged_fulls(parts, fulls, last_full))
    for dtype in sorted(layers):
        merged.sparse += merge_groups(layers[dtype], last_full)
    carried = {tensor for group in merged.sparse for tensor in group.ids.tolist()} | set(fulls)
    # A reader refuses fingerprints of tensors that are not carried, which shows that the deltas are inconsistent. So
    # only those of 0 are dropped.
    merged.fingerprints = {
        tensor: fingerprints[tensor]
        for tensor in sorted(fingerprints)
        if tensor in carried or fingerprints[tensor] != Fingerprint()
    }
    return merged


def warm_up(elements: Iterable[DType]) -> None:
    """Compile the loops for these element types now, so that no later merge waits for it."""
    positions, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for element in elements:
        bits = np.empty(0, element.uint)
        group = Sparse(element.name, np.empty(0, np.uint32), counts, positions, bits, relative=True)
        _Output.of([group]).add([group, group], np.empty(0, np.int64))
        apply_distances(element, bits, positions, bits)


def _summed(parts: Sequence[Changes], table: TensorTable) -> dict[int, Fingerprint]:
    sums: dict[int, Fingerprint] = {}
    for number, part in enumerate(parts):
        for full in part.full:
            if full.id not in part.fingerprints:
                raise ChainError(
                    f"part {number} of {len(parts)} to merge has tensor {table[full.id].name!r} in full without a "
                    "change of fingerprint, so it is an anchor; apply it, and merge the parts after it"
                )
        for tensor, change in part.fingerprints.items():
            sums[tensor] = sums.get(tensor, Fingerprint()) + change
    return sums


def _merged_fulls(parts: Sequence[Changes], fulls: dict[int, Full], last_full: Counts) -> list[Full]:
    """Return the last tensors in full, with later changes applied; those with later changes are copies."""
    if not fulls:
        return []
    moved: dict[int, Bits] = {}
    for number, part in enumerate(parts):
        for group in part.sparse:
            for row in np.flatnonzero((last_full[group.ids] >= 0) & (last_full[group.ids] < number)).tolist():
                tensor = int(group.ids[row])
                if tensor not in moved:
                    moved[tensor] = np.array(fulls[tensor].bits)
                apply_row(moved[tensor], group, row)
    return [Full(tensor, moved.get(tensor, fulls[tensor].bits)) for tensor in sorted(fulls)]


def apply_row(bits: Bits, group: Sparse, row: int) -> None:
    """Apply row ``row`` of ``group`` to its tensor's (numel,) bits, in place."""
    changed = group.rows(row, row + 1)
    if group.relative:
        apply_distances(group.element, bits, changed.positions, changed.data)
    else:
        bits[changed.positions] = changed.data


def merge_groups(groups: list[Sparse], last_full: Counts) -> list[Sparse]:
    """Merge groups of one dtype, given in order of application, except tensors that are sent in full.

    Args:
        last_full: (len(table),) at least 0 for a tensor in full, else -1.

    Returns:
        at most one relative and one absolute group; none is empty.
    """
    if len(groups) == 1 and not np.any(last_full[groups[0].ids] >= 0):
        return groups
    output = _Output.of(groups)
    for batch in _batches(groups):
        output.add(batch, last_full)
    return output.groups()


def _batches(groups: list[Sparse]) -> Iterator[list[Sparse]]:
    """Split groups between tensors, as views: all layers of a tensor are in one batch."""
    tensors, sizes = sizes_by_tensor([group.ids for group in groups], [group.counts for group in groups])
    starts = batch_starts(sizes, BATCH_ELEMENTS)
    cuts = [np.append(np.searchsorted(group.ids, tensors[starts]), group.ids.size).tolist() for group in groups]
    for batch in range(starts.size):
        yield [group.rows(rows[batch], rows[batch + 1]) for group, rows in zip(groups, cuts, strict=True)]


@dataclass
class _Half:
    """Buffers for the relative or the absolute group of a result, filled batch by batch."""

    positions: Positions
    data: Bits
    ids: list[Ids]
    counts: list[Counts]
    used: int = 0

    @classmethod
    def of(cls, size: int, element: DType) -> "_Half":
        return cls(np.empty(size, np.int64), np.empty(size, element.uint), [], [])

    def extend(self, tensors: Ids, counts: Counts, used: int) -> None:
        kept = counts > 0
        self.ids.append(tensors[kept])
        self.counts.append(counts[kept])
        self.used += used

    def group(self, dtype: str, relative: bool) -> Sparse:
        # Frees the unused end, which a view would keep; no other array shares this memory yet.
        self.positions.resize(self.used, refcheck=False)
        self.data.resize(self.used, refcheck=False)
        ids, counts = np.concatenate(self.ids), np.concatenate(self.counts)
        return Sparse(dtype, ids, counts, self.positions, self.data, relative)


@dataclass
class _Output:
    """Buffers for the result of one dtype."""

    element: DType
    relative: _Half
    absolute: _Half

    @classmethod
    def of(cls, groups: list[Sparse]) -> "_Output":
        """Return buffers for the largest possible result of merging ``groups``."""
        element = groups[0].element
        sizes = {kind: sum(g.positions.size for g in groups if g.relative is kind) for kind in (True, False)}
        return cls(element, _Half.of(sizes[True], element), _Half.of(sizes[False], element))

    def add(self, groups: list[Sparse], last_full: Counts) -> None:
        """Merge ``groups`` and append the result."""
        from vllm_delta_sync.codec import merge_kernels

        ids = np.concatenate([group.ids for group in groups])
        counts = np.concatenate([group.counts for group in groups])
        relative = np.repeat([group.relative for group in groups], [group.ids.size for group in groups])
        # A stable sort keeps the layers of a tensor in order of application.
        order = np.argsort(ids, kind="stable")
        order = order[last_full[ids[order]] < 0]
        stops = np.cumsum(counts)
        tensors, firsts = np.unique(ids[order], return_index=True)
        tallies = np.zeros(tensors.size, np.int64), np.zeros(tensors.size, np.int64)
        used = merge_kernels.merge_layers(
            np.append(firsts, order.size).astype(np.int64),
            (stops - counts)[order],
            stops[order],
            relative[order],
            np.concatenate([group.positions for group in groups]),
            np.concatenate([group.data for group in groups]).astype(self.element.uint, copy=False),
            *order_masks(self.element),
            self.relative.positions[self.relative.used :],
            self.relative.data[self.relative.used :],
            tallies[0],
            self.absolute.positions[self.absolute.used :],
            self.absolute.data[self.absolute.used :],
            tallies[1],
        )
        for half, tally, count in zip((self.relative, self.absolute), tallies, used, strict=True):
            half.extend(tensors, tally, int(count))

    def groups(self) -> list[Sparse]:
        """Return the groups that are not empty."""
        halves = ((True, self.relative), (False, self.absolute))
        return [half.group(self.element.name, relative) for relative, half in halves if half.used]


class RollingBase:
    """Base bits that advance through the versions being merged: the ``old`` of parts of codec ``tiled``.

    Args:
        old: the bits at the first version. They are not changed: a tensor is copied before its first change.
    """

    def __init__(self, old: BaseLookup) -> None:
        self._old = old
        self._bits: dict[int, Bits] = {}

    def __call__(self, tensor: int) -> BaseTensor:
        bits = self._bits.get(tensor)
        return self._old(tensor) if bits is None else BaseTensor(bits)

    def apply(self, group: Sparse, wanted: npt.NDArray[np.bool_]) -> None:
        """Apply distances to the tensors of the mask ``wanted``, (tensors of the table,) bool."""
        for tensor, positions, distances in group.tensors():
            if wanted[tensor]:
                if tensor not in self._bits:
                    self._bits[tensor] = np.array(self._old(tensor).bits)
                apply_distances(group.element, self._bits[tensor], positions, distances)

    def replace(self, full: Full) -> None:
        self._bits[full.id] = np.array(full.bits)

    def clear(self) -> None:
        self._bits.clear()


def merge_lazily(
    parts: Sequence[LazyDelta], table: TensorTable, base: RollingBase | None = None
) -> Iterator[Sparse | Full]:
    """Yield the result of ``merge_changes``, piece by piece: by dtype, tensors ascending, each in one piece only.

    Takes the memory of one batch of ``LAZY_ELEMENTS``, or of one larger tensor.

    Args:
        parts: in order of application, and not read before. Objects of one version may be in any order; a tensor that
            one of them carries in full is in no other.
        base: the ``old`` of the parts, if one of them has codec ``tiled``.

    Raises:
        FormatError, LimitError: a part is damaged. UnsupportedError: see ``LazyDelta.take``.
    """
    last_full, last_context = (np.full(len(table), -1, np.int64) for _ in range(2))
    for number, part in enumerate(parts):
        last_full[list(part.full)] = number
        if part.codec in BASE_CODECS:
            for ids, _ in part.directory.values():
                last_context[ids] = number
    in_full = np.flatnonzero(last_full >= 0)
    dtypes = {dtype for part in parts for dtype in part.directory} | {table[tensor].dtype for tensor in in_full}
    for dtype in sorted(dtypes):
        whole = np.array([tensor for tensor in in_full if table[tensor].dtype == dtype], np.int64)
        start = 0
        for stop in batch_stops(parts, dtype, len(table), None if base is None else table):
            chosen = whole[(whole >= start) & (whole < stop)].tolist()
            layers = _taken(parts, dtype, stop, chosen, last_context, base)
            if layers:
                yield from merge_groups([group for _, group in layers], last_full)
            for tensor in chosen:
                yield _apply_later(parts[last_full[tensor]].full[tensor], int(last_full[tensor]), layers)
            start = stop


def _taken(
    parts: Sequence[LazyDelta],
    dtype: str,
    stop: int,
    whole: list[int],
    last_context: npt.NDArray[np.int64],
    base: RollingBase | None,
) -> list[tuple[int, Sparse]]:
    """Return the changes of all parts to the tensors of a batch: (number of the part, changed elements).

    Args:
        whole: tensors of the batch that a part carries in full.
        last_context: (tensors of the table,) the last part of codec ``tiled`` that changes a tensor.
    """
    layers: list[tuple[int, Sparse]] = []
    first = taken = 0
    for number, part in enumerate(parts):
        layers += [(number, group) for group in part.take(dtype, stop)]
        if base is None or (number + 1 < len(parts) and parts[number + 1].version == part.version):
            continue
        # After the last object of a version, since all of them start from the same bits.
        wanted = last_context > number
        for _, group in layers[taken:]:
            base.apply(group, wanted)
        for tensor in whole:
            for carrier in parts[first : number + 1]:
                if wanted[tensor] and tensor in carrier.full:
                    base.replace(carrier.full[tensor])
        first, taken = number + 1, len(layers)
    if base is not None:
        base.clear()
    return layers


def _apply_later(full: Full, number: int, layers: list[tuple[int, Sparse]]) -> Full:
    """Return a tensor in full with the changes of later parts; a copy if there are any."""
    rows = [
        (group, int(row)) for later, group in layers if later > number for row in np.flatnonzero(group.ids == full.id)
    ]
    bits = np.array(full.bits) if rows else full.bits
    for group, row in rows:
        apply_row(bits, group, row)
    return Full(full.id, bits)

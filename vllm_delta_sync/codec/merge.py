"""Fold consecutive deltas into one, so that a receiver that is several versions behind commits once.

Per element, in the order of the parts: distances add up modulo 2^width, new bits replace whatever came before, and a
distance after new bits moves those. Per tensor, everything before a tensor in full is dropped, and everything after
it is applied to a copy. What the parts read is never written.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.codec.delta_object import batch_starts, sizes_by_tensor
from vllm_delta_sync.codec.delta_reader import LazyDelta, batch_stops
from vllm_delta_sync.errors import ChainError
from vllm_delta_sync.format.dtypes import DType
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.bits import BaseLookup, BaseTensor, Bits, Positions, apply_distances, order_masks
from vllm_delta_sync.tensors.changes import Changes, Full, Sparse

BATCH_ELEMENTS = 4 * 1024 * 1024
"""Tensors are folded in batches of about this many elements: bounds scratch memory to 16 B each, or that of one
tensor where it has more."""

Counts = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint32]


def merge_changes(parts: Sequence[Changes], table: TensorTable) -> Changes:
    """One Changes that does what ``parts`` do when they are applied in order, bit for bit.

    Takes O(changed elements) time and memory for any number of parts, plus a look at each part for every 4096
    consecutive elements of the model in which something changed.

    Args:
        parts: decoded against ``table``; each starts where the one before ends. Of anchors, whose tensors in full
            declare no change of fingerprint, there may be none: fold what follows the last one.

    Returns:
        per dtype at most one relative and one absolute group, ids ascending. A tensor may be in both, with no
        position in common. Distances that add up to 0 are left out, and with them tensors in which nothing else
        changed; new bits stay, since what they replace is not known. ``full`` ascends by id. ``fingerprints`` are the
        sums. Arrays may be shared with ``parts``.

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
    folded = Changes(full=_folded_fulls(parts, fulls, last_full))
    for dtype in sorted(layers):
        folded.sparse += merge_groups(layers[dtype], last_full)
    carried = {tensor for group in folded.sparse for tensor in group.ids.tolist()} | set(fulls)
    # A reader refuses fingerprints of what is not carried. One that is not 0 is kept for it to refuse.
    folded.fingerprints = {
        tensor: fingerprints[tensor]
        for tensor in sorted(fingerprints)
        if tensor in carried or fingerprints[tensor] != Fingerprint()
    }
    return folded


def warm_up(elements: Iterable[DType]) -> None:
    """Compile the loops for these element types now, so that no fold pays for it."""
    nowhere, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for element in elements:
        bits = np.empty(0, element.uint)
        group = Sparse(element.name, np.empty(0, np.uint32), counts, nowhere, bits, relative=True)
        _Output.of([group]).add([group, group], np.empty(0, np.int64))
        apply_distances(element, bits, nowhere, bits)


def _summed(parts: Sequence[Changes], table: TensorTable) -> dict[int, Fingerprint]:
    sums: dict[int, Fingerprint] = {}
    for number, part in enumerate(parts):
        for full in part.full:
            if full.id not in part.fingerprints:
                raise ChainError(
                    f"part {number} of {len(parts)} to fold holds tensor {table[full.id].name!r} in full without a "
                    "change of fingerprint: it is an anchor; apply it, and fold what follows"
                )
        for tensor, change in part.fingerprints.items():
            sums[tensor] = sums.get(tensor, Fingerprint()) + change
    return sums


def _folded_fulls(parts: Sequence[Changes], fulls: dict[int, Full], last_full: Counts) -> list[Full]:
    """The last tensors in full, with what came after them: copies of those that something came after."""
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
    """Do to a tensor what row number ``row`` of ``group`` says; (numel,) bits, in place."""
    start = int(group.counts[:row].sum())
    piece = slice(start, start + int(group.counts[row]))
    if group.relative:
        apply_distances(group.element, bits, group.positions[piece], group.data[piece])
    else:
        bits[group.positions[piece]] = group.data[piece]


def merge_groups(groups: list[Sparse], last_full: Counts) -> list[Sparse]:
    """Fold groups of one dtype, given in order of application, without the tensors that are sent in full.

    Args:
        last_full: (len(table),) at least 0 for a tensor in full.

    Returns:
        at most one relative and one absolute group that hold anything.
    """
    if len(groups) == 1 and not np.any(last_full[groups[0].ids] >= 0):
        return groups
    output = _Output.of(groups)
    for batch in _batches(groups):
        output.add(batch, last_full)
    return output.groups()


def _batches(groups: list[Sparse]) -> Iterator[list[Sparse]]:
    """Cut groups, as views, between tensors: all layers of a tensor are in one batch."""
    tensors, sizes = sizes_by_tensor([group.ids for group in groups], [group.counts for group in groups])
    starts = batch_starts(sizes, BATCH_ELEMENTS)
    row_cuts = [np.append(np.searchsorted(group.ids, tensors[starts]), group.ids.size).tolist() for group in groups]
    offsets = [np.append(0, np.cumsum(group.counts)) for group in groups]
    for batch in range(starts.size):
        pieces = []
        for group, cuts, offset in zip(groups, row_cuts, offsets, strict=True):
            first, last = cuts[batch], cuts[batch + 1]
            start, stop = int(offset[first]), int(offset[last])
            pieces.append(
                Sparse(
                    group.dtype,
                    group.ids[first:last],
                    group.counts[first:last],
                    group.positions[start:stop],
                    group.data[start:stop],
                    group.relative,
                )
            )
        yield pieces


@dataclass
class _Half:
    """Room for the relative or the absolute part of a result, filled batch by batch."""

    positions: Positions
    data: Bits
    ids: list[Ids]
    counts: list[Counts]
    used: int = 0

    @classmethod
    def of(cls, size: int, element: DType) -> "_Half":
        return cls(np.empty(size, np.int64), np.empty(size, element.uint), [], [])

    def grew(self, tensors: Ids, counts: Counts, used: int) -> None:
        kept = counts > 0
        self.ids.append(tensors[kept])
        self.counts.append(counts[kept])
        self.used += used

    def group(self, dtype: str, relative: bool) -> Sparse:
        # Gives the unused end back, where a view would hold it; nobody else has seen these arrays.
        self.positions.resize(self.used, refcheck=False)
        self.data.resize(self.used, refcheck=False)
        ids, counts = np.concatenate(self.ids), np.concatenate(self.counts)
        return Sparse(dtype, ids, counts, self.positions, self.data, relative)


@dataclass
class _Output:
    """The result for one dtype."""

    element: DType
    relative: _Half
    absolute: _Half

    @classmethod
    def of(cls, groups: list[Sparse]) -> "_Output":
        """Room for what folding ``groups`` can give at most."""
        element = groups[0].element
        sizes = {kind: sum(g.positions.size for g in groups if g.relative is kind) for kind in (True, False)}
        return cls(element, _Half.of(sizes[True], element), _Half.of(sizes[False], element))

    def add(self, groups: list[Sparse], last_full: Counts) -> None:
        """Fold ``groups`` into the room that is left."""
        from vllm_delta_sync.codec import merge_kernels

        ids = np.concatenate([group.ids for group in groups])
        counts = np.concatenate([group.counts for group in groups])
        relative = np.repeat([group.relative for group in groups], [group.ids.size for group in groups])
        # Stable: the layers of a tensor stay in order of application.
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
            half.grew(tensors, tally, int(count))

    def groups(self) -> list[Sparse]:
        """Those that hold anything."""
        halves = ((True, self.relative), (False, self.absolute))
        return [half.group(self.element.name, relative) for relative, half in halves if half.used]


class RollingBase:
    """Tensors on their way through the versions that are folded: the ``old`` of parts of codec ``context``.

    Args:
        old: the bits at the first version. They stay as they are: a tensor is copied before it moves.
    """

    def __init__(self, old: BaseLookup) -> None:
        self._old = old
        self._bits: dict[int, Bits] = {}

    def __call__(self, tensor: int) -> BaseTensor:
        bits = self._bits.get(tensor)
        return self._old(tensor) if bits is None else BaseTensor(bits)

    def move(self, group: Sparse, wanted: npt.NDArray[np.bool_]) -> None:
        """Apply distances to the tensors that are wanted; (tensors of the table,) mask."""
        for tensor, positions, distances in group.tensors():
            if wanted[tensor]:
                if tensor not in self._bits:
                    self._bits[tensor] = np.array(self._old(tensor).bits)
                apply_distances(group.element, self._bits[tensor], positions, distances)

    def replace(self, full: Full) -> None:
        self._bits[full.id] = np.array(full.bits)

    def forget(self) -> None:
        self._bits.clear()


def merge_lazily(
    parts: Sequence[LazyDelta], table: TensorTable, moving: RollingBase | None = None
) -> Iterator[Sparse | Full]:
    """What ``fold.fold`` makes of the parts, piece by piece: by dtype, tensors ascending, each in one piece only.

    Takes the memory of one batch of ``LAZY_ELEMENTS``, or of one tensor where that is more.

    Args:
        parts: in order of application; taken from the beginning to the end. Objects of one version may stand in any
            order, and share no tensor that one of them carries in full.
        moving: what the parts have as their ``old``, if one of them is of codec ``context``.

    Raises:
        FormatError, LimitError: a part is damaged. UnsupportedError: see ``LazyDelta.take``.
    """
    last_full, last_context = (np.full(len(table), -1, np.int64) for _ in range(2))
    for number, part in enumerate(parts):
        last_full[list(part.full)] = number
        if part.codec == "context":
            for ids, _ in part.directory.values():
                last_context[ids] = number
    in_full = np.flatnonzero(last_full >= 0)
    dtypes = {dtype for part in parts for dtype in part.directory} | {table[tensor].dtype for tensor in in_full}
    for dtype in sorted(dtypes):
        whole = np.array([tensor for tensor in in_full if table[tensor].dtype == dtype], np.int64)
        start = 0
        for stop in batch_stops(parts, dtype, len(table), None if moving is None else table):
            chosen = whole[(whole >= start) & (whole < stop)].tolist()
            layers = _taken(parts, dtype, stop, chosen, last_context, moving)
            if layers:
                yield from merge_groups([group for _, group in layers], last_full)
            for tensor in chosen:
                yield _moved(parts[last_full[tensor]].full[tensor], int(last_full[tensor]), layers)
            start = stop


def _taken(
    parts: Sequence[LazyDelta],
    dtype: str,
    stop: int,
    whole: list[int],
    last_context: npt.NDArray[np.int64],
    moving: RollingBase | None,
) -> list[tuple[int, Sparse]]:
    """What all parts do to the tensors of a batch: (number of the part, changed elements).

    Args:
        whole: tensors of the batch that some part carries in full.
        last_context: (tensors of the table,) the last part of codec ``context`` that changes a tensor.
    """
    layers: list[tuple[int, Sparse]] = []
    first = taken = 0
    for number, part in enumerate(parts):
        layers += [(number, group) for group in part.take(dtype, stop)]
        if moving is None or (number + 1 < len(parts) and parts[number + 1].version == part.version):
            continue
        # Only now: all objects of a version start from the same bits.
        wanted = last_context > number
        for _, group in layers[taken:]:
            moving.move(group, wanted)
        for tensor in whole:
            for carrier in parts[first : number + 1]:
                if wanted[tensor] and tensor in carrier.full:
                    moving.replace(carrier.full[tensor])
        first, taken = number + 1, len(layers)
    if moving is not None:
        moving.forget()
    return layers


def _moved(full: Full, number: int, layers: list[tuple[int, Sparse]]) -> Full:
    """A tensor in full, with what later parts did to it: a copy, if they did anything."""
    rows = [
        (group, int(row)) for later, group in layers if later > number for row in np.flatnonzero(group.ids == full.id)
    ]
    bits = np.array(full.bits) if rows else full.bits
    for group, row in rows:
        apply_row(bits, group, row)
    return Full(full.id, bits)

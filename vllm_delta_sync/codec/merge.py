"""``merge`` merges consecutive deltas into one, tensor by tensor.

A receiver that is several versions behind thus commits once. Per element, in the order of the deltas: distances add up
modulo 2^width, new bits replace earlier changes, and later distances move new bits. Per tensor, changes before a tensor
in full are dropped, and later ones are applied to a copy.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.codec.delta_reader import DeltaReader, batch_stops
from vllm_delta_sync.format.codecs import BASE_CODECS
from vllm_delta_sync.format.table import DType, TensorTable
from vllm_delta_sync.tensors.changes import BaseLookup, BaseTensor, Bits, Full, Sparse, apply_distances, order_masks


def merge(
    steps: Sequence[Sequence[DeltaReader]],
    table: TensorTable,
    base: "RollingBase | None" = None,
    reading: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
) -> Iterator[Sparse | Full]:
    """Yield changes with exactly the effect of applying ``steps`` in order, by dtype, tensors ascending.

    Takes the memory of one batch of tensors: ``LAZY_ELEMENTS`` changed elements, and old bits if there is a ``base``.

    Args:
        steps: the objects of each step, not read before; each step starts where the one before ends. A tensor that an
            object carries in full is in no other of its step.
        base: the ``old`` of the objects, if one of them has codec ``tiled``.
        reading: returns what to be in while step n is read, such as a handler of its errors.

    Yields:
        Full, or Sparse. Of several steps, a tensor is in one Full, or in at most one relative and one absolute group,
        which have no position in common; distances that add up to 0 are left out, new bits are not, since the old ones
        are unknown. A single step is yielded as it is. Arrays may be shared with the objects' memory.

    Raises:
        FormatError, LimitError: an object is damaged. UnsupportedError: see ``DeltaReader.take``.
    """
    last_full, last_context = (np.full(len(table), -1, np.int64) for _ in range(2))
    carriers: dict[tuple[int, int], DeltaReader] = {}
    for number, parts in enumerate(steps):
        for part in parts:
            last_full[list(part.full)] = number
            carriers |= {(number, tensor): part for tensor in part.full}
            if part.codec in BASE_CODECS:
                for ids, _ in part.directory.values():
                    last_context[ids] = number
    in_full = np.flatnonzero(last_full >= 0)
    every = [part for parts in steps for part in parts]
    dtypes = {dtype for part in every for dtype in part.directory} | {table[tensor].dtype for tensor in in_full}
    for dtype in sorted(dtypes):
        whole = np.array([tensor for tensor in in_full if table[tensor].dtype == dtype], np.int64)
        start = 0
        for stop in batch_stops(every, dtype, len(table), table if len(steps) > 1 and base is not None else None):
            chosen = whole[(whole >= start) & (whole < stop)].tolist()
            layers: list[tuple[int, Sparse]] = []
            for number, parts in enumerate(steps):
                with reading(number):
                    taken = [group for part in parts for group in part.take(dtype, stop)]
                    layers += [(number, group) for group in taken]
                    if base is None or number + 1 == len(steps):
                        continue
                    # After the last object of a step, since all of them start from the same bits.
                    wanted = last_context > number
                    for group in taken:
                        base.apply(group, wanted)
                    for tensor in chosen:
                        if wanted[tensor] and (number, tensor) in carriers:
                            base.replace(carriers[number, tensor].full[tensor])
            if base is not None:
                base.clear()
            groups = [group for _, group in layers]
            yield from _merge_groups(groups, last_full) if len(steps) > 1 else groups
            for tensor in chosen:
                number = int(last_full[tensor])
                with reading(number):
                    full = carriers[number, tensor].full[tensor]
                yield _apply_later(full, number, layers)
            start = stop


def _apply_later(full: Full, number: int, layers: list[tuple[int, Sparse]]) -> Full:
    """Return a tensor in full with the changes of later parts; a copy if there are any."""
    rows = [
        (group, int(row)) for later, group in layers if later > number for row in np.flatnonzero(group.ids == full.id)
    ]
    bits = np.array(full.bits) if rows else full.bits
    for group, row in rows:
        apply_row(bits, group, row)
    return Full(full.id, bits)


def apply_row(bits: Bits, group: Sparse, row: int) -> None:
    """Apply row ``row`` of ``group`` to its tensor's (numel,) bits, in place."""
    changed = group.rows(row, row + 1)
    if group.relative:
        apply_distances(group.element, bits, changed.positions, changed.data)
    else:
        bits[changed.positions] = changed.data


def _merge_groups(groups: list[Sparse], last_full: npt.NDArray[np.int64]) -> list[Sparse]:
    """Merge groups of one dtype, given in order of application, except tensors that are sent in full.

    Args:
        last_full: (len(table),) at least 0 for a tensor in full, else -1.

    Returns:
        at most one relative and one absolute group; none is empty.
    """
    from vllm_delta_sync.codec import merge_kernels

    if not groups or (len(groups) == 1 and not np.any(last_full[groups[0].ids] >= 0)):
        return groups
    element = groups[0].element
    ids = np.concatenate([group.ids for group in groups])
    counts = np.concatenate([group.counts for group in groups])
    relative = np.repeat([group.relative for group in groups], [group.ids.size for group in groups])
    # A stable sort keeps the layers of a tensor in order of application.
    order = np.argsort(ids, kind="stable")
    order = order[last_full[ids[order]] < 0]
    stops = np.cumsum(counts)
    tensors, firsts = np.unique(ids[order], return_index=True)
    rooms = [sum(group.positions.size for group in groups if group.relative is kind) for kind in (True, False)]
    halves = [(np.empty(size, np.int64), np.empty(size, element.uint)) for size in rooms]
    tallies = [np.zeros(tensors.size, np.int64) for _ in rooms]
    used = merge_kernels.merge_layers(
        np.append(firsts, order.size).astype(np.int64),
        (stops - counts)[order],
        stops[order],
        relative[order],
        np.concatenate([group.positions for group in groups]),
        np.concatenate([group.data for group in groups]).astype(element.uint, copy=False),
        *order_masks(element),
        *halves[0],
        tallies[0],
        *halves[1],
        tallies[1],
    )
    found = []
    for kind, (positions, data), tally, count in zip((True, False), halves, tallies, used, strict=True):
        if count:
            # Frees the unused end, which a view would keep; no other array shares this memory yet.
            positions.resize(count, refcheck=False)
            data.resize(count, refcheck=False)
            found.append(Sparse(element.name, tensors[tally > 0], tally[tally > 0], positions, data, kind))
    return found


class RollingBase:
    """Base bits that advance through the versions being merged: the ``old`` of parts of codec ``tiled``.

    Args:
        old: the bits at the first version. They are not changed: a tensor is copied before its first change, once its
            bits are asked for.
    """

    def __init__(self, old: BaseLookup) -> None:
        self._old = old
        self._tensors: dict[int, BaseTensor] = {}
        self._pending: dict[int, list[tuple[Sparse, int]]] = defaultdict(list)

    def __call__(self, tensor: int) -> BaseTensor:
        found = self._tensors.get(tensor) or self._old(tensor)
        if tensor not in self._pending:
            return found
        self._tensors[tensor] = found
        return BaseTensor(lambda: self._moved(tensor), found.rectangles)

    def _moved(self, tensor: int) -> Bits:
        """Return a tensor's bits after the changes so far: few of a thousand steps may ask for them."""
        found, rows = self._tensors[tensor], self._pending.pop(tensor, [])
        if rows:
            bits = np.array(found.bits)
            for group, row in rows:
                apply_row(bits, group, row)
            self._tensors[tensor] = BaseTensor(bits, found.rectangles)
        return self._tensors[tensor].bits

    def apply(self, group: Sparse, wanted: npt.NDArray[np.bool_]) -> None:
        """Apply a group to the tensors of the mask ``wanted``, (tensors of the table,) bool."""
        for row in np.flatnonzero(wanted[group.ids]).tolist():
            self._pending[int(group.ids[row])].append((group, row))

    def replace(self, full: Full) -> None:
        self._tensors[full.id] = BaseTensor(full.bits, self._old(full.id).rectangles)
        self._pending.pop(full.id, None)

    def clear(self) -> None:
        self._tensors.clear()
        self._pending.clear()


def warm_up(elements: Iterable[DType]) -> None:
    """Compile the loops for these element types now, so that no later merge waits for it."""
    for element in elements:
        group = Sparse.empty(element, relative=True)
        _merge_groups([group, group], np.empty(0, np.int64))
        apply_distances(element, group.data, group.positions, group.data)

"""``BudgetSelection``: choose which changes a version sends within a ``Budget``, and measure what it holds back.

All changes have one order: by size, the largest first, then by tensor and position. The ranks find together where in it
the version ends, digit by digit, from sums of how many changes have each digit. So the shards of a model send what the
whole model would, and a publisher alone is a group of one.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainer_side.diff.baseline import Baseline
from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.encode.update_gate import PIECE_ELEMENTS, Difference, add_difference, squared_norm
from trainer_side.options import Budget
from trainer_side.ranks.group import Json, ProcessGroup
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.manifest import HeldBack, Manifest
from vllm_delta_sync.format.table import DType, TensorTable, has_values, values_of
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.changes import Bits, Positions

logger = guarded_logger(__name__)

FIRST_BYTES_PER_ELEMENT = 4.0
"""Estimate before a version was measured: more than ``plain`` and ``tiled`` take for 16-bit elements, so that the
first version is small rather than encoded twice."""
TARGET_SHARE = 0.95
"""Share of ``max_bytes`` that is aimed at: bytes per element vary a little between versions."""

NO_BOUND = Budget(max_share=1.0, exact_every=1)
"""Holds nothing back: to learn when all is sent that an earlier publisher's budget held back."""

DIGIT_BITS = 12
"""Bits of a place that are found at once: each rank sends a number for each value that they can have."""

Sizes = npt.NDArray[np.uint32]
"""(n,) sizes of changes, as ``by_size`` returns them."""
Numbers = npt.NDArray[np.integer]


class Place(NamedTuple):
    """A place in the order of all changes.

    Attributes:
        size: as in ``by_size``; 2³² is behind all. tensor: id in the run's table. position: in that tensor.
    """

    size: int
    tensor: int = 0
    position: int = 0


@dataclass
class _Selection:
    """What was found out about the version under way. All but ``end`` is of this rank's part of the weights.

    Attributes:
        compared: ids of tensors of the baseline, as all ids here. always: changed elements that are never held back.
        sizes: tensor id → sizes of the changes that are not held back, in ascending order of position.
        end: the changes from here on are held back; None if all are sent.
        held: tensor id → difference of what is held back.
        gain: what all changes add to Σ w² of the weights. squares: Σ w² of the version; None if unknown.
    """

    compared: set[int]
    always: int = 0
    sizes: dict[int, Sizes] = field(default_factory=dict)
    end: Place | None = None
    held: dict[int, Difference] = field(default_factory=dict)
    gain: float = 0.0
    squares: float | None = None


class BudgetSelection:
    """Selects the changes of one version at a time. The baseline holds the bits after the changes.

    Each rank has the state of its own part of the weights, and all make the same calls. A selection costs O(changed
    elements) time and, until the version is encoded, four bytes for each.

    Args:
        baseline: of this rank. table: the run's tensors. places: as in ``RunWeights``. group: the ranks.
    """

    def __init__(
        self,
        budget: Budget,
        baseline: Baseline,
        table: TensorTable,
        places: Sequence[tuple[int, Box]],
        group: ProcessGroup,
    ) -> None:
        self._budget, self._baseline, self._table, self._group = budget, baseline, table, group
        # Elements of tied tensors that change alike have one place, so that a server that ties them serves one of the
        # two states.
        first = {tensor: targets[0] for targets in baseline.targets_of.values() for tensor in targets}
        self._places = [places[first.get(tensor, tensor)] for tensor in range(len(places))]
        self._bytes_per_element = FIRST_BYTES_PER_ELEMENT
        self._squares: float | None = None
        self._held: dict[int, Difference] = {}
        self._earlier: HeldBack | None = None
        self._unseen: set[int] = set()
        self._selection: _Selection | None = None

    def start(self, current: Manifest) -> None:
        """Start with the baseline as the current version; which tensors it holds back is not known."""
        self._selection, self._squares = None, None
        self._held, self._earlier, self._unseen = {}, current.held_back, set()
        if self._earlier is not None:
            given = {tensor for targets in self._baseline.targets_of.values() for tensor in targets}
            self._unseen = given or set(range(len(self._baseline.table)))
        self._learn(current)

    def is_exact_due(self, version: int, newest: Manifest) -> bool:
        """Return whether a version after ``newest`` must be exact."""
        every = self._budget.exact_every
        return every is not None and version - newest.exact >= every

    def encode(self, pending: PendingDelta, exact: bool, newest: Manifest, work: Callable[[], int]) -> HeldBack | None:
        """Encode the changes of a pending delta that are within the budget, and hold back the others.

        Every rank calls it with its own delta; after an error of any rank, all raise.

        Args:
            exact: hold nothing back. newest: the version before it.
            work: encodes what the delta has left; returns the bytes of this rank's objects.

        Returns:
            What all ranks hold back; None if the version is exact.
        """
        selection = self._selection = _Selection(set(pending.compared))
        least = Place(int(by_size(np.array([self._budget.min_change or 0.0], np.float32))[0]) + 1)

        def measure() -> Json:
            self._measure_changes(pending, selection, exact)
            return selection.always, sum(int(np.count_nonzero(of >= least.size)) for of in selection.sizes.values())

        always, small = self._group.sums("budget: changes", measure)
        if not exact:
            end = self._find_end(pending, selection, self._most() - int(always))
            selection.end = min(end, least) if small and end is not None else least if small else end

        def encoded() -> Json:
            self._hold_back(pending, selection)
            kept = sum(of.size for of in selection.sizes.values())
            held = sum(found.changed for found in self._all_held(selection).values())
            return work(), kept, held, len(self._unseen - selection.compared)

        most = math.inf if exact or self._budget.max_bytes is None else self._budget.max_bytes
        while True:
            size, kept, held, unseen = map(int, self._group.sums("budget: size", encoded))
            if size <= most or not kept:
                break
            selection.end = self._find_end(pending, selection, int(TARGET_SHARE * kept * most / size))
        if size > most and self._group.is_rank0:
            logger.warning("integer elements, always sent, take %d bytes; max_bytes is %d", size, most)
        return self._held_back(selection, held, unseen > 0, newest)

    def mark_durable(self, manifest: Manifest) -> None:
        """Record that the version encoded last is now durable."""
        selection, self._selection = self._selection, None
        if selection is None:
            return
        self._held = self._all_held(selection)
        self._unseen -= selection.compared
        self._squares = selection.squares
        self._learn(manifest)

    def _learn(self, manifest: Manifest) -> None:
        if manifest.held_back is not None and manifest.changed:
            self._bytes_per_element = manifest.payload_bytes / manifest.changed

    def _measure_changes(self, pending: PendingDelta, selection: _Selection, exact: bool) -> None:
        total = Difference()
        for tensor, found in pending.elements(PIECE_ELEMENTS):
            element, sizes = self._baseline.table[tensor].element, []
            for _, before, now in found:
                if self._squares is not None:
                    add_difference(total, element, before, now, True, True)
                if exact or not has_values(element):
                    selection.always += before.size
                else:
                    sizes.append(by_size(relative_changes(element, before, now)))
            if sizes:
                selection.sizes[tensor] = np.concatenate(sizes)
        selection.gain = total.squares_gain

    def _most(self) -> int:
        """Return the most elements that a version may send."""
        bounds = [self._table.total]
        if self._budget.max_share is not None:
            bounds.append(int(self._budget.max_share * self._table.total))
        if self._budget.max_bytes is not None:
            bounds.append(int(TARGET_SHARE * self._budget.max_bytes / self._bytes_per_element))
        return min(bounds)

    # Where the version ends

    def _find_end(self, pending: PendingDelta, selection: _Selection, most: int) -> Place | None:
        """Return the first place in the order of all ranks' changes whose changes do not fit; None if all do.

        Args:
            most: changes that fit.
        """
        size, room = self._find(max(0, most), 1 << 32, lambda: selection.sizes.values())
        if size < 0:
            return None
        tensor = position = 0
        if room:
            tensor, room = self._find(room, len(self._table), lambda: self._tied_tensors(selection, size))
        if room:
            numel = self._table[tensor].numel
            position, _ = self._find(room, numel, lambda: self._tied_positions(pending, selection, size, tensor))
        return Place(size, tensor, position)

    def _find(self, room: int, below: int, values: Callable[[], Iterable[Numbers]]) -> tuple[int, int]:
        """Return the smallest value up to which all ranks have more changes than ``room``, and what smaller ones leave.

        Args:
            below: larger than all values. values: returns those of this rank's changes, in (n,) arrays.

        Returns:
            −1 and 0 if all changes fit.
        """
        found, left = 0, list[Numbers]()

        def count(known: int, shift: int) -> list[int]:
            """Count this rank's values by the bits from ``shift`` to ``known``, if those above are as in ``found``."""
            left[:] = [of[of >> known == found >> known] for of in left] if left else values()
            counts = np.zeros(1 << known - shift, np.int64)
            for of in left:
                counts += np.bincount(of >> shift & counts.size - 1, minlength=counts.size)
            return counts.tolist()

        known = (below - 1).bit_length()
        while known:
            shift = max(0, known - DIGIT_BITS)
            totals = np.cumsum(self._group.sums("budget: places", partial(count, known, shift)))
            beyond = np.flatnonzero(totals > room)
            if not beyond.size:
                return -1, 0
            digit = int(beyond[0])
            found, room = found | digit << shift, room - (int(totals[digit - 1]) if digit else 0)
            known = shift if room else 0
        return found, room

    def _tied_tensors(self, selection: _Selection, size: int) -> Iterator[Numbers]:
        """Yield the tensors of the changes of one size."""
        for tensor, of in selection.sizes.items():
            yield np.broadcast_to(np.int64(self._places[tensor][0]), int(np.count_nonzero(of == size)))

    def _tied_positions(
        self, pending: PendingDelta, selection: _Selection, size: int, tensor: int
    ) -> Iterator[Numbers]:
        """Yield the positions of the changes of one size and tensor."""
        for part, of in selection.sizes.items():
            if self._places[part][0] == tensor:
                yield self._positions(pending, part, of == size)

    def _positions(self, pending: PendingDelta, tensor: int, chosen: npt.NDArray[np.bool_]) -> Positions:
        """Return where the chosen changes of a tensor of the baseline are in the whole tensor."""
        if not chosen.any():
            return np.empty(0, np.int64)
        return self._places[tensor][1].positions(pending.positions(tensor)[chosen])

    # What is held back

    def _hold_back(self, pending: PendingDelta, selection: _Selection) -> None:
        """Hold back this rank's changes from the end of the version on."""
        end = selection.end
        if end is None:
            return
        pending.sparse = True
        for tensor, of in list(selection.sizes.items()):
            keep, ties = of < end.size, of == end.size
            if self._places[tensor][0] < end.tensor:
                keep |= ties
            elif self._places[tensor][0] == end.tensor:
                keep[ties] = self._positions(pending, tensor, ties) < end.position
            if keep.all():
                continue
            before, after = pending.hold_back(tensor, keep)
            result = selection.held.setdefault(tensor, Difference())
            element = self._baseline.table[tensor].element
            for start in range(0, before.size, PIECE_ELEMENTS):
                piece = slice(start, start + PIECE_ELEMENTS)
                add_difference(result, element, before[piece], after[piece], True, True)
            selection.sizes[tensor] = of[keep]
            if not selection.sizes[tensor].size:
                del selection.sizes[tensor]

    def _held_back(self, selection: _Selection, elements: int, unseen: bool, newest: Manifest) -> HeldBack | None:
        """Return what the version holds back.

        Args:
            elements: of all ranks. unseen: whether there are more, in tensors that were not compared yet.
        """
        share = 0.0
        if unseen and self._earlier is not None:
            elements += self._earlier.elements
            share = math.inf if self._earlier.relative_norm is None else self._earlier.relative_norm
        if self._squares is not None:
            gain = selection.gain - sum(held.squares_gain for held in selection.held.values())
            selection.squares = self._squares + gain
        if not elements:
            return None

        def measure() -> Json:
            if selection.squares is None or not 0 <= selection.squares < math.inf:
                selection.squares = self._measure()
            return sum(found.distance for found in self._all_held(selection).values()), selection.squares

        distance, squares = self._group.sums("budget: distance", measure)
        far = math.hypot(math.sqrt(distance / squares), share) if squares else math.inf
        return HeldBack(
            elements=elements,
            relative_norm=float(f"{far:.6g}") if math.isfinite(far) else None,
            exact=newest.exact,
        )

    def _all_held(self, selection: _Selection) -> dict[int, Difference]:
        """Return what is held back by tensor id, of tensors that this version did not compare too."""
        rest = {tensor: found for tensor, found in self._held.items() if tensor not in selection.compared}
        return rest | selection.held

    def _measure(self) -> float:
        """Return Σ w² of the baseline: one pass over the model."""
        read = self._baseline.read
        return sum(squared_norm(spec.element, read(tensor)) for tensor, spec in enumerate(self._baseline.table))


def check_dtypes(table: TensorTable) -> None:
    """Raise UsageError if elements of a tensor mean something only together with their scales."""
    packed = ("weight_packed", "_blocks")
    coded = next((spec for spec in table if spec.dtype.startswith("F8_") or spec.name.endswith(packed)), None)
    if coded is not None:
        raise UsageError(
            f"budget is set, and tensor {coded.name!r} has dtype {coded.dtype}: its elements and their scales belong "
            "to one state, of which a budget would send parts; leave budget out, or publish 16-bit weights"
        )


def relative_changes(element: DType, before: Bits, now: Bits) -> npt.NDArray[np.float32]:
    """Return |new − old| / |old| of (n,) elements; infinite if a value is zero or not finite before or after."""
    with np.errstate(all="ignore"):
        old, new = values_of(element, before), values_of(element, now)
        sizes = np.abs((new - old) / old)
        sizes[(new == 0) | ~np.isfinite(sizes)] = np.inf
        return sizes.astype(np.float32)


def by_size(scores: npt.NDArray[np.float32]) -> Sizes:
    """Return (n,) numbers that ascend where (n,) scores of at least 0 descend; equal ones stay equal."""
    return ~scores.view(np.uint32)

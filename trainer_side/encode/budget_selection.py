"""``BudgetSelection``: choose which changes a version sends within a ``Budget``, and measure what it holds back."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trainer_side.diff.baseline import Baseline
from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.encode.update_gate import PIECE_ELEMENTS, Difference, add_difference, squared_norm
from trainer_side.options import Budget
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.dtypes import DType, has_values, values_of
from vllm_delta_sync.format.manifest import HeldBack, Manifest
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.tensors.bits import Bits

logger = guarded_logger(__name__)

FIRST_BYTES_PER_ELEMENT = 4.0
"""Estimate before a version was measured: more than ``plain`` and ``tiled`` take for 16-bit elements, so that the
first version is small rather than encoded twice."""
TARGET_SHARE = 0.95
"""Share of ``max_bytes`` that is aimed at: bytes per element vary a little between versions."""

_HALF, _LOW = np.uint32(16), np.uint32(0xFFFF)

Scores = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


@dataclass
class _Selection:
    """What was found out about the version under way.

    Attributes:
        compared: tensor ids. always: changed elements that are never held back.
        scores: tensor id → (n,) sizes of the changes that are not held back, in ascending order of position.
        copies: tensor id → ids of all tensors with its changes: itself, and those tied to it.
        held: tensor id → difference of what is held back.
        gain: what all changes add to Σ w² of the weights. squares: Σ w² of the version; None if unknown.
    """

    compared: set[int]
    always: int = 0
    scores: dict[int, Scores] = field(default_factory=dict)
    copies: dict[int, list[int]] = field(default_factory=dict)
    held: dict[int, Difference] = field(default_factory=dict)
    gain: float = 0.0
    squares: float | None = None

    @property
    def kept(self) -> int:
        """Number of scored elements that are not held back."""
        return sum(scores.size * len(self.copies[tensor]) for tensor, scores in self.scores.items())


class BudgetSelection:
    """Selects the changes of one version at a time. The baseline holds the bits after the changes.

    A selection costs O(changed elements) time and, until the version is encoded, four bytes for each.
    """

    def __init__(self, budget: Budget, baseline: Baseline) -> None:
        self._budget, self._baseline = budget, baseline
        tied = [targets for targets in baseline.targets_of.values() if len(targets) > 1]
        self._tied_to = {tensor: targets[0] for targets in tied for tensor in targets[1:]}
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

    def select(self, pending: PendingDelta, exact: bool) -> None:
        """Hold back changes of a pending delta until the rest is within the budget; none if ``exact``."""
        selection = self._selection = _Selection(set(pending.compared))
        table, total = self._baseline.table, Difference()
        for tensor, found in pending.elements(PIECE_ELEMENTS):
            element, scores = table[tensor].element, []
            for _, before, now in found:
                if self._squares is not None:
                    add_difference(total, element, before, now, True, True)
                if exact or not has_values(element):
                    selection.always += before.size
                else:
                    scores.append(relative_changes(element, before, now))
            if scores:
                self._add_scores(selection, tensor, np.concatenate(scores))
        if not exact:
            most = self._most() - selection.always
            self._hold_back(pending, selection, most, self._budget.min_change or 0.0)
        selection.gain = total.squares_gain

    def must_shrink(self, pending: PendingDelta, payload_bytes: int, exact: bool) -> bool:
        """Hold back more if the encoded version exceeds ``max_bytes``; return whether to encode it again."""
        selection, most = self._selected, self._budget.max_bytes
        if exact or most is None or payload_bytes <= most:
            return False
        kept = selection.kept
        if not kept:
            logger.warning("integer elements, always sent, take %d bytes; max_bytes is %d", payload_bytes, most)
            return False
        self._hold_back(pending, selection, int(TARGET_SHARE * kept * most / payload_bytes), 0.0)
        return True

    def held_back(self, pending: PendingDelta, newest: Manifest) -> HeldBack | None:
        """Return what the selected version holds back; None if it is exact. Args: newest: the version before it."""
        selection = self._selected
        if self._squares is not None:
            gain = selection.gain - sum(held.squares_gain for held in selection.held.values())
            selection.squares = self._squares + gain
        held = self._not_compared(selection) | selection.held
        elements, share = sum(found.changed for found in held.values()), 0.0
        if self._unseen - selection.compared and self._earlier is not None:
            elements += self._earlier.elements
            share = math.inf if self._earlier.relative_norm is None else self._earlier.relative_norm
        if not elements:
            return None
        if selection.squares is None or not 0 <= selection.squares < math.inf:
            selection.squares = self._measure()
        distance = sum(found.distance for found in held.values())
        far = math.hypot(math.sqrt(distance / selection.squares), share) if selection.squares else math.inf
        return HeldBack(
            elements=elements,
            relative_norm=float(f"{far:.6g}") if math.isfinite(far) else None,
            exact=newest.exact,
        )

    def mark_durable(self, manifest: Manifest) -> None:
        """Record that the version selected last is now durable."""
        selection, self._selection = self._selection, None
        if selection is None:
            return
        self._held = self._not_compared(selection) | selection.held
        self._unseen -= selection.compared
        self._squares = selection.squares
        self._learn(manifest)

    @property
    def _selected(self) -> _Selection:
        if self._selection is None:
            raise UsageError("no version is selected yet")
        return self._selection

    def _not_compared(self, selection: _Selection) -> dict[int, Difference]:
        return {tensor: found for tensor, found in self._held.items() if tensor not in selection.compared}

    def _add_scores(self, selection: _Selection, tensor: int, scores: Scores) -> None:
        first = self._tied_to.get(tensor, tensor)
        if first in selection.scores and np.array_equal(selection.scores[first], scores):
            # Tied tensors change alike, so that a server that ties them serves one of the two states.
            selection.copies[first].append(tensor)
        else:
            selection.scores[tensor], selection.copies[tensor] = scores, [tensor]

    def _most(self) -> int:
        """Return the most elements that a version may send."""
        bounds = [self._baseline.table.total]
        if self._budget.max_share is not None:
            bounds.append(int(self._budget.max_share * self._baseline.table.total))
        if self._budget.max_bytes is not None:
            bounds.append(int(TARGET_SHARE * self._budget.max_bytes / self._bytes_per_element))
        return min(bounds)

    def _hold_back(self, pending: PendingDelta, selection: _Selection, most: int, least: float) -> None:
        ids = list(selection.scores)
        weights = [len(selection.copies[tensor]) for tensor in ids]
        masks = largest([selection.scores[tensor] for tensor in ids], weights, most, least)
        for tensor, keep in zip(ids, masks, strict=True):
            if keep.all():
                continue
            for copy in selection.copies[tensor]:
                before, after = pending.hold_back(copy, keep)
                result = selection.held.setdefault(copy, Difference())
                for start in range(0, before.size, PIECE_ELEMENTS):
                    piece = slice(start, start + PIECE_ELEMENTS)
                    element = self._baseline.table[copy].element
                    add_difference(result, element, before[piece], after[piece], True, True)
            selection.scores[tensor] = selection.scores[tensor][keep]
            if not selection.scores[tensor].size:
                del selection.scores[tensor]

    def _measure(self) -> float:
        """Return Σ w² of the baseline: one pass over the model."""
        read = self._baseline.read
        return sum(squared_norm(spec.element, read(tensor)) for tensor, spec in enumerate(self._baseline.table))

    def _learn(self, manifest: Manifest) -> None:
        if manifest.held_back is not None and manifest.changed:
            self._bytes_per_element = manifest.payload_bytes / manifest.changed


def check_dtypes(table: TensorTable) -> None:
    """Raise UsageError if elements of a tensor mean something only together with their scales."""
    coded = next((spec for spec in table if spec.dtype.startswith("F8_")), None)
    if coded is not None:
        raise UsageError(
            f"budget is set, and tensor {coded.name!r} has dtype {coded.dtype}: its elements and their scales belong "
            "to one state, of which a budget would send parts; leave budget out, or publish 16-bit weights"
        )


def relative_changes(element: DType, before: Bits, now: Bits) -> Scores:
    """Return |new − old| / |old| of (n,) elements; infinite if a value is zero or not finite before or after."""
    with np.errstate(all="ignore"):
        old, new = values_of(element, before), values_of(element, now)
        sizes = np.abs((new - old) / old)
        sizes[(new == 0) | ~np.isfinite(sizes)] = np.inf
        return sizes.astype(np.float32)


def largest(scores: Sequence[Scores], weights: Sequence[int], most: int, least: float) -> list[Mask]:
    """Return masks of the largest scores: all that are at least ``least``, but together no more than ``most``.

    Of equal scores the first are taken. Needs no sorting: two histograms find the smallest score that is taken.

    Args:
        scores: (n,) each, at least 0. weights: how often each score of an array counts.
    """
    keys = [item.view(np.uint32) for item in scores]  # in the order of the scores, since none is negative
    cut, room = _cut(keys, weights, most)
    if cut < int(np.float32(least).view(np.uint32)):
        return [item >= np.float32(least) for item in scores]
    masks = []
    for item, weight in zip(keys, weights, strict=True):
        mask = item > cut
        ties = np.flatnonzero(item == cut)[: room // weight]
        mask[ties] = True
        room -= ties.size * weight
        masks.append(mask)
    return masks


def _cut(keys: Sequence[npt.NDArray[np.uint32]], weights: Sequence[int], most: int) -> tuple[int, int]:
    """Return the largest key of which not all fit into ``most``, and how many do; −1 and 0 if all keys fit."""
    high = _histogram((item >> _HALF for item in keys), weights)
    top = _first_beyond(high, most)
    if top < 0:
        return -1, 0
    room = most - int(high[top + 1 :].sum())
    low = _histogram((item[item >> _HALF == top] & _LOW for item in keys), weights)
    cut = _first_beyond(low, room)
    return top << 16 | cut, max(0, room - int(low[cut + 1 :].sum()))


def _histogram(digits: Iterable[npt.NDArray[np.uint32]], weights: Sequence[int]) -> npt.NDArray[np.int64]:
    counts = np.zeros(1 << 16, np.int64)
    for item, weight in zip(digits, weights, strict=True):
        counts += weight * np.bincount(item, minlength=counts.size)
    return counts


def _first_beyond(counts: npt.NDArray[np.int64], most: int) -> int:
    """Return the largest digit at which the count from above exceeds ``most``; −1 if none does."""
    beyond = np.flatnonzero(np.cumsum(counts[::-1]) > max(0, most))
    return counts.size - 1 - int(beyond[0]) if beyond.size else -1

"""What a lossless delta cannot be smaller than, as entropies, and which weights change: by exponent.

Bounds are of positions (where an element changes) and of values (by how many units in the last place), each drawn from
one distribution for the whole model, or from one for each class of elements:

- *thresholds*: between one, two or three thresholds on the old magnitude, the best powers of two, by search.
- *given the old exponent*: for each exponent that an element may have had.
- *and the last mask*: also for whether it moved up, down or not at all in the version before.

Frequencies are those of the very data, and what it costs to send them is left out, so few elements flatter them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from benchmarks.common.formats import baseline_of, find_changes, flats, table_of
from benchmarks.common.training_data import Pair, Weights

MANTISSA_BITS, EXPONENT_BIAS = 7, 127
EXPONENTS, MASKS = 256, 3
MOST_THRESHOLDS = 3
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tally:
    """Elements of a pair by class: the old exponent, and whether the version before moved them down, not at all, or up.

    Attributes:
        all: (EXPONENTS, MASKS). exponents, masks, moved: (n,) class of each changed element, and units in the last
            place from old to new. masks_known: whether the pair has a version before.
    """

    all: Counts
    exponents: Counts
    masks: Counts
    moved: Counts
    masks_known: bool

    @property
    def by_exponent(self) -> tuple[Counts, Counts]:
        """(all, changed) elements of each stored exponent."""
        return self.all.sum(axis=1), np.bincount(self.exponents, minlength=EXPONENTS)


def tally(pair: Pair) -> Tally:
    """Count the elements of a pair."""
    moved, last = _distances(pair.old, pair.new), _distances(pair.before, pair.old) if pair.before else {}
    counts = np.zeros(EXPONENTS * MASKS, np.int64)
    classes: list[Counts] = []
    for tensor, bits in enumerate(flats(pair.old)):
        found = (MASKS * ((bits >> MANTISSA_BITS) & 0xFF) + 1).astype(np.int16)
        if tensor in last:
            positions, distances = last[tensor]
            found[positions] += np.sign(distances)
        counts += np.bincount(found, minlength=counts.size)
        if tensor in moved:
            classes.append(found[moved[tensor][0]].astype(np.int64))
    exponents, masks = np.divmod(np.concatenate([*classes, np.empty(0, np.int64)]), MASKS)
    values = np.concatenate([*(moved[tensor][1] for tensor in sorted(moved)), np.empty(0, np.int64)]).astype(np.int64)
    return Tally(counts.reshape(EXPONENTS, MASKS), exponents, masks, values, bool(pair.before))


def _distances(old: Weights, new: Weights) -> dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int16]]]:
    """Tensor → positions of changed elements, and new − old in units in the last place."""
    changes = find_changes(baseline_of(old), flats(new), table_of(old))
    return {
        tensor: (positions, data.view(np.int16))
        for group in changes.sparse
        for tensor, positions, data in group.tensors()
    }


@dataclass(frozen=True)
class Thresholds:
    """The best so many powers of two, ascending, and what positions then take: each class is from one to the next."""

    powers: tuple[int, ...]
    position: float


@dataclass(frozen=True)
class Bounds:
    """Bytes per changed element.

    Attributes:
        position, value: nothing known. thresholds: one, two, three. with_mask: positions and values given the old
            exponent and the last mask; None where the version before is not known.
    """

    position: float
    value: float
    thresholds: tuple[Thresholds, ...]
    position_given_exponent: float
    value_given_exponent: float
    with_mask: float | None

    @property
    def independent(self) -> float:
        return self.position + self.value

    @property
    def given_exponent(self) -> float:
        return self.position_given_exponent + self.value_given_exponent


def bounds(counted: Tally) -> Bounds:
    """All bounds of one pair."""
    total, changed = counted.by_exponent
    with_mask = None
    if counted.masks_known:
        classes = MASKS * counted.exponents + counted.masks
        hits = np.bincount(classes, minlength=counted.all.size)
        with_mask = _positions(counted.all.reshape(-1), hits) + _values(classes, counted.moved)
    return Bounds(
        _positions(total.sum(keepdims=True), changed.sum(keepdims=True)),
        _values(np.zeros_like(counted.moved), counted.moved),
        tuple(_best_thresholds(total, changed, count) for count in range(1, MOST_THRESHOLDS + 1)),
        _positions(total, changed),
        _values(counted.exponents, counted.moved),
        with_mask,
    )


def _best_thresholds(total: Counts, changed: Counts, count: int) -> Thresholds:
    """Search all choices of so many exponents that begin a class."""
    used = np.flatnonzero(total)
    most = min(count, used.size - 1)

    def tried() -> Iterator[Thresholds]:
        for chosen in combinations(used[1:].tolist(), most):
            starts = [0, *chosen]
            position = _positions(np.add.reduceat(total, starts), np.add.reduceat(changed, starts))
            yield Thresholds(tuple(exponent - EXPONENT_BIAS for exponent in chosen), position)

    return min(tried(), key=lambda found: found.position)


def _positions(total: Counts, changed: Counts) -> float:
    """Entropy of which elements change, given how many of each class do, in bytes per changed element."""
    bits = _log_sum(total) - _log_sum(changed) - _log_sum(total - changed)
    return bits / max(1, int(changed.sum())) / 8


def _values(classes: Counts, moved: Counts) -> float:
    """Entropy of how far elements move, given the class of each, in bytes per changed element."""
    _, pairs = np.unique(classes << 17 | (moved + (1 << 16)), return_counts=True)
    return (_log_sum(np.bincount(classes)) - _log_sum(pairs)) / max(1, moved.size) / 8


def _log_sum(counts: Counts) -> float:
    """Σ n log₂ n."""
    positive = counts[counts > 0].astype(float)
    return float((positive * np.log2(positive)).sum())


@dataclass(frozen=True)
class Exponent:
    """One row of the histogram: elements with |w| in [2^power, 2^(power + 1)), in percent of all; and changed ones.

    Attributes:
        changed: percent of those with this exponent. of_changes: percent of all changes.
    """

    power: int
    share: float
    changed: float
    of_changes: float


def histogram(counted: Tally, least_share: float = 0.1) -> list[Exponent]:
    """Exponents that at least so many percent of the elements have, ascending."""
    total, changed = counted.by_exponent
    return [
        Exponent(
            power - EXPONENT_BIAS,
            100 * total[power] / total.sum(),
            100 * changed[power] / total[power],
            100 * changed[power] / max(1, changed.sum()),
        )
        for power in np.flatnonzero(100 * total >= least_share * total.sum()).tolist()
    ]

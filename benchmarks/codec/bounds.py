"""What a lossless delta cannot be smaller than, as entropies, and which weights change: by exponent.

Bounds are of two kinds. *Independent*: where an element changes, and by how many units in the last place, each drawn
from one distribution for the whole model. *Given the old exponent*: distributions of their own for each exponent that
an element may have had; *and the last mask*: also for whether it moved up, down or not at all in the version before.
Frequencies are those of the very data, and what it costs to send them is left out, so few elements flatter them.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.common.formats import find_changes, flats, table_of
from benchmarks.common.training_data import Pair, Weights

MANTISSA_BITS, EXPONENT_BIAS = 7, 127
Classes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Bounds:
    """Bytes per changed element.

    Attributes:
        position, value: what ``independent`` is the sum of. with_mask: None where the version before is not known.
    """

    position: float
    value: float
    given_exponent: float
    with_mask: float | None

    @property
    def independent(self) -> float:
        return self.position + self.value


def exponents(weights: Weights) -> Classes:
    """Stored exponent (0 to 255) of every element."""
    return np.concatenate([(bits >> MANTISSA_BITS) & 0xFF for bits in flats(weights)]).astype(np.int64)


def distances(old: Weights, new: Weights) -> npt.NDArray[np.int32]:
    """new − old in units in the last place, for every element; 0 where nothing changed."""
    baseline = [bits.copy() for bits in flats(old)]
    changes = find_changes(baseline, flats(new), table_of(old))
    moved = [np.zeros(bits.size, np.int32) for bits in baseline]
    for group in changes.sparse:
        for tensor, positions, data in group.tensors():
            moved[tensor][positions] = data.view(np.int16)
    return np.concatenate(moved)


def bounds(pair: Pair) -> Bounds:
    """All bounds of one pair."""
    moved = distances(pair.old, pair.new)
    everything = np.zeros(moved.size, np.int64)
    by_exponent = exponents(pair.old)
    position, value = _entropies(everything, moved)
    with_mask = None
    if pair.before:
        last = np.sign(distances(pair.before, pair.old)) + 1
        with_mask = sum(_entropies(3 * by_exponent + last, moved))
    return Bounds(position, value, sum(_entropies(by_exponent, moved)), with_mask)


def _entropies(classes: Classes, moved: npt.NDArray[np.int32]) -> tuple[float, float]:
    """Entropy of positions and of values given classes, in bytes per changed element."""
    changed = moved != 0
    total = int(np.count_nonzero(changed))
    if not total:
        return 0.0, 0.0
    in_class = np.bincount(classes)
    hits = np.bincount(classes[changed], minlength=in_class.size)
    position = _log_sum(in_class) - _log_sum(hits) - _log_sum(in_class - hits)
    _, pairs = np.unique(classes[changed] << 17 | (moved[changed] + (1 << 16)), return_counts=True)
    value = _log_sum(hits) - _log_sum(pairs)
    return position / total / 8, value / total / 8


def _log_sum(counts: npt.NDArray[np.int64]) -> float:
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


def histogram(pair: Pair, least_share: float = 0.1) -> list[Exponent]:
    """Exponents that at least so many percent of the elements have, ascending."""
    stored = exponents(pair.old)
    changed = np.concatenate([a != b for a, b in zip(flats(pair.old), flats(pair.new), strict=True)])
    counts = np.bincount(stored, minlength=256)
    hits = np.bincount(stored[changed], minlength=256)
    return [
        Exponent(
            power - EXPONENT_BIAS,
            100 * counts[power] / stored.size,
            100 * hits[power] / counts[power],
            100 * hits[power] / max(1, hits.sum()),
        )
        for power in np.flatnonzero(100 * counts >= least_share * stored.size).tolist()
    ]

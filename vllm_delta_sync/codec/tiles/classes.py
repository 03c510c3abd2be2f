"""Classes of elements: ``choose_thresholds`` says where they begin, by the elements' old bits.

A weight changes if its update exceeds half the distance to the next number, and the weight's exponent determines that
distance. So small weights change often, and large ones hardly ever. Elements of one class share tables.
"""

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.codec.tiles.alphabets import CLASSES
from vllm_delta_sync.format.dtypes import DType

KEYS = 256
VALUE_TOKENS = 64
"""Values are counted by the tokens of small numbers, and all others together."""
TABLE_BITS = 200.0
"""Approximate cost of adding a class: one gap table of about 35 tokens."""
TOKEN_BITS = 4.0
"""Approximate cost of each value token that a class has."""
_SMALL = 1e-12


def key_shift(element: DType) -> int:
    """Return by how many bits an element's magnitude is shifted right to get its key."""
    return max(8 * element.itemsize - dropped_bits(element) - 8, 0)


def key_limits(thresholds: npt.NDArray[np.uint8], element: DType) -> npt.NDArray[np.unsignedinteger]:
    """Return (CLASSES,), of the element's width: the least magnitudes with these keys."""
    return (thresholds.astype(np.uint64) << np.uint64(key_shift(element))).astype(element.uint)


def dropped_bits(element: DType) -> int:
    """Return the number of highest bits that a magnitude lacks: 1, the sign, for a float, else 0."""
    return 1 if element.is_float else 0


def magnitude_mask(element: DType) -> np.unsignedinteger:
    """Return the bits that a magnitude has, of the element's width."""
    found: np.unsignedinteger = element.uint.type(((1 << 8 * element.itemsize) - 1) >> dropped_bits(element))
    return found


def choose_thresholds(owned: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return the keys at which the classes end: the cheapest partition, by dynamic programming.

    Args:
        owned: (KEYS,) elements of each key, at least the changed ones. tokens: (KEYS, VALUE_TOKENS) value tokens of the
            changed elements.

    Returns:
        (CLASSES,) ascending; 0 for a class that there is not.
    """
    used = np.flatnonzero(owned > 0)
    thresholds = np.zeros(CLASSES, np.uint8)
    if used.size < 2:
        return thresholds
    tokens = tokens[:, tokens.any(axis=0)]
    owned_sums = np.concatenate([[0.0], np.cumsum(owned[used])])
    token_sums = np.concatenate([np.zeros((1, tokens.shape[1]), np.int64), np.cumsum(tokens[used], axis=0)])
    best = np.full((CLASSES + 1, used.size), np.inf)
    cuts = np.zeros(best.shape, np.int64)
    best[0, 0] = 0.0
    # The pairs by their second key: those that end at key k begin at k · (k − 1) / 2.
    stops, starts = np.tril_indices(used.size, -1)
    costs = _bits(owned_sums[stops] - owned_sums[starts], token_sums[stops] - token_sums[starts])
    for stop in range(1, used.size):
        first = stop * (stop - 1) // 2
        totals = best[:-1, :stop] + costs[first : first + stop]
        cuts[1:, stop] = np.argmin(totals, axis=1)
        best[1:, stop] = np.min(totals, axis=1)
    # The others' gaps count all elements.
    best += _bits(np.full(used.size, owned_sums[-1]), token_sums[-1] - token_sums[:-1])
    count, stop = (int(index) for index in np.unravel_index(np.argmin(best), best.shape))
    for number in range(count, 0, -1):
        thresholds[CLASSES - 1 - (count - number)] = used[stop]
        stop = int(cuts[number, stop])
    return thresholds


def _bits(owned: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return bits that classes with these elements and value tokens take: positions, values, tables."""
    changed = tokens.sum(axis=1)
    share = np.clip(changed / np.maximum(owned, 1.0), _SMALL, 1 - _SMALL)
    positions = -owned * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    shares = tokens / np.maximum(changed, 1)[:, None]
    values = -changed * (shares * np.log2(np.maximum(shares, _SMALL))).sum(axis=1)
    return positions + values + TABLE_BITS + TOKEN_BITS * (tokens > 0).sum(axis=1)

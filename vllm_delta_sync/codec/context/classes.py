"""Which elements codec ``context`` codes together: those whose old bits let expect the same.

A weight changes if its update exceeds half the distance to the next number, and that distance is set by its exponent.
Small weights change often, large ones hardly ever.
"""

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.format.dtypes import DType

KEYS = 256
MOST_CLASSES = 6
_TABLE_BITS = 400.0
"""What a further class costs, about: a table of gaps with some 35 tokens, and the ends it adds to tiles."""
_TOKEN_BITS = 8.0
_SMALL = 1e-12


def dropped_bits(element: DType) -> np.uint64:
    """How many of the highest bits do not count for an element's key: the sign of a float."""
    return np.uint64(1 if element.is_float else 0)


def chosen_thresholds(
    owned: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64], tiles: int
) -> npt.NDArray[np.uint8]:
    """Keys at which the second and later classes begin: the cheapest of all ways to cut the keys.

    Args:
        owned: (KEYS,) elements of each key, at least those that changed. tokens: (KEYS, TOKENS) value tokens of the
            elements that changed. tiles: with changes; each of them ends each class.

    Returns:
        (classes − 1,) ascending.
    """
    used = np.flatnonzero(owned > 0)
    if used.size < 2:
        return np.empty(0, np.uint8)
    owned_sums = np.concatenate([[0.0], np.cumsum(owned[used])])
    token_sums = np.concatenate([np.zeros((1, tokens.shape[1]), np.int64), np.cumsum(tokens[used], axis=0)])
    best = np.full((MOST_CLASSES + 1, used.size + 1), np.inf)
    cuts = np.zeros(best.shape, np.int64)
    best[0, 0] = 0.0
    for stop in range(1, used.size + 1):
        starts = np.arange(stop)
        costs = _bits(owned_sums[stop] - owned_sums[starts], token_sums[stop] - token_sums[starts], tiles)
        totals = best[:-1, :stop] + costs
        cuts[1:, stop] = np.argmin(totals, axis=1)
        best[1:, stop] = np.min(totals, axis=1)
    count = int(np.argmin(best[:, used.size]))
    found, stop = [], used.size
    for number in range(count, 1, -1):
        stop = int(cuts[number, stop])
        found.append(int(used[stop]))
    return np.array(found[::-1], np.uint8)


def _bits(owned: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64], tiles: int) -> npt.NDArray[np.float64]:
    """Bits that classes of so many elements and such value tokens take: positions, values, tables, ends of tiles."""
    changed = tokens.sum(axis=1)
    share = np.clip(changed / np.maximum(owned, 1.0), _SMALL, 1 - _SMALL)
    positions = -owned * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    shares = tokens / np.maximum(changed, 1)[:, None]
    values = -changed * (shares * np.log2(np.maximum(shares, _SMALL))).sum(axis=1)
    ends = tiles * np.log2(1 + changed / max(tiles, 1))
    return positions + values + ends + _TABLE_BITS + _TOKEN_BITS * (tokens > 0).sum(axis=1)

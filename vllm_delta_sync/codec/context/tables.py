"""Tables of codec ``context``: entropy coding (``encoding``, ``decoding``) and classes (``choose_thresholds``).

Entropy coding uses asymmetric numeral systems with static tables (J. Duda, "Asymmetric numeral systems",
arXiv:1311.2540). A coder's state is one of STATES; a symbol of frequency f out of STATES takes about
STATE_BITS − log2 f bits. All tables have the same size, so each symbol may use another table. A number of any size is
split into a token, which has a frequency, and raw bits. docs/FORMAT.md, "Codec context", specifies this.

A class is a set of elements with similar old bits, coded by the same tables. A weight changes if its update exceeds
half the distance to the next number, and the weight's exponent determines that distance. So small weights change often,
and large ones hardly ever.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.format.dtypes import DType

STATE_BITS = 10
STATES = 1 << STATE_BITS
STRIDE = STATES // 2 + STATES // 8 + 3
"""Distance between the states of one symbol; odd, so that all states are reached."""
TOKENS = 256
"""Size of an alphabet: 64-bit numbers have tokens below 252, and a gap's token is increased by one."""

Frequencies = npt.NDArray[np.uint16]


Decoding = npt.NDArray[np.uint32]
"""(tables, STATES) entries by state; tables of gaps and of values alternate. Fields from the lowest bit: base of the
next state, to which the bits read are added (12 bits), number of bits to read (4), number of raw bits that follow (6),
token (8). They share one word because the latency of loading it limits the speed."""


class Encoding(NamedTuple):
    """(tables, STATES) states in the order of their tokens; (tables, TOKENS) frequencies, and where each begins."""

    states: npt.NDArray[np.uint16]
    frequencies: Frequencies
    starts: Frequencies


def token_ranges() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return (TOKENS,) smallest number of each token, and (TOKENS,) number of its raw bits."""
    tokens = np.arange(TOKENS, dtype=np.uint64)
    bits = np.maximum(tokens // 4, 1) - 1
    firsts = np.where(tokens < 8, tokens, (4 + tokens % 4) << bits)
    return firsts.astype(np.uint64), bits.astype(np.uint64)


def normalized(counts: npt.NDArray[np.int64]) -> Frequencies:
    """Map (TOKENS,) counts → frequencies that sum to STATES, at least 1 for a token that occurs; all 0 if none."""
    frequencies = np.zeros(TOKENS, np.uint16)
    tokens = np.flatnonzero(counts)
    if not tokens.size:
        return frequencies
    wanted = counts[tokens]
    found = np.maximum(np.round(wanted * (STATES / int(wanted.sum()))).astype(np.int64), 1)
    # Correct the sum after rounding where that saves the most or costs the fewest bits.
    excess = int(found.sum()) - STATES
    step = -1 if excess > 0 else 1
    gain = wanted * _log_ratio(found, step)
    for _ in range(abs(excess)):
        best = int(np.argmax(gain))
        found[best] += step
        gain[best] = wanted[best] * _log_ratio(found[best : best + 1], step)[0]
    frequencies[tokens] = found
    return frequencies


def _log_ratio(frequencies: npt.NDArray[np.int64], step: int) -> npt.NDArray[np.float64]:
    """Return log2 of a frequency after ``step`` over that before; −∞ where it would become 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log2((frequencies + step) / frequencies))


def decoding(frequencies: Frequencies) -> Decoding:
    """Return decoding tables for (tables, TOKENS) frequencies; from a row of zeros, of token 0 and no bits."""
    from vllm_delta_sync.codec.context import shared_kernels

    tables = np.zeros((frequencies.shape[0], STATES), np.uint32)
    shared_kernels.fill_tables(np.ascontiguousarray(frequencies), tables, np.zeros(tables.shape, np.uint16))
    return tables


def encoding(frequencies: Frequencies) -> Encoding:
    """Return the encoding tables for (tables, TOKENS) frequencies."""
    from vllm_delta_sync.codec.context import shared_kernels

    states = np.zeros((frequencies.shape[0], STATES), np.uint16)
    shared_kernels.fill_tables(frequencies, np.zeros(states.shape, np.uint32), states)
    starts = np.cumsum(frequencies, axis=-1, dtype=np.int64) - frequencies
    return Encoding(states, frequencies, starts.astype(np.uint16))


KEYS = 256
MAX_CHOSEN_CLASSES = 6
_TABLE_BITS = 400.0
"""Approximate cost of adding a class: one gap table of about 35 tokens, plus one end marker per tile."""
_TOKEN_BITS = 8.0
_SMALL = 1e-12


def dropped_bits(element: DType) -> np.uint64:
    """Return the number of highest bits that an element's key omits: 1 for the sign of a float, else 0."""
    return np.uint64(1 if element.is_float else 0)


def choose_thresholds(
    owned: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64], tiles: int
) -> npt.NDArray[np.uint8]:
    """Return the keys at which the second and later classes begin: the cheapest partition, by dynamic programming.

    Args:
        owned: (KEYS,) elements of each key, at least the changed ones. tokens: (KEYS, TOKENS) value tokens of the
            changed elements. tiles: number of tiles with changes; each class has an end in each of them.

    Returns:
        (classes − 1,) ascending.
    """
    used = np.flatnonzero(owned > 0)
    if used.size < 2:
        return np.empty(0, np.uint8)
    tokens = tokens[:, tokens.any(axis=0)]
    owned_sums = np.concatenate([[0.0], np.cumsum(owned[used])])
    token_sums = np.concatenate([np.zeros((1, tokens.shape[1]), np.int64), np.cumsum(tokens[used], axis=0)])
    best = np.full((MAX_CHOSEN_CLASSES + 1, used.size + 1), np.inf)
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
    """Return bits that classes with these elements and value tokens take: positions, values, tables, ends in tiles."""
    changed = tokens.sum(axis=1)
    share = np.clip(changed / np.maximum(owned, 1.0), _SMALL, 1 - _SMALL)
    positions = -owned * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    shares = tokens / np.maximum(changed, 1)[:, None]
    values = -changed * (shares * np.log2(np.maximum(shares, _SMALL))).sum(axis=1)
    ends = tiles * np.log2(1 + changed / max(tiles, 1))
    return positions + values + ends + _TABLE_BITS + _TOKEN_BITS * (tokens > 0).sum(axis=1)

"""Static entropy coding by tables: asymmetric numeral systems, as codec ``context`` uses them.

A coder's state is one of STATES; a symbol of frequency f out of STATES takes about STATE_BITS − log2 f bits. All tables
have one size, so that each symbol may be coded by another one. Numbers of any size are split into a token, which has a
frequency, and raw bits. docs/FORMAT.md, "Codec context", says exactly how. The method: J. Duda, "Asymmetric numeral
systems", arXiv:1311.2540.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.format.dtypes import DType

STATE_BITS = 10
STATES = 1 << STATE_BITS
STRIDE = STATES // 2 + STATES // 8 + 3
"""How far apart the states of one symbol are laid; odd, so that all states are reached."""
TOKENS = 256
"""Size of an alphabet: 64-bit numbers have tokens below 252, and a gap's token is one more."""

Frequencies = npt.NDArray[np.uint16]


Decoding = npt.NDArray[np.uint32]
"""(tables, STATES), gaps and values by turns, by state, from the lowest bits on: what to add the bits read to for the
next state (12 bits), how many bits to read (4), how many raw bits follow them (6), token (8). In one word, since what
takes time is to wait for it."""


class Encoding(NamedTuple):
    """(tables, STATES) states in the order of their tokens; (tables, TOKENS) frequencies, and where each begins."""

    states: npt.NDArray[np.uint16]
    frequencies: Frequencies
    starts: Frequencies


def token_ranges() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """(TOKENS,) smallest number of each token, and how many raw bits follow it."""
    tokens = np.arange(TOKENS, dtype=np.uint64)
    bits = np.maximum(tokens // 4, 1) - 1
    firsts = np.where(tokens < 8, tokens, (4 + tokens % 4) << bits)
    return firsts.astype(np.uint64), bits.astype(np.uint64)


def normalized(counts: npt.NDArray[np.int64]) -> Frequencies:
    """(TOKENS,) counts → frequencies that add up to STATES, at least 1 for whatever occurs; zeros for no counts."""
    total = int(counts.sum())
    if not total:
        return np.zeros(TOKENS, np.uint16)
    found = np.maximum(np.round(counts * (STATES / total)).astype(np.int64), (counts > 0).astype(np.int64))
    # What rounding left over goes where it costs or saves the most bits.
    while (excess := int(found.sum()) - STATES) != 0:
        step = -1 if excess > 0 else 1
        able = found > 1 if excess > 0 else counts > 0
        gain = np.full(TOKENS, -np.inf)
        gain[able] = counts[able] * np.log2((found[able] + step) / found[able])
        found[int(np.argmax(gain))] += step
    return found.astype(np.uint16)


def starts_of(frequencies: Frequencies) -> Frequencies:
    """(…, TOKENS) sum of the frequencies before each token."""
    ends = np.cumsum(frequencies, axis=-1, dtype=np.int64)
    return (ends - frequencies).astype(np.uint16)


def decoding(frequencies: Frequencies) -> Decoding:
    """Tables of (tables, TOKENS) frequencies; rows of zeros give tables of token 0 that read nothing."""
    from vllm_delta_sync.codec.context import shared_kernels

    tables = np.zeros((frequencies.shape[0], STATES), np.uint32)
    shared_kernels.fill_tables(np.ascontiguousarray(frequencies), tables, np.zeros(tables.shape, np.uint16))
    return tables


def encoding(frequencies: Frequencies) -> Encoding:
    """Tables of (tables, TOKENS) frequencies."""
    from vllm_delta_sync.codec.context import shared_kernels

    states = np.zeros((frequencies.shape[0], STATES), np.uint16)
    shared_kernels.fill_tables(frequencies, np.zeros(states.shape, np.uint32), states)
    return Encoding(states, frequencies, starts_of(frequencies))


KEYS = 256
MOST_CLASSES = 6
_TABLE_BITS = 400.0
"""What a further class costs, about: a table of gaps with some 35 tokens, and the ends it adds to tiles."""
_TOKEN_BITS = 8.0
_SMALL = 1e-12


def dropped_bits(element: DType) -> np.uint64:
    """How many of the highest bits do not count for an element's key: the sign of a float."""
    return np.uint64(1 if element.is_float else 0)


def choose_thresholds(
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

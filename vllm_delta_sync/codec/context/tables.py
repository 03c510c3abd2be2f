"""Static entropy coding by tables: asymmetric numeral systems, as codec ``context`` uses them.

A coder's state is one of STATES; a symbol of frequency f out of STATES takes about STATE_BITS − log2 f bits. All tables
have one size, so that each symbol may be coded by another one. Numbers of any size are split into a token, which has a
frequency, and raw bits. docs/FORMAT.md, "Codec context", says exactly how. The method: J. Duda, "Asymmetric numeral
systems", arXiv:1311.2540.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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

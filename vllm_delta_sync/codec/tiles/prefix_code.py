"""Prefix codes of tiles: tokens of numbers, code lengths, and the tables that decode a symbol in one step.

A number of any size is split into a token and raw bits. A symbol is a gap's token with the kind of the value that
follows it, so that most changes take one step: +1 and −1, the most frequent distances, are kinds of their own. Codes
are canonical (D. A. Huffman, 1952; lengths suffice to know the codes, as in RFC 1951) and at most LONGEST bits long.
docs/FORMAT.md specifies this.
"""

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.codec.tiles.alphabets import LONGEST, SYMBOLS

Counts = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.uint8]
"""(TABLES, 2, SYMBOLS) code lengths, of gaps with kinds and of values; 0 for a symbol without a code."""
Decoding = npt.NDArray[np.uint16]
"""(TABLES, 2, 2^LONGEST) entries by the next LONGEST bits. Fields from the lowest bit: length of the code (4 bits, 0
for no code); of a gap its kind (2), then raw bits (5), then the bits above them (3); of a value raw bits (6), then the
bits above them (3)."""


def code_lengths(counts: Counts) -> Lengths:
    """Return the best code lengths of (TABLES, 2, SYMBOLS) counts, but for the limit of LONGEST."""
    from vllm_delta_sync.codec.tiles import shared_kernels

    lengths = np.zeros(counts.shape, np.uint8)
    for row, found in zip(counts.reshape(-1, SYMBOLS), lengths.reshape(-1, SYMBOLS), strict=True):
        shared_kernels.assign_lengths(row, found)
    return lengths


def code_words(lengths: Lengths) -> npt.NDArray[np.uint16]:
    """Return the codes of these lengths, first bit lowest."""
    from vllm_delta_sync.codec.tiles import shared_kernels

    words = np.zeros(lengths.shape, np.uint16)
    for row, found in zip(lengths.reshape(-1, SYMBOLS), words.reshape(-1, SYMBOLS), strict=True):
        shared_kernels.assign_words(row, found)
    return words


def overfull(lengths: Lengths) -> bool:
    """Return whether a table has a code that is too long, or more codes than there can be."""
    used = np.where(lengths > 0, 1 << (LONGEST - np.minimum(lengths, LONGEST).astype(np.int64)), 0).sum(axis=-1)
    return bool(np.any(lengths > LONGEST) or np.any(used > 1 << LONGEST))


def decoding(lengths: Lengths) -> Decoding:
    """Return decoding tables; of a table without codes, all entries are 0."""
    from vllm_delta_sync.codec.tiles import shared_kernels

    tables = np.zeros((lengths.shape[0], 2, 1 << LONGEST), np.uint16)
    shared_kernels.fill_tables(lengths, code_words(lengths), tables)
    return tables

"""Compiled loops (numba) of codec ``packed``. Imported lazily; the conventions of ``format/kernels.py`` apply.

``counts`` and ``numels`` are (k,) int64, one per tensor; the data of tensors are concatenated in this order.
tests/codec/test_packed.py compares each function with a plain numpy reference.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from vllm_delta_sync.format.kernels import ONE, ZERO, _compile, _inline, at_least, trailing_zeros

BYTE = np.uint64(8)
ESCAPE = np.uint64(255)
SMALLEST = np.uint64(3)
"""Zigzag distances 1 and 2 have their own codes; those from SMALLEST to LARGEST take one more byte."""
LARGEST = np.uint64(258)
SMALL = np.uint64(2)
WIDE = np.uint64(3)
THREE = np.uint64(3)
SEVEN = np.uint64(7)
BATCH = 1024
"""Elements of ``encode_values`` at a time, a multiple of 64: their codes stay in the first-level cache."""

_CODES = np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3
SMALLS_IN = np.count_nonzero(_CODES == 2, axis=1)
WIDES_IN = np.count_nonzero(_CODES == 3, axis=1)
"""Per byte of four codes: how many are SMALL, how many are WIDE."""


@_compile
def encode_gaps(positions, counts, shifts, gaps, low, escapes):
    """Encode positions as ``gaps`` without ``shifts`` (k,) low bits, and those as ``low`` (u8, all zero before).

    A gap of 255 or more is stored as 255, the excess in ``escapes`` (u64). Returns the number of escapes.
    """
    cursor = 0
    begin = np.int64(0)
    used = 0
    for group in range(counts.size):
        where, out = positions[cursor : cursor + counts[group]], gaps[cursor : cursor + counts[group]]
        cursor += counts[group]
        shift = np.uint64(shifts[group])
        # A loop of its own without a branch, so that it uses vectors; the others run only where they are needed.
        largest = _gap(where, 0) >> shift
        out[0] = np.uint8(min(largest, ESCAPE))
        for i in range(1, where.size):
            gap = np.uint64(where[i] - where[i - 1] - 1) >> shift
            largest = max(largest, gap)
            out[i] = np.uint8(min(gap, ESCAPE))
        if largest >= ESCAPE:
            for i in range(where.size):
                if out[i] == ESCAPE:
                    escapes[used] = (_gap(where, i) >> shift) - ESCAPE
                    used += 1
        if shift != ZERO:
            begin += _encode_low(where, shift, low[begin:])
    return used


@_inline
def _gap(positions, i):
    """Return the number of unchanged elements before element ``i`` of a tensor's positions."""
    return np.uint64(positions[i] - (positions[i - 1] + 1 if i else 0))


@_compile
def _encode_low(positions, shift, low):
    """Write the ``shift`` low bits of all gaps → bytes written."""
    least = (ONE << shift) - ONE
    begin = 0
    pending_bits = ZERO
    bits = ZERO
    following = ZERO
    for i in range(positions.size):
        position = np.uint64(positions[i])
        pending_bits |= ((position - following) & least) << bits
        following = position + ONE
        bits += shift
        while bits >= BYTE:
            low[begin] = np.uint8(pending_bits & ESCAPE)
            begin += 1
            pending_bits >>= BYTE
            bits -= BYTE
    if bits != ZERO:
        low[begin] = np.uint8(pending_bits)
        begin += 1
    return begin


@_compile
def decode_gaps(gaps, low, escapes, counts, shifts, numels, positions):
    """Inverse of encode_gaps, into ``positions``; ``low`` has the size that counts and shifts imply.

    Returns -1 if correct, else the group whose positions leave its tensor or whose low bits continue after its last
    element, or ``counts.size`` if the number of escapes does not match the gaps.
    """
    cursor = 0
    begin = np.int64(0)
    used = 0
    for group in range(counts.size):
        numel = np.uint64(numels[group])
        shift = np.uint64(shifts[group])
        least = (ONE << shift) - ONE
        following = ZERO
        pending_bits = ZERO
        bits = ZERO
        for _ in range(counts[group]):
            gap = np.uint64(gaps[cursor])
            if gap == ESCAPE:
                if used >= escapes.size:
                    return counts.size
                if np.uint64(escapes[used]) >= numel:
                    return group
                gap += np.uint64(escapes[used])
                used += 1
            while bits < shift:
                pending_bits |= np.uint64(low[begin]) << bits
                begin += 1
                bits += BYTE
            # Checked before the shift, which could overflow and wrap a gap beyond the tensor to inside it.
            if gap > numel >> shift:
                return group
            position = following + ((gap << shift) | (pending_bits & least))
            pending_bits >>= shift
            bits -= shift
            if position >= numel:
                return group
            positions[cursor] = np.int64(position)
            following = position + ONE
            cursor += 1
        if pending_bits != ZERO:
            return group
    if used != escapes.size:
        return counts.size
    return -1


@_compile
def encode_mask(positions, counts, numels, mask):
    """Set the bits of ``positions`` in ``mask`` (all zero before); each tensor has whole bytes, lowest bit first."""
    cursor = 0
    begin = np.int64(0)
    for group in range(counts.size):
        for _ in range(counts[group]):
            position = np.uint64(positions[cursor])
            mask[np.uint64(begin) + (position >> THREE)] |= np.uint8(ONE << (position & SEVEN))
            cursor += 1
        begin += (numels[group] + 7) >> 3


@_compile
def decode_mask(mask, counts, numels, positions):
    """Inverse of encode_mask. Returns -1, or the group with a wrong number of bits or bits beyond its end."""
    cursor = 0
    begin = np.int64(0)
    for group in range(counts.size):
        end = cursor + counts[group]
        for start in range(0, numels[group], 8):
            byte = np.uint64(mask[begin])
            begin += 1
            most = min(numels[group] - start, 8)
            if byte >> np.uint64(most) != ZERO:
                return group
            if cursor + 8 <= end:
                # The bits are unpredictable, so all eight are written without branches; unset ones are overwritten.
                for bit in range(8):
                    positions[cursor] = start + bit
                    cursor += (byte >> np.uint64(bit)) & ONE != ZERO
            else:
                for bit in range(8):
                    if (byte >> np.uint64(bit)) & ONE != ZERO:
                        if cursor >= end:
                            return group
                        positions[cursor] = start + bit
                        cursor += 1
        if cursor != end:
            return group
    return -1


@_compile
def encode_values(distances, counts, codes, small, wide):
    """Encode ULP distances as two-bit ``codes``, ``small`` and ``wide``.

    Returns the number of elements written to ``small`` (u8) and to ``wide`` (zigzag distances, unsigned, of the width
    of ``distances``).
    """
    number = distances.dtype.type
    top = number(8 * distances.itemsize - 1)
    zigzags = np.empty(BATCH, distances.dtype)
    kinds = np.empty(BATCH, np.uint8)
    cursor = 0
    begin = 0
    smalls = 0
    wides = 0
    for group in range(counts.size):
        end = cursor + counts[group]
        while cursor < end:
            batch = distances[cursor : min(cursor + BATCH, end)]
            cursor += batch.size
            # Codes are unpredictable, so these loops have no branches and use vectors; only the last one, which visits
            # the elements that need more bytes, has. A distance of 0, which our writers never produce, is wide.
            for i in range(batch.size):
                zigzags[i] = (batch[i] << number(1)) ^ (number(0) - (batch[i] >> top))
            for i in range(batch.size):
                over = number(zigzags[i] - number(SMALLEST))
                more = SMALL if (over < zigzags[i]) & (over <= number(LARGEST - SMALLEST)) else WIDE
                kinds[i] = zigzags[i] - number(1) if number(zigzags[i] - number(1)) <= number(1) else more
            kinds[batch.size : (batch.size + 63) & ~63] = 0
            size = (batch.size + 3) >> 2
            for i in range(size):
                codes[begin + i] = kinds[4 * i] | kinds[4 * i + 1] << 2 | kinds[4 * i + 2] << 4 | kinds[4 * i + 3] << 6
            begin += size
            for start in range(0, batch.size, 64):
                word = at_least(kinds, np.uint64(start), np.uint8(SMALL))
                while word != ZERO:
                    i = np.uint64(start) + trailing_zeros(word)
                    word &= word - ONE
                    if kinds[i] == SMALL:
                        small[smalls] = np.uint8(zigzags[i] - number(SMALLEST))
                        smalls += 1
                    else:
                        wide[wides] = zigzags[i]
                        wides += 1
    return smalls, wides


@_compile
def count_codes(codes, counts):
    """Count codes SMALL and WIDE; also return -1, or the group whose last byte has codes beyond its elements."""
    begin = np.int64(0)
    smalls = 0
    wides = 0
    for group in range(counts.size):
        end = begin + ((counts[group] + 3) >> 2)
        for i in range(begin, end):
            smalls += SMALLS_IN[codes[i]]
            wides += WIDES_IN[codes[i]]
        spare = np.uint64((4 * (end - begin) - counts[group]) << 1)
        if np.uint64(codes[end - 1]) >> (np.uint64(8) - spare) != ZERO:
            return smalls, wides, group
        begin = end
    return smalls, wides, -1


@_compile
def decode_values(codes, counts, small, wide, distances):
    """Inverse of encode_values; ``small`` and ``wide`` have the sizes that count_codes returns."""
    cursor = 0
    begin = np.int64(0)
    smalls = 0
    wides = 0
    for group in range(counts.size):
        for i in range(counts[group]):
            code = (np.uint64(codes[begin + (i >> 2)]) >> np.uint64((i & 3) << 1)) & THREE
            zigzag = code + ONE
            if code >= SMALL:
                if code == SMALL:
                    zigzag = np.uint64(small[smalls]) + SMALLEST
                    smalls += 1
                else:
                    zigzag = np.uint64(wide[wides])
                    wides += 1
            distances[cursor] = (zigzag >> ONE) ^ (ZERO - (zigzag & ONE))
            cursor += 1
        begin += (counts[group] + 3) >> 2


@_compile
def frame_end(data, start):
    """Return the end of a zstd frame's blocks that begin at ``start``; -1 if it is beyond ``data`` (u8)."""
    place = np.int64(start)
    while place + 3 <= data.size:
        header = np.int64(data[place]) | np.int64(data[place + 1]) << 8 | np.int64(data[place + 2]) << 16
        # Block header: last block (1 bit), type (2 bits; 1 is one repeated byte), size.
        place += 3 + (1 if header >> 1 & 3 == 1 else header >> 3)
        if header & 1:
            return place if place <= data.size else -1
    return -1

"""Compiled loops (numba) that decode codec ``context``. Arrays are flat and C-contiguous; every loop releases the GIL.

Streams are not trusted: for any bytes, a loop ends and writes only inside the arrays that it was given.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from vllm_delta_sync.codec.context.shared_kernels import mask_tile
from vllm_delta_sync.codec.context.tables import STATE_BITS
from vllm_delta_sync.format.kernels import ONE, ZERO, _compile, ones, trailing_zeros

PADDING = 32
"""Bytes that must follow a stream in memory: one damaged entry can read so far beyond its end."""
FEW = np.uint64(28)
"""Largest number of bits of a step for which the next step uses the same load from the stream."""
SLACK = 2
"""Elements that ``collect`` writes at least per word of 64, so arrays need this much extra room."""

# Errors of ``decode_tile``, as negative numbers.
SHORT, TRAILING, OUTSIDE, TOO_MANY, STILL = -1, -2, -3, -4, -5

_EACH = np.uint64(0x0101010101010101)
_TOPS = np.uint64(0x8080808080808080)
_TOP = np.uint64(1 << 63)


def _places():
    """Return (2048,) uint8: entry 8 · byte + rank is the index of set bit number ``rank`` of a byte."""
    table = np.zeros((256, 8), np.uint8)
    for byte in range(256):
        bits_set = [bit for bit in range(8) if byte >> bit & 1]
        table[byte, : len(bits_set)] = bits_set
    return table.reshape(-1)


_PLACES = _places()


@_compile
def _select(word, rank):
    """Return the index of set bit number ``rank`` of ``word``, which must have that many."""
    # Without branches: set bits up to each byte, then the byte, then the bit in it.
    sums = word - ((word >> ONE) & np.uint64(0x5555555555555555))
    sums = (sums & np.uint64(0x3333333333333333)) + ((sums >> np.uint64(2)) & np.uint64(0x3333333333333333))
    sums = ((sums + (sums >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)) * _EACH
    passed = ((((rank * _EACH) | _TOPS) - sums) & _TOPS) >> np.uint64(7)
    byte = ones(passed) << np.uint64(3)
    rank -= ((sums << np.uint64(8)) >> byte) & np.uint64(255)
    return byte + np.uint64(_PLACES[(((word >> byte) & np.uint64(255)) << np.uint64(3)) + rank])


@intrinsic
def _load(typing_context, data, place):
    """Return eight bytes of a uint8 array from ``place`` (uint64) on, as uint64. The caller checks the bounds."""

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(data, place), generate


@_compile
def _read(data, place, count):
    """Return ``count`` bits, at most 57, from bit ``place`` on."""
    return (_load(data, place >> np.uint64(3)) >> (place & np.uint64(7))) & ((ONE << count) - ONE)


@_compile
def _wide(data, place, count):
    """Return ``count`` bits, at most 64, from bit ``place`` on."""
    low = min(count, np.uint64(32))
    return _read(data, place, low) + (_read(data, place + low, count - low) << low)


@_compile
def _step(entry, ahead):
    """Return (token, bits read, raw bits that follow, next state) for an entry of ``Decoding`` and the next bits."""
    entry = np.uint64(entry)
    width = (entry >> np.uint64(12)) & np.uint64(15)
    state = (entry & np.uint64(4095)) + (ahead & ((ONE << width) - ONE))
    return entry >> np.uint64(22), width, (entry >> np.uint64(16)) & np.uint64(63), state


@_compile
def decode_span(bits, grid, span, drop, thresholds, wanted, ends, payload, tables, firsts, positions, distances):
    """Decode the ``wanted`` tiles of some bands of a tensor.

    Args:
        bits: (numel,) old bits, valid in wanted tiles. grid, span: see ``entries_of_span``.
        wanted: (tiles,) bool. ends: (tiles + 1,) int64, start of each stream in ``payload``, and end of the last one.
        payload, tables, firsts: see ``decode_tile``.
        positions, distances: output, room for as many elements as may change, and SLACK more.

    Returns:
        (number of elements, or a negative error; tile of the error).
    """
    rows, columns, slab, height, width = grid
    across = (columns + width - 1) // width
    words = (min(height, slab) * min(width, columns) + 63) // 64
    scratch = np.empty(words * 64, np.uint8)
    masks = np.empty((thresholds.size + 1, words), np.uint64)
    marks = np.zeros(words, np.uint64)
    zigzags = np.empty(words * 64, distances.dtype)
    most = positions.size - SLACK
    in_rows = np.empty(min(most, min(height, slab) * columns) + SLACK, np.int32)
    if across > 1:
        band_positions, band_distances = np.empty(in_rows.size, np.int64), np.empty(in_rows.size, distances.dtype)
    else:
        band_positions, band_distances = positions, distances
    found = 0
    row, last_row, tile, _ = span
    while row < last_row:
        stop = min(row + height, row // slab * slab + slab, rows)
        in_band = 0
        if across == 1:
            band_positions, band_distances = positions[found:], distances[found:]
        for column in range(across):
            if wanted[tile] and ends[tile + 1] > ends[tile]:
                left = column * width
                across_tile = min(width, columns - left)
                origin = row * columns + left
                size = mask_tile(bits, origin, stop - row, across_tile, columns, drop, thresholds, scratch, masks)
                used = (size + 63) // 64
                got = decode_tile(
                    masks, used, payload, ends[tile], ends[tile + 1], tables, firsts, marks, zigzags,
                    most - found - in_band,
                )  # fmt: skip
                if got < 0:
                    return got, tile
                collect(
                    marks[:used], zigzags, across_tile, origin, columns, band_positions[in_band:],
                    band_distances[in_band:], in_rows[in_band:],
                )  # fmt: skip
                in_band += got
            tile += 1
        if across > 1:
            _by_row(
                band_positions[:in_band],
                band_distances[:in_band],
                in_rows,
                stop - row,
                positions[found:],
                distances[found:],
            )
        found += in_band
        row = stop
    return found, tile


@_compile
def _by_row(from_positions, from_distances, in_rows, rows, positions, distances):
    """Merge a band's tiles, given from left to right and each ascending, into the order of the tensor."""
    cursors = np.zeros(rows + 1, np.int64)
    for i in range(from_positions.size):
        cursors[in_rows[i] + 1] += 1
    for i in range(1, rows):
        cursors[i] += cursors[i - 1]
    for i in range(from_positions.size):
        row = in_rows[i]
        cursor = cursors[row]
        cursors[row] += 1
        positions[cursor] = from_positions[i]
        distances[cursor] = from_distances[i]


@_compile
def decode_tile(masks, words, data, first, stop, tables, firsts, marks, zigzags, room):
    """Read one tile's stream.

    Args:
        masks: (classes, words or more) uint64: elements of each class. data: (bytes,) uint8; the stream is
            data[first:stop], and at least PADDING bytes follow it.
        tables: ``Decoding``, two tables for each class: gaps and values. firsts: see ``token_ranges``.
        marks: (words,) uint64 output, all zero before: one bit per changed element. zigzags: output, its distance at
            the same index, unsigned, of the element's width.
        room: largest number of changed elements.

    Returns:
        number of changed elements, or a negative error.
    """
    place = np.uint64(first) << np.uint64(3)
    end = np.uint64(stop) << np.uint64(3)
    widest = np.uint64(8 * zigzags.itemsize)
    state = _read(data, place, np.uint64(STATE_BITS))
    place += np.uint64(STATE_BITS)
    last = np.uint64(words)
    found = 0
    for kind in range(masks.shape[0]):
        mine = masks[kind]
        any_member = ZERO
        for i in range(words):
            any_member |= mine[i]
        if not any_member:
            continue
        gap_table, value_table = tables[2 * kind], tables[2 * kind + 1]
        # Unsigned, since numba checks signed indices for negative values at each use.
        word = ZERO
        count = ones(mine[word])
        rank = ZERO
        while True:
            # One load of 57 bits serves both numbers unless they are large, because each load waits for the previous.
            ahead = _load(data, place >> np.uint64(3)) >> (place & np.uint64(7))
            token, width, raw, state = _step(gap_table[state], ahead)
            if not token:
                place += width
                break
            gap, used = firsts[token - ONE], width + raw
            if used > FEW:
                gap += _wide(data, place + width, raw)
                place += used
                used = ZERO
                ahead = _read(data, place, np.uint64(57))
            else:
                gap += (ahead >> width) & ((ONE << raw) - ONE)
                ahead >>= used
            token, width, raw, state = _step(value_table[state], ahead)
            place += used + width
            value = firsts[token]
            if width + raw > FEW:
                value += _wide(data, place, raw)
            else:
                value += (ahead >> width) & ((ONE << raw) - ONE)
            place += raw
            value += ONE
            if gap >> np.uint64(32) or place > end:
                return OUTSIDE
            if found >= room:
                return TOO_MANY
            if not value or (widest < np.uint64(64) and value >> widest):
                return STILL
            rank += gap
            while rank >= count:
                rank -= count
                word += ONE
                if word >= last:
                    return OUTSIDE
                count = ones(mine[word])
            bit = _select(mine[word], rank)
            rank += ONE
            marks[word] |= ONE << bit
            zigzags[(word << np.uint64(6)) + bit] = value
            found += 1
    if state or place > end:
        return SHORT
    if end - place >= np.uint64(8) or _read(data, place, end - place):
        return TRAILING
    return found


@_compile
def collect(marks, zigzags, columns, origin, stride, positions, out, rows):
    """Write the elements that ``decode_tile`` marked, ascending, and clear the marks.

    Args:
        zigzags: (64 · words,). origin: flat index of the tile's first element. stride: of a row.
        positions: int64 output. out: output of distances, without zigzag. rows: int32 output, row inside the tile. All
            have room for SLACK more elements, which are undefined.
    """
    used = np.uint64(0)
    one = out.dtype.type(1)
    row = ZERO
    start = ZERO
    width = np.uint64(columns)
    for word in range(marks.size):
        remaining = marks[word]
        marks[word] = ZERO
        here = np.uint64(word) << np.uint64(6)
        left = ones(remaining)
        while True:
            # Always SLACK at a time, since the number of set bits is unpredictable; surplus is overwritten.
            for i in range(SLACK):
                place = here + trailing_zeros(remaining | _TOP)
                remaining &= remaining - ONE
                while place >= start + width:
                    start += width
                    row += ONE
                positions[used + np.uint64(i)] = origin + np.int64(row) * stride + np.int64(place - start)
                value = zigzags[place]
                out[used + np.uint64(i)] = (value >> one) ^ (out.dtype.type(0) - (value & one))
                rows[used + np.uint64(i)] = row
            if left <= np.uint64(SLACK):
                break
            used += np.uint64(SLACK)
            left -= np.uint64(SLACK)
        used += left

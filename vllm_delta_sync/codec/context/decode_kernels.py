"""Compiled loops that decode codec ``context``. Arrays are flat and C-contiguous; every loop releases the GIL.

Streams are not trusted: whatever their bytes are, nothing is written outside the arrays given, and a loop ends.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from vllm_delta_sync.codec.context.shared_kernels import mask_tile, ones, trailing_zeros
from vllm_delta_sync.codec.context.tables import STATE_BITS
from vllm_delta_sync.format.kernels import ONE, ZERO, _compile

PADDING = 32
"""Bytes that must follow a stream in memory: what one entry of damaged bytes can make a reader look at."""
FEW = np.uint64(28)
"""Bits of a step that are taken from the same look at the stream as those of the step before."""
SLACK = 2
"""How many elements ``collect`` writes at least for 64 that it looks at."""

# What ``decode_tile`` finds wrong, as negative numbers.
SHORT, TRAILING, OUTSIDE, TOO_MANY, STILL = -1, -2, -3, -4, -5

_EACH = np.uint64(0x0101010101010101)
_TOPS = np.uint64(0x8080808080808080)
_TOP = np.uint64(1 << 63)


def _places():
    """(2048,) uint8: at 8 · byte + rank, the index of the bit set number ``rank`` of a byte."""
    table = np.zeros((256, 8), np.uint8)
    for byte in range(256):
        held = [bit for bit in range(8) if byte >> bit & 1]
        table[byte, : len(held)] = held
    return table.reshape(-1)


_PLACES = _places()


@_compile
def _select(word, rank):
    """Index of the bit set number ``rank``; there must be that many."""
    # Without branches: ones of each byte and all below it, then which byte, then which bit of it.
    sums = word - ((word >> ONE) & np.uint64(0x5555555555555555))
    sums = (sums & np.uint64(0x3333333333333333)) + ((sums >> np.uint64(2)) & np.uint64(0x3333333333333333))
    sums = ((sums + (sums >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)) * _EACH
    passed = ((((rank * _EACH) | _TOPS) - sums) & _TOPS) >> np.uint64(7)
    byte = ones(passed) << np.uint64(3)
    rank -= ((sums << np.uint64(8)) >> byte) & np.uint64(255)
    return byte + np.uint64(_PLACES[(((word >> byte) & np.uint64(255)) << np.uint64(3)) + rank])


@intrinsic
def _load(typing_context, data, place):
    """Eight bytes of a uint8 array from ``place`` (uint64) on, as uint64. The caller sees to the bounds."""

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(data, place), generate


@_compile
def _read(data, place, count):
    """``count`` bits, at most 57, from bit ``place`` on."""
    return (_load(data, place >> np.uint64(3)) >> (place & np.uint64(7))) & ((ONE << count) - ONE)


@_compile
def _wide(data, place, count):
    """``count`` bits, at most 64, from bit ``place`` on."""
    low = min(count, np.uint64(32))
    return _read(data, place, low) + (_read(data, place + low, count - low) << low)


@_compile
def _step(entry, ahead):
    """(token, bits taken, raw bits that follow them, next state) by an entry of ``Decoding`` and the bits ahead."""
    entry = np.uint64(entry)
    width = (entry >> np.uint64(12)) & np.uint64(15)
    state = (entry & np.uint64(4095)) + (ahead & ((ONE << width) - ONE))
    return entry >> np.uint64(22), width, (entry >> np.uint64(16)) & np.uint64(63), state


@_compile
def decode_tensor(bits, grid, drop, thresholds, wanted, ends, payload, tables, firsts, positions, distances):
    """Decode the tiles of a tensor that are wanted.

    Args:
        bits: (numel,) old bits, as far as they are in wanted tiles. grid: see ``entries_of_tensor``.
        wanted: (tiles,) bool. ends: (tiles + 1,) int64, where in ``payload`` each stream begins, and the last one ends.
        payload, tables, firsts: see ``decode_tile``.
        positions, distances: room for as many elements as may change, and SLACK more.

    Returns:
        (elements found, or what is wrong; tile at which).
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
    tile = 0
    row = 0
    while row < rows:
        stop = min(row + height, row // slab * slab + slab, rows)
        held = 0
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
                    most - found - held,
                )  # fmt: skip
                if got < 0:
                    return got, tile
                collect(
                    marks[:used], zigzags, across_tile, origin, columns, band_positions[held:], band_distances[held:],
                    in_rows[held:],
                )  # fmt: skip
                held += got
            tile += 1
        if across > 1:
            _by_row(
                band_positions[:held], band_distances[:held], in_rows, stop - row, positions[found:], distances[found:]
            )
        found += held
        row = stop
    return found, tile


@_compile
def _by_row(from_positions, from_distances, in_rows, rows, positions, distances):
    """Bring a band's tiles, each ascending, from left to right, into the order of the tensor."""
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
        masks: (classes, words or more) uint64: which elements are of a class. data: (bytes,) uint8; the stream is
            data[first:stop], and PADDING bytes or more follow it.
        tables: ``Decoding``, two tables for each class: gaps and values. firsts: see ``token_ranges``.
        marks: (words,) uint64, zero: a bit is set for each changed element. zigzags: its distance, unsigned of the
            element's width, at the same number.
        room: the most elements that may change.

    Returns:
        how many did, or what is wrong, below 0.
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
        # Unsigned, as what may be below 0 is looked at twice whenever it is an index.
        word = ZERO
        count = ones(mine[word])
        rank = ZERO
        while True:
            # One look at 57 bits does for both numbers, unless they are large: each look waits for the one before.
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
    """Emit what ``decode_tile`` marked, ascending, and clear the marks.

    Args:
        zigzags: (64 · words,). origin: flat index of the tile's first element. stride: of a row.
        positions: int64, out: distances, zigzag undone, rows: int32 row inside the tile; room for all, and for SLACK
            elements that mean nothing.
    """
    used = np.uint64(0)
    one = out.dtype.type(1)
    row = ZERO
    start = ZERO
    width = np.uint64(columns)
    for word in range(marks.size):
        held = marks[word]
        marks[word] = ZERO
        here = np.uint64(word) << np.uint64(6)
        left = ones(held)
        while True:
            # Always so many at a time, whether there are or not: how many comes as a surprise at each word.
            for i in range(SLACK):
                place = here + (trailing_zeros(held | _TOP))
                held &= held - ONE
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

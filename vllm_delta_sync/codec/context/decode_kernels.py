"""Compiled loops (numba) that decode codec ``context``. Arrays are flat and C-contiguous; every loop releases the GIL.

Streams are not trusted: for any bytes, a loop ends and writes only inside the arrays that it was given.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from vllm_delta_sync.codec.context.shared_kernels import (
    BLOCK_WORDS,
    keys_of_tiles,
    masks_of_classes,
    room_of,
    tiles_together,
)
from vllm_delta_sync.codec.context.tables import SLACK, STATE_BITS
from vllm_delta_sync.format.kernels import ONE, ZERO, _compile, ones, trailing_zeros

PADDING = 32
"""Bytes that must follow a stream in memory: one damaged entry can read so far beyond its end."""
FEW = np.uint64(28)
"""Largest number of bits of a step for which the next step uses the same load from the stream."""

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
    room = room_of(min(height, slab) * min(width, columns))
    together = tiles_together(across, room)
    keys = np.empty(together * room, np.uint8)
    masks = np.empty((thresholds.size + 1, room // 64), np.uint64)
    gaps, values = np.empty(room, np.uint32), np.empty(room, distances.dtype)
    marks, zigzags = np.zeros(room // 64, np.uint64), np.empty(room, distances.dtype)
    places = np.empty(room + SLACK, np.uint32)
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
        for group in range(0, across, together):
            count = min(together, across - group)
            needed = wanted[tile : tile + count] & (ends[tile + 1 : tile + count + 1] > ends[tile : tile + count])
            left = group * width
            keys_of_tiles(
                bits, row * columns + left, stop - row, columns - left, width, columns, drop, needed, room, keys
            )
            for number in range(count):
                if needed[number]:
                    left = (group + number) * width
                    across_tile = min(width, columns - left)
                    size = (stop - row) * across_tile
                    used = (size + 63) // 64
                    masks_of_classes(keys[number * room : (number + 1) * room], size, thresholds, masks)
                    got = decode_tile(
                        masks, used, payload, ends[tile], ends[tile + 1], tables, firsts, gaps, values, marks, zigzags,
                        most - found - in_band,
                    )  # fmt: skip
                    if got < 0:
                        return got, tile
                    collect(marks[:used], zigzags, places, band_distances[in_band:])
                    _positions_of(
                        places[:got], across_tile, row * columns + left, columns, band_positions[in_band:],
                        in_rows[in_band:],
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
def _positions_of(places, width, origin, stride, positions, rows):
    """Map indices in a tile → positions in the tensor, and rows of the tile (int32)."""
    per_row = 1.0 / width
    for i in range(places.size):
        # The quotient by the reciprocal, as in ``encode_kernels._by_column``.
        row = np.int64((np.float64(places[i]) + 0.5) * per_row)
        rows[i] = row
        positions[i] = origin + row * stride + (np.int64(places[i]) - row * width)


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
def decode_tile(masks, words, data, first, stop, tables, firsts, gaps, values, marks, zigzags, room):
    """Read one tile's stream.

    Args:
        masks: (classes, words, in whole blocks of BLOCK_WORDS, or more) uint64: elements of each class. data: (bytes,)
            uint8; the stream is data[first:stop], and at least PADDING bytes follow it.
        tables: ``Decoding``, two tables for each class: gaps and values. firsts: see ``token_ranges``.
        gaps, values: scratch, uint32 and of the element's width, of as many elements as the tile has.
        marks: (words,) uint64 output, all zero before: one bit per changed element. zigzags: output, its distance at
            the same index, unsigned, of the element's width.
        room: largest number of changed elements.

    Returns:
        number of changed elements, or a negative error.
    """
    place = np.uint64(first) << np.uint64(3)
    end = np.uint64(stop) << np.uint64(3)
    state = _read(data, place, np.uint64(STATE_BITS))
    place += np.uint64(STATE_BITS)
    found = 0
    for kind in range(masks.shape[0]):
        mine = masks[kind]
        any_member = ZERO
        for i in range(words):
            any_member |= mine[i]
        if any_member:
            # Two passes: the first waits for one table entry after the other, the second for branches that are hard to
            # predict, so that each mispredicted one would stop the first as well.
            count, place, state = _read_class(
                data, place, end, state, tables[2 * kind], tables[2 * kind + 1], firsts, gaps, values, room - found
            )
            if count < 0:
                return count
            if not _mark(mine, words, gaps[:count], values[:count], marks, zigzags):
                return OUTSIDE
            found += count
    if state or place > end:
        return SHORT
    if end - place >= np.uint64(8) or _read(data, place, end - place):
        return TRAILING
    return found


@_compile
def _read_class(data, place, end, state, gap_table, value_table, firsts, gaps, values, room):
    """Read the entries of one class → (how many, or a negative error; place and state after them).

    Args:
        place, end: bits. gaps, values: output.
    """
    widest = np.uint64(8 * values.itemsize)
    count = np.uint64(0)
    while True:
        # One load of 57 bits serves both numbers unless they are large, because each load waits for the previous.
        ahead = _load(data, place >> np.uint64(3)) >> (place & np.uint64(7))
        token, width, raw, state = _step(gap_table[state], ahead)
        if not token:
            return np.int64(count), place + width, state
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
        if gap >> np.uint64(32) or place > end or count >= np.uint64(gaps.size):
            return np.int64(OUTSIDE), place, state
        if count >= np.uint64(room):
            return np.int64(TOO_MANY), place, state
        if not value or (widest < np.uint64(64) and value >> widest):
            return np.int64(STILL), place, state
        gaps[count] = gap
        values[count] = value
        count += ONE


@_compile
def _mark(mine, words, gaps, values, marks, zigzags):
    """Mark the members of a class that follow each other at ``gaps`` → whether it has them all."""
    # Blocks of four words: their loop ends after fewer steps, which are predicted better, and no branch chooses a word.
    blocks = np.uint64((words + BLOCK_WORDS - 1) // BLOCK_WORDS)
    block = ZERO
    first, second, third, fourth = ones(mine[0]), ones(mine[1]), ones(mine[2]), ones(mine[3])
    rank = ZERO
    for i in range(gaps.size):
        rank += np.uint64(gaps[i])
        while rank >= first + second + third + fourth:
            rank -= first + second + third + fourth
            block += ONE
            if block >= blocks:
                return False
            at = block * np.uint64(BLOCK_WORDS)
            first, second = ones(mine[at]), ones(mine[at + ONE])
            third, fourth = ones(mine[at + np.uint64(2)]), ones(mine[at + np.uint64(3)])
        word = block * np.uint64(BLOCK_WORDS)
        inside = rank
        after_first, after_second = np.uint64(rank >= first), np.uint64(rank >= first + second)
        after_third = np.uint64(rank >= first + second + third)
        inside -= after_first * first + after_second * second + after_third * third
        word += after_first + after_second + after_third
        bit = _select(mine[word], inside)
        marks[word] |= ONE << bit
        zigzags[(word << np.uint64(6)) + bit] = values[i]
        rank += ONE
    return True


@_compile
def collect(marks, zigzags, places, out):
    """Write the elements that ``decode_tile`` marked, ascending, and clear the marks.

    Args:
        zigzags: (64 · words,). places: uint32 output, index in the tile. out: output of distances, without zigzag. Both
            have room for SLACK more elements, which are undefined.
    """
    used = np.uint64(0)
    one = out.dtype.type(1)
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
                places[used + np.uint64(i)] = place
                value = zigzags[place]
                out[used + np.uint64(i)] = (value >> one) ^ (out.dtype.type(0) - (value & one))
            if left <= np.uint64(SLACK):
                break
            used += np.uint64(SLACK)
            left -= np.uint64(SLACK)
        used += left

"""Compiled loops (numba) that encode with codec ``context``.

Arrays are flat and C-contiguous; every loop releases the GIL.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from vllm_delta_sync.codec.context.shared_kernels import key_of, leading_zeros, mask_tile, token_of
from vllm_delta_sync.codec.context.tables import STATE_BITS, STATES
from vllm_delta_sync.format.kernels import ONE, ZERO, _compile, ones


@_compile
def count_keys(bits, step, drop, counts):
    """Count the keys of the first 64 of every 64 · ``step`` elements in counts[key]."""
    for start in range(0, bits.size, 64 * step):
        piece = bits[start : start + 64]
        for i in range(piece.size):
            counts[key_of(piece[i], drop)] += 1


@_compile
def count_tokens(bits, positions, zigzags, drop, counts):
    """Count each changed element in counts[key, token of zigzag − 1]."""
    for i in range(positions.size):
        counts[key_of(bits[positions[i]], drop), token_of(np.uint64(zigzags[i]) - ONE)] += 1


@_compile
def entries_of_tensor(bits, grid, drop, thresholds, positions, zigzags, kinds, gaps, values, sizes):
    """Write the entries of all tiles of a tensor, tile after tile.

    Args:
        bits: (numel,) old bits. grid: (rows, columns, rows of a slab, of a tile, columns of a tile), int64.
        positions: (n,) int64 ascending. zigzags: (n,), of the width of ``bits``.
        kinds, gaps, values: see ``gaps_of_tile``; room for n entries and all ends of classes.
        sizes: (tiles,) int64 output: entries of each tile, 0 without changes.

    Returns:
        number of entries.
    """
    rows, columns, slab, height, width = grid
    across = (columns + width - 1) // width
    words = (min(height, slab) * min(width, columns) + 63) // 64
    scratch = np.empty(words * 64, np.uint8)
    masks = np.empty((thresholds.size + 1, words), np.uint64)
    class_of = np.zeros(256, np.uint8)
    for key in range(256):
        for threshold in thresholds:
            class_of[key] += np.uint8(key >= threshold)
    tallies = np.empty(across + 1, np.int64)
    used = 0
    tile = 0
    first = 0
    row = 0
    while row < rows:
        stop = min(row + height, row // slab * slab + slab, rows)
        last = first + np.searchsorted(positions[first:], stop * columns)
        places, moved = _by_column(positions[first:last] - row * columns, zigzags[first:last], columns, width, tallies)
        for column in range(across):
            begin, end = tallies[column], tallies[column + 1]
            sizes[tile] = 0
            if end > begin:
                left = column * width
                size = mask_tile(
                    bits, row * columns + left, stop - row, min(width, columns - left), columns, drop,
                    thresholds, scratch, masks,
                )  # fmt: skip
                sizes[tile] = gaps_of_tile(
                    scratch,
                    class_of,
                    masks,
                    size,
                    places[begin:end],
                    moved[begin:end],
                    kinds[used:],
                    gaps[used:],
                    values[used:],
                )
                used += sizes[tile]
            tile += 1
        first = last
        row = stop
    return used


@_compile
def _by_column(places, zigzags, columns, width, tallies):
    """Sort a band's changes stably by tile; places become indices inside the tile. ``tallies``: start of each tile."""
    tiles = np.empty(places.size, np.int32)
    inside = np.empty(places.size, np.int64)
    tallies[:] = 0
    row = start = left = tile = 0
    # Places ascend, so row and tile advance step by step, without divisions.
    for i in range(places.size):
        while places[i] >= start + columns:
            start += columns
            row += 1
            left = tile = 0
        while places[i] >= start + left + width:
            left += width
            tile += 1
        tiles[i] = tile
        inside[i] = row * min(width, columns - left) + places[i] - start - left
        tallies[tile + 1] += 1
    for i in range(1, tallies.size):
        tallies[i] += tallies[i - 1]
    cursors = tallies[:-1].copy()
    sorted_places = np.empty_like(places)
    sorted_zigzags = np.empty_like(zigzags)
    for i in range(places.size):
        cursor = cursors[tiles[i]]
        cursors[tiles[i]] += 1
        sorted_places[cursor] = inside[i]
        sorted_zigzags[cursor] = zigzags[i]
    return sorted_places, sorted_zigzags


@_compile
def gaps_of_tile(keys, class_of, masks, size, places, zigzags, kinds, gaps, values):
    """Sort a tile's changes by class, and compute their gaps within the class.

    Args:
        keys: (size,) uint8 key of each element. class_of: (256,) uint8 class of each key. masks: (classes, words or
            more). places: (n,) int64 ascending indices inside the tile. zigzags: (n,), at least 1.
        kinds, gaps, values: output, room for n + classes entries: class (uint8), gap + 1 (uint32) and zigzag − 1; an
            entry with 0 instead of gap + 1 ends a class.

    Returns:
        number of entries.
    """
    classes = masks.shape[0]
    passed = np.zeros(classes, np.uint32)
    tallies = np.zeros(classes, np.int64)
    ranks = np.empty(places.size, np.uint32)
    cursor = 0
    for word in range((size + 63) // 64):
        stop = word * 64 + 64
        while cursor < places.size and places[cursor] < stop:
            kind = class_of[keys[places[cursor]]]
            below = (ONE << np.uint64(places[cursor] & 63)) - ONE
            ranks[cursor] = passed[kind] + np.uint32(ones(masks[kind, word] & below))
            tallies[kind] += 1
            cursor += 1
        for kind in range(classes):
            passed[kind] += np.uint32(ones(masks[kind, word]))
    used = 0
    cursors = np.zeros(classes, np.int64)
    for kind in range(classes):
        cursors[kind] = used
        if passed[kind]:
            used += tallies[kind] + 1
            kinds[used - 1] = kind
            gaps[used - 1] = 0
            values[used - 1] = 0
    nexts = np.zeros(classes, np.uint32)
    for i in range(places.size):
        kind = class_of[keys[places[i]]]
        entry = cursors[kind]
        cursors[kind] += 1
        kinds[entry] = kind
        gaps[entry] = ranks[i] - nexts[kind] + np.uint32(1)
        values[entry] = zigzags[i] - 1
        nexts[kind] = ranks[i] + np.uint32(1)
    return used


@_compile
def tally(kinds, gaps, values, counts):
    """Count the tokens of entries: gaps and ends in counts[class, 0, …], values in counts[class, 1, …]."""
    for i in range(kinds.size):
        if gaps[i]:
            counts[kinds[i], 0, token_of(np.uint64(gaps[i]) - ONE) + ONE] += 1
            counts[kinds[i], 1, token_of(np.uint64(values[i]))] += 1
        else:
            counts[kinds[i], 0, 0] += 1


@_compile
def encode_tiles(sizes, kinds, gaps, values, tables, out, lengths):
    """Write the streams of all tiles → bytes written.

    Args:
        sizes: (tiles,) entries of each. tables: see ``encode_tile``. out: uint8, room for all.
        lengths: (tiles,) int64 output: bytes of each stream, 0 for a tile without entries.
    """
    room = 0
    for tile in range(sizes.size):
        room = max(room, 4 * sizes[tile] + 1)
    fields = np.empty(room, np.uint64)
    widths = np.empty(room, np.uint64)
    first = 0
    used = 0
    for tile in range(sizes.size):
        last = first + sizes[tile]
        lengths[tile] = 0
        if last > first:
            count = encode_tile(kinds[first:last], gaps[first:last], values[first:last], tables, fields, widths)
            lengths[tile] = write_fields(fields[:count], widths[:count], out[used:])
            used += lengths[tile]
        first = last
    return used


@_compile
def encode_tile(kinds, gaps, values, tables, fields, widths):
    """Code a tile's entries backwards → number of fields, to be written from last to first.

    Args:
        tables: ``Encoding``, two tables for each class: gaps and values. fields, widths: (4 · entries + 1,) uint64.
    """
    states, frequencies, starts = tables
    state = STATES
    used = 0
    for i in range(kinds.size - 1, -1, -1):
        row = 2 * np.int64(kinds[i])
        token = ZERO
        if gaps[i]:
            value = np.uint64(values[i])
            token = token_of(value)
            fields[used], widths[used] = rest_of(value, token)
            # A decoder reads the state's bits before the raw bits, so they are recorded after them.
            used += 1
            state = _put(state, token, states[row + 1], frequencies[row + 1], starts[row + 1], fields, widths, used)
            used += 1
            gap = np.uint64(gaps[i]) - ONE
            token = token_of(gap)
            fields[used], widths[used] = rest_of(gap, token)
            token += ONE
            used += 1
        state = _put(state, token, states[row], frequencies[row], starts[row], fields, widths, used)
        used += 1
    fields[used] = state - STATES
    widths[used] = STATE_BITS
    return used + 1


@_compile
def _put(state, token, states, frequencies, starts, fields, widths, used):
    """Code one symbol: record the bits that decoding it reads → the next state."""
    frequency = np.int64(frequencies[token])
    count = STATE_BITS - (63 - np.int64(leading_zeros(np.uint64(frequency))))
    count -= (state >> count) < frequency
    fields[used] = state & ((1 << count) - 1)
    widths[used] = count
    return STATES + np.int64(states[np.int64(starts[token]) + (state >> count) - frequency])


@_compile
def rest_of(value, token):
    count = max(token >> np.uint64(2), ONE) - ONE
    return value & ((ONE << count) - ONE), count


@_compile
def write_fields(fields, widths, out):
    """Write the fields, last field first, as a bit string, lowest bits first → bytes written."""
    pending_bits = ZERO
    filled = ZERO
    used = 0
    for i in range(fields.size - 1, -1, -1):
        value, left = fields[i], widths[i]
        while left:
            part = min(left, np.uint64(32))
            pending_bits |= (value & ((ONE << part) - ONE)) << filled
            filled += part
            value >>= part
            left -= part
            while filled >= np.uint64(8):
                out[used] = np.uint8(pending_bits & np.uint64(255))
                used += 1
                pending_bits >>= np.uint64(8)
                filled -= np.uint64(8)
    if filled:
        out[used] = np.uint8(pending_bits)
        used += 1
    return used

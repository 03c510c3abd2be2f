"""Compiled loops (numba) that encode with codec ``context``.

Arrays are flat and C-contiguous; every loop releases the GIL.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from vllm_delta_sync.codec.context.shared_kernels import key_of, leading_zeros, mask_tile, store_word, token_of
from vllm_delta_sync.codec.context.tables import STATE_BITS, STATES
from vllm_delta_sync.format.kernels import ONE, PIECE, ZERO, _compile, ones, prefetch

WORDS_PER_ENTRY = 2
"""Of 64 bits: an entry takes at most 2 · STATE_BITS, and the raw bits of a 64-bit and a 32-bit number."""
AHEAD = 16
"""Number of samples by which prefetching is ahead of counting: they lie too far apart for the processor's own."""
LINE_BYTES = 64


@_compile
def count_keys(bits, step, drop, counts):
    """Count the keys of the first 64 of every 64 · ``step`` elements in counts[key]."""
    # Four tables in turn: neighbors often have the same key, and adding to a number waits for the addition before.
    partial = np.zeros((4, counts.size), np.int64)
    first, second, third, fourth = partial
    for start in range(0, bits.size, 64 * step):
        for ahead in range(start + 64 * step * AHEAD, start + 64 * (step * AHEAD + 1), LINE_BYTES // bits.itemsize):
            prefetch(bits, np.uint64(ahead))
        piece = bits[start : start + 64]
        whole = piece.size // 4 * 4
        for i in range(0, whole, 4):
            first[key_of(piece[i], drop)] += 1
            second[key_of(piece[i + 1], drop)] += 1
            third[key_of(piece[i + 2], drop)] += 1
            fourth[key_of(piece[i + 3], drop)] += 1
        for i in range(whole, piece.size):
            first[key_of(piece[i], drop)] += 1
    counts += first + second + third + fourth


@_compile
def count_tokens(bits, positions, zigzags, drop, counts):
    """Count each changed element in counts[key, token of zigzag − 1]."""
    for i in range(min(PIECE, positions.size)):
        prefetch(bits, np.uint64(positions[i]))
    for i in range(positions.size):
        if i + PIECE < positions.size:
            prefetch(bits, np.uint64(positions[i + PIECE]))
        counts[key_of(bits[np.uint64(positions[i])], drop), token_of(np.uint64(zigzags[i]) - ONE)] += 1


@_compile
def entries_of_span(bits, grid, span, drop, thresholds, positions, zigzags, kinds, gaps, values, sizes):
    """Write the entries of the tiles of some bands of a tensor, tile after tile.

    Args:
        bits: (numel,) old bits. grid: (rows, columns, rows of a slab, of a tile, columns of a tile), int64.
            span: ``tiles.Span`` of the bands.
        positions: (n,) int64 ascending, inside the bands. zigzags: (n,), of the width of ``bits``.
        kinds, gaps, values: see ``entries_of_tile``; room for n entries and all ends of classes.
        sizes: (tiles of the bands,) int64 output: entries of each, 0 without changes.

    Returns:
        number of entries.
    """
    rows, columns, slab, height, width = grid
    across = (columns + width - 1) // width
    words = (min(height, slab) * min(width, columns) + 63) // 64
    keys = np.empty(words * 64, np.uint8)
    masks = np.empty((thresholds.size + 1, words), np.uint64)
    before = np.empty(masks.shape, np.uint32)
    class_of = np.zeros(256, np.uint8)
    for key in range(256):
        for threshold in thresholds:
            class_of[key] += np.uint8(key >= threshold)
    tallies = np.empty(across + 1, np.int64)
    used = 0
    first = 0
    row, last_row, _, _ = span
    tile = 0
    while row < last_row:
        stop = min(row + height, row // slab * slab + slab, rows)
        last = first + np.searchsorted(positions[first:], stop * columns)
        places, moved = _by_column(positions[first:last] - row * columns, zigzags[first:last], columns, width, tallies)
        for column in range(across):
            begin, end = tallies[column], tallies[column + 1]
            sizes[tile] = 0
            if end > begin:
                left = column * width
                size = mask_tile(
                    bits, row * columns + left, stop - row, min(width, columns - left), columns, drop, thresholds, keys,
                    masks,
                )  # fmt: skip
                sizes[tile] = entries_of_tile(
                    keys, class_of, masks, before, size, places[begin:end], moved[begin:end], kinds[used:],
                    gaps[used:], values[used:],
                )  # fmt: skip
                used += sizes[tile]
            tile += 1
        first = last
        row = stop
    return used


@_compile
def _by_column(places, zigzags, columns, width, tallies):
    """Sort a band's changes stably by tile; places become indices inside the tile. ``tallies``: start of each tile."""
    tiles = np.empty(places.size, np.uint32)
    inside = np.empty(places.size, np.int64)
    # Quotients by reciprocals, since integer division has no vectors. Half a unit is further from a whole number than
    # the rounding error, for bands below 2^50 elements.
    per_column, per_tile = 1.0 / columns, 1.0 / width
    for i in range(places.size):
        row = np.int64((np.float64(places[i]) + 0.5) * per_column)
        column = places[i] - row * columns
        tile = np.int64((np.float64(column) + 0.5) * per_tile)
        left = tile * width
        tiles[i] = tile
        inside[i] = row * min(width, columns - left) + column - left
    tallies[:] = 0
    for i in range(places.size):
        tallies[tiles[i] + 1] += 1
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
def entries_of_tile(keys, class_of, masks, before, size, places, zigzags, kinds, gaps, values):
    """Sort a tile's changes by class, and compute their gaps within the class.

    Args:
        keys: (size,) uint8 key of each element. class_of: (256,) uint8 class of each key. masks: (classes, words or
            more). before: scratch, uint32 of that shape. places: (n,) int64 ascending indices inside the tile.
            zigzags: (n,), at least 1.
        kinds, gaps, values: output, room for n + classes entries: class (uint8), gap + 1 (uint32) and zigzag − 1; an
            entry with 0 instead of gap + 1 ends a class.

    Returns:
        number of entries.
    """
    classes = masks.shape[0]
    words = (size + 63) // 64
    tallies = np.zeros(classes, np.int64)
    for i in range(places.size):
        tallies[class_of[keys[np.uint64(places[i])]]] += 1
    used = 0
    cursors = np.zeros(classes, np.int64)
    for kind in range(classes):
        mine, passed = masks[kind], before[kind]
        members = np.uint64(0)
        for word in range(words):
            passed[word] = members
            members += ones(mine[word])
        cursors[kind] = used
        if members:
            used += tallies[kind] + 1
            kinds[used - 1] = kind
            gaps[used - 1] = 0
            values[used - 1] = 0
    nexts = np.zeros(classes, np.uint32)
    for i in range(places.size):
        place = np.uint64(places[i])
        at = place >> np.uint64(6)
        kind = class_of[keys[place]]
        below = (ONE << (place & np.uint64(63))) - ONE
        rank = before[kind, at] + np.uint32(ones(masks[kind, at] & below))
        entry = cursors[kind]
        cursors[kind] += 1
        kinds[entry] = kind
        gaps[entry] = rank - nexts[kind] + np.uint32(1)
        values[entry] = zigzags[i] - 1
        nexts[kind] = rank + np.uint32(1)
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
        sizes: (tiles,) entries of each. tables: see ``encode_tile``. out: uint8, room for all, and 8 bytes more.
        lengths: (tiles,) int64 output: bytes of each stream, 0 for a tile without entries.
    """
    most = 0
    for tile in range(sizes.size):
        most = max(most, sizes[tile])
    words = np.empty(WORDS_PER_ENTRY * most + 2, np.uint64)
    first = 0
    used = 0
    for tile in range(sizes.size):
        last = first + sizes[tile]
        lengths[tile] = 0
        if last > first:
            lengths[tile] = encode_tile(
                kinds[first:last], gaps[first:last], values[first:last], tables, words, out[used:]
            )
            used += lengths[tile]
        first = last
    return used


@_compile
def encode_tile(kinds, gaps, values, tables, words, out):
    """Code a tile's entries, from the last to the first, into a bit string, lowest bits first → bytes written.

    Args:
        tables: ``Encoding``, two tables for each class: gaps and values. words: scratch, WORDS_PER_ENTRY for each entry
            and 2 more. The bit string is made in it from its end on, in the order in which a decoder reads it.
    """
    states, frequencies, starts = tables
    state = np.uint64(STATES)
    writer = ZERO, ZERO, np.uint64(words.size - 1)
    for i in range(kinds.size - 1, -1, -1):
        row = 2 * np.int64(kinds[i])
        token = ZERO
        if gaps[i]:
            value = np.uint64(values[i])
            token = token_of(value)
            writer = _prepend_rest(words, writer, value, token)
            # A decoder reads the state's bits before the raw bits.
            state, writer = _put(state, token, states[row + 1], frequencies[row + 1], starts[row + 1], words, writer)
            gap = np.uint64(gaps[i]) - ONE
            token = token_of(gap)
            writer = _prepend_rest(words, writer, gap, token)
            token += ONE
        state, writer = _put(state, token, states[row], frequencies[row], starts[row], words, writer)
    pending, filled, cursor = _prepend(words, writer, state - np.uint64(STATES), np.uint64(STATE_BITS))
    size = (filled + np.uint64(64) * (np.uint64(words.size - 1) - cursor) + np.uint64(7)) >> np.uint64(3)
    # The string begins with the pending bits, and the words follow, each moved up by as many.
    for place in range(0, np.int64(size), 8):
        cursor += ONE
        word = words[cursor] if cursor < np.uint64(words.size) else ZERO
        store_word(out, np.uint64(place), pending | (word << filled))
        pending = (word >> ONE) >> (np.uint64(63) - filled)
    return np.int64(size)


@_compile
def _prepend(words, writer, value, count):
    """Put ``count`` bits, at most 63, before those written so far → writer.

    The writer has bits that are not in ``words`` yet, their number (below 64), and the index of the next word to write.
    """
    pending, filled, cursor = writer
    total = filled + count
    # Without branches: a word is written each time, and again until it is full.
    words[cursor] = ((pending << ONE) << (np.uint64(63) - filled)) | (value >> (total & np.uint64(63)))
    full = total >> np.uint64(6)
    filled = total & np.uint64(63)
    pending = value & ((ONE << filled) - ONE) if full else (pending << count) | value
    return pending, filled, cursor - full


@_compile
def _put(state, token, states, frequencies, starts, words, writer):
    """Code one symbol: write the bits that decoding it reads → the next state, and the writer."""
    # All but the last three lines waits for no other symbol. Unsigned, since numba checks signed indices.
    frequency = np.uint64(frequencies[token])
    most = leading_zeros(frequency) - np.uint64(63 - STATE_BITS)
    least, first = frequency << most, np.uint64(starts[token]) - frequency
    count = most - np.uint64(state < least)
    writer = _prepend(words, writer, state & ((ONE << count) - ONE), count)
    return np.uint64(STATES) + np.uint64(states[first + (state >> count)]), writer


@_compile
def _prepend_rest(words, writer, value, token):
    """Write the raw bits of a number → writer."""
    count = max(token >> np.uint64(2), ONE) - ONE
    return _prepend(words, writer, value & ((ONE << count) - ONE), count)

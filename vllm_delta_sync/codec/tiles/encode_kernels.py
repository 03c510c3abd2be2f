"""Compiled loops (numba) that encode tiles. Arrays are C-contiguous; every loop releases the GIL."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"

import numpy as np
from numba.extending import intrinsic

from vllm_delta_sync.codec.tiles.alphabets import CLASSES, KINDS, OTHERS, PLAIN
from vllm_delta_sync.codec.tiles.shared_kernels import (
    LANES,
    LOW6,
    S6,
    THREE,
    TWO,
    load_word,
    mask_tiles,
    store_word,
    token_of,
    words_of,
)
from vllm_delta_sync.format.kernels import ONE, PIECE, ZERO, _compile, ones, prefetch

AHEAD = 16
"""Number of samples by which prefetching is ahead of counting: they lie too far apart for the processor's own."""
LINE_BYTES = 64
SEVEN = np.uint64(7)
WHOLE = np.uint64(56)
"""Bits of whole bytes, of the at most 58 that are written at once."""
FEW = np.uint64(40)
"""Largest number of raw bits written at once, beside up to seven that are pending and a code."""


@_compile
def count_keys(bits, step, magnitudes, shift, counts):
    """Count the keys of the first 64 of every 64 · ``step`` elements in counts[key]."""
    # Four tables in turn: neighbors often have the same key, and adding to a number waits for the addition before.
    partial = np.zeros((4, counts.size), np.int64)
    for start in range(0, bits.size, 64 * step):
        for ahead in range(start + 64 * step * AHEAD, start + 64 * (step * AHEAD + 1), LINE_BYTES // bits.itemsize):
            prefetch(bits, np.uint64(ahead))
        for i in range(start, min(start + 64, bits.size)):
            partial[i & 3, np.uint64(bits[i] & magnitudes) >> shift] += 1
    counts += partial[0] + partial[1] + partial[2] + partial[3]


@intrinsic
def zigzag_of(typing_context, distance):
    """Map two's complement 0, −1, 1, −2 … → 0, 1, 2, 3 …, in the same width."""

    def generate(context, builder, signature, arguments):
        # In the element's width: numba would widen to 64 bits.
        [value] = arguments
        return builder.xor(builder.shl(value, value.type(1)), builder.ashr(value, value.type(value.type.width - 1)))

    return distance(distance), generate


@_compile
def count_tokens(bits, positions, distances, magnitudes, shift, counts):
    """Count each changed element in counts[key, token of zigzag − 1], whose last column has all larger tokens."""
    last = np.uint64(counts.shape[1] - 1)
    for i in range(min(PIECE, positions.size)):
        prefetch(bits, np.uint64(positions[i]))
    for i in range(positions.size):
        if i + PIECE < positions.size:
            prefetch(bits, np.uint64(positions[i + PIECE]))
        key = np.uint64(bits[np.uint64(positions[i])] & magnitudes) >> shift
        counts[key, min(token_of(np.uint64(zigzag_of(distances[i])) - ONE), last)] += 1


@_compile
def gaps_of_bands(
    bits,
    row_edges,
    column_edges,
    first,
    last,
    magnitudes,
    limits,
    plain,
    positions,
    distances,
    kinds,
    gaps,
    values,
    sizes,
):
    """Write the classes, gaps and values of the changes in some bands of a tensor, tile after tile, by ascending rank.

    Args:
        bits: (numel,) old bits, which are not read in plain tiles. row_edges, column_edges: see ``Grid``.
        first, last: the bands. magnitudes, limits: see ``mask_tiles``. plain: (tiles of the bands,) bool.
        positions: (n,) int64 ascending, inside the bands. distances: (n,) of the width of ``bits``, none 0.
        kinds, gaps, values: (n,) output: table (uint8), gap (uint32) and zigzag of each change.
        sizes: (tiles of the bands,) int64 output: changes of each.
    """
    across, columns = column_edges.size - 1, column_edges[-1]
    # Only what the largest tile takes.
    tallest, widest = np.int64(0), np.int64(0)
    for band in range(first, last):
        tallest = max(tallest, row_edges[band + 1] - row_edges[band])
    tile_of = np.zeros(columns if tallest > 1 else 0, np.uint16)
    for tile in range(across):
        widest = max(widest, column_edges[tile + 1] - column_edges[tile])
        tile_of[column_edges[tile] : column_edges[tile + 1]] = tile
    words = tallest * words_of(widest)
    slots = across if tallest > 1 else 1
    masks = np.empty((slots, CLASSES, words), np.uint64)
    before = np.empty((slots, CLASSES, words + 1 + LANES), np.uint32)
    edges = np.empty((slots, 2), np.int64)
    # Quotients by reciprocals, since integer division has no vectors. Half a unit is further from a whole number than
    # the rounding error, for bands below 2^50 elements.
    per_column = 1.0 / columns
    begin, tile = 0, 0
    tallies = np.zeros(across + 1, np.int64)
    for band in range(first, last):
        top, bottom = row_edges[band], row_edges[band + 1]
        end = begin + np.searchsorted(positions[begin:], bottom * columns)
        rows, places = np.empty(end - begin, np.int32), np.empty(end - begin, np.int64)
        moved = np.empty(end - begin, distances.dtype)
        tallies[:] = 0
        if bottom - top == 1 or across == 1:
            # Tiles follow each other in memory.
            for i in range(begin, end):
                offset = positions[i] - top * columns
                row = np.int64((np.float64(offset) + 0.5) * per_column)
                rows[i - begin], places[i - begin] = row, offset - row * columns
                moved[i - begin] = zigzag_of(distances[i])
            for number in range(across):
                tallies[number + 1] = end - begin
                if across > 1:
                    tallies[number + 1] = np.searchsorted(
                        positions[begin:end], top * columns + column_edges[number + 1]
                    )
        else:
            for i in range(begin, end):
                offset = positions[i] - top * columns
                row = np.int64((np.float64(offset) + 0.5) * per_column)
                tallies[tile_of[offset - row * columns] + 1] += 1
            for number in range(across):
                tallies[number + 1] += tallies[number]
            cursors = tallies[:-1].copy()
            for i in range(begin, end):
                offset = positions[i] - top * columns
                row = np.int64((np.float64(offset) + 0.5) * per_column)
                column = offset - row * columns
                number = tile_of[column]
                cursor = cursors[number]
                cursors[number] += 1
                rows[cursor], places[cursor], moved[cursor] = row, column, zigzag_of(distances[i])
        masked, slot = 0, -1
        if tallest > 1:
            for number in range(across):
                if tallies[number + 1] > tallies[number] and not plain[tile + number]:
                    edges[masked] = column_edges[number], column_edges[number + 1]
                    masked += 1
            mask_tiles(bits, 0, columns, top, bottom, edges[:masked], magnitudes, limits, masks, before)
        for number in range(across):
            low, high = tallies[number], tallies[number + 1]
            sizes[tile] = high - low
            if high > low:
                left, right = column_edges[number], column_edges[number + 1]
                out = begin + low, begin + high
                if plain[tile]:
                    _plain_gaps(
                        rows[low:high], places[low:high], left, right, moved[low:high],
                        kinds[out[0] : out[1]], gaps[out[0] : out[1]], values[out[0] : out[1]],
                    )  # fmt: skip
                else:
                    slot += 1
                    if tallest == 1:
                        slot = 0
                        edges[0] = left, right
                        mask_tiles(bits, 0, columns, top, bottom, edges, magnitudes, limits, masks, before)
                    _class_gaps(
                        masks[slot], before[slot], (bottom - top) * words_of(right - left), left, right, rows[low:high],
                        places[low:high], moved[low:high], kinds[out[0] : out[1]], gaps[out[0] : out[1]],
                        values[out[0] : out[1]],
                    )  # fmt: skip
            tile += 1
        begin = end


@_compile
def _plain_gaps(rows, places, left, right, zigzags, kinds, gaps, values):
    following = 0
    for i in range(rows.size):
        rank = np.int64(rows[i]) * (right - left) + places[i] - left
        kinds[i], gaps[i], values[i] = PLAIN, rank - following, zigzags[i]
        following = rank + 1


@_compile
def _class_gaps(masks, before, words, left, right, rows, places, zigzags, kinds, gaps, values):
    """Sort a tile's changes by rank, and compute their gaps; arguments as in ``gaps_of_bands`` and ``mask_tiles``."""
    members = before[:, words]
    ranks, owners = np.empty(rows.size, np.uint32), np.empty(rows.size, np.uint8)
    starts = np.zeros(CLASSES + 2, np.int64)
    base = np.zeros(CLASSES + 1, np.uint32)
    for kind in range(CLASSES):
        base[kind + 1] = base[kind] + members[kind]
    across = words_of(right - left)
    for i in range(rows.size):
        place = np.uint64(places[i] - left)
        bit = place & LOW6
        word = np.uint64(rows[i] * across) + (place >> S6)
        # Without branches, since the class is unpredictable.
        low, middle, high = masks[ZERO, word], masks[ONE, word], masks[TWO, word]
        owner = ONE * ((middle >> bit) & ONE) + TWO * ((high >> bit) & ONE)
        owner += THREE * ((~(low | middle | high) >> bit) & ONE)
        mine = low if owner == ZERO else (middle if owner == ONE else high)
        rank = before[min(owner, TWO), word] + np.uint32(ones(mine & ((ONE << bit) - ONE)))
        among_all = np.uint32(rows[i]) * np.uint32(right - left) + np.uint32(place)
        ranks[i] = base[owner] + (among_all if owner == THREE else rank)
        owners[i] = owner
        starts[owner + ONE] += 1
    for kind in range(CLASSES):
        starts[kind + 1] += starts[kind]
    for i in range(rows.size):
        owner = np.uint64(owners[i])
        cursor = np.uint64(starts[owner])
        starts[owner] += 1
        gaps[cursor], values[cursor] = ranks[i], zigzags[i]
    # A gap has the table of the element at which it begins.
    kind, following = ZERO, np.uint32(0)
    for i in range(rows.size):
        while kind < OTHERS and following >= base[kind + ONE]:
            kind += ONE
        reached = gaps[i]
        kinds[i], gaps[i] = kind, reached - following
        following = reached + np.uint32(1)


@_compile
def tally(kinds, gaps, values, counts):
    """Count the symbols of changes in counts[table, 0, …], and the tokens of large values in counts[table, 1, …]."""
    for i in range(kinds.size):
        zigzag = np.uint64(values[i])
        kind = min(zigzag - ONE, np.uint64(KINDS - 1))
        counts[kinds[i], 0, token_of(np.uint64(gaps[i])) * np.uint64(KINDS) + kind] += 1
        if kind == np.uint64(KINDS - 1):
            counts[kinds[i], 1, token_of(zigzag - np.uint64(KINDS))] += 1


@_compile
def write_streams(sizes, kinds, gaps, values, words, lengths, out, bit_sizes):
    """Write the streams of all tiles, one after the other → bits written; the rest of the last byte is 0.

    Args:
        sizes: (tiles,) changes of each. words, lengths: (TABLES, 2, SYMBOLS) codes. out: uint8, room for all, and 16
            bytes more. bit_sizes: (tiles,) uint32 output: bits of each stream.
    """
    place, pending, filled = ZERO, ZERO, ZERO
    first, before = 0, ZERO
    for tile in range(sizes.size):
        for i in range(first, first + sizes[tile]):
            kind, zigzag, gap = kinds[i], np.uint64(values[i]), np.uint64(gaps[i])
            token = token_of(gap)
            large = zigzag >= np.uint64(KINDS)
            symbol = token * np.uint64(KINDS) + (np.uint64(KINDS - 1) if large else zigzag - ONE)
            raw = max(token >> TWO, ONE) - ONE
            length = np.uint64(lengths[kind, 0, symbol])
            pending |= np.uint64(words[kind, 0, symbol]) << filled
            pending |= (gap & ((ONE << raw) - ONE)) << (filled + length)
            filled += length + raw
            store_word(out, place, pending)
            place += filled >> THREE
            pending >>= filled & WHOLE
            filled &= SEVEN
            if large:
                value = zigzag - np.uint64(KINDS)
                token = token_of(value)
                raw = max(token >> TWO, ONE) - ONE
                length = np.uint64(lengths[kind, 1, token])
                few = min(raw, FEW)
                pending |= np.uint64(words[kind, 1, token]) << filled
                pending |= (value & ((ONE << few) - ONE)) << (filled + length)
                filled += length + few
                store_word(out, place, pending)
                place += filled >> THREE
                pending >>= filled & WHOLE
                filled &= SEVEN
                if raw > few:
                    rest = raw - few
                    pending |= (value >> few & ((ONE << rest) - ONE)) << filled
                    filled += rest
                    store_word(out, place, pending)
                    place += filled >> THREE
                    pending >>= filled & WHOLE
                    filled &= SEVEN
        first += sizes[tile]
        written = (place << THREE) + filled
        bit_sizes[tile] = np.uint32(written - before)
        before = written
    store_word(out, place, pending)
    return before


@_compile
def append_bits(out, bits, data, count):
    """Append ``count`` bits of ``data`` to the ``bits`` that ``out`` has; the bits after these are 0 in both.

    ``out`` has room for 16 bytes more, ``data`` 8 bytes more than its bits take.
    """
    place, shift = bits >> THREE, bits & SEVEN
    pending = np.uint64(out[place]) if shift else ZERO
    for i in range(np.uint64(0), (count + np.uint64(55)) // np.uint64(56)):
        # Seven bytes at a time, so that eight hold them with up to seven bits that are pending.
        pending |= (load_word(data, np.uint64(7 * i)) & ((ONE << np.uint64(56)) - ONE)) << shift
        store_word(out, place, pending)
        place += np.uint64(7)
        pending >>= np.uint64(56)
    store_word(out, place, pending)

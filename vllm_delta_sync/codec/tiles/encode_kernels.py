"""Compiled loops (numba) that encode tiles. Arrays are C-contiguous; every loop releases the GIL."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"

import numpy as np
from numba import carray
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
from vllm_delta_sync.format.kernels import (
    ONE,
    PIECE,
    ZERO,
    _compile,
    _key,
    _mirror_mask,
    _unkey,
    ones,
    pointer,
    prefetch,
)

AHEAD = 16
"""Number of samples by which prefetching is ahead of counting: they lie too far apart for the processor's own."""
LINE_BYTES = 64
BUCKETS = CLASSES + 1
"""Of the changes of a tile: one for each class, one for those of none."""
FOUR = np.uint64(4)
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
def gaps_of_tensors(jobs, edges, magnitudes, limits, plain, positions, distances, kinds, gaps, values, sizes):
    """Write the classes, gaps and values of the changes in bands of some tensors of a block.

    Args:
        jobs: (n, 13) int64, each for one tensor: address and number of its old bits, origin, stride, and whether they
            have the changes already; in ``edges`` the first row edge, the first column edge, and the end; the first
            tile of the bands in the block; first and last band; first and last of their changes.
        plain: (tiles of the block,) bool. positions, distances: of all changes of the block.
        kinds, gaps, values, sizes: output, as that of ``gaps_of_bands``, but of the block.
    """
    for job in range(jobs.shape[0]):
        rows_at, columns_at, end, tile = jobs[job, 5], jobs[job, 6], jobs[job, 7], jobs[job, 8]
        start, stop = jobs[job, 11], jobs[job, 12]
        gaps_of_bands(
            carray(pointer(jobs[job, 0]), jobs[job, 1], distances.dtype), jobs[job, 2], jobs[job, 3], jobs[job, 4] > 0,
            edges[rows_at:columns_at], edges[columns_at:end], jobs[job, 9], jobs[job, 10], magnitudes, limits,
            plain[tile:], positions[start:stop], distances[start:stop], kinds[start:stop], gaps[start:stop],
            values[start:stop], sizes[tile:],
        )  # fmt: skip


@_compile
def gaps_of_bands(
    bits,
    origin,
    stride,
    after,
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
        bits, origin, stride: old bits, see ``Matrix``; not read in plain tiles. after: they have the changes already.
        row_edges, column_edges: see ``Grid``.
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
    for tile in range(across):
        widest = max(widest, column_edges[tile + 1] - column_edges[tile])
    words = tallest * words_of(widest)
    # All tiles of a band at once; one at a time where they follow each other in memory. Behind their masks those of
    # plain tiles, which have no classes.
    group = across if tallest > 1 else 1
    masks = np.empty((group + 1, CLASSES, words), np.uint64)
    before = np.empty((group + 1, CLASSES, words + 1 + LANES), np.uint32)
    masks[group], before[group] = 0, 0
    edges = np.empty((group, 2), np.int64)
    slots, widths = np.empty(group, np.uint64), np.empty(group, np.uint64)
    lefts, lengths = np.empty(group, np.uint64), np.empty(group, np.uint64)
    tile_of = np.zeros(columns if group > 1 else 0, np.uint16)
    for tile in range(group if group > 1 else 0):
        tile_of[column_edges[tile] : column_edges[tile + 1]] = tile
    # Quotients by reciprocals, since integer division has no vectors. Half a unit is further from a whole number than
    # the rounding error, for bands below 2^50 elements.
    per_column = 1.0 / columns
    begin, tile = 0, 0
    ends, following = np.empty(BUCKETS * group + 1, np.int64), np.empty(BUCKETS * group, np.uint32)
    for band in range(first, last):
        top, bottom = row_edges[band], row_edges[band + 1]
        for start in range(0, across, group):
            end = begin + np.searchsorted(positions[begin:], (bottom - 1) * columns + column_edges[start + group])
            masked = 0
            for number in range(group):
                left, right = column_edges[start + number], column_edges[start + number + 1]
                slots[number], lefts[number] = group, left
                widths[number], lengths[number] = words_of(right - left), right - left
                if end > begin and not plain[tile + number]:
                    edges[masked], slots[number] = (left, right), masked
                    masked += 1
            # By tiles and classes, as they follow each other in the streams.
            ranks, buckets = np.empty(end - begin, np.uint32), np.empty(end - begin, np.uint32)
            ends[:] = begin
            # Unsigned, since numba checks signed indices for negative values at each use.
            if masked == 0:
                # Plain tiles need no masks.
                for i in range(np.uint64(begin), np.uint64(end)):
                    offset = positions[i] - top * columns
                    row = np.int64((np.float64(offset) + 0.5) * per_column)
                    column = np.uint64(offset - row * columns)
                    number = np.uint64(tile_of[column]) if group > 1 else ZERO
                    bucket = number * np.uint64(BUCKETS) + np.uint64(CLASSES)
                    ranks[i - np.uint64(begin)] = np.uint64(row) * lengths[number] + (column - lefts[number])
                    buckets[i - np.uint64(begin)] = bucket
                    ends[bucket + ONE] += 1
            else:
                mask_tiles(bits, origin, stride, top, bottom, edges[:masked], magnitudes, limits, masks, before)
                if after:
                    # Few changes move an element to another class, and only these change the masks.
                    moved, old = np.empty(end - begin + 1, np.int64), np.empty(end - begin + 1, bits.dtype)
                    count = _find_moved(
                        bits, origin, stride, columns, positions[begin:end], distances[begin:end], magnitudes, limits,
                        moved, old,
                    )  # fmt: skip
                    for i in range(count):
                        offset = positions[begin + moved[i]] - top * columns
                        row = offset // columns
                        column = offset - row * columns
                        number = tile_of[column] if group > 1 else 0
                        slot = slots[number]
                        if slot == group:  # a plain tile
                            continue
                        place = np.uint64(column) - lefts[number]
                        word = np.uint64(row) * widths[number] + (place >> S6)
                        behind = np.uint64(bottom - top) * widths[number] + ONE
                        now = bits[np.uint64(origin + (top + row) * stride + column)]
                        # Out of the class that it has now (the addition wraps), into the one that it had.
                        for found, more in ((now, np.uint32(0xFFFFFFFF)), (old[i], np.uint32(1))):
                            owner = _class_of(found & magnitudes, limits)
                            if owner < CLASSES:
                                masks[slot, owner, word] ^= ONE << (place & LOW6)
                                before[slot, owner, word + ONE : behind] += more
                for i in range(np.uint64(begin), np.uint64(end)):
                    offset = positions[i] - top * columns
                    row = np.int64((np.float64(offset) + 0.5) * per_column)
                    column = np.uint64(offset - row * columns)
                    number = np.uint64(tile_of[column]) if group > 1 else ZERO
                    slot, place = slots[number], column - lefts[number]
                    bit, word = place & LOW6, np.uint64(row) * widths[number] + (place >> S6)
                    # By arithmetic alone: the class is unpredictable, and of a choice LLVM would make a branch.
                    is1, is2 = (masks[slot, ONE, word] >> bit) & ONE, (masks[slot, TWO, word] >> bit) & ONE
                    is3 = (masks[slot, THREE, word] >> bit) & ONE
                    owner = is1 + TWO * is2 + THREE * is3
                    none = ONE ^ is1 ^ is2 ^ is3 ^ ((masks[slot, ZERO, word] >> bit) & ONE)
                    earlier = masks[slot, owner, word] & ((ONE << bit) - ONE)
                    rank = np.uint64(before[slot, owner, word]) + ones(earlier)
                    among_all = np.uint64(row) * lengths[number] + place
                    bucket = number * np.uint64(BUCKETS) + owner + none * np.uint64(CLASSES)
                    ranks[i - np.uint64(begin)] = rank ^ ((rank ^ among_all) & (ZERO - none))
                    buckets[i - np.uint64(begin)] = bucket
                    ends[bucket + ONE] += 1
            for bucket in range(BUCKETS * group):
                ends[bucket + 1] += ends[bucket] - begin
            following[:] = 0
            for i in range(np.uint64(begin), np.uint64(end)):
                bucket, rank = np.uint64(buckets[i - np.uint64(begin)]), ranks[i - np.uint64(begin)]
                cursor = np.uint64(ends[bucket])
                ends[bucket] += 1
                gaps[cursor], values[cursor] = rank - following[bucket], zigzag_of(distances[i])
                following[bucket] = rank + np.uint32(1)
            # Each number is the end of a bucket now.
            done = begin
            for number in range(group):
                members = before[slots[number], :, np.uint64(bottom - top) * widths[number]]
                mine = slice(BUCKETS * number, BUCKETS * (number + 1))
                _join_classes(members, PLAIN if plain[tile] else OTHERS, done, ends[mine], following[mine], kinds, gaps)
                sizes[tile], done = ends[mine.stop - 1] - done, ends[mine.stop - 1]
                tile += 1
            begin = end


@_compile
def _class_of(magnitude, limits):
    """Return the class of an element, CLASSES for none."""
    passed01 = np.uint8(magnitude >= limits[0]) + np.uint8(magnitude >= limits[1])
    return passed01 + np.uint8(magnitude >= limits[2]) + np.uint8(magnitude >= limits[3])


@_compile
def _find_moved(bits, origin, stride, columns, positions, distances, magnitudes, limits, moved, old):
    """Write which changes move an element to another class, and its old bits → how many.

    Args:
        bits, origin, stride: with the changes, see ``Matrix``. columns: of the tensor.
        moved, old: output, room for one more than there are changes.
    """
    mask = ~ZERO >> np.uint64(64 - 8 * bits.itemsize)
    sign = mask ^ np.uint64(magnitudes)
    mirror = _mirror_mask(sign, mask)
    now, was, differs = np.empty(PIECE, bits.dtype), np.empty(PIECE, bits.dtype), np.empty(PIECE, np.bool_)
    found = ZERO
    for start in range(0, positions.size, PIECE):
        where, steps = positions[start : start + PIECE], distances[start : start + PIECE]
        if stride == columns:
            for i in range(where.size):
                now[i] = bits[np.uint64(origin + where[i])]
        else:
            for i in range(where.size):
                row = where[i] // columns
                now[i] = bits[np.uint64(origin + row * stride + where[i] - row * columns)]
        for i in range(where.size):
            key = _key(np.uint64(now[i]), sign, mirror) - np.uint64(steps[i])
            was[i] = _unkey(key & mask, sign, mirror)
            differs[i] = _class_of(was[i] & magnitudes, limits) != _class_of(now[i] & magnitudes, limits)
        for i in range(where.size):
            moved[found], old[found] = start + i, was[i]
            found += np.uint64(differs[i])
    return np.int64(found)


@_compile
def _join_classes(members, others, start, ends, following, kinds, gaps):
    """Write the tables of a tile's gaps, and let the first gap of each class begin where the class before it ended.

    Args:
        members: (CLASSES,) elements of each class. others: the table after those of the classes.
        start, ends: where the changes of the first class begin; where those of each class end, and those without.
        following: (BUCKETS,) rank after the last change of each class, among its members.
    """
    # A gap has the table of the element at which it begins.
    kind, kind_end, reached, base = 0, members[0], np.uint32(0), np.uint32(0)
    for owner in range(BUCKETS):
        if start < ends[owner]:
            while kind < CLASSES and reached >= kind_end:
                kind += 1
                kind_end += members[min(kind, CLASSES - 1)]
            kinds[start : ends[owner]] = owner if owner < CLASSES else others
            kinds[start] = kind if kind < CLASSES else others
            gaps[start] += base - reached
            reached = base + following[owner]
        start = ends[owner]
        base += members[min(owner, CLASSES - 1)]


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
            symbol = token * np.uint64(KINDS) + zigzag - ONE - np.uint64(large) * (zigzag - np.uint64(KINDS))
            raw = (token >> TWO) - np.uint64(token >= FOUR)
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
                raw = (token >> TWO) - np.uint64(token >= FOUR)
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

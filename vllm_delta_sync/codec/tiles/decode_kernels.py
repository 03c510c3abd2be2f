"""Compiled loops (numba) that decode tiles. Arrays are C-contiguous; every loop releases the GIL.

Streams are not trusted: for any bytes, a loop ends and writes only inside the arrays that it was given.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from vllm_delta_sync.codec.tiles.alphabets import CLASSES, KINDS, LONGEST, OTHERS, PLAIN
from vllm_delta_sync.codec.tiles.shared_kernels import LANES, LOW6, S6, load_word, mask_tiles, words_of, words_passed
from vllm_delta_sync.format.kernels import ONE, ZERO, _compile, ones, trailing_zeros

PADDING = 24
"""Bytes that must follow a stream in memory: one damaged symbol can read so far beyond its end."""

# Errors of ``decode_bands``, as negative numbers.
SHORT, NO_CODE, OUTSIDE, TOO_MANY, WIDE, TWICE = -1, -2, -3, -4, -5, -6

_EACH = np.uint64(0x0101010101010101)
_TOPS = np.uint64(0x8080808080808080)
_THREE = np.uint64(3)
_SEVEN = np.uint64(7)
_WINDOW = np.uint64(57)
"""Bits that one load gives at least."""


DEPOSITS = get_host_cpu_features().get("bmi2", False) and get_host_cpu_name() not in ("bdver4", "znver1", "znver2")
"""Whether the processor has the instruction PDEP, and does not take hundreds of cycles for it."""


@intrinsic
def _deposited(typing_context, source, word):
    """Return ``source`` with its lowest bits moved to the places of the bits set in ``word``: PDEP of x86."""

    def generate(context, builder, signature, arguments):
        number = ir.IntType(64)
        kind = ir.FunctionType(number, [number, number])
        return builder.call(builder.module.declare_intrinsic("llvm.x86.bmi.pdep.64", [], kind), arguments)

    return types.uint64(types.uint64, types.uint64), generate


@_compile
def select_by_deposit(word, rank):
    """Return the index of set bit number ``rank`` of ``word``, which must have that many."""
    return trailing_zeros(_deposited(ONE << rank, word))


@_compile
def select_by_counting(word, rank):
    """As ``select_by_deposit``, for any processor."""
    # Without branches: set bits up to each byte, then the byte.
    sums = word - ((word >> ONE) & np.uint64(0x5555555555555555))
    sums = (sums & np.uint64(0x3333333333333333)) + ((sums >> np.uint64(2)) & np.uint64(0x3333333333333333))
    sums = ((sums + (sums >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)) * _EACH
    passed = ((((rank * _EACH) | _TOPS) - sums) & _TOPS) >> np.uint64(7)
    byte = ones(passed) << np.uint64(3)
    rank -= ((sums << np.uint64(8)) >> byte) & np.uint64(255)
    bits = (word >> byte) & np.uint64(255)
    for _ in range(rank):
        bits &= bits - ONE
    return byte + trailing_zeros(bits)


_select = select_by_deposit if DEPOSITS else select_by_counting


@_compile
def _read(data, place, count):
    """Return ``count`` bits, at most 57, from bit ``place`` on."""
    return (load_word(data, place >> _THREE) >> (place & _SEVEN)) & ((ONE << count) - ONE)


@_compile
def decode_bands(
    bits, origin, stride, row_edges, column_edges, first, last, magnitudes, limits, wanted, plain, starts, sizes,
    payload, tables, positions, distances,
):  # fmt: skip
    """Decode the ``wanted`` tiles of some bands of a tensor.

    Args:
        bits, origin, stride: see ``Matrix``; valid in wanted tiles that are not plain.
        row_edges, column_edges: see ``Grid``.
        first, last: the bands. magnitudes, limits: see ``mask_tiles``. wanted, plain: (tiles,) bool, of the tensor.
        starts, sizes: (tiles,) int64: first bit in ``payload``, and bits, of each stream; PADDING bytes follow.
        tables: ``Decoding``, one for each class, then that of plain tiles.
        positions, distances: output, room for as many elements as may change.

    Returns:
        (number of elements, or a negative error; tile of the error).
    """
    across, columns = column_edges.size - 1, column_edges[-1]
    tallest, widest = np.int64(0), np.int64(0)
    for band in range(first, last):
        tallest = max(tallest, row_edges[band + 1] - row_edges[band])
    for tile in range(across):
        widest = max(widest, column_edges[tile + 1] - column_edges[tile])
    words = tallest * words_of(widest)
    slots = across if tallest > 1 else 1
    masks = np.empty((slots, CLASSES, words), np.uint64)
    before = np.empty((slots, CLASSES, words + 1 + LANES), np.uint32)
    edges = np.empty((slots, 2), np.int64)
    none = np.zeros(CLASSES, np.uint32)
    most = positions.size
    ranks, targets, zigzags = np.empty(most, np.uint32), np.empty(most, np.uint32), np.empty(most, distances.dtype)
    # The words of a row of all tiles of a band, then those of the next row. One tile at a time where tiles follow each
    # other in memory.
    row_words = words_of(widest)
    if tallest > 1:
        row_words = 0
        for tile in range(across):
            row_words += words_of(column_edges[tile + 1] - column_edges[tile])
    marks, earlier = np.zeros(tallest * row_words, np.uint64), np.empty(tallest * row_words, np.uint32)
    lefts = np.empty(row_words, np.int64)
    found = 0
    for band in range(first, last):
        top, bottom = row_edges[band], row_edges[band + 1]
        group = across if bottom - top > 1 else 1
        for start in range(0, across, group):
            # Only tiles that are wanted and have changes take words.
            in_row, masked = np.int64(0), 0
            for number in range(start, start + group):
                tile = band * across + number
                if wanted[tile] and sizes[tile]:
                    left, right = column_edges[number], column_edges[number + 1]
                    for word in range(words_of(right - left)):
                        lefts[in_row + word] = left + 64 * word
                    in_row += words_of(right - left)
                    if not plain[tile]:
                        edges[masked] = left, right
                        masked += 1
            if in_row == 0:
                continue
            if masked:
                mask_tiles(bits, origin, stride, top, bottom, edges[:masked], magnitudes, limits, masks, before)
            offset, done, slot = np.int64(0), 0, -1
            for number in range(start, start + group):
                tile = band * across + number
                if not wanted[tile] or not sizes[tile]:
                    continue
                columns_here = column_edges[number + 1] - column_edges[number]
                width = words_of(columns_here)
                members, others = none, PLAIN
                if not plain[tile]:
                    slot += 1
                    members, others = before[slot, :, (bottom - top) * width], OTHERS
                got = read_stream(
                    payload, starts[tile], sizes[tile], tables, members, others, (bottom - top) * columns_here,
                    ranks[: most - found - done], zigzags[done:],
                )  # fmt: skip
                if got < 0:
                    return got, tile
                cursor, end = 0, done + got
                if not plain[tile]:
                    cursor = _mark(
                        ranks[:got], masks[slot], before[slot], members, width, offset, in_row, marks, targets[done:]
                    )
                base = members[0] + members[1] + members[2]
                _mark_others(ranks[cursor:got], base, columns_here, offset, in_row, marks, targets[done + cursor :])
                done, offset = end, offset + width
            total = _place(
                targets[:done], zigzags, marks[: (bottom - top) * in_row], earlier, in_row, lefts, top * columns,
                columns, positions[found:], distances[found:],
            )  # fmt: skip
            if total != done:
                return TWICE, band * across + start
            found += done
    return found, 0


@_compile
def read_stream(data, start, size, tables, members, others, elements, ranks, zigzags):
    """Read one tile's stream → number of changed elements, or a negative error.

    Args:
        start, size: first bit in ``data``, and number of bits. members: (CLASSES,) elements of each class.
        others: the table after those of the classes. elements: of the tile.
        ranks, zigzags: output: ascending ranks, and distances, unsigned, of the element's width. Room for as many
            elements as may change.
    """
    kind, kind_end, room = 0, np.int64(members[0]), elements
    for number in members:
        elements += np.int64(number)
    place = np.uint64(start)
    end = place + np.uint64(size)
    widest = np.uint64(8 * zigzags.itemsize)
    lowest = np.uint64((1 << LONGEST) - 1)
    large = np.uint64(KINDS - 1)
    following = np.int64(0)
    found = 0
    while place < end:
        if following >= elements or found >= room:
            return OUTSIDE
        if found >= ranks.size:
            return TOO_MANY
        while following >= kind_end:
            kind += 1
            if kind < CLASSES:
                kind_end += np.int64(members[kind])
            else:
                kind, kind_end = others, elements
        # One load of 57 bits serves a whole change unless its value is large, because each load waits for the last one.
        ahead = load_word(data, place >> _THREE) >> (place & _SEVEN)
        entry = np.uint64(tables[kind, 0, ahead & lowest])
        length, raw = entry & np.uint64(15), (entry >> S6) & np.uint64(31)
        if length == ZERO:
            return NO_CODE
        ahead >>= length
        gap = ((entry >> np.uint64(11)) << raw) | (ahead & ((ONE << raw) - ONE))
        place += length + raw
        value = ((entry >> np.uint64(4)) & _THREE) + ONE
        if value > large:
            ahead >>= raw
            entry = np.uint64(tables[kind, 1, ahead & lowest])
            passed = length + raw
            length, raw = entry & np.uint64(15), (entry >> np.uint64(4)) & np.uint64(63)
            if length == ZERO:
                return NO_CODE
            value = entry >> np.uint64(10)
            place += length
            if passed + length + raw <= _WINDOW:
                value = (value << raw) | ((ahead >> length) & ((ONE << raw) - ONE))
            else:
                low = min(raw, np.uint64(32))
                rest = _read(data, place + low, raw - low) << low
                value = (value << raw) | rest | _read(data, place, low)
            place += raw
            if value > ~ZERO - np.uint64(KINDS):
                return WIDE
            value += np.uint64(KINDS)
            if widest < np.uint64(64) and value >> widest:
                return WIDE
        if gap >= np.uint64(elements - following):
            return OUTSIDE
        following += np.int64(gap)
        ranks[found], zigzags[found] = following, value
        following += 1
        found += 1
    if place != end:
        return SHORT
    return found


@_compile
def _mark_others(ranks, base, columns, offset, in_row, marks, targets):
    """As ``_mark``, for ranks among all elements of a tile of so many columns; ``base`` is the first one's."""
    # A quotient by a reciprocal: exact, since a tile has fewer than 2^20 elements.
    reciprocal = np.uint64(((1 << 40) + columns - 1) // columns)
    across, start, width = np.uint64(in_row), np.uint64(offset), np.uint64(columns)
    for i in range(ranks.size):
        rank = np.uint64(ranks[i] - base)
        row = (rank * reciprocal) >> np.uint64(40)
        column = rank - row * width
        word = row * across + start + (column >> S6)
        marks[word] |= ONE << (column & LOW6)
        targets[i] = (word << S6) + (column & LOW6)


@_compile
def _mark(ranks, masks, before, members, width, offset, in_row, marks, targets):
    """Mark a tile's changed elements that have classes in the words of its band → how many.

    Args:
        ranks: see ``read_stream``. masks, before, members: of the tile, see ``mask_tiles``.
        width: words of the tile, in a row. offset: of the tile in a row of the band. in_row: words of that.
        marks: one bit for each element of the band. targets: output: the index of each element in ``marks``.
    """
    # A quotient by a reciprocal: exact, since a tile has fewer than 2^16 words.
    reciprocal = np.uint64(((1 << 32) + width - 1) // width)
    skip = np.uint64(in_row - width)
    cursor, base = ZERO, np.uint32(0)
    size = np.uint64(ranks.size)
    for kind in range(CLASSES):
        # Unsigned, since numba checks signed indices for negative values at each use.
        row_of_class, word = np.uint64(kind), ZERO
        while cursor < size and ranks[cursor] - base < members[kind]:
            rank = ranks[cursor] - base
            # Many words at once, since the number of words to the next change is unpredictable.
            passed = words_passed(before, row_of_class, word + ONE, rank)
            word += passed
            while passed == np.uint64(LANES):
                passed = words_passed(before, row_of_class, word + ONE, rank)
                word += passed
            bit = _select(masks[row_of_class, word], np.uint64(rank - before[row_of_class, word]))
            target = word + ((word * reciprocal) >> np.uint64(32)) * skip + np.uint64(offset)
            marks[target] |= ONE << bit
            targets[cursor] = (target << S6) + bit
            cursor += ONE
        base += members[kind]
    return np.int64(cursor)


@_compile
def _place(targets, zigzags, marks, earlier, in_row, lefts, origin, stride, positions, distances):
    """Write the marked elements of a band, ascending, and clear the marks → how many different ones.

    An element's place is the number of marks before its own, so that nothing is sorted.

    Args:
        targets, zigzags: (n,) elements, in any order: see ``_mark``. marks: of the band. earlier: scratch memory for
            as many numbers. in_row: words of a row. lefts: (in_row,) column of the first element of each word.
        origin: flat index of the band's first element. stride: of a row.
        positions, distances: output, room for n elements.
    """
    total = np.uint32(0)
    for word in range(marks.size):
        earlier[word] = total
        total += np.uint32(ones(marks[word]))
    # A quotient by a reciprocal: exact, since a band has fewer than 2^20 words.
    across = np.uint64(in_row)
    reciprocal = np.uint64(((1 << 40) + in_row - 1) // in_row)
    one = distances.dtype.type(1)
    for i in range(targets.size):
        word, bit = np.uint64(targets[i]) >> S6, np.uint64(targets[i]) & LOW6
        place = np.uint64(earlier[word]) + ones(marks[word] & ((ONE << bit) - ONE))
        row = (word * reciprocal) >> np.uint64(40)
        positions[place] = origin + np.int64(row) * stride + lefts[word - row * across] + np.int64(bit)
        distances[place] = (zigzags[i] >> one) ^ (distances.dtype.type(0) - (zigzags[i] & one))
    marks[:] = ZERO
    return np.int64(total)

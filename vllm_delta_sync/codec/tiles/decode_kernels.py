"""Compiled loops (numba) that decode tiles. Arrays are C-contiguous; every loop releases the GIL.

Streams are not trusted: for any bytes, a loop ends and writes only inside the arrays that it was given.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_name  # type: ignore[import-untyped]
from numba import carray, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from vllm_delta_sync.codec.tiles.alphabets import CLASSES, KINDS, LONGEST, OTHERS, PLAIN
from vllm_delta_sync.codec.tiles.shared_kernels import (
    LANES,
    LAST,
    LOW6,
    S6,
    load_word,
    mask_tiles,
    words_of,
    words_passed,
)
from vllm_delta_sync.format.kernels import ONE, ZERO, _compile, ones, pointer, trailing_zeros

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


# What numba compiles for, which NUMBA_CPU_NAME and NUMBA_CPU_FEATURES may limit: for others LLVM ends the process.
_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
DEPOSITS = "+bmi2" in _FEATURES and get_host_cpu_name() not in ("bdver4", "znver1", "znver2")
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
def decode_tensors(
    jobs, edges, magnitudes, limits, wanted, coded, starts, sizes, payload, tables, positions, distances, counts
):  # fmt: skip
    """Decode bands of some tensors of a block, one after the other.

    Args:
        jobs: (n, 11) int64, each the arguments of ``decode_bands`` for one tensor: address and number of its old bits,
            origin, stride; in ``edges`` the first row edge, the first column edge, and the end; its first tile; first
            and last band; and for how many elements there is room.
        wanted, coded, starts, sizes: as for ``decode_bands``, but of all these tensors and others.
        positions, distances: output, of the elements of one tensor after the other; room for all.
        counts: (n,) int64 output: elements of each.

    Returns:
        (job, negative error, tile of the tensor) of the first error, otherwise zeros.
    """
    done = 0
    for job in range(jobs.shape[0]):
        rows_at, columns_at, end, tile = jobs[job, 4], jobs[job, 5], jobs[job, 6], jobs[job, 7]
        room = jobs[job, 10]
        found, where = decode_bands(
            carray(pointer(jobs[job, 0]), jobs[job, 1], distances.dtype), jobs[job, 2], jobs[job, 3],
            edges[rows_at:columns_at], edges[columns_at:end], jobs[job, 8], jobs[job, 9], magnitudes, limits,
            wanted[tile:], coded[tile:], starts[tile:], sizes[tile:], payload, tables, positions[done : done + room],
            distances[done : done + room],
        )  # fmt: skip
        if found < 0:
            return job, found, where
        counts[job] = found
        done += found
    return 0, 0, 0


@_compile
def decode_bands(
    bits, origin, stride, row_edges, column_edges, first, last, magnitudes, limits, wanted, coded, starts, sizes,
    payload, tables, positions, distances,
):  # fmt: skip
    """Decode the ``wanted`` tiles of some bands of a tensor.

    Args:
        bits, origin, stride: see ``Matrix``; valid in coded tiles.
        row_edges, column_edges: see ``Grid``.
        first, last: the bands. magnitudes, limits: see ``mask_tiles``.
        wanted, coded: (tiles,) bool, of the tensor: which tiles to decode, all with changes; and which of them are not
            plain.
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
    sampled = np.empty((slots, CLASSES, words // LANES + LANES), np.uint32)
    edges = np.empty((slots, 2), np.int64)
    none = np.zeros(CLASSES, np.uint32)
    most = positions.size
    targets, zigzags = np.empty(most, np.uint32), np.empty(most, distances.dtype)
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
            # Only tiles that are wanted take words.
            in_row, masked = np.int64(0), 0
            for number in range(start, start + group):
                tile = band * across + number
                if wanted[tile]:
                    left, right = column_edges[number], column_edges[number + 1]
                    for word in range(words_of(right - left)):
                        lefts[in_row + word] = left + 64 * word
                    in_row += words_of(right - left)
                    if coded[tile]:
                        edges[masked] = left, right
                        masked += 1
            if in_row == 0:
                continue
            if masked:
                mask_tiles(bits, origin, stride, top, bottom, edges[:masked], magnitudes, limits, masks, before)
            for slot in range(masked):
                many = (bottom - top) * words_of(edges[slot, 1] - edges[slot, 0]) // LANES
                for kind in range(CLASSES):
                    for number in range(many):
                        sampled[slot, kind, number] = before[slot, kind, (number + 1) * LANES]
                    sampled[slot, kind, many : many + LANES] = LAST
            offset, done, slot = np.int64(0), 0, -1
            for number in range(start, start + group):
                tile = band * across + number
                if not wanted[tile]:
                    continue
                columns_here = column_edges[number + 1] - column_edges[number]
                mine, members, others = np.uint64(0), none, PLAIN
                if coded[tile]:
                    slot += 1
                    mine, others = np.uint64(slot), OTHERS
                    members = before[mine, :, (bottom - top) * words_of(columns_here)]
                got = read_stream(
                    payload, starts[tile], sizes[tile], tables, masks[mine], before[mine], sampled[mine], members,
                    others, bottom - top, columns_here, offset, in_row, marks, targets[done : most - found],
                    zigzags[done:],
                )  # fmt: skip
                if got < 0:
                    return got, tile
                done, offset = done + got, offset + words_of(columns_here)
            total = _place(
                targets[:done], zigzags, marks[: (bottom - top) * in_row], earlier, in_row, lefts, top * columns,
                columns, positions[found:], distances[found:],
            )  # fmt: skip
            if total != done:
                return TWICE, band * across + start
            found += done
    return found, 0


@_compile
def read_stream(
    data, start, size, tables, masks, before, sampled, members, others, rows, columns, offset, in_row, marks, targets,
    zigzags,
):  # fmt: skip
    """Read one tile's stream and mark its changed elements in the words of its band → how many, or a negative error.

    Args:
        start, size: first bit in ``data``, and number of bits. masks, before: of the tile, see ``mask_tiles``; not read
            if it is plain. members: (CLASSES,) elements of each class. others: the table after those of the classes.
        sampled: (CLASSES, …) of ``before`` every LANES-th, but for the first; then the largest number LANES times.
        rows, columns: of the tile. offset: of its first word in a row of the band. in_row: words of that.
        marks: one bit for each element of the band. targets, zigzags: output, by ascending rank: the index of each
            changed element in ``marks``, and its distance, unsigned, of the element's width.
    """
    # Quotients by reciprocals: exact, since a tile has fewer than 2^16 words and 2^20 elements.
    width, across = np.uint64(words_of(columns)), np.uint64(in_row)
    per_word = np.uint64(((1 << 32) + width - 1) // width)
    per_column = np.uint64(((1 << 40) + columns - 1) // columns)
    origin, skip = np.uint64(offset), across - width
    room = rows * columns
    elements = room
    for number in members:
        elements += np.int64(number)
    steps = (rows * words_of(columns) // LANES + LANES - 1) // LANES
    columns = np.uint64(columns)
    # The class that ``following`` is in, and where it begins and ends.
    kind, table, kind_base, kind_end = ZERO, ZERO, np.int64(0), np.int64(members[0])
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
        if found >= targets.size:
            return TOO_MANY
        while following >= kind_end:
            kind, kind_base = kind + ONE, kind_end
            table, kind_end = (kind, kind_end + members[kind]) if kind < CLASSES else (np.uint64(others), elements)
        # One load of 57 bits serves a whole change unless its value is large, because each load waits for the last one.
        ahead = load_word(data, place >> _THREE) >> (place & _SEVEN)
        entry = np.uint64(tables[table, 0, ahead & lowest])
        length, raw = entry & np.uint64(15), (entry >> S6) & np.uint64(31)
        if length == ZERO:
            return NO_CODE
        ahead >>= length
        gap = ((entry >> np.uint64(11)) << raw) | (ahead & ((ONE << raw) - ONE))
        place += length + raw
        value = ((entry >> np.uint64(4)) & _THREE) + ONE
        if value > large:
            ahead >>= raw
            entry = np.uint64(tables[table, 1, ahead & lowest])
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
        while following >= kind_end:
            kind, kind_base = kind + ONE, kind_end
            table, kind_end = (kind, kind_end + members[kind]) if kind < CLASSES else (np.uint64(others), elements)
        rank = np.uint32(following - kind_base)
        if kind < CLASSES:
            # In two steps and without branches: the number of words to the next change is unpredictable.
            word = ZERO
            for first in range(steps):
                word += words_passed(sampled, kind, np.uint64(first) * np.uint64(LANES), rank)
            word *= np.uint64(LANES)
            word += words_passed(before, kind, word + ONE, rank)
            bit = _select(masks[kind, word], np.uint64(rank - before[kind, word]))
            target = word + ((word * per_word) >> np.uint64(32)) * skip + origin
        else:
            row = (np.uint64(rank) * per_column) >> np.uint64(40)
            column = np.uint64(rank) - row * columns
            bit, target = column & LOW6, row * across + origin + (column >> S6)
        marks[target] |= ONE << bit
        targets[found], zigzags[found] = (target << S6) + bit, value
        following += 1
        found += 1
    if place != end:
        return SHORT
    return found


@_compile
def _place(targets, zigzags, marks, earlier, in_row, lefts, origin, stride, positions, distances):
    """Write the marked elements of a band, ascending, and clear the marks → how many different ones.

    An element's place is the number of marks before its own, so that nothing is sorted.

    Args:
        targets, zigzags: (n,) elements, in any order: see ``read_stream``. marks: of the band. earlier: scratch memory
            for as many numbers. in_row: words of a row. lefts: (in_row,) column of the first element of each word.
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

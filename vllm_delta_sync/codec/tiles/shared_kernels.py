"""Compiled loops (numba) that encoding and decoding tiles share. Arrays are C-contiguous; every loop releases the GIL.

A tile's elements have ranks: first those of the first class in row-major order, then those of the second, and so on;
then once more all elements, of whatever class, in row-major order. A change of an element that has a class takes its
rank there, any other that among all elements. A plain tile has no classes. A class is a bit mask over the tile, in
64-bit words of which each lies in one row.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from vllm_delta_sync.codec.tiles.alphabets import CLASSES, KINDS, LONGEST, SYMBOLS
from vllm_delta_sync.format.kernels import ONE, ZERO, _compile, ones, prefetch

S6 = np.uint64(6)
LOW6 = np.uint64(63)
TWO = np.uint64(2)
THREE = np.uint64(3)
LANES = 16
"""Words of which ``words_passed`` looks at the counts at once."""
LAST = np.uint32(np.iinfo(np.uint32).max)
AHEAD = 8192
"""By about how many elements prefetching is ahead of reading, in whole rows: fewer keep too few reads in flight."""


@intrinsic
def leading_zeros(typing_context, word):
    """Count the zeros above the highest bit set in a uint64, which must not be 0."""

    def generate(context, builder, signature, arguments):
        return builder.ctlz(arguments[0], ir.IntType(1)(1))

    return types.uint64(word), generate


@intrinsic
def load_word(typing_context, data, place):
    """Return eight bytes of a uint8 array from ``place`` (uint64) on, as uint64. The caller checks the bounds."""

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(data, place), generate


@intrinsic
def store_word(typing_context, data, place, word):
    """Write a uint64 to a uint8 array from ``place`` (uint64) on, lowest byte first. The caller checks the bounds."""

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(64).as_pointer())
        builder.store(arguments[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(data, place, word), generate


@intrinsic
def below(typing_context, bits, index, limit, magnitudes):
    """Return a 64-bit mask of those of bits[index : index + 64] that, and ``magnitudes``, are below ``limit``.

    The caller checks the bounds.
    """

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        vector = ir.VectorType(arguments[2].type, 64)
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)

        def each(value):
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
            return builder.shuffle_vector(one, one, lanes)

        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), vector.as_pointer())
        loaded = builder.and_(builder.load(place, align=1), each(arguments[3]))
        return builder.bitcast(builder.icmp_unsigned("<", loaded, each(arguments[2])), ir.IntType(64))

    return types.uint64(bits, index, limit, magnitudes), generate


@intrinsic
def words_passed(typing_context, before, row, place, rank):
    """Return how many of before[row, place : place + LANES] (uint32) are at most ``rank``.

    The caller checks the bounds.
    """

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        across = builder.extract_value(array.shape, 1)
        index = builder.add(builder.mul(arguments[1], across), arguments[2])
        kind = ir.VectorType(ir.IntType(32), LANES)
        zeros = ir.Constant(kind, [0] * LANES)
        loaded = builder.load(builder.bitcast(builder.gep(array.data, [index]), kind.as_pointer()), align=1)
        one = builder.insert_element(ir.Constant(kind, ir.Undefined), arguments[3], ir.IntType(32)(0))
        passed = builder.icmp_unsigned("<=", loaded, builder.shuffle_vector(one, one, zeros))
        mask = builder.zext(builder.bitcast(passed, ir.IntType(LANES)), ir.IntType(64))
        return builder.ctpop(mask)

    return types.uint64(before, types.uint64, types.uint64, types.uint32), generate


@_compile
def words_of(columns):
    """Return the number of words of a row with this many columns."""
    return (columns + 63) >> 6


@_compile
def mask_tiles(bits, start, stride, top, bottom, edges, magnitudes, limits, masks, before):
    """Compute the class masks of some tiles that lie side by side.

    Args:
        bits: old bits: those of a matrix's element (row, column) at ``start`` + row · ``stride`` + column.
        top, bottom: the tiles' rows. edges: (tiles, 2) int64: the first column of each, and the column after its last.
        magnitudes, limits: ``magnitude_mask`` and (CLASSES,) ``key_limits``, of the element's width.
        masks: (tiles, CLASSES, words or more) uint64 output. before: (tiles, CLASSES, words + 1 + LANES or more) uint32
            output: elements of each class before each word, then all of them, then the largest number LANES times.
    """
    limit0, limit1, limit2, limit3 = limits[0], limits[1], limits[2], limits[3]
    tiles = edges.shape[0]
    counts = np.zeros((tiles, CLASSES), np.uint32)
    ahead = AHEAD if bottom - top == 1 else max(2, AHEAD // max(1, stride)) * stride
    # Row by row, as the elements lie in memory. Unsigned, since numba checks signed indices for negative values at each
    # use.
    for row in range(top, bottom):
        for tile in range(tiles):
            left, right = edges[tile, 0], edges[tile, 1]
            across = words_of(right - left)
            slot, place = np.uint64(tile), np.uint64((row - top) * across)
            origin = start + row * stride + left
            for i in range(origin + ahead, origin + ahead + right - left, 64 // bits.itemsize):
                prefetch(bits, np.uint64(i))
            if origin + 64 * across > bits.size:
                # Whole words are read otherwise, and a call in that loop would take the registers of its vectors.
                _mask_row_by_elements(
                    bits, origin, right - left, limits, magnitudes, masks[slot], before[slot], place, counts[slot]
                )
                continue
            # A variable for each class, since numba keeps no array in registers.
            count0, count1, count2, count3 = counts[slot, 0], counts[slot, 1], counts[slot, 2], counts[slot, 3]
            for number in range(across):
                before[slot, ZERO, place], before[slot, ONE, place] = count0, count1
                before[slot, TWO, place], before[slot, THREE, place] = count2, count3
                i = np.uint64(origin + 64 * number)
                mask0 = below(bits, i, limit0, magnitudes)
                below1, below2 = below(bits, i, limit1, magnitudes), below(bits, i, limit2, magnitudes)
                mask1, mask2 = below1 & ~mask0, below2 & ~below1
                mask3 = below(bits, i, limit3, magnitudes) & ~below2
                masks[slot, ZERO, place], masks[slot, ONE, place] = mask0, mask1
                masks[slot, TWO, place], masks[slot, THREE, place] = mask2, mask3
                count0 += np.uint32(ones(mask0))
                count1 += np.uint32(ones(mask1))
                count2 += np.uint32(ones(mask2))
                count3 += np.uint32(ones(mask3))
                place += ONE
            counts[slot, 0], counts[slot, 1], counts[slot, 2], counts[slot, 3] = count0, count1, count2, count3
            if (right - left) % 64:
                for kind in range(CLASSES):
                    beyond = masks[slot, kind, place - ONE] & (~ZERO << np.uint64((right - left) % 64))
                    masks[slot, kind, place - ONE] ^= beyond
                    counts[slot, kind] -= np.uint32(ones(beyond))
    for tile in range(tiles):
        words = (bottom - top) * words_of(edges[tile, 1] - edges[tile, 0])
        before[tile, :, words] = counts[tile]
        before[tile, :, words + 1 : words + 1 + LANES] = LAST


@_compile
def _mask_row_by_elements(bits, origin, columns, limits, magnitudes, masks, before, place, counts):
    """Compute the masks of one row of a tile, whose last word ends beyond ``bits``; arguments as in ``mask_tiles``."""
    for start in range(0, columns, 64):
        for kind in range(CLASSES):
            found = ZERO
            for i in range(start, min(start + 64, columns)):
                magnitude = bits[origin + i] & magnitudes
                if magnitude < limits[kind] and (kind == 0 or magnitude >= limits[kind - 1]):
                    found |= ONE << np.uint64(i - start)
            before[kind, place] = counts[kind]
            masks[kind, place] = found
            counts[kind] += np.uint32(ones(found))
        place += ONE


@_compile
def token_of(value):
    """Return the token of a uint64."""
    # Without a branch, which would be unpredictable: from 4 on, one formula holds for all.
    small = np.uint64(value < np.uint64(4)) << TWO
    value += small
    exponent = np.uint64(63) - leading_zeros(value)
    return (exponent << TWO) - np.uint64(4) + ((value >> (exponent - TWO)) & THREE) - small


@_compile
def assign_lengths(counts, lengths):
    """Write the lengths of a prefix code for (n,) int64 ``counts``, at most LONGEST; 0 for what does not occur."""
    used = np.flatnonzero(counts)
    size = used.size
    if size < 2:
        lengths[used] = 1
        return
    order = used[np.argsort(counts[used], kind="mergesort")]
    # Leaves and inner nodes both ascend, so the two smallest are at the front of one of both.
    weights, parents = np.zeros(2 * size - 1, np.int64), np.zeros(2 * size - 1, np.int64)
    weights[:size] = counts[order]
    leaf, inner = 0, size
    for node in range(size, 2 * size - 1):
        for _ in range(2):
            if inner >= node or (leaf < size and weights[leaf] <= weights[inner]):
                child, leaf = leaf, leaf + 1
            else:
                child, inner = inner, inner + 1
            parents[child] = node
            weights[node] += weights[child]
    depths = np.zeros(2 * size - 1, np.int64)
    for node in range(2 * size - 3, -1, -1):
        depths[node] = depths[parents[node]] + 1
    depths = np.minimum(depths[:size], LONGEST)
    room = np.int64(1) << LONGEST
    for i in range(size):
        room -= np.int64(1) << (LONGEST - depths[i])
    # Too long codes were cut, so others become longer: where that costs the fewest bits for the room that it gives.
    while room < 0:
        best = -1
        for i in range(size):
            if depths[i] < LONGEST and (best < 0 or weights[i] << depths[i] < weights[best] << depths[best]):
                best = i
        depths[best] += 1
        room += np.int64(1) << (LONGEST - depths[best])
    # What is left makes the most frequent codes shorter.
    for i in range(size - 1, -1, -1):
        while depths[i] > 1 and np.int64(1) << (LONGEST - depths[i]) <= room:
            room -= np.int64(1) << (LONGEST - depths[i])
            depths[i] -= 1
    for i in range(size):
        lengths[order[i]] = depths[i]


@_compile
def assign_words(lengths, words):
    """Write the canonical codes of these lengths: ascending by length, then by symbol; first bit lowest."""
    following = 0
    for length in range(1, LONGEST + 1):
        following <<= 1
        for symbol in range(SYMBOLS):
            if lengths[symbol] == length:
                word = 0
                for bit in range(length):
                    word |= (following >> bit & 1) << (length - 1 - bit)
                words[symbol] = word
                following += 1


@_compile
def fill_tables(lengths, words, tables):
    """Fill ``Decoding`` from (tables, 2, SYMBOLS) lengths and codes, which fit."""
    for row in range(lengths.shape[0]):
        for values in range(2):
            for symbol in range(SYMBOLS):
                length = np.int64(lengths[row, values, symbol])
                if length == 0:
                    continue
                token = symbol if values else symbol // KINDS
                raw = max(token // 4, 1) - 1
                above = token if token < 8 else 4 + token % 4
                entry = length | (raw << 4 | above << 10 if values else symbol % KINDS << 4 | raw << 6 | above << 11)
                for place in range(np.int64(words[row, values, symbol]), 1 << LONGEST, 1 << length):
                    tables[row, values, place] = entry

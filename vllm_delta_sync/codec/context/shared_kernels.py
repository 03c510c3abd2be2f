"""Compiled loops (numba) that encoding and decoding with codec ``context`` share. Arrays are flat and C-contiguous.

A tile's elements are numbered in row-major order inside the tile. A class is a bit mask over them, in 64-bit words;
64 elements are compared at once.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from vllm_delta_sync.codec.context.tables import STATE_BITS, STATES, STRIDE, TOKENS
from vllm_delta_sync.format.kernels import ONE, ZERO, _compile, at_least, prefetch

AHEAD = 24
"""Number of rows by which prefetching is ahead of reading."""


@intrinsic
def leading_zeros(typing_context, word):
    def generate(context, builder, signature, arguments):
        return builder.ctlz(arguments[0], ir.IntType(1)(1))

    return types.uint64(word), generate


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
def key_of(typing_context, bits, drop):
    """Return the highest byte of ``bits`` shifted left by ``drop`` bits, as uint8: the key of an element."""

    def generate(context, builder, signature, arguments):
        # In the element's width: numba would widen to 64 bits, at a quarter of the speed.
        element = arguments[0].type
        moved = builder.shl(arguments[0], builder.trunc(arguments[1], element) if element.width < 64 else arguments[1])
        high = builder.lshr(moved, element(element.width - 8))
        return builder.trunc(high, ir.IntType(8)) if element.width > 8 else high

    return types.uint8(bits, drop), generate


@_compile
def mask_tile(bits, origin, rows, columns, stride, drop, thresholds, scratch, masks):
    """Compute the class masks of the tile at flat index ``origin`` of ``bits`` → number of elements.

    Args:
        drop: number of bits above the key, uint64. thresholds: ascending uint8 keys at which the second and later
            classes begin. scratch: uint8, room for the tile rounded up to a multiple of 64.
        masks: (classes, words) uint64 output.
    """
    size = rows * columns
    for row in range(rows):
        line = bits[origin + row * stride : origin + row * stride + columns]
        out = scratch[row * columns : row * columns + columns]
        # Rows of a tile lie far apart, so the processor does not prefetch them by itself.
        ahead = origin + (row + AHEAD) * stride
        for i in range(ahead, ahead + columns, 64 // bits.itemsize):
            prefetch(bits, np.uint64(i))
        for i in range(columns):
            out[i] = key_of(line[i], drop)
    words = (size + 63) // 64
    # Separate loops per threshold and per combination: in one loop, the compiler turns words into vectors of bits and
    # packs them one by one.
    masks[0, :words] = ~ZERO
    if size % 64:
        masks[0, words - 1] = (ONE << np.uint64(size % 64)) - ONE
    for kind in range(thresholds.size):
        threshold, reached = thresholds[kind], masks[kind + 1]
        for word in range(words):
            reached[word] = at_least(scratch, np.uint64(word * 64), threshold)
        reached[words - 1] &= masks[0, words - 1]
    for kind in range(thresholds.size):
        mine, above = masks[kind], masks[kind + 1]
        for word in range(words):
            mine[word] ^= above[word]
    return size


@_compile
def token_of(value):
    if value < np.uint64(8):
        return value
    exponent = np.uint64(63) - leading_zeros(value)
    return (exponent << np.uint64(2)) - np.uint64(4) + ((value >> (exponent - np.uint64(2))) & np.uint64(3))


@_compile
def fill_tables(frequencies, tables, states):
    """Fill ``Decoding`` and the states of ``Encoding`` from (tables, TOKENS) frequencies; rows add up to STATES or 0.

    Even rows are for gaps, whose tokens are increased by one; odd rows are for values.
    """
    for row in range(frequencies.shape[0]):
        wanted = frequencies[row]
        tokens = np.zeros(STATES, np.uint8)
        place = 0
        for token in range(TOKENS):
            for _ in range(wanted[token]):
                tokens[place] = token
                place = (place + STRIDE) % STATES
        starts = np.zeros(TOKENS, np.int64)
        for token in range(1, TOKENS):
            starts[token] = starts[token - 1] + wanted[token - 1]
        if starts[TOKENS - 1] + wanted[TOKENS - 1] == 0:
            continue
        numbers = np.zeros(TOKENS, np.int64)
        for state in range(STATES):
            token = tokens[state]
            number = np.int64(wanted[token]) + numbers[token]
            count = STATE_BITS - 63 + np.int64(leading_zeros(np.uint64(number)))
            number_token = np.int64(token) - (row + 1) % 2
            raw = number_token // 4 - 1 if number_token >= 8 else 0
            tables[row, state] = ((number << count) - STATES) | (count << 12) | (raw << 16) | (np.int64(token) << 22)
            states[row, starts[token] + numbers[token]] = state
            numbers[token] += 1

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
from vllm_delta_sync.format.kernels import ONE, ZERO, _compile, at_least

BLOCK_WORDS = 4
TOGETHER_BYTES = 2 * 1024**2
"""Keys that are computed at once, unless one tile has more: so many fit the caches beside what else is in use."""


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
def room_of(elements):
    """Return the room that a tile of so many elements has in arrays of its keys: whole blocks of words."""
    return (elements + 64 * BLOCK_WORDS - 1) // (64 * BLOCK_WORDS) * (64 * BLOCK_WORDS)


@_compile
def tiles_together(across, room):
    """Return of how many tiles side by side ``keys_of_tiles`` is to compute the keys at once."""
    return max(1, min(across, TOGETHER_BYTES // max(room, 1)))


@_compile
def keys_of_tiles(bits, origin, rows, columns, width, stride, drop, needed, room, keys):
    """Compute the keys of tiles side by side. Row by row through all of them, since tiles have short rows far apart.

    Args:
        origin: flat index in ``bits`` of the first element. columns: of all these tiles; each has ``width``, the last
            one maybe fewer. stride: of a row. drop: number of bits above the key, uint64.
        needed: (tiles,) bool: those to compute. keys: uint8 output; tile t begins at t · ``room``.
    """
    for row in range(rows):
        for tile in range(needed.size):
            if needed[tile]:
                left = tile * width
                across = min(width, columns - left)
                place = origin + row * stride + left
                line = bits[place : place + across]
                out = keys[tile * room + row * across : tile * room + (row + 1) * across]
                for i in range(across):
                    out[i] = key_of(line[i], drop)


@_compile
def masks_of_classes(keys, size, thresholds, masks):
    """Compute the class masks of a tile.

    Args:
        keys: (size,) uint8, with room for whole words of 64. thresholds: ascending keys at which the second and later
            classes begin.
        masks: (classes, words or more) uint64 output, up to a whole block of BLOCK_WORDS.
    """
    words = (size + 63) // 64
    last = (ONE << np.uint64(size % 64)) - ONE if size % 64 else ~ZERO
    # Separate loops per threshold and per combination: in one loop, the compiler turns words into vectors of bits and
    # packs them one by one.
    masks[0, :words] = ~ZERO
    for kind in range(thresholds.size):
        threshold, reached = thresholds[kind], masks[kind + 1]
        for word in range(words):
            reached[word] = at_least(keys, np.uint64(word * 64), threshold)
    for kind in range(thresholds.size):
        mine, above = masks[kind], masks[kind + 1]
        for word in range(words):
            mine[word] ^= above[word]
    for kind in range(thresholds.size + 1):
        masks[kind, words - 1] &= last
        masks[kind, words : (words + BLOCK_WORDS - 1) // BLOCK_WORDS * BLOCK_WORDS] = ZERO


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

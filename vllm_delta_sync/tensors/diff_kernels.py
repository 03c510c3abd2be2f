"""Compiled loops (numba) of change detection; the conventions of ``format/kernels.py`` apply.

A tensor is compared in chunks of ``CHUNK_ELEMENTS``. Each changed element becomes one entry in ``relative`` (its index
in the chunk, 16 bits) and in ``distances`` (its ULP distance). For each chunk with changes, ``starts`` has the flat
index of its first element, and ``ends`` the end of its entries. ``state`` counts entries, chunks and compared elements.
The loops themselves update it, so it is right even if the caller is interrupted just after a loop.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types
from numba.extending import intrinsic

from vllm_delta_sync.format.kernels import (
    ONE,
    PIECE,
    ZERO,
    _compile,
    _high,
    _inline,
    _key,
    _low,
    _mirror_mask,
    _premix,
    ones,
    pointer,
    prefetch,
    trailing_zeros,
)
from vllm_delta_sync.tensors.changes import CHUNK_ELEMENTS

LANES = np.uint64(64)
LAST_LANE = np.uint64(1 << 63)
AT_ONCE = np.uint64(2)
# Elements rounded at a time: they stay in the first-level cache until they are compared.
ROUND_ELEMENTS = 4096
# Rows and columns transposed at a time: the cache lines of both sides stay in the first-level cache.
TILE = 32
HALF = np.uint32(0x7FFF)
S16 = np.uint32(16)
LAST = np.uint32(1)
MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)


@intrinsic
def differing(typing_context, old, new, start):
    """Return a 64-bit mask, lowest bit first, of the elements start, start + 1, … in which two arrays differ."""

    def generate(context, builder, signature, arguments):
        width = signature.args[0].dtype.bitwidth
        vector = ir.VectorType(ir.IntType(width), int(LANES))

        def load(which):
            data = context.make_array(signature.args[which])(context, builder, arguments[which]).data
            place = builder.gep(data, [arguments[2]])
            loaded = builder.load(builder.bitcast(place, vector.as_pointer()))
            loaded.align = width // 8
            return loaded

        return builder.bitcast(builder.icmp_unsigned("!=", load(0), load(1)), ir.IntType(int(LANES)))

    return types.uint64(old, new, types.uint64), generate


@_compile
def _extract(old, new, offset, first, sign, mirror, mask, seed, relative, distances):
    """Collect the changes of one piece of a chunk, update ``old`` to ``new`` → fingerprint (low, high), entries.

    The piece starts at ``offset`` in its chunk and at ``first`` in its tensor. The arrays have room for all elements.
    """
    # Two passes: find, then compute and store. Neither has a branch that depends on an element; in a single loop each
    # change would cost a misprediction or two, and its arithmetic would not use vectors.
    found = _find(old, new, offset, relative, distances)
    low_sum = ZERO
    high_sum = ZERO
    before = np.empty(PIECE, old.dtype)
    for start in range(0, found, PIECE):
        where = relative[start : min(start + PIECE, found)]
        fresh = distances[start : min(start + PIECE, found)]
        for i in range(where.size):
            before[i] = old[np.uint64(where[i]) - offset]
        for i in range(where.size):
            old[np.uint64(where[i]) - offset] = fresh[i]
        for i in range(where.size):
            x = _premix(seed, first + (np.uint64(where[i]) - offset))
            low_before = _low(x, np.uint64(before[i]))
            low_after = _low(x, np.uint64(fresh[i]))
            low_sum += low_after - low_before
            high_sum += _high(low_after) - _high(low_before)
        for i in range(where.size):
            fresh[i] = (_key(np.uint64(fresh[i]), sign, mirror) - _key(np.uint64(before[i]), sign, mirror)) & mask
    return low_sum, high_sum, np.uint64(found)


@_compile
def _find(old, new, offset, relative, fresh):
    """Write the index of each differing element, plus ``offset``, and its new bits → number of them."""
    cursor = ZERO
    size = np.uint64(old.size)
    whole = size - size % LANES
    start = ZERO
    # Without prefetches: the processor's own follow both arrays. With ours as well, detecting changes took 1.2 times as
    # long ("detect changes" of benchmarks.codec).
    while start < whole:
        word = differing(old, new, start)
        left = ones(word)
        # At least AT_ONCE per word, since the number of set bits is unpredictable; surplus entries are overwritten.
        while True:
            for _ in range(AT_ONCE):
                i = start + trailing_zeros(word | LAST_LANE)
                # Another thread may write, so the mask is only a hint. The element is read once: the same value is
                # compared, collected and stored.
                value = new[i]
                relative[cursor] = offset + i
                fresh[cursor] = value
                cursor += np.uint64((word != ZERO) & (old[i] != value))
                word &= word - ONE
            if left <= AT_ONCE:
                break
            left -= AT_ONCE
        start += LANES
    for i in range(whole, size):
        value = new[i]
        relative[cursor] = offset + i
        fresh[cursor] = value
        cursor += np.uint64(old[i] != value)
    return np.int64(cursor)


@_inline
def _close(chunk_start, found, starts, ends, state):
    """Record a finished chunk, if it has changes."""
    if found:
        state[0] += found
        starts[state[1]] = chunk_start
        ends[state[1]] = state[0]
        state[1] += 1


@_compile
def collect(old, new, start, sign, mask, seed, relative, distances, starts, ends, state):
    """Compare, collect, and update ``old`` to ``new``, from element state[2] on → fingerprint change (low, high).

    Stops early, between two chunks, if ``relative`` or ``starts`` may have no room for the next chunk.
    ``start`` is the flat index, in the tensor, of the first element of both arrays.
    """
    mirror = _mirror_mask(sign, mask)
    low_sum = ZERO
    high_sum = ZERO
    while state[2] < old.size and state[0] + CHUNK_ELEMENTS <= relative.size and state[1] < starts.size:
        here = state[2]
        stop = min(here + CHUNK_ELEMENTS, old.size)
        room = relative[state[0] :], distances[state[0] :]
        low, high, found = _extract(
            old[here:stop], new[here:stop], ZERO, np.uint64(start + here), sign, mirror, mask, seed, room[0], room[1]
        )
        low_sum += low
        high_sum += high
        _close(start + here, np.int64(found), starts, ends, state)
        state[2] = stop
    return low_sum, high_sum


@_compile
def collect_each(
    first, olds, news, sizes, seeds, sign, mask, relative, distances, starts, ends, state, bounds, sums
):  # fmt: skip
    """Do ``collect`` for small tensors from number ``first`` on → the number of the first that is not finished.

    The tensors are given by their addresses: to make an array of each takes longer than to compare it.

    Stops early as ``collect`` does, which then goes on at element state[2] of that tensor.

    Args:
        olds, news: (n,) int64 addresses of elements of the dtype of ``distances``. sizes: (n,) int64, of each tensor.
        seeds: (n,) uint64.
        bounds: (n + 1, 2) int64; row k + 1 becomes state[0] and state[1] behind tensor k, which may have nothing yet.
        sums: (n, 2) uint64; the changes of the fingerprints (low, high) are added to them.
    """
    for number in range(first, sizes.size):
        old = carray(pointer(olds[number]), sizes[number], distances.dtype)
        new = carray(pointer(news[number]), sizes[number], distances.dtype)
        low, high = collect(old, new, 0, sign, mask, seeds[number], relative, distances, starts, ends, state)
        sums[number, 0] += low
        sums[number, 1] += high
        stop = sizes.size if state[2] < sizes[number] else number + 1
        for row in range(number + 1, stop + 1):
            bounds[row, 0] = state[0]
            bounds[row, 1] = state[1]
        if state[2] < sizes[number]:
            return number
        state[2] = 0
    return sizes.size


@_compile
def round_to_bf16(singles, nan, out):
    """Round bits of float32 → bits of bfloat16, to nearest even; ``nan`` (uint16) for every NaN."""
    for i in range(out.size):
        x = singles[i]
        rounded = np.uint16((x + HALF + ((x >> S16) & LAST)) >> S16)
        out[i] = nan if (x & MAGNITUDE) > INFINITY else rounded


@_compile
def collect_rounded(old, singles, nan, block, start, sign, mask, seed, relative, distances, starts, ends, state):
    """Do ``collect`` for float32 bits against a bfloat16 baseline; ``block`` is uint16 scratch of at least
    min(ROUND_ELEMENTS, elements)."""
    mirror = _mirror_mask(sign, mask)
    low_sum = ZERO
    high_sum = ZERO
    while state[2] < old.size and state[0] + CHUNK_ELEMENTS <= relative.size and state[1] < starts.size:
        here = state[2]
        stop = min(here + CHUNK_ELEMENTS, old.size)
        found = np.int64(0)
        for piece in range(here, stop, ROUND_ELEMENTS):
            size = min(ROUND_ELEMENTS, stop - piece)
            fresh = block[:size]
            round_to_bf16(singles[piece : piece + size], nan, fresh)
            used = state[0] + found
            low, high, more = _extract(
                old[piece : piece + size], fresh, np.uint64(piece - here), np.uint64(start + piece),
                sign, mirror, mask, seed, relative[used:], distances[used:],
            )  # fmt: skip
            low_sum += low
            high_sum += high
            found += np.int64(more)
        _close(start + here, found, starts, ends, state)
        state[2] = stop
    return low_sum, high_sum


@_compile
def gather(memory, row_stride, column_stride, columns, out):
    """Copy a matrix with any strides (in elements) from ``memory`` to ``out``, in row-major order."""
    rows = out.size // columns
    for top in range(0, rows, TILE):
        for left in range(0, columns, TILE):
            for row in range(top, min(top + TILE, rows)):
                for column in range(left, min(left + TILE, columns)):
                    out[row * columns + column] = memory[row * row_stride + column * column_stride]


@_compile
def expand(relative, starts, ends, positions):
    """Write the flat positions (int64) of entries whose indices count from the start of their chunk."""
    cursor = 0
    for chunk in range(starts.size):
        start = starts[chunk]
        while cursor < ends[chunk]:
            positions[cursor] = start + relative[cursor]
            cursor += 1


@_compile
def put(old, new, relative, distances, starts, ends, state):
    """Update ``old`` to the bits ``new`` of the entries, which a device has found, and count them in ``state``."""
    for chunk in range(starts.size):
        # The memory of the next chunk arrives while this one is written.
        if chunk + 1 < starts.size:
            memory = old[starts[chunk + 1] :]
            where = relative[ends[chunk] : ends[chunk + 1]]
            for i in range(where.size):
                prefetch(memory, np.uint64(where[i]))
        memory = old[starts[chunk] :]
        first = ends[chunk - 1] if chunk else 0
        where = relative[first : ends[chunk]]
        bits = new[first : ends[chunk]]
        for i in range(where.size):
            memory[np.uint64(where[i])] = bits[i]
    state[0] = relative.size
    state[1] = starts.size

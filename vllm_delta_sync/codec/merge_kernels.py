"""``merge_layers``: the compiled loop (numba) that merges layers of changes.

Imported lazily; the conventions of ``format/kernels.py`` apply. tests/codec/test_merge.py compares it with applying the
layers one by one.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

# numba's cache ignores changes of functions inlined from another file; docs/FORMAT.md fixes these functions.
from vllm_delta_sync.format.kernels import ONE, ZERO, _compile, _key, _mirror_mask, _unkey, trailing_zeros

TILE = np.uint64(4096)
"""Positions per step. They have 64 words of flags, and one more word flags which of these are used."""
WORDS = 64
AHEAD = 3
S6 = np.uint64(6)
LOW6 = np.uint64(63)
END = np.int64(np.iinfo(np.int64).max)


@_compile
def _scatter(start, stop, base, positions, data, relative, mirror, sign, mask, values, seen, fixed, used, pinned):
    """Apply the elements from ``start`` on that lie in the tile at ``base`` to ``values``.

    → index of the first element beyond the tile, used words, words with absolute elements.
    """
    i = start
    while i < stop:
        offset = np.uint64(positions[i] - base)
        # Unsigned, so a position before the tile, which ascending input never has, ends the loop too.
        if offset >= TILE:
            break
        word = offset >> S6
        bit = ONE << (offset & LOW6)
        if not relative:
            values[offset] = data[i]
            fixed[word] |= bit
            pinned |= ONE << word
        elif pinned != ZERO and fixed[word] & bit != ZERO:
            key = _key(np.uint64(values[offset]), sign, mirror) + np.uint64(data[i])
            values[offset] = _unkey(key & mask, sign, mirror)
        else:
            values[offset] += data[i]
        seen[word] |= bit
        used |= ONE << word
        i += 1
    return i, used, pinned


@_compile
def _list_bits(seen, used, offsets):
    """List the ascending positions of the bits set in the ``used`` words of ``seen``; clear these words → count."""
    found = 0
    while used != ZERO:
        word = trailing_zeros(used)
        used &= used - ONE
        bits = seen[word]
        seen[word] = ZERO
        # Most words have a few bits, but an unpredictable number: list AHEAD without branches; surplus is overwritten.
        for _ in range(AHEAD):
            offsets[found] = (word << S6) | trailing_zeros(bits)
            found += bits != ZERO
            bits &= bits - ONE
        while bits != ZERO:
            offsets[found] = (word << S6) | trailing_zeros(bits)
            found += 1
            bits &= bits - ONE
    return found


@_compile
def _emit(offsets, pinned, base, values, fixed, near, near_data, r, far, far_data, a):
    """Write the tile's elements from index ``r`` or ``a`` on, and clear the tile → next values of ``r`` and ``a``."""
    if pinned == ZERO:
        for i in range(offsets.size):
            offset = offsets[i]
            near[r] = base + np.int64(offset)
            near_data[r] = values[offset]
            # A distance of 0 is overwritten by the next element.
            r += values[offset] != 0
            values[offset] = 0
        return r, a
    for i in range(offsets.size):
        offset = offsets[i]
        if (fixed[offset >> S6] >> (offset & LOW6)) & ONE != ZERO:
            far[a] = base + np.int64(offset)
            far_data[a] = values[offset]
            a += 1
        elif values[offset] != 0:
            near[r] = base + np.int64(offset)
            near_data[r] = values[offset]
            r += 1
        values[offset] = 0
    fixed[:] = ZERO
    return r, a


@_compile
def merge_layers(
    firsts,
    starts,
    stops,
    relative,
    positions,
    data,
    sign,
    mask,
    near,
    near_data,
    near_counts,
    far,
    far_data,
    far_counts,
):
    """Merge the layers of each tensor of one dtype; the positions of a layer ascend.

    Args:
        firsts: (t + 1,) int64; tensor t has the layers firsts[t] … firsts[t + 1] − 1, in order of application.
        starts, stops: (layers,) int64: each layer's elements in ``positions`` (int64) and ``data``.
        relative: (layers,) bool: ULP distances, else new bits.
        near, near_data: output for the remaining distances, none of them 0; room for all relative elements.
        far, far_data: output for the new bits; room for all absolute elements.
        near_counts, far_counts: (t,) int64 output: elements of each tensor.

    Returns:
        number of elements written to ``near`` and to ``far``.
    """
    mirror = _mirror_mask(sign, mask)
    # Layers are merged in a dense tile, which is all 0 before and after each step.
    values = np.zeros(TILE, data.dtype)
    seen = np.zeros(WORDS, np.uint64)
    fixed = np.zeros(WORDS, np.uint64)
    offsets = np.empty(64 * WORDS + AHEAD, np.uint64)
    cursors = starts.copy()
    r = 0
    a = 0
    for tensor in range(firsts.size - 1):
        r_before = r
        a_before = a
        while True:
            base = END
            for layer in range(firsts[tensor], firsts[tensor + 1]):
                if cursors[layer] < stops[layer]:
                    base = min(base, positions[cursors[layer]])
            if base == END:
                break
            used = ZERO
            pinned = ZERO
            for layer in range(firsts[tensor], firsts[tensor + 1]):
                cursors[layer], used, pinned = _scatter(
                    cursors[layer], stops[layer], base, positions, data, relative[layer], mirror, sign, mask,
                    values, seen, fixed, used, pinned,
                )  # fmt: skip
            found = _list_bits(seen, used, offsets)
            r, a = _emit(offsets[:found], pinned, base, values, fixed, near, near_data, r, far, far_data, a)
        near_counts[tensor] = r - r_before
        far_counts[tensor] = a - a_before
    return r, a

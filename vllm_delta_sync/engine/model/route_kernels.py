"""``route_elements``: the compiled loop (numba) that turns changed elements of a tensor into those of a patch.

Imported lazily; the conventions of ``format/kernels.py`` apply. tests/receiver/test_patch_routing.py compares it with
indexing.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

# numba's cache ignores changes of functions inlined from another file; docs/FORMAT.md fixes this function.
from vllm_delta_sync.format.kernels import _compile, _premix


@_compile
def route_elements(
    positions, data, seed, offset, sizes, strides, target, target_strides, addresses, steps, premix,
):  # fmt: skip
    """Write those of a tensor's changed elements that lie in a region → (how many, whether their addresses ascend).

    Args:
        positions: (n,) int64 ascending. data: (n,) unsigned. seed: of the tensor's hashes.
        offset, sizes, strides: of the region in the tensor; (d,) int64, by descending stride, all of them positive.
        target, target_strides: offset and (d,) strides of where it lies in its destination.
        addresses (int32 or int64), steps, premix (uint64): output with room for n elements.
    """
    # Quotients by reciprocals, since integer division takes longer. Half a unit is further from a whole number than
    # the rounding error, for tensors below 2^50 elements.
    reciprocals = 1.0 / strides
    # A last dimension of neighbors needs no division.
    divided = strides.size - 1 if strides.size and strides[-1] == 1 else strides.size
    found = np.uint64(0)
    before, ascending = np.int64(-1), True
    for i in range(positions.size):
        rest = positions[i] - offset
        inside = rest >= 0
        address = target
        for dim in range(divided):
            coordinate = np.int64((np.float64(rest) + 0.5) * reciprocals[dim])
            rest -= coordinate * strides[dim]
            inside &= coordinate < sizes[dim]
            address += coordinate * target_strides[dim]
        if divided < strides.size:
            inside &= rest < sizes[-1]
            address += rest * target_strides[-1]
        else:
            inside &= rest == 0
        # Written always, since whether an element is inside is unpredictable; the next one overwrites it.
        addresses[found] = address
        steps[found] = data[i]
        premix[found] = _premix(seed, np.uint64(positions[i]))
        ascending &= (not inside) | (address > before)
        before = address if inside else before
        found += np.uint64(inside)
    return np.int64(found), ascending

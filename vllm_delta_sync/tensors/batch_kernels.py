"""``collect_each`` (numba): ``diff_kernels.collect`` for many small tensors in one call.

The tensors are given by their addresses: to make an array of each takes longer than to compare it.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types
from numba.extending import intrinsic

from vllm_delta_sync.format.kernels import _compile
from vllm_delta_sync.tensors.diff_kernels import collect


@intrinsic
def _pointer(typing_context, address):
    """Return an address as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), generate


@_compile
def collect_each(
    first, olds, news, sizes, seeds, sign, mask, relative, distances, starts, ends, state, bounds, sums
):  # fmt: skip
    """Compare, collect, and update tensors from number ``first`` on → the number of the first that is not finished.

    Stops early as ``collect`` does, which then goes on at element state[2] of that tensor.

    Args:
        olds, news: (n,) int64 addresses of elements of the dtype of ``distances``. sizes: (n,) int64, of each tensor.
        seeds: (n,) uint64.
        bounds: (n + 1, 2) int64; row k + 1 becomes state[0] and state[1] behind tensor k, which may have nothing yet.
        sums: (n, 2) uint64; the changes of the fingerprints (low, high) are added to them.
    """
    for number in range(first, sizes.size):
        old = carray(_pointer(olds[number]), sizes[number], distances.dtype)
        new = carray(_pointer(news[number]), sizes[number], distances.dtype)
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

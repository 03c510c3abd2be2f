"""Compiled loops (numba) that fingerprint, route, move and exchange elements.

Import this module lazily: compiling takes time and loads LLVM. Arrays are flat, C-contiguous and hold bit patterns
(``uintN`` views). Every loop releases the GIL. ``sign`` is the sign bit of a float's pattern, 0 for integers; ``mask``
has all bits of the width set. tests/codec/test_kernels.py compares each function with a plain numpy reference.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from contextlib import contextmanager, suppress

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import ffi  # type: ignore[import-untyped]
from numba import carray, types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

from vllm_delta_sync.logs import ONCE, LogThrottle, guarded_logger

logger = guarded_logger(__name__)
_log = LogThrottle(logger, ONCE)


def _let_modules_be_scanned(library):
    """Let llvmlite's handle of its library have no attribute with the name of a special one.

    Cause: the handle answers any name, ``__dict__`` included, with a C function; on the CPU vLLM calls ``vars()`` on
    what the modules of a process hold. Symptom: an ``LLM`` that is made after a ``Publisher``, in one process, ends
    with AttributeError '_lib_fn_wrapper' object has no attribute 'get'. Remove when: llvmlite does this.
    """
    original = library.__getattr__

    def look_up(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return original(self, name)

    library.__getattr__ = look_up


_let_modules_be_scanned(type(ffi.lib))

# GOLDEN, BITS and FINAL are the increment and the multipliers of splitmix64 (Steele, Lea, Flood 2014; Stafford's
# mix 13), PREMIX is the multiplier of degski's hash64, LANE is xxHash64's second prime. docs/FORMAT.md fixes them.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
PREMIX = np.uint64(0xD6E8FEB86659FD93)
BITS = np.uint64(0xBF58476D1CE4E5B9)
FINAL = np.uint64(0x94D049BB133111EB)
LANE = np.uint64(0xC2B2AE3D27D4EB4F)
S29 = np.uint64(29)
S32 = np.uint64(32)
ZERO = np.uint64(0)
ONE = np.uint64(1)


def _warn_uncached(reason):
    _log.warn(
        f"each process compiles its loops again, which takes seconds: {reason}; set NUMBA_CACHE_DIR to a writable "
        "directory to cache them",
        "cache",
    )


class _LoopCache(FunctionCache):
    """numba's cache of a compiled loop. If it cannot be used, the loop is compiled and runs all the same.

    Cause: numba raises from the call of a loop what reading and writing its cache raises. Symptom: with a full disk, or
    a file that a power failure has emptied, nothing can be published, served or verified. Remove when: numba does this.
    """

    @contextmanager
    def _guard_against_spurious_io_errors(self):
        try:
            yield
        except OSError as error:
            _warn_uncached(f"{error.strerror or error} ({self.cache_path})")
        except Exception:  # noqa: BLE001  whatever reading a damaged file ends with
            with suppress(OSError):
                self.flush()  # so that it is written anew


def _compile(function):
    """Return a loop that is compiled when it is first called."""
    loop = numba.njit(nogil=True)(function)
    try:
        loop._cache = _LoopCache(function)
    except RuntimeError as error:  # numba finds no folder for compiled code
        _warn_uncached(error)
    return loop


_inline = numba.njit(inline="always")


def read_only(array):
    """Return a view that cannot be written.

    numba compiles a loop once for arrays that can be written and once for those that cannot. Arrays that a loop only
    reads may be either, such as the bytes of an object and a decompressed part of them, so they are passed like this.
    """
    view = array.view()
    view.flags.writeable = False
    return view


@_inline
def _mix(x):
    x = (x ^ (x >> S32)) * PREMIX
    return x ^ (x >> S32)


@_inline
def _premix(seed, index):
    return _mix(seed + index * GOLDEN)


@_inline
def _low(x, bits):
    y = x + bits * BITS
    y = (y ^ (y >> S29)) * FINAL
    return y ^ (y >> S32)


@_inline
def _high(low):
    z = low * LANE
    return z ^ (z >> S29)


# Without branches: the sign of a weight is unpredictable, and each misprediction would wait for the cache miss that
# fetches the weight, so that misses would not overlap.
@_inline
def _mirror_mask(sign, mask):
    return (mask ^ sign) * np.uint64(sign != ZERO)


@_inline
def _key(bits, sign, mirror):
    """Return the monotone order key: negative floats mirrored below positive ones; a bijection of all patterns."""
    return bits ^ (((ZERO - np.uint64((bits & sign) != ZERO)) & mirror) ^ sign)


@_inline
def _unkey(key, sign, mirror):
    return key ^ (((ZERO - np.uint64((key & sign) == ZERO)) & mirror) ^ sign)


@_inline
def _hash_row(row, x, step):
    """Sum a row's element hashes; ``x`` is seed + index · GOLDEN of its first element and grows by ``step``."""
    low_sum = ZERO
    high_sum = ZERO
    for i in range(row.size):
        # An addition, since the loop is limited by its four other multiplications.
        low = _low(_mix(x), np.uint64(row[i]))
        x += step
        low_sum += low
        high_sum += _high(low)
    return low_sum, high_sum


@_compile
def fingerprint_range(bits, start, seed):
    """Sum the element hashes of ``bits`` at flat indices start, start + 1, … → (low, high)."""
    return _hash_row(bits, seed + np.uint64(start) * GOLDEN, GOLDEN)


@_compile
def fingerprint_box(bits, sizes, at, steps, start, strides, seed):
    """Sum the element hashes over a box → (low, high).

    The element with coordinates c (0 ≤ cᵢ < sizesᵢ, all sizes positive) is bits[at + Σ cᵢ·stepsᵢ] and has flat index
    start + Σ cᵢ·stridesᵢ. All arrays are int64 of one length, at least 1. The last dimension is the inner loop.
    """
    inner = sizes.size - 1
    length, step = sizes[inner], steps[inner]
    growth = np.uint64(strides[inner]) * GOLDEN
    coordinates = np.zeros(sizes.size, np.int64)
    low_sum = ZERO
    high_sum = ZERO
    while True:
        x = seed + np.uint64(start) * GOLDEN
        if step == 1:
            low, high = _hash_row(bits[at : at + length], x, growth)
        else:
            low, high = _hash_row(bits[at : at + (length - 1) * step + 1 : step], x, growth)
        low_sum += low
        high_sum += high
        dim = inner - 1
        while dim >= 0:
            coordinates[dim] += 1
            at += steps[dim]
            start += strides[dim]
            if coordinates[dim] < sizes[dim]:
                break
            coordinates[dim] = 0
            at -= sizes[dim] * steps[dim]
            start -= sizes[dim] * strides[dim]
            dim -= 1
        if dim < 0:
            return low_sum, high_sum


@_compile
def fingerprint_change(positions, old, new, seed):
    """Sum hash(new) − hash(old) over ``positions`` (int64) → (low, high)."""
    low_sum = ZERO
    high_sum = ZERO
    for i in range(positions.size):
        x = _premix(seed, np.uint64(positions[i]))
        before = _low(x, np.uint64(old[i]))
        after = _low(x, np.uint64(new[i]))
        low_sum += after - before
        high_sum += _high(after) - _high(before)
    return low_sum, high_sum


@intrinsic
def pointer(typing_context, address):
    """Return an address as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), generate


@intrinsic
def prefetch(typing_context, array, index):
    """Prefetch the cache line of ``array[index]``; ``index`` is uint64. Never faults."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [pointer.type],
            ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number]),
        )
        # Arguments: read; second-level cache, since the first allows too few misses in flight; data.
        builder.call(function, [pointer, number(0), number(2), number(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def trailing_zeros(typing_context, word):
    """Count the zeros below the lowest bit set in a uint64, as uint64; 64 for 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.uint64(word), generate


@intrinsic
def ones(typing_context, word):
    """Count the bits set in a uint64, as uint64."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(word), generate


# The three loops below touch memory far apart, so their speed depends on how many cache misses are in flight. They
# work in pieces of PIECE elements and in passes: prefetch the next piece, fetch, compute, store. The next piece arrives
# while this one is computed. In a single loop, the arithmetic of each element would fill the processor's window, and
# few misses would be in flight. At 1 % changed, prefetching doubles the speed, and these loops are faster than a bare
# scatter of known bits. Arrays are sliced per piece and positions are unsigned: otherwise numba checks each element for
# a negative index, which prevents vector instructions.
PIECE = 64


@_compile
def add_distances(bits, positions, distances, sign, mask, negate):
    """Move bits[p] by +distance (or −distance, if ``negate``) in monotone order, modulo 2^width; in place."""
    mirror = _mirror_mask(sign, mask)
    flip = ZERO - np.uint64(negate)
    old = np.empty(PIECE, bits.dtype)
    for start in range(0, positions.size, PIECE):
        where = positions[start : start + PIECE]
        ahead = positions[start + PIECE : start + 2 * PIECE]
        steps = distances[start : start + PIECE]
        for i in range(ahead.size):
            prefetch(bits, np.uint64(ahead[i]))
        for i in range(where.size):
            old[i] = bits[np.uint64(where[i])]
        for i in range(where.size):
            step = (np.uint64(steps[i]) ^ flip) - flip
            old[i] = _unkey((_key(np.uint64(old[i]), sign, mirror) + step) & mask, sign, mirror)
        for i in range(where.size):
            bits[np.uint64(where[i])] = old[i]


@_compile
def commit_relative(bits, positions, distances, premix, sign, mask, backwards):
    """Move bits[p] by +distance (or −distance, if ``backwards``) and hash → fingerprint change (low, high)."""
    mirror = _mirror_mask(sign, mask)
    flip = ZERO - np.uint64(backwards)
    low_sum = ZERO
    high_sum = ZERO
    old = np.empty(PIECE, bits.dtype)
    for start in range(0, positions.size, PIECE):
        where = positions[start : start + PIECE]
        ahead = positions[start + PIECE : start + 2 * PIECE]
        steps = distances[start : start + PIECE]
        words = premix[start : start + PIECE]
        for i in range(ahead.size):
            prefetch(bits, np.uint64(ahead[i]))
        for i in range(where.size):
            old[i] = bits[np.uint64(where[i])]
        for i in range(where.size):
            before = np.uint64(old[i])
            step = (np.uint64(steps[i]) ^ flip) - flip
            after = _unkey((_key(before, sign, mirror) + step) & mask, sign, mirror)
            old[i] = after
            low_before = _low(words[i], before)
            low_after = _low(words[i], after)
            low_sum += low_after - low_before
            high_sum += _high(low_after) - _high(low_before)
        for i in range(where.size):
            bits[np.uint64(where[i])] = old[i]
    return low_sum, high_sum


@_compile
def exchange(bits, positions, values, premix):
    """Swap bits[p] with ``values`` and hash → fingerprint change of ``bits`` (low, high). Its own inverse."""
    low_sum = ZERO
    high_sum = ZERO
    old = np.empty(PIECE, bits.dtype)
    for start in range(0, positions.size, PIECE):
        where = positions[start : start + PIECE]
        ahead = positions[start + PIECE : start + 2 * PIECE]
        fresh = values[start : start + PIECE]
        words = premix[start : start + PIECE]
        for i in range(ahead.size):
            prefetch(bits, np.uint64(ahead[i]))
        for i in range(where.size):
            old[i] = bits[np.uint64(where[i])]
        for i in range(where.size):
            low_before = _low(words[i], np.uint64(old[i]))
            low_after = _low(words[i], np.uint64(fresh[i]))
            low_sum += low_after - low_before
            high_sum += _high(low_after) - _high(low_before)
        for i in range(where.size):
            bits[np.uint64(where[i])] = fresh[i]
        for i in range(where.size):
            fresh[i] = old[i]
    return low_sum, high_sum


@_compile
def commit_each(pointers, counts, index_type, bit_type, sign, mask, relative, backwards, sums):
    """Do ``commit_relative``, or ``exchange`` if not ``relative``, for one array of bits after the other.

    Args:
        pointers: (n, 4) int64 addresses of bits, positions, distances or values, and premix.
        counts: (n,) int64 positions of each. index_type, bit_type: (0,) arrays of the types of positions and bits.
        sums: (n, 2) uint64, set to the fingerprint change (low, high) of each.
    """
    for row in range(counts.size):
        positions = carray(pointer(pointers[row, 1]), counts[row], index_type.dtype)
        data = carray(pointer(pointers[row, 2]), counts[row], bit_type.dtype)
        premix = carray(pointer(pointers[row, 3]), counts[row], np.uint64)
        # Nothing asks for the size of the bits, which is at least that.
        size = np.int64(positions[counts[row] - 1]) + 1 if counts[row] else 0
        bits = carray(pointer(pointers[row, 0]), size, bit_type.dtype)
        if relative:
            sums[row, 0], sums[row, 1] = commit_relative(bits, positions, data, premix, sign, mask, backwards)
        else:
            sums[row, 0], sums[row, 1] = exchange(bits, positions, data, premix)


@_compile
def first_not_ascending(positions, counts, numels):
    """Return the first group whose positions do not strictly ascend inside [0, numel); -1 if there is none."""
    cursor = 0
    for group in range(counts.size):
        previous = np.int64(-1)
        for _ in range(counts[group]):
            position = positions[cursor]
            if position <= previous or position >= numels[group]:
                return group
            previous = position
            cursor += 1
    return -1


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

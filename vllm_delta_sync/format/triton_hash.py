"""The element hash of fingerprints as Triton functions, for kernels that measure weights on their device.

Imported only where Triton is. ``kernels.py`` has the same arithmetic for CPUs; docs/FORMAT.md fixes it. All words are
uint64, and arithmetic wraps.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

# Triton reads globals only as constexpr. The numbers are those of ``kernels.py``, which names their sources.
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
PREMIX = tl.constexpr(0xD6E8FEB86659FD93)
BITS = tl.constexpr(0xBF58476D1CE4E5B9)
FINAL = tl.constexpr(0x94D049BB133111EB)
LANE = tl.constexpr(0xC2B2AE3D27D4EB4F)


@triton.jit
def premix(seed, index):
    """Return the position half of an element's hash: its tensor's seed and its flat index."""
    x = seed + index.to(tl.uint64) * GOLDEN
    x = (x ^ (x >> 32)) * PREMIX
    return x ^ (x >> 32)


@triton.jit
def low_lane(words, bits):
    """Return the low lane of elements: premixed words, and bit patterns as uint64."""
    y = words + bits * BITS
    y = (y ^ (y >> 29)) * FINAL
    return y ^ (y >> 32)


@triton.jit
def high_lane(low):
    """Return the high lane of elements, made of their low lane."""
    z = low * LANE
    return z ^ (z >> 29)

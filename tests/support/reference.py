"""What the compiled loops compute, written a second time: slowly, in plain Python integers, from docs/FORMAT.md.

Nothing here imports the modules under test. Bit patterns, positions and hashes are Python integers; a tensor is a
list of them.
"""

from hashlib import sha256

U64 = (1 << 64) - 1
DOMAIN = b"vllm-delta-sync fingerprint v1\0"


def seed(name: str) -> int:
    """Per-tensor start value of the fingerprint."""
    return int.from_bytes(sha256(DOMAIN + name.encode()).digest()[:8], "little")


def element_hash(start: int, index: int, bits: int) -> tuple[int, int]:
    """(low, high) of one element of the tensor whose seed is ``start``."""
    x = (start + index * 0x9E3779B97F4A7C15) & U64
    x = ((x ^ (x >> 32)) * 0xD6E8FEB86659FD93) & U64
    x ^= x >> 32
    y = (x + bits * 0xBF58476D1CE4E5B9) & U64
    y = ((y ^ (y >> 29)) * 0x94D049BB133111EB) & U64
    low = y ^ (y >> 32)
    z = (low * 0xC2B2AE3D27D4EB4F) & U64
    return low, z ^ (z >> 29)


def fingerprint(name: str, elements: dict[int, int]) -> tuple[int, int]:
    """(low, high) sums over {flat index: bits}."""
    low = high = 0
    for index, bits in elements.items():
        one, two = element_hash(seed(name), index, bits)
        low, high = (low + one) & U64, (high + two) & U64
    return low, high


def order_key(bits: int, width: int, is_float: bool) -> int:
    """Rank of a pattern among the 2^width patterns of its type."""
    if not is_float:
        return bits
    top = 1 << (width - 1)
    return (1 << width) - 1 - bits if bits & top else bits + top


def distance(old: int, new: int, width: int, is_float: bool) -> int:
    """ULP distance new − old modulo 2^width."""
    return (order_key(new, width, is_float) - order_key(old, width, is_float)) % (1 << width)


def moved(bits: int, step: int, width: int, is_float: bool) -> int:
    """The pattern ``step`` ranks above ``bits``, modulo 2^width."""
    rank = (order_key(bits, width, is_float) + step) % (1 << width)
    if not is_float:
        return rank
    top = 1 << (width - 1)
    return rank - top if rank >= top else (1 << width) - 1 - rank


def diff(old: list[int], new: list[int], width: int, is_float: bool) -> tuple[list[int], list[int]]:
    positions = [index for index, (before, after) in enumerate(zip(old, new, strict=True)) if before != after]
    return positions, [distance(old[index], new[index], width, is_float) for index in positions]

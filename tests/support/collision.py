"""Other weights with the same fingerprint, found in seconds: it is a sum, and sums can be made to come out.

Wagner's generalized birthday search: 128 elements may each take any of 65 536 bit patterns. Lists of choices are merged
two by two, and each round keeps those sums in which 16 bits more are zero: four rounds for the low lane, and three for
what is then left to chance in the high one.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.format.fingerprint import tensor_seed
from vllm_delta_sync.format.kernels import BITS, FINAL, GOLDEN, LANE, PREMIX, S29, S32
from vllm_delta_sync.tensors.changes import Bits

ROUNDS = 7
KEPT = 2**16
ELEMENTS = 2**ROUNDS
Words = npt.NDArray[np.uint64]


@dataclass
class _Sums:
    """Sums of hashes modulo 2^64, in both lanes, and which element of which list each is made of."""

    low: Words
    high: Words
    parts: "tuple[_Sums, npt.NDArray[np.int64], _Sums, npt.NDArray[np.int64]] | None" = None

    def choices(self, number: int) -> list[int]:
        if self.parts is None:
            return [number]
        left, of_left, right, of_right = self.parts
        return left.choices(int(of_left[number])) + right.choices(int(of_right[number]))


def same_fingerprint(name: str, bits: Bits) -> Bits:
    """A copy of a 16-bit tensor in which the first 128 elements are others, and the fingerprint is the same."""
    changed = bits.copy()
    changed[:ELEMENTS] = _others(name, bits[:ELEMENTS].tobytes())
    return changed


@cache
def _others(name: str, data: bytes) -> list[int]:
    found = _search(name, np.frombuffer(data, np.uint16), 0, ROUNDS)
    zero = np.flatnonzero((found.low == 0) & (found.high == 0))
    return found.choices(int(zero[-1]))


def _search(name: str, bits: Bits, first: int, rounds: int) -> _Sums:
    if rounds == 0:
        return _changes(name, first, int(bits[first]))
    half = 2 ** (rounds - 1)
    left, right = _search(name, bits, first, rounds - 1), _search(name, bits, first + half, rounds - 1)
    lane, shift = ("low", "high")[rounds > 4], np.uint64(16 * ((rounds - 1) % 4))
    wanted = (getattr(left, lane) >> shift).astype(np.uint16)
    offered = (np.uint64(0) - getattr(right, lane) >> shift).astype(np.uint16)
    order = np.argsort(offered, kind="stable")
    begin = np.searchsorted(offered[order], wanted, "left")
    count = np.searchsorted(offered[order], wanted, "right") - begin
    # No more than are of use: where few values are left, almost everything fits together.
    count = np.minimum(count, max(1, KEPT // len(wanted)) * 2)
    of_left = np.repeat(np.arange(len(wanted)), count)
    ranks = np.arange(len(of_left)) - np.repeat(np.cumsum(count) - count, count)
    of_right = order[np.repeat(begin, count) + ranks]
    of_left, of_right = of_left[:KEPT], of_right[:KEPT]
    sums = left.low[of_left] + right.low[of_right], left.high[of_left] + right.high[of_right]
    return _Sums(*sums, (left, of_left.astype(np.uint16), right, of_right.astype(np.uint16)))


def _changes(name: str, position: int, old: int) -> _Sums:
    """By how much each of the 65 536 patterns would change the fingerprint at one position."""
    with np.errstate(over="ignore"):
        mixed = np.uint64(tensor_seed(name)) + np.uint64(position) * GOLDEN
        mixed = (mixed ^ (mixed >> S32)) * PREMIX
        low = (mixed ^ (mixed >> S32)) + np.arange(2**16, dtype=np.uint64) * BITS
        low = (low ^ (low >> S29)) * FINAL
        low ^= low >> S32
        high = low * LANE
    high ^= high >> S29
    return _Sums(low - low[old], high - high[old])

"""``Fingerprint``: an additive 128-bit hash over (tensor name, flat index, bits) of all weights.

It is additive: an update costs O(changed elements), and tensors, shards and ranks are summed in any order. So it can be
forged: it detects accidents and proves nothing about who wrote the bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import FormatError, TensorMismatchError
from vllm_delta_sync.format.table import DType

_MASK = (1 << 64) - 1
_DOMAIN = b"vllm-delta-sync fingerprint v1\0"


@dataclass(frozen=True)
class Fingerprint:
    """Two sums modulo 2^64. ``hex()`` is 32 digits, the high lane first."""

    low: int = 0
    high: int = 0

    def __add__(self, other: "Fingerprint") -> "Fingerprint":
        return Fingerprint((self.low + other.low) & _MASK, (self.high + other.high) & _MASK)

    def __sub__(self, other: "Fingerprint") -> "Fingerprint":
        return Fingerprint((self.low - other.low) & _MASK, (self.high - other.high) & _MASK)

    def hex(self) -> str:
        return f"{self.high:016x}{self.low:016x}"

    @classmethod
    def from_hex(cls, text: str) -> "Fingerprint":
        """Parse ``hex()``; raises FormatError unless it is 32 lower-case hex digits."""
        if len(text) != 32 or any(c not in "0123456789abcdef" for c in text):
            raise FormatError(f"fingerprint {text[:40]!r} is not 32 lower-case hex digits")
        return cls(low=int(text[16:], 16), high=int(text[:16], 16))


@lru_cache(maxsize=65_536)
def tensor_seed(name: str) -> int:
    """Start value of a tensor's hash: the first 8 bytes, little-endian, of SHA-256(domain ‖ UTF-8 name)."""
    return int.from_bytes(sha256(_DOMAIN + name.encode()).digest()[:8], "little")


def fingerprint_tensor(name: str, bits: npt.NDArray[np.unsignedinteger], start: int = 0) -> Fingerprint:
    """Return the fingerprint of a flat piece of a tensor whose first element has flat index ``start``.

    Args:
        bits: (n,) unsigned bit patterns, C-contiguous.
    """
    from vllm_delta_sync.format import kernels

    low, high = kernels.fingerprint_range(kernels.read_only(bits), np.int64(start), np.uint64(tensor_seed(name)))
    return Fingerprint(int(low), int(high))


def fingerprint_strided(
    name: str,
    bits: npt.NDArray[np.unsignedinteger],
    shape: Sequence[int],
    memory: tuple[int, Sequence[int]],
    index: tuple[int, Sequence[int]],
) -> Fingerprint:
    """Return the fingerprint of a box of a tensor whose elements lie in memory with any positive strides.

    Args:
        bits: flat, C-contiguous memory that contains the box's elements.
        shape: of the box; it may be empty.
        memory: (offset, stride per dimension) of the elements in ``bits``; strides are positive.
        index: (offset, stride per dimension) of the elements' flat indices in the whole tensor.

    Raises:
        TensorMismatchError: the box is not inside ``bits``.
    """
    from vllm_delta_sync.format import kernels

    if 0 in shape:
        return Fingerprint()
    # The inner loop runs along neighbours in memory; contiguous dimensions are joined to make it long.
    dimensions: list[tuple[int, int, int]] = []
    for step, stride, size in sorted(zip(memory[1], index[1], shape, strict=True), reverse=True):
        outer = dimensions[-1] if dimensions else (0, 0, 0)
        if outer[:2] == (step * size, stride * size):
            dimensions[-1] = (step, stride, outer[2] * size)
        elif size > 1:
            dimensions.append((step, stride, size))
    steps, strides, sizes = (np.array(column, np.int64) for column in zip(*(dimensions or [(1, 1, 1)]), strict=True))
    last = memory[0] + int(((sizes - 1) * steps).sum())
    if memory[0] < 0 or last >= bits.size or steps.min() < 1:
        raise TensorMismatchError(
            f"tensor {name!r}: a box of shape {tuple(shape)} with strides {tuple(memory[1])} at {memory[0]} is not "
            f"inside {bits.size} elements"
        )
    low, high = kernels.fingerprint_box(
        bits, sizes, np.int64(memory[0]), steps, np.int64(index[0]), strides, np.uint64(tensor_seed(name))
    )
    return Fingerprint(int(low), int(high))


def fingerprint_change(
    name: str,
    positions: npt.NDArray[np.int64],
    old: npt.NDArray[np.unsignedinteger],
    new: npt.NDArray[np.unsignedinteger],
) -> Fingerprint:
    """Return the fingerprint after minus before, where (n,) flat positions change from ``old`` to ``new`` bits."""
    from vllm_delta_sync.format import kernels

    arrays = map(kernels.read_only, (positions, old, new))
    low, high = kernels.fingerprint_change(*arrays, np.uint64(tensor_seed(name)))
    return Fingerprint(int(low), int(high))


def compile_kernels(elements: Iterable[DType]) -> None:
    """Compile the loops that hash tensors and changes of these element types now."""
    for element in elements:
        bits = np.empty(0, element.uint)
        fingerprint_tensor("", bits)
        fingerprint_change("", np.empty(0, np.int64), bits, bits)

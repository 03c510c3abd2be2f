"""Bit patterns of flat tensors: ``apply_distances`` applies changes in place; ``segments.diff`` finds them.

All arrays are flat and C-contiguous; ``bits`` have the unsigned dtype of their element type (DType.uint).
The ULP distance of two patterns is their difference, modulo 2^width, in a monotone order of all patterns
(docs/FORMAT.md), so that +0.0, −0.0 and every NaN stay distinct.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.format.dtypes import DType

Bits = npt.NDArray[np.unsignedinteger]
Positions = npt.NDArray[np.int64]

CHUNK_ELEMENTS = 32_768
"""Elements compared at a time: they fit a core's cache, and an index fits 16 bits."""


@cache
def order_masks(dtype: DType) -> tuple[np.uint64, np.uint64]:
    """Return (sign, mask) for the kernels: the sign bit (0 for integer types) and all bits of the width."""
    width = 8 * dtype.itemsize
    return np.uint64(1 << (width - 1) if dtype.is_float else 0), np.uint64((1 << width) - 1)


def apply_distances(dtype: DType, bits: Bits, positions: Positions, distances: Bits) -> None:
    """Move ``bits`` at ``positions`` by ``distances``, in place."""
    from vllm_delta_sync.format import kernels

    kernels.add_distances(bits, positions, distances, *order_masks(dtype), False)


def revert_distances(dtype: DType, bits: Bits, positions: Positions, distances: Bits) -> None:
    """Undo ``apply_distances`` with the same arguments, in place."""
    from vllm_delta_sync.format import kernels

    kernels.add_distances(bits, positions, distances, *order_masks(dtype), True)


Rectangle = tuple[int, int, int, int]
"""(first row, end of rows, first column, end of columns) of a tensor as the matrix that tiles cut (docs/FORMAT.md)."""


class Matrix(NamedTuple):
    """Bits of a tensor as the matrix that tiles cut: element (row, column) is flat[origin + row · stride + column]."""

    flat: Bits
    origin: int
    stride: int


class InPlace(NamedTuple):
    """Bits that are read where they are, of any moment, as any values, while the context that ``reading`` returns is
    entered: one context for all tensors of a lookup, held for milliseconds."""

    matrix: Matrix
    reading: Callable[[], AbstractContextManager[None]]


class BaseTensor:
    """The base bits of one tensor: its bits at the version that a delta applies to.

    Args:
        bits: (numel,) in row-major order of the whole tensor, undefined outside ``rectangles``; or a function that
            returns them, called only if they are needed.
        rectangles: disjoint parts that this process has; None for the whole tensor.
        in_place: the bits inside ``rectangles`` where they are; None if ``bits`` must be read. While they are
            encoded, the matrix holds nothing else, and does not change.
        after: the bits already include the changes that are being encoded; the encoder derives the old ones from them.
    """

    def __init__(
        self,
        bits: Bits | Callable[[], Bits],
        rectangles: tuple[Rectangle, ...] | None = None,
        in_place: InPlace | None = None,
        after: bool = False,
    ) -> None:
        self._bits = bits
        self.rectangles, self.in_place, self.after = rectangles, in_place, after

    @property
    def bits(self) -> Bits:
        if callable(self._bits):
            self._bits = self._bits()
        return self._bits


BaseLookup = Callable[[int], BaseTensor]
"""Tensor id → its bits before the delta. Called once to decode a tensor, twice to encode it; results are not kept."""

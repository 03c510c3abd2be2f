"""The bits that a delta starts from, for codecs that need them on both sides."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_delta_sync.tensors.bits import Bits

Rectangle = tuple[int, int, int, int]
"""First row, end of rows, first column, end of columns, of a tensor seen as rows of its last dimension."""


@dataclass(frozen=True)
class BaseTensor:
    """What somebody holds of one tensor at the version that a delta applies to.

    Attributes:
        bits: (numel,) in row-major order of the whole tensor; outside ``held`` anything may stand.
        held: rectangles without overlap; None for all of it.
    """

    bits: Bits
    held: tuple[Rectangle, ...] | None = None


Old = Callable[[int], BaseTensor]
"""Tensor id → its bits before the delta. Asked once to decode a tensor, twice to encode it; answers are not kept."""

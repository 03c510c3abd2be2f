"""``Box``: the part of a tensor that one process holds, in coordinates of the whole tensor.

Pure functions. Flat indices are row-major, in the box ("local") or in the whole tensor ("global"). Changes found in all
boxes of a tensor, mapped to global positions, equal the changes found in the whole tensor.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import TensorMismatchError
from vllm_delta_sync.tensors.changes import Bits, Positions


@dataclass(frozen=True)
class Box:
    """A range in each dimension of a tensor.

    Attributes:
        offsets: start in each dimension.
        shape: of the box; it may be empty.
        whole: shape of the tensor.

    Raises:
        TensorMismatchError: the box is not inside the tensor.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]

    def __post_init__(self) -> None:
        dimensions = {len(self.offsets), len(self.shape), len(self.whole)}
        inside = len(dimensions) == 1 and all(
            offset >= 0 and size >= 0 and offset + size <= all_of_it
            for offset, size, all_of_it in zip(self.offsets, self.shape, self.whole, strict=True)
        )
        if not inside:
            raise TensorMismatchError(
                f"box {list(self.shape)} at {list(self.offsets)} is not inside a tensor {list(self.whole)}; give "
                "offset, local and global size of each dimension"
            )

    @classmethod
    def all_of(cls, whole: tuple[int, ...]) -> "Box":
        """Return the box that is the whole tensor."""
        return cls((0,) * len(whole), whole, whole)

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """True if the box covers the whole tensor."""
        return self.shape == self.whole

    def overlaps(self, other: "Box") -> bool:
        """Return whether a box of the same tensor, and not empty either, shares an element with this one."""
        rows = zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        return all(max(at, start) < min(at + size, start + extent) for at, size, start, extent in rows)

    @property
    def index(self) -> tuple[Any, ...]:
        """Index that selects the box from an array or tensor of shape ``whole``, as a view."""
        return *(slice(at, at + size) for at, size in zip(self.offsets, self.shape, strict=True)), ...

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Step of the global flat index in each dimension."""
        return tuple(math.prod(self.whole[axis + 1 :]) for axis in range(len(self.whole)))

    @cached_property
    def start(self) -> int:
        """Global flat index of the first element; undefined for an empty box."""
        return sum(offset * stride for offset, stride in zip(self.offsets, self.strides, strict=True))

    @cached_property
    def stop(self) -> int:
        """Global flat index behind the last element; ``start`` for an empty box."""
        if not self.numel:
            return self.start
        return self.start + 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_range(self) -> bool:
        """True if the box is the contiguous range ``start`` to ``stop`` of the whole tensor."""
        return self.stop - self.start == self.numel

    def positions(self, local: Positions) -> Positions:
        """Return the global flat positions of (n,) local ones; ascending stays ascending.

        Raises TensorMismatchError if a position is outside the box.
        """
        if local.size and not 0 <= int(local.min()) <= int(local.max()) < self.numel:
            raise TensorMismatchError(f"positions {local.min()} to {local.max()} are not inside {self.numel} elements")
        rest = np.array(local, np.int64)
        if self.is_range:
            rest += self.start
            return rest
        found = np.full(local.size, self.start, np.int64)
        for size, stride in reversed(list(zip(self.shape, self.strides, strict=True))):
            rest, index = np.divmod(rest, size)
            index *= stride
            found += index
        return found

    def inside(self, positions: Positions) -> tuple[slice | npt.NDArray[np.bool_], Positions]:
        """Select those of (n,) ascending global flat positions that are in the box.

        Args:
            positions: inside the whole tensor.

        Returns:
            a slice or an (n,) mask of ``positions``, and the selected ones as (m,) ascending local positions.
        """
        if not self.numel:
            return slice(0, 0), np.empty(0, np.int64)
        first, last = (int(found) for found in np.searchsorted(positions, (self.start, self.stop)))
        if self.is_range:
            return slice(first, last), np.subtract(positions[first:last], self.start, dtype=np.int64)
        rest = np.array(positions[first:last], np.int64)
        local = np.zeros(rest.size, np.int64)
        chosen = np.ones(rest.size, np.bool_)
        for offset, size, stride in zip(self.offsets, self.shape, self.strides, strict=True):
            index, rest = np.divmod(rest, stride)
            index -= offset
            chosen &= (index >= 0) & (index < size)
            local *= size
            local += index
        mask = np.zeros(positions.size, np.bool_)
        mask[first:last] = chosen
        return mask, local[chosen]

    def view(self, bits: Bits) -> Bits:
        """Return the box in the flat array of its tensor, as a view; raises TensorMismatchError if the sizes differ."""
        if bits.size != math.prod(self.whole):
            raise TensorMismatchError(f"{bits.size} elements are not those of a tensor {list(self.whole)}")
        cut: Bits = bits.reshape(self.whole)[self.index]
        return cut


def boxes_of_range(start: int, stop: int, whole: tuple[int, ...]) -> list[Box]:
    """Cover a range of flat indices with few boxes, ascending; each box is a contiguous range.

    Raises TensorMismatchError if the range is not inside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(whole):
        raise TensorMismatchError(f"elements {start} to {stop} are not inside a tensor {list(whole)}")
    if start == stop:
        return []
    found: list[Box] = []
    _cut(start, stop, whole, (), found)
    return found


def _cut(start: int, stop: int, whole: tuple[int, ...], outer: tuple[int, ...], found: list[Box]) -> None:
    """Append the boxes of a range of the subtensor whose first indices are ``outer``."""
    depth = len(outer)
    inner = whole[depth:]
    if start == 0 and stop == math.prod(inner):
        found.append(Box((*outer, *(0 for _ in inner)), (*(1 for _ in outer), *inner), whole))
        return
    row = math.prod(inner[1:])
    first, into = divmod(start, row)
    last, rest = divmod(stop, row)
    if first == last:
        _cut(into, rest, whole, (*outer, first), found)
        return
    if into:
        _cut(into, row, whole, (*outer, first), found)
        first += 1
    if first < last:
        rows = Box(
            (*outer, first, *(0 for _ in inner[1:])),
            (*(1 for _ in outer), last - first, *inner[1:]),
            whole,
        )
        found.append(rows)
    if rest:
        _cut(0, rest, whole, (*outer, last), found)

"""``Region`` describes a strided box in flat memory: the geometry behind routes. Pure arithmetic, no tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Region:
    """The flat indices offset + Σ cᵢ·strideᵢ for 0 ≤ cᵢ < sizeᵢ. Dimensions of size 1 are left out."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return int(np.prod(self.sizes, dtype=np.int64)) if self.sizes else 1

    @property
    def last(self) -> int:
        """The highest index."""
        return self.offset + sum(stride * (size - 1) for stride, size in zip(self.strides, self.sizes, strict=True))

    @property
    def is_injective(self) -> bool:
        """True if provably no index occurs twice: each stride is larger than the reach of all smaller ones together.

        A region whose indices are distinct for another reason counts as not injective; the model is then refused.
        """
        reach = 0
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True)):
            if stride <= reach:
                return False
            reach += stride * (size - 1)
        return True


def coalesce(
    sizes: Sequence[int], first: tuple[int, Sequence[int]], second: tuple[int, Sequence[int]]
) -> tuple[Region, Region]:
    """Return two regions of one shape, given as (offset, strides) each; merges dimensions where both are contiguous."""
    merged: list[tuple[int, int, int]] = []
    for size, a, b in zip(sizes, first[1], second[1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == a * size and merged[-1][2] == b * size:
            merged[-1] = (merged[-1][0] * size, a, b)
        else:
            merged.append((size, a, b))
    shape = tuple(row[0] for row in merged)
    return (
        Region(first[0], shape, tuple(row[1] for row in merged)),
        Region(second[0], shape, tuple(row[2] for row in merged)),
    )


def split_regions(first: Region, second: Region, limit: int) -> Iterator[tuple[Region, Region]]:
    """Cut two regions of one shape at the same places into pieces of at most ``limit`` elements, in row-major order."""
    if first.numel <= limit:
        yield first, second
        return
    size, rest = first.sizes[0], first.sizes[1:]
    rows = limit // (first.numel // size)
    for start in range(0, size, max(1, rows)):
        count = min(max(1, rows), size - start)
        sizes = (count, *rest) if count > 1 else rest
        cut = [
            Region(
                region.offset + start * region.strides[0],
                sizes,
                region.strides if count > 1 else region.strides[1:],
            )
            for region in (first, second)
        ]
        yield from split_regions(cut[0], cut[1], limit)


def find_overlap(regions: Sequence[Region]) -> tuple[int, int] | None:
    """Return the positions in ``regions`` (each injective) of two that share an index; None if no two do.

    Memory use does not grow with the size of the regions. Only regions whose spans of flat indices meet are compared.
    """
    boxes = [_Box(region.offset, _dimensions(region)) for region in regions]
    open_boxes: list[int] = []
    for position in sorted(range(len(boxes)), key=lambda position: boxes[position].first):
        open_boxes = [known for known in open_boxes if boxes[known].last >= boxes[position].first]
        for known in open_boxes:
            if _boxes_intersect(boxes[known], boxes[position]):
                return min(known, position), max(known, position)
        open_boxes.append(position)
    return None


@dataclass(frozen=True)
class _Box:
    """The indices first + Σ cᵢ·strideᵢ for 0 ≤ cᵢ < sizeᵢ, with (stride, size) from the largest stride down."""

    first: int
    dimensions: tuple[tuple[int, int], ...]

    @cached_property
    def last(self) -> int:
        return self.first + sum(stride * (size - 1) for stride, size in self.dimensions)

    def row(self, number: int) -> "_Box":
        """Return the part at one coordinate of the dimension of the largest stride."""
        return _Box(self.first + number * self.dimensions[0][0], self.dimensions[1:])


def _dimensions(region: Region) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(zip(region.strides, region.sizes, strict=True), reverse=True))


def _boxes_intersect(one: _Box, other: _Box) -> bool:
    """Return whether two injective boxes share an index.

    Rows of an injective box span less than its largest stride. If both boxes have the same largest stride, row i of one
    and row j of the other can meet only for the few differences i − j at which their spans meet, and the answer depends
    on the difference alone. Otherwise the function compares the other box with those rows of the larger-stride box that
    meet its span.
    """
    if one.last < other.first or other.last < one.first:
        return False
    if not one.dimensions and not other.dimensions:
        return True
    if not one.dimensions or (other.dimensions and other.dimensions[0][0] > one.dimensions[0][0]):
        one, other = other, one
    stride, rows = one.dimensions[0]
    least, most = 0, rows - 1
    if other.dimensions and other.dimensions[0][0] == stride:
        least -= other.dimensions[0][1] - 1
        other = other.row(0)
    start = one.row(0)
    # Rows whose span [start.first, start.last] + number · stride meets [other.first, other.last].
    least = max(least, -((start.last - other.first) // stride))
    most = min(most, (other.last - start.first) // stride)
    return any(_boxes_intersect(one.row(number), other) for number in range(least, most + 1))

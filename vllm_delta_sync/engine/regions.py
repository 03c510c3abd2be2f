"""Strided boxes in flat memory: the geometry behind routes. Pure arithmetic, no tensors."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

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
    def is_linear(self) -> bool:
        """True if the indices are consecutive in coordinate order."""
        return not self.sizes or (len(self.sizes) == 1 and self.strides[0] == 1)

    @property
    def is_injective(self) -> bool:
        """True if provably no index occurs twice: each stride steps over all that the smaller ones reach.

        A region that is injective in some cleverer way counts as not injective: what cannot be proven is refused.
        """
        reach = 0
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True)):
            if stride <= reach:
                return False
            reach += stride * (size - 1)
        return True

    def coordinates(self, indices: Indices) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """Invert: flat indices → ((dimensions, n) coordinates, (n,) whether the index lies in the region).

        Needs ``is_injective``. Coordinates of indices outside are meaningless.
        """
        rest = indices - self.offset
        inside = rest >= 0
        found = np.zeros((len(self.sizes), indices.size), np.int64)
        order = sorted(range(len(self.sizes)), key=lambda dim: -self.strides[dim])
        for dim in order:
            found[dim], rest = np.divmod(rest, self.strides[dim])
            inside &= found[dim] < self.sizes[dim]
        return found, inside & (rest == 0)

    def walk(self, start: int, stop: int) -> Indices:
        """(dimensions, stop − start) coordinates, in row-major order from the start-th on."""
        order = np.arange(start, stop, dtype=np.int64)
        found = np.empty((len(self.sizes), order.size), np.int64)
        for dim in reversed(range(len(self.sizes))):
            order, found[dim] = np.divmod(order, self.sizes[dim])
        return found

    def indices(self, coordinates: Indices) -> Indices:
        """(dimensions, n) coordinates → (n,) flat indices."""
        result = np.full(coordinates.shape[1], self.offset, np.int64)
        for dim, stride in enumerate(self.strides):
            result += coordinates[dim] * stride
        return result


def coalesce(
    sizes: Sequence[int], first: tuple[int, Sequence[int]], second: tuple[int, Sequence[int]]
) -> tuple[Region, Region]:
    """Two regions of one shape, (offset, strides) each, with dimensions merged where both are contiguous."""
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


def find_overlap(regions: Sequence[Region], extent: int) -> tuple[int, int] | None:
    """Positions in ``regions`` (each injective) of two that share an index below ``extent``; None if none do.

    Linear regions are compared as intervals; otherwise a map of ``extent`` bytes is drawn.
    """
    if all(region.is_linear for region in regions):
        order = sorted(range(len(regions)), key=lambda position: regions[position].offset)
        for left, right in itertools.pairwise(order):
            if regions[left].offset + regions[left].numel > regions[right].offset:
                return left, right
        return None
    owner = np.zeros(extent, np.uint8)
    for position, region in enumerate(regions):
        box = np.lib.stride_tricks.as_strided(owner[region.offset :], region.sizes, region.strides)
        if box.any():
            return _first_sharing(regions, position), position
        box[...] = 1
    return None


def _first_sharing(regions: Sequence[Region], position: int) -> int:
    indices = regions[position].indices(regions[position].walk(0, regions[position].numel))
    return next(i for i in range(position) if regions[i].coordinates(indices)[1].any())

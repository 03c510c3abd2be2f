"""``Route`` leads from elements of a checkpoint tensor to elements of a ``Destination``, which holds weights.

Both sides are a ``Region``, a strided box in flat memory: pure arithmetic, no tensors.

``SparsePatch``, ``RoutePatch`` and ``DensePatch`` are what is written there: a ``StagedPatch`` consists of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_delta_sync.format.table import DType
from vllm_delta_sync.tensors.changes import Bits

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

    def row(self, number: int) -> "Region":
        """Return the part at one coordinate of the first dimension."""
        return Region(self.offset + number * self.strides[0], self.sizes[1:], self.strides[1:])

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
    rows = max(1, limit // (first.numel // size))
    for start in range(0, size, rows):
        count = min(rows, size - start)
        sizes = (count, *rest) if count > 1 else rest
        cut = [
            Region(
                region.offset + start * region.strides[0], sizes, region.strides if count > 1 else region.strides[1:]
            )
            for region in (first, second)
        ]
        yield from split_regions(cut[0], cut[1], limit)


def find_overlap(regions: Sequence[Region]) -> tuple[int, int] | None:
    """Return the positions in ``regions`` (each injective) of two that share an index; None if no two do.

    Memory use does not grow with the size of the regions. Only regions whose spans of flat indices meet are compared.
    """
    ordered = [_by_stride(region) for region in regions]
    last = [region.last for region in regions]
    met: list[int] = []
    for position in sorted(range(len(ordered)), key=lambda position: ordered[position].offset):
        met = [known for known in met if last[known] >= ordered[position].offset]
        for known in met:
            if _intersect(ordered[known], ordered[position]):
                return min(known, position), max(known, position)
        met.append(position)
    return None


def _by_stride(region: Region) -> Region:
    """Return a region with its dimensions from the largest stride down."""
    order = sorted(range(len(region.sizes)), key=lambda dim: region.strides[dim], reverse=True)
    sizes, strides = (tuple(values[dim] for dim in order) for values in (region.sizes, region.strides))
    return Region(region.offset, sizes, strides)


def _intersect(one: Region, other: Region) -> bool:
    """Return whether two injective regions, as ``_by_stride`` returns them, share an index.

    Rows of an injective region span less than its largest stride. If both regions have the same largest stride, row i
    of one and row j of the other can meet only for the few differences i − j at which their spans meet, and the answer
    depends on the difference alone. Otherwise the function compares the other region with those rows of the
    larger-stride region that meet its span.
    """
    if one.last < other.offset or other.last < one.offset:
        return False
    if not one.sizes and not other.sizes:
        return True
    if other.strides[:1] > one.strides[:1]:
        one, other = other, one
    stride, least, most = one.strides[0], 0, one.sizes[0] - 1
    if other.strides[:1] == one.strides[:1]:
        least -= other.sizes[0] - 1
        other = other.row(0)
    start = one.row(0)
    # Rows whose span [start.offset, start.last] + number · stride meets [other.offset, other.last].
    least = max(least, -((start.last - other.offset) // stride))
    most = min(most, (other.last - start.offset) // stride)
    return any(_intersect(one.row(number), other) for number in range(least, most + 1))


NARROW_ELEMENTS = 1 << 31
"""Below so many elements, addresses in a destination and positions in a tensor are int32: half the memory, and half of
what a commit reads."""

Words = npt.NDArray[np.uint64]
Addresses = npt.NDArray[np.int32] | Indices


@dataclass
class Destination:
    """One storage that holds weights: its name for messages, the whole storage as a flat signed-integer tensor, and the
    (module, attribute) pairs that refer to it."""

    name: str
    dtype: torch.dtype
    flat: torch.Tensor
    owners: list[tuple[torch.nn.Module, str]] = field(default_factory=list)

    @property
    def is_live(self) -> bool:
        """Whether every module attribute that had this storage when routes were traced still has it."""
        storage = self.flat.untyped_storage()._cdata
        found = (getattr(module, attribute, None) for module, attribute in self.owners)
        return all(isinstance(t, torch.Tensor) and t.untyped_storage()._cdata == storage for t in found)

    @property
    def bits(self) -> Bits:
        """(numel,) unsigned view for compiled loops; CPU only, shares memory."""
        return host_bits(self.flat)

    @property
    def address(self) -> int:
        """Of the first element."""
        return self.flat.data_ptr()


@dataclass(frozen=True)
class Route:
    """The ``source`` indices of a checkpoint tensor lie, in order, at the ``target`` indices of a destination."""

    destination: int
    source: Region
    target: Region

    @cached_property
    def dimensions(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(d,) sizes, source strides and target strides, by descending source stride."""
        rows = sorted(
            zip(self.source.sizes, self.source.strides, self.target.strides, strict=True), key=lambda row: -row[1]
        )
        sizes, strides, targets = np.array(rows, np.int64).reshape(-1, 3).T.copy()
        return sizes, strides, targets

    @cached_property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(source stride, target stride) of each dimension, by descending source stride; the last source stride is 1.

        So an index in the source, counted from its first element, leads to one in the target by a division per
        dimension but the last.
        """
        _, strides, targets = self.dimensions
        found = tuple(zip(strides.tolist(), targets.tolist(), strict=True))
        return found if found and found[-1][0] == 1 else (*found, (1, 0))

    @property
    def span(self) -> int:
        """Elements of the tensor from the first to the last that the route leads from."""
        return self.source.last - self.source.offset + 1

    @property
    def index(self) -> np.dtype[Any]:
        """Type of the positions of a ``RoutePatch``: int32 or int64."""
        return np.dtype(np.int32 if self.span < NARROW_ELEMENTS else np.int64)


@dataclass
class SparsePatch:
    """Changed elements of one destination in host memory, ascending by address, all held by the same ranks.

    Several patches may lead to one destination; they have no element in common.

    Attributes:
        destination: position in RouteMap.destinations.
        group: the group of ranks that hold copies of these elements.
        positions: (n,) int32 or int64 indices into the destination's flat view.
        data: (n,) unsigned: ULP distances if ``relative``, else the bits to exchange.
        premix: (n,) uint64: index half of each element's hash (docs/FORMAT.md), so that a commit hashes bits only.

    All three arrays are C-contiguous.
    """

    destination: int
    group: int
    element: DType
    relative: bool
    positions: Addresses
    data: Bits
    premix: Words

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return self.positions.nbytes + self.data.nbytes + self.premix.nbytes

    @property
    def first(self) -> int:
        """The lowest address."""
        return int(self.positions[0])


@dataclass
class RoutePatch:
    """Changed elements that one route leads to a destination on a device, in any order.

    A commit computes their addresses and all of their hashes on the device, and so reads fewer bytes than of a
    ``SparsePatch``. The patches of two routes have no element of a destination in common.

    Attributes:
        seed: of the tensor's hashes (docs/FORMAT.md).
        group: the group of ranks that hold copies of what the route loads.
        positions: (n,) int32 or int64: flat index in the tensor, less that of the route's first element.
        data: (n,) unsigned: ULP distances if ``relative``, else the bits to exchange.

    Both arrays are C-contiguous.
    """

    route: Route
    seed: int
    group: int
    element: DType
    relative: bool
    positions: Addresses
    data: Bits

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return self.positions.nbytes + self.data.nbytes


@dataclass
class DensePatch:
    """All elements of one route.

    Attributes:
        data: the bits to exchange: contiguous signed integers in host memory, shaped like the route's regions.
    """

    route: Route
    data: torch.Tensor

    @classmethod
    def of(cls, route: Route, flat: torch.Tensor) -> "DensePatch":
        """Return the patch that gives a route the bits of its tensor, (numel,) signed integers in host memory."""
        return cls(route, region_view(flat, route.source).clone(memory_format=torch.contiguous_format))

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return self.data.nbytes


def region_view(flat: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the elements of a region of a flat (numel,) tensor, in the region's shape."""
    return flat.as_strided(region.sizes, region.strides, region.offset)


def signed_view(bits: Bits) -> torch.Tensor:
    """Return (numel,) bits as signed integers in the same memory; read-only bits are copied, as torch wants it."""
    return torch.from_numpy(np.require(bits, requirements=["W"]).view(f"<i{bits.itemsize}"))


def host_bits(flat: torch.Tensor) -> Bits:
    """Inverse of ``signed_view``, for a tensor in host memory."""
    return flat.numpy().view(f"<u{flat.element_size()}")

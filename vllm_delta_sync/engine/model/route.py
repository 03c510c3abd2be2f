"""``Route`` leads from elements of a checkpoint tensor to elements of a ``Destination``, which holds weights.

``SparsePatch``, ``RoutePatch`` and ``DensePatch`` are what is written there: a ``StagedPatch`` consists of them.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_delta_sync.engine.model.regions import Indices, Region
from vllm_delta_sync.format.dtypes import DType
from vllm_delta_sync.tensors.bits import Bits

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
    """One tensor in full: per route, the bits to exchange, shaped like the route's region, in host memory."""

    exchanges: list[tuple[Route, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return sum(buffer.nbytes for _, buffer in self.exchanges)


def region_view(flat: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the elements of a region of a flat (numel,) tensor, in the region's shape."""
    return flat.as_strided(region.sizes, region.strides, region.offset)


def host_bits(flat: torch.Tensor) -> Bits:
    """Return (numel,) signed integers in host memory as an unsigned view."""
    signed: np.ndarray = flat.numpy()
    return signed.view(f"<u{flat.element_size()}")

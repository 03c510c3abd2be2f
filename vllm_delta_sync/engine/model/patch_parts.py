"""``SparsePatch`` and ``DensePatch``: what a ``StagedPatch`` consists of."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_delta_sync.engine.model.regions import Indices
from vllm_delta_sync.engine.model.route import Route
from vllm_delta_sync.format.dtypes import DType
from vllm_delta_sync.tensors.bits import Bits

Words = npt.NDArray[np.uint64]
Addresses = npt.NDArray[np.int32] | Indices


@dataclass
class SparsePatch:
    """Changed elements of one destination, ascending by address, all held by the same ranks.

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
class DensePatch:
    """One tensor in full: per route, the bits to exchange, shaped like the route's region, in host memory."""

    exchanges: list[tuple[Route, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return sum(buffer.nbytes for _, buffer in self.exchanges)

"""``route_changes`` turns decoded changes into a ``StagedPatch``: per destination, ready to be applied in one pass.

A patch is its own undo log. To revert, distances are subtracted; absolute bits and full tensors are exchanged in place
with what they overwrite, so that after a commit the patch holds the old bits. A commit allocates nothing that grows
with the patch.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vllm_delta_sync.engine.model.regions import Indices, Region
from vllm_delta_sync.engine.model.route_map import Route, RouteMap
from vllm_delta_sync.errors import FingerprintError
from vllm_delta_sync.format.dtypes import DType
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor, tensor_seed
from vllm_delta_sync.tensors.bits import Bits
from vllm_delta_sync.tensors.changes import Changes, Full, Sparse
from vllm_delta_sync.tensors.torch_views import SIGNED

if TYPE_CHECKING:
    from vllm_delta_sync.engine.model.device_patch import DevicePatch
    from vllm_delta_sync.engine.model.host_patch import HostBatch

Words = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int32] | Indices
Piece = tuple[Positions, Bits, Words]

NARROW_ELEMENTS = 1 << 31
"""Destinations below this size use int32 addresses: half the memory, and half of what a commit reads."""


@dataclass
class SparsePatch:
    """Changed elements of one destination, ascending by address, all held by the same ranks.

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
    positions: Positions
    data: Bits
    premix: Words

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return self.positions.nbytes + self.data.nbytes + self.premix.nbytes


@dataclass
class DensePatch:
    """One tensor in full: per route, the bits to exchange, shaped like the route's region, in host memory."""

    exchanges: list[tuple[Route, torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return sum(buffer.nbytes for _, buffer in self.exchanges)


@dataclass
class StagedPatch:
    """Everything this rank writes for one version.

    Attributes:
        declared: change of fingerprint over ``sparse``, over all ranks, each element counted once.
        fingerprints: per tensor id of the run: its fingerprint after the commit, whether or not this rank loads it.
        applied: whether the weights contain the patch.
        measured: per group of ranks, the change of fingerprint that the last commit measured.
        on_host: what of ``sparse`` is applied in host memory; None until ``stage_on_host`` has run.
        on_device: what of ``sparse`` is applied on an accelerator; None until ``stage_on_device`` has run.
    """

    version: int
    sparse: list[SparsePatch]
    declared: Fingerprint
    dense: list[DensePatch]
    fingerprints: list[Fingerprint] = field(repr=False)
    applied: bool = False
    measured: dict[int, Fingerprint] = field(default_factory=dict)
    on_host: "list[HostBatch] | None" = field(default=None, repr=False)
    on_device: "DevicePatch | None" = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return sum(patch.nbytes for patch in self.sparse) + sum(patch.nbytes for patch in self.dense)

    @property
    def elements(self) -> int:
        """Number of elements that a commit writes on this rank."""
        dense = sum(buffer.numel() for patch in self.dense for _, buffer in patch.exchanges)
        return sum(patch.positions.size for patch in self.sparse) + dense


def route_changes(version: int, changes: Changes, routes: RouteMap, before: list[Fingerprint]) -> StagedPatch:
    """Route the changes of a version.

    Args:
        before: per tensor id of the run, the fingerprint before this version.

    Raises:
        FingerprintError: a tensor sent in full does not have the fingerprint that its object declares.
        MemoryError: the patch does not fit into memory.
    """
    after = list(before)
    for tensor, change in changes.fingerprints.items():
        after[tensor] += change
    for full in changes.full:
        _check_full(full, routes, after, changes)
    dense = [_route_dense(full, routes) for full in changes.full if routes.routes_to_write(full.id)]
    sparse = [patch for group in changes.sparse for patch in _route_sparse(group, routes)]
    in_full = {full.id for full in changes.full}
    # Use the declared changes, not the decoded ones: a rank may have dropped elements that it does not hold.
    scattered = [
        change for tensor, change in changes.fingerprints.items() if tensor not in in_full and routes.loaded[tensor]
    ]
    declared = sum(scattered, Fingerprint())
    return StagedPatch(version, sparse, declared, dense, after)


def keep_local(changes: Changes, routes: RouteMap, keep: set[int]) -> Changes:
    """Drop the scattered elements that this rank does not hold: used before versions are merged.

    Tensors in full are kept, since they are hashed whole. Fingerprints remain those of all ranks.

    Args:
        keep: tensor ids of which everything is kept: those that an earlier version of the merge sent in full.
    """
    groups = [_keep_local_group(group, routes, keep) for group in changes.sparse]
    return Changes([group for group in groups if group.positions.size], changes.full, changes.fingerprints)


def _keep_local_group(group: Sparse, routes: RouteMap, keep: set[int]) -> Sparse:
    kept: list[tuple[int, Indices, Bits]] = []
    for tensor, positions, data in group.tensors():
        found = routes.routes[tensor]
        if tensor in keep or sum(route.source.numel for route in found) == routes.table[tensor].numel:
            kept.append((tensor, positions, data))
            continue
        inside = np.zeros(positions.size, bool)
        for route in found:
            inside |= route.map(positions)[1]
        if inside.any():
            kept.append((tensor, positions[inside], data[inside]))
    if sum(part[1].size for part in kept) == group.positions.size:
        return group
    empty = (np.empty(0, np.int64), np.empty(0, group.data.dtype))
    return Sparse(
        group.dtype,
        np.array([part[0] for part in kept], np.uint32),
        np.array([part[1].size for part in kept], np.int64),
        np.concatenate([part[1] for part in kept] or [empty[0]]),
        np.concatenate([part[2] for part in kept] or [empty[1]]),
        group.relative,
    )


def _check_full(full: Full, routes: RouteMap, after: list[Fingerprint], changes: Changes) -> None:
    spec = routes.table[full.id]
    measured = fingerprint_tensor(spec.name, full.bits)
    # An anchor declares absolute fingerprints only; its caller compares them with the manifest.
    if full.id in changes.fingerprints and after[full.id] != measured:
        raise FingerprintError(
            f"tensor {spec.name!r} was sent in full, but its fingerprint does not follow from the current weights: the "
            "object was made against other weights"
        )
    after[full.id] = measured


def _route_dense(full: Full, routes: RouteMap) -> DensePatch:
    # torch wants writable memory; downloaded memory may be read-only.
    bits = np.require(full.bits, requirements=["W"])
    flat = torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(SIGNED[bits.itemsize])
    return DensePatch(
        [
            (route, region_view(flat, route.source).clone(memory_format=torch.contiguous_format))
            for route in routes.routes[full.id]
        ],
    )


def _route_sparse(group: Sparse, routes: RouteMap) -> list[SparsePatch]:
    from vllm_delta_sync.format import kernels

    names = [routes.table[tensor].name for tensor in group.ids.tolist()]
    seeds = np.array([tensor_seed(name) for name in names], np.uint64)
    premix = np.empty(group.positions.size, np.uint64)
    kernels.premix_positions(group.positions, seeds, group.counts, premix)
    pieces: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    cursor = 0
    for tensor, positions, data in group.tensors():
        words = premix[cursor : cursor + positions.size]
        cursor += positions.size
        if tensor in routes.duplicates:
            continue
        for route, holders in zip(routes.routes[tensor], routes.groups[tensor], strict=True):
            mapped, inside = route.map(positions)
            extent = routes.destinations[route.destination].flat.numel()
            target: Positions = mapped.astype(np.int32) if extent < NARROW_ELEMENTS else mapped
            part = (target, data, words) if inside.all() else (target[inside], data[inside], words[inside])
            if part[0].size:
                pieces[route.destination, holders].append(part)
    # Pop the pieces one by one, so that pieces and patches do not all exist at once.
    return [_merge(*key, group, pieces.pop(key)) for key in sorted(pieces)]


def _merge(destination: int, holders: int, group: Sparse, parts: list[Piece]) -> SparsePatch:
    parts.sort(key=lambda part: int(part[0][0]))
    positions: Positions = np.concatenate([part[0] for part in parts])
    data = np.concatenate([part[1] for part in parts])
    premix = np.concatenate([part[2] for part in parts])
    if np.any(positions[1:] <= positions[:-1]):
        order = np.argsort(positions, kind="stable")
        positions, data, premix = positions[order], data[order], premix[order]
    return SparsePatch(destination, holders, group.element, group.relative, positions, data, premix)


def region_view(flat: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the elements of a region of a flat (numel,) tensor, in the region's shape."""
    return flat.as_strided(region.sizes, region.strides, region.offset)


def compile_routing() -> None:
    """Compile the loop of ``route_changes`` now."""
    from vllm_delta_sync.format import kernels

    numbers, words = np.empty(0, np.int64), np.empty(0, np.uint64)
    kernels.premix_positions(numbers, words, numbers, words)

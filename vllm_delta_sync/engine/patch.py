"""Stage: turn decoded changes into per-destination patches that a commit can apply in one pass."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

from vllm_delta_sync.engine.regions import Indices
from vllm_delta_sync.engine.routes import Route, RouteMap
from vllm_delta_sync.errors import FingerprintError
from vllm_delta_sync.wire.bits import Bits
from vllm_delta_sync.wire.changes import Changes, Full, Sparse
from vllm_delta_sync.wire.dtypes import DType
from vllm_delta_sync.wire.fingerprint import Fingerprint, fingerprint_tensor, tensor_seed

Words = np.ndarray


@dataclass
class SparsePatch:
    """Changed elements of one destination, ascending by address.

    Attributes:
        destination: position in RouteMap.destinations.
        positions: (n,) int64 indices into the destination's flat view.
        data: (n,) unsigned: ULP distances if ``relative``, else new bits.
        premix: (n,) uint64: index half of each element's hash (docs/FORMAT.md), so that a commit hashes bits only.
    """

    destination: int
    element: DType
    relative: bool
    positions: Indices
    data: Bits
    premix: Words


@dataclass
class DensePatch:
    """One tensor in full: its routes, and its (numel,) bits in checkpoint order."""

    tensor: int
    routes: list[Route]
    bits: Bits


@dataclass
class StagedPatch:
    """Everything this rank writes for one version.

    Attributes:
        declared: change of fingerprint that applying ``sparse`` must cause.
        fingerprints: per tensor id of the run: what it has after the commit, loaded by this model or not.
    """

    version: int
    sparse: list[SparsePatch]
    declared: Fingerprint
    dense: list[DensePatch]
    fingerprints: list[Fingerprint]

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(p.positions.nbytes + p.data.nbytes + p.premix.nbytes for p in self.sparse) + sum(
            p.bits.nbytes for p in self.dense
        )


def stage(version: int, changes: Changes, routes: RouteMap, held: list[Fingerprint]) -> StagedPatch:
    """Route a version's changes.

    Args:
        held: per tensor id of the run, the fingerprint before this version.

    Raises:
        FingerprintError: a tensor sent in full does not come to the fingerprint that its object declares.
    """
    after = list(held)
    for tensor, change in changes.fingerprints.items():
        after[tensor] += change
    for full in changes.full:
        _check_full(full, routes, after, changes)
    # torch wants writable memory; what was fetched may be read only. Copied here, not while the engine is paused.
    dense = [
        DensePatch(full.id, routes.routes[full.id], np.require(full.bits, requirements=["W"]))
        for full in changes.full
        if routes.routes[full.id]
    ]
    sparse: list[SparsePatch] = []
    declared = Fingerprint()
    for group in changes.sparse:
        sparse += _stage_sparse(group, routes)
        for tensor in group.ids.tolist():
            if routes.routes[tensor]:
                declared += changes.fingerprints[tensor]
    return StagedPatch(version, sparse, declared, dense, after)


def _check_full(full: Full, routes: RouteMap, after: list[Fingerprint], changes: Changes) -> None:
    spec = routes.table[full.id]
    measured = fingerprint_tensor(spec.name, full.bits)
    # An anchor declares nothing relative; its caller compares with the manifest's absolute fingerprints.
    if full.id in changes.fingerprints and after[full.id] != measured:
        raise FingerprintError(
            f"tensor {spec.name!r} was sent in full but does not lead from the weights held to the declared "
            "fingerprint: the object was made against other weights"
        )
    after[full.id] = measured


def _stage_sparse(group: Sparse, routes: RouteMap) -> list[SparsePatch]:
    from vllm_delta_sync.wire import kernels

    names = [routes.table[tensor].name for tensor in group.ids.tolist()]
    seeds = np.array([tensor_seed(name) for name in names], np.uint64)
    premix = np.empty(group.positions.size, np.uint64)
    kernels.premix_positions(group.positions, seeds, group.counts, premix)
    pieces: dict[int, list[tuple[Indices, Bits, Words]]] = defaultdict(list)
    cursor = 0
    for tensor, positions, data in group.tensors():
        words = premix[cursor : cursor + positions.size]
        cursor += positions.size
        for route in routes.routes[tensor]:
            target, inside = route.map(positions)
            whole = bool(inside.all())
            pieces[route.destination].append(
                (target, data, words) if whole else (target[inside], data[inside], words[inside])
            )
    return [_merge(destination, group, parts) for destination, parts in sorted(pieces.items())]


def _merge(destination: int, group: Sparse, parts: list[tuple[Indices, Bits, Words]]) -> SparsePatch:
    parts.sort(key=lambda part: int(part[0][0]) if part[0].size else -1)
    positions = np.concatenate([part[0] for part in parts])
    data = np.concatenate([part[1] for part in parts])
    premix = np.concatenate([part[2] for part in parts])
    if np.any(positions[1:] <= positions[:-1]):
        order = np.argsort(positions, kind="stable")
        positions, data, premix = positions[order], data[order], premix[order]
    return SparsePatch(destination, group.element, group.relative, positions, data, premix)


def dense_view(flat: torch.Tensor, route: Route) -> torch.Tensor:
    """The destination elements of a route, shaped as the route's source region."""
    return flat.as_strided(route.target.sizes, route.target.strides, route.target.offset)


def source_view(flat: torch.Tensor, route: Route) -> torch.Tensor:
    """The source elements of a route in a flat (numel,) tensor."""
    return flat.as_strided(route.source.sizes, route.source.strides, route.source.offset)

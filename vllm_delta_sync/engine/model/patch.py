"""``PatchBuilder`` turns decoded changes into a ``StagedPatch``: addresses of destinations, applied in one pass.

A patch is its own undo log. To revert, distances are subtracted; absolute bits and full tensors are exchanged in place
with what they overwrite, so that after a commit the patch holds the old bits. A commit allocates nothing that grows
with the patch.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from vllm_delta_sync.engine.model.device_patch import DevicePatch
from vllm_delta_sync.engine.model.route import (
    NARROW_ELEMENTS,
    DensePatch,
    Region,
    Route,
    RoutePatch,
    SparsePatch,
    signed_view,
)
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.errors import FingerprintError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor, tensor_seed
from vllm_delta_sync.format.table import DType
from vllm_delta_sync.tensors.changes import Bits, Full, Positions, Sparse, order_masks


class HostBatch:
    """Patches of one element type and one type of index, all relative or none: what one compiled loop applies in host
    memory.

    The loop takes the addresses of all arrays, so that a commit makes one call, whatever the number of destinations.
    The addresses of the patch are read beside generation, those of the weights in the pause. The batch refers to the
    memory of the patches' arrays, which must stay where they are.
    """

    def __init__(self, patches: list[SparsePatch], routes: RouteMap) -> None:
        first = patches[0]
        self._patches = patches  # keeps alive what the addresses lead to
        self._destinations = [routes.destinations[patch.destination] for patch in patches]
        self._relative = first.relative
        self._types = np.empty(0, first.positions.dtype), np.empty(0, first.data.dtype)
        self._masks = order_masks(first.element)
        self._counts = np.array([patch.positions.size for patch in patches], np.int64)
        self._pointers = np.zeros((len(patches), 4), np.int64)
        for row, patch in zip(self._pointers, patches, strict=True):
            row[1:] = [array.ctypes.data for array in (patch.positions, patch.data, patch.premix)]
        self._sums = np.zeros((len(patches), 2), np.uint64)
        groups = np.array([patch.group for patch in patches])
        self._rows = {group: np.flatnonzero(groups == group) for group in sorted(set(groups.tolist()))}

    def apply(self, reverse: bool) -> dict[int, Fingerprint]:
        """Apply all patches, or take them back: all or none. Returns the change of fingerprint per group of ranks."""
        from vllm_delta_sync.format import kernels

        self._pointers[:, 0] = [destination.address for destination in self._destinations]
        kernels.commit_each(
            self._pointers, self._counts, *self._types, *self._masks, self._relative, reverse, self._sums
        )
        totals = ((group, self._sums[rows].sum(axis=0)) for group, rows in self._rows.items())
        return {group: Fingerprint(int(low), int(high)) for group, (low, high) in totals}


def _kind(patch: SparsePatch) -> tuple[Any, ...]:
    """What the patches of a batch have in common."""
    return patch.element, patch.relative, patch.positions.dtype


@dataclass
class StagedPatch:
    """Everything this rank writes for one version.

    Attributes:
        sparse, routed: what changes in host memory, and on a device.
        declared: change of fingerprint over ``sparse`` and ``routed``, over all ranks, each element counted once.
        fingerprints: per tensor id of the run: its fingerprint after the commit, whether or not this rank loads it.
        applied: whether the weights contain the patch.
        measured: per group of ranks, the change of fingerprint that the last commit measured.
        on_host: ``sparse`` as it is applied; None until ``prepare`` has run.
        on_device: ``routed`` as it is applied; None without an accelerator.
    """

    version: int
    sparse: list[SparsePatch]
    declared: Fingerprint
    dense: list[DensePatch]
    fingerprints: list[Fingerprint] = field(repr=False)
    routed: list[RoutePatch] = field(default_factory=list)
    applied: bool = False
    measured: dict[int, Fingerprint] = field(default_factory=dict)
    on_host: list[HostBatch] | None = field(default=None, repr=False)
    on_device: DevicePatch | None = field(default=None, repr=False)

    def prepare(self, routes: RouteMap) -> None:
        """Prepare the commit, so that nothing is left for the pause.

        Raises:
            torch.OutOfMemoryError: the device has not even memory for the smallest workspace. BusyError: the engine is
            asleep.
        """
        self.on_host = [HostBatch(list(patches), routes) for _, patches in groupby(self.sparse, _kind)]
        if routes.memory.accelerator is not None:
            self.on_device = DevicePatch(self.routed, routes, routes.memory.accelerator.workspace)
            self.on_device.upload()

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return sum(patch.nbytes for patches in (self.sparse, self.routed, self.dense) for patch in patches)

    @property
    def elements(self) -> int:
        """Number of elements that a commit writes on this rank."""
        sizes = (patch.positions.size for patches in (self.sparse, self.routed) for patch in patches)
        return sum(sizes) + sum(patch.data.numel() for patch in self.dense)


class PatchBuilder:
    """Builds the patch of a version from its changes, piece by piece: memory is the patch and what a piece takes.

    Args:
        before: per tensor id of the run, the fingerprint before this version.
        declared: the changes of fingerprint that the version's objects declare, per tensor id.
    """

    def __init__(
        self, version: int, routes: RouteMap, before: list[Fingerprint], declared: Mapping[int, Fingerprint]
    ) -> None:
        self._version, self._routes, self._declared = version, routes, declared
        self._sparse: list[SparsePatch] = []
        self._routed: list[RoutePatch] = []
        self._dense: list[DensePatch] = []
        self._full: set[int] = set()
        self._after = list(before)
        for tensor, change in declared.items():
            self._after[tensor] += change

    def add(self, piece: Sparse | Full) -> None:
        """Add changes. No element may come twice, and no tensor in full may come otherwise.

        Raises:
            FingerprintError: a tensor in full does not have the fingerprint that its object declares.
            MemoryError: the patch does not fit into memory.
        """
        if isinstance(piece, Sparse):
            self._add_sparse(piece)
            return
        spec = self._routes.table[piece.id]
        measured = fingerprint_tensor(spec.name, piece.bits)
        # An anchor declares absolute fingerprints only; its caller compares them with the manifest.
        if piece.id in self._declared and self._after[piece.id] != measured:
            raise FingerprintError(
                f"tensor {spec.name!r} was sent in full, but its fingerprint does not follow from the current weights: "
                "the object was made against other weights"
            )
        self._after[piece.id] = measured
        self._full.add(piece.id)
        if routes := self._routes.routes[piece.id]:
            # Once for all routes: a tensor of stacked experts has one for each, and read-only bits are copied here.
            bits = signed_view(piece.bits)
            self._dense += [DensePatch.of(route, bits) for route in routes]

    def _add_sparse(self, group: Sparse) -> None:
        narrow: list[_Part] = []
        wide: list[_Part] = []
        cursor = 0
        for tensor, positions, data in group.tensors():
            start, cursor = cursor, cursor + positions.size
            spec = self._routes.table[tensor]
            seed = tensor_seed(spec.name)
            for route, holders in zip(self._routes.routes[tensor], self._routes.groups[tensor], strict=True):
                first, last = 0, positions.size
                if route.source.numel < spec.numel:
                    ends = np.searchsorted(positions, [route.source.offset, route.source.last + 1])
                    first, last = int(ends[0]), int(ends[1])
                if last == first:
                    continue
                destination = self._routes.destinations[route.destination]
                if self._routes.is_on_device(route):
                    mine = slice(first, last)
                    self._routed += _route_patch(group, positions[mine], data[mine], route, seed, holders)
                    continue
                part = _Part(seed, start + first, start + last, route, holders)
                (narrow if destination.flat.numel() < NARROW_ELEMENTS else wide).append(part)
        self._sparse += _fill(group, narrow, np.int32)
        self._sparse += _fill(group, wide, np.int64)

    def add_routed(self, patch: RoutePatch) -> None:
        """Add changes that a device has decoded where its weights are; as ``add``."""
        self._routed.append(patch)

    def finish(self) -> StagedPatch:
        """Return the patch of all that was added."""
        # Where patches follow each other in memory, so do their destinations.
        self._sparse.sort(key=lambda patch: (patch.element.name, not patch.relative, patch.destination, patch.first))
        # Use the declared changes, not the decoded ones: a rank decodes only the elements that it holds.
        scattered = [
            change
            for tensor, change in self._declared.items()
            if tensor not in self._full and self._routes.loaded[tensor]
        ]
        total = sum(scattered, Fingerprint())
        return StagedPatch(self._version, self._sparse, total, self._dense, self._after, self._routed)


class _Part(NamedTuple):
    """Elements [first, last) of a group, which lie between a route's ends, and the ranks that hold what it loads."""

    seed: int
    first: int
    last: int
    route: Route
    holders: int


def _route_patch(
    group: Sparse, positions: Positions, data: Bits, route: Route, seed: int, holders: int
) -> Iterator[RoutePatch]:
    """Yield the patch of those of a tensor's changes that a route leads to a device, if there are any."""
    if route.source.numel == route.span:
        shifted = (positions - route.source.offset).astype(route.index)
        yield RoutePatch(route, seed, holders, group.element, group.relative, shifted, data.copy())
        return
    from vllm_delta_sync.format import kernels

    # To where they are in the tensor: this leaves those between the rows of the route's part out.
    sizes, strides, _ = route.dimensions
    inside, kept = np.empty(positions.size, route.index), np.empty(positions.size, data.dtype)
    found, _ = kernels.route_elements(
        positions, data, np.uint64(seed), route.source.offset, sizes, strides, 0, strides, inside, kept,
        np.empty(positions.size, np.uint64),
    )  # fmt: skip
    if found:
        for array in (inside, kept):
            # Frees the unused end, which a view would keep; no other array shares this memory yet.
            array.resize(found, refcheck=False)
        yield RoutePatch(route, seed, holders, group.element, group.relative, inside, kept)


def _fill(group: Sparse, parts: list[_Part], index: type[np.integer[Any]]) -> Iterator[SparsePatch]:
    """Yield the patches of parts of a group, as views of arrays that they share."""
    from vllm_delta_sync.format import kernels

    # What follows each other in a destination is one patch: a commit reads each destination's address in the pause.
    parts.sort(key=lambda part: (part.route.destination, part.holders, part.route.target.offset))
    room = sum(part.last - part.first for part in parts)
    addresses, data, premix = np.empty(room, index), np.empty(room, group.data.dtype), np.empty(room, np.uint64)
    ends, used = [0], 0
    for part in parts:
        changed, rest = slice(part.first, part.last), slice(used, room)
        sizes, strides, targets = part.route.dimensions
        found, ascending = kernels.route_elements(
            group.positions[changed], group.data[changed], np.uint64(part.seed), part.route.source.offset, sizes,
            strides, part.route.target.offset, targets, addresses[rest], data[rest], premix[rest],
        )  # fmt: skip
        if not ascending:
            mine = slice(used, used + found)
            order = np.argsort(addresses[mine], kind="stable")
            for array in (addresses, data, premix):
                array[mine] = array[mine][order]
        used += found
        ends.append(used)
    for array in (addresses, data, premix):
        # Frees the unused end, which a view would keep; no other array shares this memory yet.
        array.resize(used, refcheck=False)
    # A patch ends where the next part is in another destination, or lies among what came before.
    cuts = [0]
    for number, at in enumerate(ends[1:-1], 1):
        one, other = parts[number - 1], parts[number]
        apart = (one.route.destination, one.holders) != (other.route.destination, other.holders)
        if apart or (0 < at < used and addresses[at] <= addresses[at - 1]):
            cuts.append(number)
    for number, following in pairwise([*cuts, len(parts)]):
        mine = slice(ends[number], ends[following])
        if mine.stop > mine.start:
            destination, holders = parts[number].route.destination, parts[number].holders
            yield SparsePatch(
                destination, holders, group.element, group.relative, addresses[mine], data[mine], premix[mine]
            )


def compile_routing(elements: Iterable[DType]) -> None:
    """Compile the loop of ``PatchBuilder`` for these element types now."""
    route = Route(0, Region(0, (), ()), Region(0, (), ()))
    for element in elements:
        group = Sparse.empty(element, relative=True)
        for index in (np.int32, np.int64):
            list(_fill(group, [_Part(0, 0, 0, route, 0)], index))

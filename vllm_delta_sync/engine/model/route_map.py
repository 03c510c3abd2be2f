"""``RouteMap`` holds routes: where each element of a checkpoint lies in a model's memory.

``LiveBaseReader`` reads base bits through them from a rank's live model, in checkpoint order.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain

import numpy as np
import torch

from vllm_delta_sync.codec.tiles.coder import SMALL_ELEMENTS
from vllm_delta_sync.codec.tiles.grid import CutTileError, TensorView, covered_rectangles, extent, grid_of, held_part
from vllm_delta_sync.engine.model.reload_units import ReloadUnits
from vllm_delta_sync.engine.model.route import (
    Destination,
    Region,
    Route,
    coalesce,
    host_bits,
    region_view,
    signed_view,
    split_regions,
)
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.errors import EngineError, ModelError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_strided
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, InPlace, Matrix

READ_ELEMENTS = 1 << 22
"""Elements read at a time beside generation: bounds host memory, and how long ``/sleep`` waits."""
STRIP_COLUMNS = 128
"""Columns copied at a time where the model holds a tensor transposed."""


@dataclass
class RouteMap:
    """Routes of one rank, for every tensor of a run. Destinations do not overlap; if an element is loaded to several
    places, its routes have the same source region.

    Attributes:
        destinations: storages, referred to by position.
        routes: per tensor id; empty for tensors that this rank does not load.
        groups: per tensor id, per route: the group of ranks that hold copies of what the route loads. All 0 until
            ``RankWorker.set_version`` sets what ``prove_ownership`` found.
        loaded: per tensor id: whether any rank writes it; until ``set_version``, whether this rank does.
        reload_units: units of the tensors that the model computes with, whose routes lead to host copies; None if there
            are none.
        memory: guards the destinations.
    """

    table: TensorTable
    destinations: list[Destination]
    routes: list[list[Route]]
    groups: list[list[int]] = field(init=False)
    loaded: list[bool] = field(init=False)
    reload_units: ReloadUnits | None = None
    memory: WeightMemory = field(default_factory=WeightMemory)

    def __post_init__(self) -> None:
        self.groups = [[0] * len(routes) for routes in self.routes]
        self.loaded = [bool(routes) for routes in self.routes]

    @property
    def unloaded(self) -> list[str]:
        """Names of the run's tensors that the model's loader does not load."""
        return [spec.name for i, spec in enumerate(self.table) if spec.numel and not self.routes[i]]

    def add_reload_units(self, units: ReloadUnits) -> None:
        """Let the tensors that units reload lead to their host copies, which are among the destinations."""
        self.reload_units = units
        for unit in units.units:
            for tensor, number in unit.inputs.items():
                numel = self.table[tensor].numel
                whole = coalesce((numel,), (0, (1,)), (0, (1,)))
                self.routes[tensor] = [Route(number, *whole)] if numel else []
                self.loaded[tensor], self.groups[tensor] = bool(numel), [0] * len(self.routes[tensor])

    @cached_property
    def _used_routes(self) -> list[Route]:
        units = [] if self.reload_units is None else self.reload_units.units
        return [*chain.from_iterable(self.routes), *(output.route for unit in units for output in unit.outputs)]

    @cached_property
    def _used_destinations(self) -> list[int]:
        # Cached: every pause asks, and a mixture of experts has many thousand routes.
        return sorted({route.destination for route in self._used_routes})

    @property
    def whole_storages(self) -> set[int]:
        """Identities of the storages in which every element comes from the run."""
        sizes: Counter[int] = Counter()
        for route in self._used_routes:
            flat = self.destinations[route.destination].flat
            sizes[flat.untyped_storage()._cdata] += route.target.numel * flat.element_size()
        used = (self.destinations[number].flat.untyped_storage() for number in self._used_destinations)
        return {storage._cdata for storage in used if sizes[storage._cdata] >= storage.nbytes()}

    def is_on_device(self, route: Route) -> bool:
        """Return whether a route leads to memory of the accelerator; if not, it leads to host memory."""
        accelerator = self.memory.accelerator
        return accelerator is not None and self.destinations[route.destination].flat.device == accelerator.device

    def is_live(self, tensor: int) -> bool:
        """Return whether the model still computes with a tensor's destinations."""
        own = all(self.destinations[route.destination].is_live for route in self.routes[tensor])
        return own and (self.reload_units is None or self.reload_units.is_live(tensor))

    def check_live(self) -> None:
        """Raise ModelError if a parameter was replaced by another tensor since routes were traced."""
        dead = next(
            (self.destinations[i].name for i in self._used_destinations if not self.destinations[i].is_live), None
        )
        if dead is not None:
            raise ModelError(
                f"parameter {dead!r} was replaced by another tensor after its routes were traced (a reload, or .data = "
                "...): patches would not reach the model; start the server again"
            )

    def measure(self, tensors: Sequence[int]) -> dict[int, list[Fingerprint]]:
        """Return tensor → fingerprints per route; zeros for a tensor whose reload unit does not match the model."""
        stale = set() if self.reload_units is None else self.reload_units.stale(tensors)
        found = dict(zip(tensors, self.fingerprint_routes(tensors), strict=True))
        # No element has fingerprint zero, so that zeros never match.
        return found | {tensor: [Fingerprint()] * len(found[tensor]) for tensor in stale}

    def fingerprint_routes(self, tensors: Sequence[int]) -> list[list[Fingerprint]]:
        """Hash checkpoint tensors in the model's memory, per tensor and route.

        On a device with Triton, kernels add up the hashes, and all sums are read once, at the end.
        """
        routes = [(self.table[tensor].name, route) for tensor in tensors for route in self.routes[tensor]]
        found = [Fingerprint()] * len(routes)
        accelerator, sums = self.memory.accelerator, None
        if accelerator is not None and accelerator.has_triton:
            from vllm_delta_sync.engine.model.fingerprint_triton import DeviceSums

            sums = DeviceSums(len(routes), accelerator.device)
        for slot, (name, route) in enumerate(routes):
            flat = self.destinations[route.destination].flat
            if sums is not None and flat.device == sums.device and len(route.source.sizes) <= sums.MAX_DIMS:
                for source, target in split_regions(route.source, route.target, sums.MAX_ELEMENTS):
                    with self.memory.reading():
                        sums.add(slot, name, flat, source, target)
            else:
                fingerprint = fingerprint_in_place if flat.device.type == "cpu" else fingerprint_via_copy
                for source, target in split_regions(route.source, route.target, READ_ELEMENTS):
                    with self.memory.reading():
                        found[slot] += fingerprint(name, flat, source, target)
        if sums is not None:
            found = [one + other for one, other in zip(found, sums.read(), strict=True)]
        slots = iter(found)
        return [[next(slots) for _ in self.routes[tensor]] for tensor in tensors]


def fingerprint_in_place(name: str, flat: torch.Tensor, source: Region, target: Region) -> Fingerprint:
    """Fingerprint a tensor's ``source`` elements, at ``target`` of (numel,) signed integers in host memory."""
    live_layout = (target.offset, target.strides)
    return fingerprint_strided(name, host_bits(flat), source.sizes, live_layout, (source.offset, source.strides))


def fingerprint_via_copy(name: str, flat: torch.Tensor, source: Region, target: Region) -> Fingerprint:
    """As ``fingerprint_in_place``, on any device, through a copy in host memory."""
    copied = flat.as_strided(target.sizes, target.strides, target.offset).contiguous().cpu()
    return fingerprint_in_place(name, copied.reshape(-1), source, Region(0, target.sizes, copied.stride()))


class LiveBaseReader:
    """A ``BaseLookup`` that reads one tensor at a time from the live model: where it is, if it lies in host memory as a
    matrix with rows of neighbors; otherwise in a copy, which takes the memory of that tensor.

    Args:
        weights_stamp: returns a new value once weights may have been written.

    Attributes:
        elsewhere: tensors whose changes are not decoded against what this reads: it says that it has no part of them.
    """

    def __init__(self, routes: RouteMap, weights_stamp: Callable[[], object]) -> None:
        self._routes = routes
        self.elsewhere: set[int] = set()
        self._weights_stamp, self._initial_stamp = weights_stamp, weights_stamp()

    def __call__(self, tensor: int) -> BaseTensor:
        """Return the rank's part of a tensor; its bits are copied if they are asked for.

        Asking for them, and reading them in place, raises:
            EngineError: weights were written since this object was made. CutTileError: see
            ``held_part``. BusyError: the engine fell asleep.
        """
        if not self._routes.routes[tensor] or tensor in self.elsewhere:
            # Most tensors of a model of experts, and each is asked for once per object.
            return BaseTensor(partial(self._copy, tensor), ())
        spec = self._routes.table[tensor]
        return held_part(spec, _held_views(self._routes, tensor), partial(self._copy, tensor), self._in_place(tensor))

    def _in_place(self, tensor: int) -> InPlace | None:
        """Return a tensor's part where it is, if that is one rectangle with adjacent columns in host memory."""
        _, columns = extent(self._routes.table[tensor].shape)
        routes = self._routes.routes[tensor]
        if len({route.source for route in routes}) != 1:
            return None
        source, target = routes[0].source, routes[0].target
        destination = self._routes.destinations[routes[0].destination]
        row, column = divmod(source.offset, columns)
        match source.strides, target.strides:
            case (1,), (1,):
                stride = columns
            # Rows that go on in the next row of the matrix are two rectangles.
            case (int(below), 1), (int(stride), 1) if below == columns and column + source.sizes[1] <= columns:
                pass
            case _:
                return None
        if destination.flat.device.type != "cpu":
            return None
        return InPlace(Matrix(destination.bits, target.offset - row * stride - column, stride), self.reading)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold off writers while live bits are read: some milliseconds, or a fraction of a second for the largest.

        Raises:
            EngineError: weights were written since this object was made. BusyError: the engine fell asleep.
        """
        self._check()
        try:
            with self._routes.memory.reading():
                yield
        finally:
            # Every writer changes the stamp before it writes, so this discards what was decoded against mixed bits, and
            # hides the errors that they caused.
            self._check()

    def _copy(self, tensor: int) -> Bits:
        """Copy a tensor. Pages of the result outside the rank's part are never touched."""
        self._check()
        spec, routes = self._routes.table[tensor], self._routes.routes[tensor]
        bits: Bits = np.empty(spec.numel, spec.element.uint)
        flat = signed_view(bits)
        for route in routes:
            live = self._routes.destinations[route.destination].flat
            for source, target in split_regions(route.source, route.target, READ_ELEMENTS):
                with self._routes.memory.reading():
                    _copy_into(region_view(live, target), region_view(flat, source))
        # Every writer changes the stamp before it writes, so this check discards mixed copies.
        self._check()
        return bits

    def _check(self) -> None:
        if self._weights_stamp() != self._initial_stamp:
            raise EngineError("weights were written while a version was decoded against them; it will be staged again")


def _held_views(routes: RouteMap, tensor: int) -> list[TensorView]:
    """Return what a rank holds of a tensor."""
    # Regions that are loaded to several places count once.
    sources = dict.fromkeys(route.source for route in routes.routes[tensor])
    return [TensorView(region.offset, tuple(region.sizes), tuple(region.strides)) for region in sources]


def cut_tensors(routes: RouteMap) -> list[str]:
    """Return the names of the tensors of which this rank's share ends inside a tile that a writer may code as a whole.

    A version of codec ``tiled`` that changes such a tile cannot be decoded here.
    """
    found = []
    for tensor, spec in enumerate(routes.table):
        if spec.numel < SMALL_ELEMENTS:
            continue
        try:
            _, cut = grid_of(spec.shape).held(covered_rectangles(spec, _held_views(routes, tensor)))
            is_cut = bool(cut.any())
        except CutTileError:
            is_cut = True
        if is_cut:
            found.append(spec.name)
    return found


def _copy_into(live: torch.Tensor, copied: torch.Tensor) -> None:
    """Copy in column strips where elements adjacent in ``copied`` lie far apart in ``live``: reuses pages in cache."""
    if copied.dim() > 1:
        closest = min(range(copied.dim()), key=copied.stride)
        if live.stride(closest) > min(live.stride()):
            for far, near in zip(live.split(STRIP_COLUMNS, closest), copied.split(STRIP_COLUMNS, closest), strict=True):
                near.copy_(far)
            return
    copied.copy_(live)

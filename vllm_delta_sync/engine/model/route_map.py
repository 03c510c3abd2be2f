"""``RouteMap`` holds routes: where each element of a checkpoint lies in a model's memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import torch

from vllm_delta_sync.engine.model.reload_units import ReloadUnits
from vllm_delta_sync.engine.model.route import Destination, Region, Route, coalesce, host_bits, split_regions
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_strided
from vllm_delta_sync.format.table import TensorTable

READ_ELEMENTS = 1 << 22
"""Elements read at a time beside generation: bounds host memory, and how long ``/sleep`` waits."""


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

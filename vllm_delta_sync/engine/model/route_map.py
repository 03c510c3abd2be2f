"""Routes: where each element of a checkpoint lives in a model's memory. ``loader_trace.py`` finds them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_delta_sync.engine.model.regions import Region, split_regions
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_strided
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.bits import Bits, Positions

if TYPE_CHECKING:
    from vllm_delta_sync.engine.model.reload_units import ReloadUnits

READ_ELEMENTS = 1 << 22
"""Elements read at a time beside generation: bounds host memory, and how long ``/sleep`` waits."""


@dataclass
class Destination:
    """One storage that holds weights: its name for messages, all of it as a flat signed-integer tensor, and the
    (module, attribute) pairs that own it."""

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
        return _bits(self.flat)


@dataclass(frozen=True)
class Route:
    """``source`` indices of a checkpoint tensor, one by one, lie at ``target`` indices of a destination."""

    destination: int
    source: Region
    target: Region

    def map(self, positions: Positions) -> tuple[Positions, np.ndarray]:
        """Flat source positions (n,) → (target positions (n,), (n,) whether this route covers the position)."""
        if self.source.is_linear and self.target.is_linear:
            shifted = positions + (self.target.offset - self.source.offset)
            inside = (positions >= self.source.offset) & (positions < self.source.offset + self.source.numel)
            return shifted, inside
        coordinates, inside = self.source.coordinates(positions)
        return self.target.indices(coordinates), inside


@dataclass
class RouteMap:
    """Routes of one rank, for every tensor of a run: no destination is shared, and where an element is loaded to
    several places, the routes that lead there are of one region.

    Attributes:
        destinations: storages, referred to by position.
        routes: per tensor id; empty for tensors that this rank does not load (such as a tied head).
        groups: per tensor id, per route: the group of ranks that hold copies of what the route loads. All 0 until
            ``shard_ownership.py`` says otherwise.
        loaded: per tensor id: whether any rank loads it. Until then, whether this one does.
        derived: of the tensors that the model computes with, whose routes lead to shadows; None if there are none.
        memory: that of the destinations.
    """

    table: TensorTable
    destinations: list[Destination]
    routes: list[list[Route]]
    groups: list[list[int]] = field(default_factory=list)
    loaded: list[bool] = field(default_factory=list)
    reload_units: "ReloadUnits | None" = None
    memory: WeightMemory = field(default_factory=WeightMemory)

    def __post_init__(self) -> None:
        if not self.groups:
            self.groups = [[0] * len(routes) for routes in self.routes]
        if not self.loaded:
            self.loaded = [bool(routes) for routes in self.routes]

    @property
    def unloaded(self) -> list[str]:
        """Names of the run's tensors that the model's loader leaves out."""
        return [spec.name for spec, routes in zip(self.table, self.routes, strict=True) if not routes and spec.numel]

    @cached_property
    def _used_destinations(self) -> list[int]:
        # Found once: asking is part of every pause, and a model of experts has many thousand routes.
        outputs = (
            []
            if self.reload_units is None
            else [output.route for unit in self.reload_units.units for output in unit.outputs]
        )
        return sorted({route.destination for routes in [*self.routes, outputs] for route in routes})

    def is_live(self, tensor: int) -> bool:
        """Whether a tensor's destinations are still what the model computes with."""
        own = all(self.destinations[route.destination].is_live for route in self.routes[tensor])
        return own and (self.reload_units is None or self.reload_units.is_live(tensor, self))

    def check_live(self) -> None:
        """Raise ModelError if a parameter was replaced by another tensor since routes were traced."""
        dead = next(
            (self.destinations[i].name for i in self._used_destinations if not self.destinations[i].is_live), None
        )
        if dead is not None:
            raise ModelError(
                f"parameter {dead!r} was replaced by another tensor after it was proven (a reload, or .data = ...): "
                "patches would not reach the model; start the server again"
            )

    def measure(self, tensors: Sequence[int]) -> Iterator[tuple[int, list[Fingerprint]]]:
        """(tensor, fingerprints) of each; of one that the model computes with and holds something else of: zeros."""
        derived = set() if self.reload_units is None else set(tensors) & set(self.reload_units.tensors)
        stale = derived if self.reload_units is None else derived - self.reload_units.up_to_date(derived, self)
        for tensor in tensors:
            found = self.fingerprint_routes(tensor)
            # No element has a fingerprint of zero.
            yield tensor, [Fingerprint()] * len(found) if tensor in stale else found

    def fingerprint_routes(self, tensor: int) -> list[Fingerprint]:
        """Hash one checkpoint tensor, per route, where it lies in the model: what this rank really holds."""
        name = self.table[tensor].name
        found = []
        for route in self.routes[tensor]:
            destination = self.destinations[route.destination]
            fingerprint = fingerprint_in_place if destination.flat.device.type == "cpu" else fingerprint_via_copy
            total = Fingerprint()
            for source, target in split_regions(route.source, route.target, READ_ELEMENTS):
                with self.memory.reading():
                    total += fingerprint(name, destination.flat, source, target)
            found.append(total)
        return found


def fingerprint_in_place(name: str, flat: torch.Tensor, source: Region, target: Region) -> Fingerprint:
    """Fingerprint of ``source`` elements of a tensor, at ``target`` in (numel,) signed integers in host memory."""
    held = (target.offset, target.strides)
    return fingerprint_strided(name, _bits(flat), source.sizes, held, (source.offset, source.strides))


def fingerprint_via_copy(name: str, flat: torch.Tensor, source: Region, target: Region) -> Fingerprint:
    """As ``fingerprint_in_place`` on any device, through a copy in host memory."""
    copied = flat.as_strided(target.sizes, target.strides, target.offset).contiguous().cpu().reshape(-1)
    strides = [math.prod(source.sizes[dim + 1 :]) for dim in range(len(source.sizes))]
    index = (source.offset, source.strides)
    return fingerprint_strided(name, _bits(copied), source.sizes, (0, strides), index)


def _bits(flat: torch.Tensor) -> Bits:
    signed: np.ndarray = flat.numpy()
    return signed.view(f"<u{flat.element_size()}")

"""``LiveBaseReader`` reads base bits from a rank's live model, in checkpoint order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from vllm_delta_sync.codec.tiles.coder import SMALL_ELEMENTS
from vllm_delta_sync.codec.tiles.grid import CutTileError, TensorView, covered_rectangles, extent, grid_of, held_part
from vllm_delta_sync.engine.model.route import region_view, signed_view, split_regions
from vllm_delta_sync.engine.model.route_map import READ_ELEMENTS, RouteMap
from vllm_delta_sync.errors import EngineError
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, InPlace, Matrix

STRIP_COLUMNS = 128
"""Columns copied at a time where the model holds a tensor transposed."""


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

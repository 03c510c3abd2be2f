"""``LiveBaseReader`` reads base bits for codec ``context`` from a rank's live model, in checkpoint order."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from vllm_delta_sync.codec.context.tiles import extent
from vllm_delta_sync.codec.merge import apply_row
from vllm_delta_sync.engine.model.patch import region_view
from vllm_delta_sync.engine.model.regions import Region, split_regions
from vllm_delta_sync.engine.model.route_map import READ_ELEMENTS, RouteMap
from vllm_delta_sync.errors import EngineError, UnsupportedError
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.bits import BaseLookup, BaseTensor, Rectangle
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.torch_views import SIGNED

MOST_RECTANGLES = 4096
"""Bounds the work: each rectangle is compared with each tile of its tensor."""
STRIP_COLUMNS = 128
"""Columns copied at a time where the model holds a tensor transposed."""


class LiveBaseReader:
    """An ``BaseLookup`` that copies one tensor at a time from the live model, and uses the memory of that tensor.

    Args:
        weights_stamp: returns a new value once weights may have been written.
    """

    def __init__(self, routes: RouteMap, weights_stamp: Callable[[], object]) -> None:
        self._routes = routes
        self._weights_stamp, self._initial_stamp = weights_stamp, weights_stamp()

    def __call__(self, tensor: int) -> BaseTensor:
        """Copy a tensor. Pages of the result outside the rank's part are never touched.

        Raises:
            EngineError: weights were written since this object was made. UnsupportedError: see
            ``covered_rectangles``. BusyError: the engine fell asleep.
        """
        self._check()
        spec, routes = self._routes.table[tensor], self._routes.routes[tensor]
        # Regions that are loaded to several places count once.
        rectangles = covered_rectangles(spec, list(dict.fromkeys(route.source for route in routes)))
        bits = np.empty(spec.numel, spec.element.uint)
        flat = torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(SIGNED[bits.itemsize])
        for route in routes:
            live = self._routes.destinations[route.destination].flat
            for source, target in split_regions(route.source, route.target, READ_ELEMENTS):
                with self._routes.memory.reading():
                    _copy_into(region_view(live, target), region_view(flat, source))
        # Every writer changes the stamp before it writes, so this check discards mixed copies.
        self._check()
        return BaseTensor(bits, rectangles)

    def _check(self) -> None:
        if self._weights_stamp() != self._initial_stamp:
            raise EngineError("weights were written while a version was decoded against them; it will be staged again")


def _copy_into(live: torch.Tensor, copied: torch.Tensor) -> None:
    """Copy in column strips where elements adjacent in ``copied`` lie far apart in ``live``: reuses pages in cache."""
    if copied.dim() > 1:
        closest = min(range(copied.dim()), key=copied.stride)
        if live.stride(closest) > min(live.stride()):
            for far, near in zip(live.split(STRIP_COLUMNS, closest), copied.split(STRIP_COLUMNS, closest), strict=True):
                near.copy_(far)
            return
    copied.copy_(live)


def with_changes(old: BaseLookup, parts: Sequence[Changes]) -> BaseLookup:
    """Return the base bits after some changes: ``old`` with ``parts`` applied on top.

    Args:
        old: returns bits that the caller may modify.
        parts: in order of application; elements that the rank does not hold may be missing. More may be appended later.
    """

    def read(tensor: int) -> BaseTensor:
        found, first = None, 0
        for number, part in enumerate(parts):
            for full in part.full:
                if full.id == tensor:
                    found, first = BaseTensor(np.array(full.bits)), number + 1
        found = found or old(tensor)
        for group in (group for part in parts[first:] for group in part.sparse):
            row = int(np.searchsorted(group.ids, tensor))
            if row < group.ids.size and group.ids[row] == tensor:
                apply_row(found.bits, group, row)
        return found

    return read


def covered_rectangles(spec: TensorSpec, regions: Sequence[Region]) -> tuple[Rectangle, ...] | None:
    """Return the rectangles of a tensor that regions without overlap cover; None if they cover all of it.

    Raises:
        UnsupportedError: they are more than ``MOST_RECTANGLES``.
    """
    if sum(region.numel for region in regions) == spec.numel:
        return None
    _, columns = extent(spec.shape)
    found: list[Rectangle] = []
    for region in regions:
        length, height, starts = _runs(region, columns)
        if len(found) + len(starts) > MOST_RECTANGLES:
            raise UnsupportedError(
                f"this rank holds tensor {spec.name!r} in more than {MOST_RECTANGLES} pieces, too many to decode codec "
                "'context' in; publish with codec='packed'"
            )
        for start in starts:
            found += _rectangles(*divmod(start, columns), length, height, columns)
    return tuple(found)


def _runs(region: Region, columns: int) -> tuple[int, int, list[int]]:
    """Split a region into runs of consecutive elements: length of a run, number of rows it repeats in, starts."""
    length, height = 1, 1
    others: list[tuple[int, int]] = []
    for stride, size in sorted(zip(region.strides, region.sizes, strict=True)):
        if stride == length:
            length *= size
        elif stride == columns:
            height = size
        else:
            others.append((stride, size))
    if region.numel // (length * height) > MOST_RECTANGLES:
        return length, height, [0] * (MOST_RECTANGLES + 1)
    steps = ([stride * number for number in range(size)] for stride, size in others)
    return length, height, [region.offset + sum(chosen) for chosen in itertools.product(*steps)]


def _rectangles(row: int, column: int, length: int, height: int, columns: int) -> list[Rectangle]:
    """Return a run's rectangles: ``length`` elements that start there and repeat in ``height`` − 1 rows below."""
    if column + length <= columns:
        return [(row, row + height, column, column + length)]
    found: list[Rectangle] = []
    if column:
        found.append((row, row + height, column, columns))
        row, length = row + 1, length - (columns - column)
    whole, rest = divmod(length, columns)
    if whole:
        found.append((row, row + whole, 0, columns))
    if rest:
        found.append((row + whole, row + whole + height, 0, rest))
    return found

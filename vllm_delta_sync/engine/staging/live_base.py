"""The bits that a rank's model holds, tensor by tensor in checkpoint order: what codec ``context`` decodes against."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from vllm_delta_sync.codec.context.tiles import extent
from vllm_delta_sync.codec.merge import apply_row
from vllm_delta_sync.engine.model.patch import region_view
from vllm_delta_sync.engine.model.regions import Region, pieces
from vllm_delta_sync.engine.model.route_map import READ_ELEMENTS, RouteMap
from vllm_delta_sync.errors import EngineError, UnsupportedError
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.bits import BaseLookup, BaseTensor, Rectangle
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.torch_views import SIGNED

MOST_RECTANGLES = 4096
"""Each is compared with each tile of its tensor."""
TOGETHER = 128
"""Columns copied at a time where a tensor is held transposed."""


class LiveBaseReader:
    """An ``Old`` that copies a tensor out of the live model whenever it is asked. Memory of that one tensor.

    Args:
        moves: says something else once weights may have been written.
    """

    def __init__(self, routes: RouteMap, moves: Callable[[], object]) -> None:
        self._routes = routes
        self._moves, self._began = moves, moves()

    def __call__(self, tensor: int) -> BaseTensor:
        """Pages outside of what is held are never touched.

        Raises:
            EngineError: weights moved since this object was made. UnsupportedError: see ``held_rectangles``.
            BusyError: the engine fell asleep meanwhile.
        """
        self._check()
        spec, routes = self._routes.table[tensor], self._routes.routes[tensor]
        # What is loaded to several places is held once.
        held = held_rectangles(spec, list(dict.fromkeys(route.source for route in routes)))
        bits = np.empty(spec.numel, spec.element.uint)
        flat = torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(SIGNED[bits.itemsize])
        for route in routes:
            there = self._routes.destinations[route.destination].flat
            for source, target in pieces(route.source, route.target, READ_ELEMENTS):
                with self._routes.memory.reading():
                    _copy(region_view(there, target), region_view(flat, source))
        # Whoever writes says so before, so a copy that came out mixed is never handed on.
        self._check()
        return BaseTensor(bits, held)

    def _check(self) -> None:
        if self._moves() != self._began:
            raise EngineError("weights were written while a version was decoded against them; it is staged again")


def _copy(there: torch.Tensor, here: torch.Tensor) -> None:
    """Copy to ``here``, a part at a time where neighbours here lie far apart there: their pages stay at hand."""
    if here.dim() > 1:
        closest = min(range(here.dim()), key=here.stride)
        if there.stride(closest) > min(there.stride()):
            for far, near in zip(there.split(TOGETHER, closest), here.split(TOGETHER, closest), strict=True):
                near.copy_(far)
            return
    here.copy_(there)


def moved(old: BaseLookup, parts: Sequence[Changes]) -> BaseLookup:
    """``old`` after some changes, which are applied to the bits that it gives.

    Args:
        old: gives bits that are nobody else's. parts: in order of application, elements that are not held left out.
            They may grow afterwards.
    """

    def ask(tensor: int) -> BaseTensor:
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

    return ask


def held_rectangles(spec: TensorSpec, regions: Sequence[Region]) -> tuple[Rectangle, ...] | None:
    """What regions without overlap cover of a tensor; None for all of it.

    Raises:
        UnsupportedError: they are scattered over more than ``MOST_RECTANGLES``.
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
    """A region as runs of consecutive elements: their length, in how many rows each is found again, their starts."""
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
    """A run of ``length`` elements that begins there, and the same in the ``height`` − 1 rows below."""
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

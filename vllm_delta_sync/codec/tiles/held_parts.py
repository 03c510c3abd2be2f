"""What a process holds of a tensor, as rectangles of the matrix that tiles cut. Begin with ``held_part``."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from vllm_delta_sync.codec.tiles.grid import extent
from vllm_delta_sync.errors import UnsupportedError
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.bits import BaseTensor, Bits, InPlace, Rectangle
from vllm_delta_sync.tensors.boxes import Box

MOST_RECTANGLES = 4096
"""Bounds the work: each rectangle is compared with the tiles of its tensor."""


class CutTileError(UnsupportedError):
    """A tile that is not plain cannot be decoded, because only a part of its old bits is here."""


class TensorView(NamedTuple):
    """Some elements of a tensor: flat index of the first one; number and distance per dimension of more than one."""

    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def view_of(box: Box) -> TensorView:
    """Return a box that is not empty as a view."""
    kept = [(size, stride) for size, stride in zip(box.shape, box.strides, strict=True) if size > 1]
    return TensorView(box.start, tuple(size for size, _ in kept), tuple(stride for _, stride in kept))


def covered_rectangles(spec: TensorSpec, views: Sequence[TensorView]) -> tuple[Rectangle, ...] | None:
    """Return the rectangles of a tensor that views without overlap cover; None if they cover all of it.

    Raises:
        CutTileError: they are more than ``MOST_RECTANGLES``.
    """
    if sum(view.numel for view in views) == spec.numel:
        return None
    _, columns = extent(spec.shape)
    found: list[Rectangle] = []
    for view in views:
        length, height, starts = _runs(view, columns)
        if len(found) + len(starts) > MOST_RECTANGLES:
            raise CutTileError(
                f"this rank holds tensor {spec.name!r} in more than {MOST_RECTANGLES} pieces, too many to decode codec "
                "'tiled' in; publish with codec='plain'"
            )
        for start in starts:
            found += _rectangles(*divmod(start, columns), length, height, columns)
    return tuple(found)


def held_part(
    spec: TensorSpec,
    views: Sequence[TensorView],
    read: Callable[[], Bits],
    in_place: InPlace | None = None,
) -> BaseTensor:
    """Return the part of a tensor that views without overlap cover.

    If they are too many, plain tiles are decoded as if all of it were held, and others are refused.

    Args:
        read: returns the (numel,) bits, called only if they are needed. in_place: see ``BaseTensor``.
    """
    try:
        return BaseTensor(read, covered_rectangles(spec, views), in_place)
    except CutTileError as error:
        return refusing(error)


def refusing(error: CutTileError) -> BaseTensor:
    """Return a base tensor of which plain tiles can be decoded; asking for its bits raises the error."""

    def refuse() -> NoReturn:
        raise error

    return BaseTensor(refuse)


def _runs(view: TensorView, columns: int) -> tuple[int, int, list[int]]:
    """Split a view into runs of consecutive elements: length of a run, number of rows it repeats in, starts."""
    length, height = 1, 1
    others: list[tuple[int, int]] = []
    for stride, size in sorted(zip(view.strides, view.sizes, strict=True)):
        if stride == length:
            length *= size
        elif stride == columns:
            height = size
        else:
            others.append((stride, size))
    if view.numel // (length * height) > MOST_RECTANGLES:
        return length, height, [0] * (MOST_RECTANGLES + 1)
    steps = ([stride * number for number in range(size)] for stride, size in others)
    return length, height, [view.start + sum(chosen) for chosen in itertools.product(*steps)]


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

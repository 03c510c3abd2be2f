"""``Grid``: how a tensor is cut into tiles, each of which is coded by itself. It depends on the tensor's shape alone.

A tensor is a matrix with rows of its last dimension. A tensor of one dimension, or with fewer than NARROW columns, is
one row. Rows form slabs (such as the experts of a stacked tensor), which no tile crosses.

``held_part`` says which rectangles of that matrix a process holds. ``on_threads`` codes parts of a tensor side by side.
"""

import itertools
import math
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import UnsupportedError
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, InPlace, Rectangle

SHARERS = ((16, 8, 6, 4, 3, 2), (8, 6, 4, 3, 2), (4, 3, 2), (3,))
"""Numbers of ranks between which rows and columns may be divided. The first row whose tiles are large enough is taken,
so that many ranks can hold a large tensor."""
SHARERS_OF_ROWS = ((4, 3, 2), (3, 2), (2,))
"""As SHARERS, of the rows of smaller tensors, whose columns are not divided: mostly projections to few heads. A tensor
that is too small for each of these is not cut for ranks."""
LEAST_ELEMENTS = 16 * 1024
"""Average size of a tile, at least: a tile takes about two bytes, which must be few beside its changes."""
TILE_ELEMENTS = 48 * 1024
"""Size of a tile, at most but for half a band more; bounds scratch memory on both sides."""
TALL = 6
"""A matrix with this many times more rows than columns is a vocabulary, whose columns are never divided."""
VOCABULARY_ROWS = 64
"""vLLM pads a vocabulary to a multiple of this before it divides it."""
NARROW = 64
"""Fewer columns than this are never apart: elements are compared by 64."""
THREADS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""Most threads. More would take cores from the training, or from a server's rollouts."""
THREAD_ELEMENTS = 512 * 1024
"""A thread gets so many elements at least: one that has less to do takes longer to start."""

Edges = npt.NDArray[np.int64]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Span(NamedTuple):
    """Some consecutive bands of tiles: the first, and the end."""

    first: int
    last: int


@dataclass(frozen=True)
class Grid:
    """Tiles of a matrix: (bands + 1,) rows and (across + 1,) columns where they begin, and where the last ones end."""

    row_edges: Edges
    column_edges: Edges

    def __post_init__(self) -> None:
        # A grid is shared, and loops are compiled for arrays that cannot be written.
        self.row_edges.flags.writeable = self.column_edges.flags.writeable = False

    @cached_property
    def across(self) -> int:
        """Tiles per band: side by side."""
        return self.column_edges.size - 1

    @cached_property
    def bands(self) -> int:
        """Bands of tiles, one below the other."""
        return self.row_edges.size - 1

    @cached_property
    def tiles(self) -> int:
        return self.bands * self.across

    @cached_property
    def columns(self) -> int:
        return int(self.column_edges[-1])

    @cached_property
    def is_row(self) -> bool:
        """Whether the matrix has one row, in whose order the tiles lie."""
        return int(self.row_edges[-1]) == 1

    @cached_property
    def numel(self) -> int:
        return int(self.row_edges[-1]) * self.columns

    def covered(self, rectangles: Sequence[Rectangle] | None) -> npt.NDArray[np.int64]:
        """Return (bands, across): elements of each tile inside disjoint rectangles of this matrix; None: all."""
        heights, widths = np.diff(self.row_edges), np.diff(self.column_edges)
        if rectangles is None:
            return np.outer(heights, widths)
        found = np.zeros((self.bands, self.across), np.int64)
        for first, last, left, right in rectangles:
            # Only the bands that the rectangle meets, since a rank may hold thousands of rectangles.
            bands = slice(
                max(int(np.searchsorted(self.row_edges, first, "right")) - 1, 0),
                int(np.searchsorted(self.row_edges, last)),
            )
            down = np.minimum(self.row_edges[1:][bands], last) - np.maximum(self.row_edges[:-1][bands], first)
            along = np.minimum(self.column_edges[1:], right) - np.maximum(self.column_edges[:-1], left)
            found[bands] += np.outer(np.maximum(down, 0), np.maximum(along, 0))
        return found

    def held(self, rectangles: Sequence[Rectangle] | None) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return (tiles,) which tiles disjoint rectangles meet, None: all; and which of these they hold only in part.

        The second are cut: they can be decoded only if they are plain.
        """
        covered = self.covered(rectangles).reshape(-1)
        met = covered > 0
        return met, met & (covered != self.covered(None).reshape(-1))


def threads_for(work: int, least: int) -> int:
    """Return on how many threads to do ``work``, if each is to have ``least`` of it."""
    return max(1, min(THREADS, work // least))


def on_threads(call: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Return ``call(item)`` for each item, all at once, the first one in this thread; raise the first error.

    The compiled loops release the GIL.
    """
    if len(items) == 1:
        return [call(items[0])]
    found: dict[int, _Result] = {}
    errors: dict[int, BaseException] = {}

    def run(number: int) -> None:
        try:
            found[number] = call(items[number])
        except BaseException as error:  # noqa: BLE001  raised below
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(1, len(items))]
    started = []
    for number, thread in enumerate(threads, 1):
        try:
            thread.start()
            started.append(thread)
        except RuntimeError:  # the interpreter is shutting down, or there are too many threads
            run(number)
    try:
        run(0)
    finally:
        for thread in started:
            thread.join()
    if errors:
        raise errors[min(errors)]
    return [found[number] for number in range(len(items))]


def shares_of_threads(grids: Sequence[Grid]) -> list[list[tuple[int, Span]]]:
    """Return what threads code side by side: for each one, tensors by number, and which of their bands."""
    ends = [0, *itertools.accumulate(grid.numel for grid in grids)]
    parts = threads_for(ends[-1], THREAD_ELEMENTS)

    def start(part: int) -> tuple[int, int]:
        """Return tensor and band."""
        element = ends[-1] * part // parts
        number = min(bisect_right(ends, element), len(grids)) - 1
        return number, grids[number].bands * (element - ends[number]) // (ends[number + 1] - ends[number])

    found = []
    for (first, top), (last, bottom) in pairwise(map(start, range(parts + 1))):
        bands = [grid.bands for grid in grids[first:last]] + [bottom]
        share = [(first + number, Span(0 if number else top, end)) for number, end in enumerate(bands)]
        found.append([(number, span) for number, span in share if span.first < span.last])
    return [share for share in found if share]


def extent(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor as a matrix."""
    numel, columns = math.prod(shape), shape[-1] if len(shape) > 1 else 1
    return (numel // columns, columns) if columns >= NARROW else (1, numel)


@lru_cache(4096)
def grid_of(shape: tuple[int, ...]) -> Grid:
    """Return the grid of a tensor of this shape, which has elements."""
    rows, columns = extent(shape)
    if rows == 1:
        cuts = _cuts(columns, SHARERS[0])
        return Grid(np.array([0, 1]), _edges(cuts, columns, TILE_ELEMENTS))
    slab = shape[-2] if len(shape) > 2 and shape[-2] * columns >= LEAST_ELEMENTS else rows
    tall = slab == rows >= TALL * columns
    divided = -(-slab // VOCABULARY_ROWS) * VOCABULARY_ROWS if tall else slab
    along: list[int] = []
    down: list[int] = []
    for sharers, only_rows in [*((each, tall) for each in SHARERS), *((each, True) for each in SHARERS_OF_ROWS)]:
        columns_at = [] if only_rows else _cuts(columns, sharers)
        rows_at = [row for row in _cuts(divided, sharers) if row < slab]
        tiles = (len(columns_at) + 1) * (len(rows_at) + 1)
        wide = all(right - left >= NARROW for left, right in pairwise([0, *columns_at, columns]))
        if wide and 1 < tiles <= slab * columns // LEAST_ELEMENTS:
            along, down = columns_at, rows_at
            break
    column_edges = _edges(along, columns, TILE_ELEMENTS)
    height = max(1, TILE_ELEMENTS // int(np.diff(column_edges).max()))
    # A power of two, where the shards of most trainers begin too.
    of_slab = _edges(down, slab, 1 << (height.bit_length() - 1))
    firsts = np.arange(0, rows, slab, dtype=np.int64)
    return Grid(np.append((firsts[:, None] + of_slab[:-1]).reshape(-1), rows), column_edges)


def least_tiles(numel: int) -> int:
    """Return a number of tiles that a tensor of so many elements has at least, without making its grid."""
    return numel // (2 * TILE_ELEMENTS)


def _cuts(size: int, sharers: Sequence[int]) -> list[int]:
    """Return where the shares of so many ranks begin, for all numbers of ranks that divide ``size``."""
    shares = {Fraction(number, ranks) for ranks in sharers if size % ranks == 0 for number in range(1, ranks)}
    return [int(size * share) for share in sorted(shares)]


def _edges(cuts: list[int], size: int, step: int) -> Edges:
    """Return 0, the cuts, ``size``, and the multiples of ``step`` that are at least half a step from all of those."""
    half, found = max(1, step // 2), [np.zeros(1, np.int64)]
    for first, last in pairwise([0, *cuts, size]):
        found += [np.arange(-(-(first + half) // step) * step, last - half + 1, step), np.array([last])]
    return np.concatenate(found)


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

"""``Grid``: how a tensor is cut into tiles, which codec ``context`` codes independently.

A tensor is treated as rows of its last dimension; a tensor with one dimension has rows of one element. Rows form slabs
(such as the experts of a stacked tensor), which no tile crosses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.codec.context.tile_threads import threads_for
from vllm_delta_sync.errors import FormatError, UnsupportedError
from vllm_delta_sync.format.limits import MAX_TILE_ELEMENTS, MIN_TILE_ELEMENTS
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.bits import Rectangle

CUTS = (16, 8, 4, 2, 1)
"""Numbers of equal parts into which a writer cuts rows and columns, if divisible; tensor parallelism cuts there too."""
CUT_ELEMENTS = {16: 2**24, 8: 2**22, 4: 2**20, 2: 2**19, 1: 0}
"""Parts → elements: a slab of this many elements is cut into at least as many parts, one for each rank."""
CHANGES_PER_TILE = 1024
"""A smaller slab is cut too if each tile keeps this many changes; a tile costs about 8 bytes, 1 % of their bytes."""
TILE_BYTES = 8
SAVED_BYTES = 0.35
"""Approximate bytes that a changed element saves in a tile, compared with codec ``packed``."""
BLOCK_BYTES = 800
"""Approximate overhead of a block of codec ``packed``: the names of its planes, and their frames."""
TALL = 8
"""A tensor with this many times more rows than columns is a vocabulary, whose columns are never sharded."""
THREAD_ELEMENTS = 512 * 1024
"""A thread gets so many elements at least: one that has less to do takes longer to start."""
TILE_ELEMENTS = 128 * 1024
"""Largest tile of a writer, but for one row more; bounds scratch memory on both sides."""


class Span(NamedTuple):
    """Some consecutive bands of tiles: first row, end of rows, first tile, end of tiles."""

    first_row: int
    last_row: int
    first_tile: int
    last_tile: int


@dataclass(frozen=True)
class Grid:
    """A tensor's rows and columns, rows of a slab, rows and columns of a tile. Tiles at edges may be smaller."""

    rows: int
    columns: int
    slab: int
    height: int
    width: int

    @property
    def across(self) -> int:
        """Tiles per band: side by side."""
        return -(-self.columns // self.width)

    @property
    def bands(self) -> int:
        """Bands of tiles, one below the other."""
        whole, rest = divmod(self.rows, self.slab)
        return whole * -(-self.slab // self.height) + -(-rest // self.height)

    @property
    def tiles(self) -> int:
        return self.bands * self.across

    def array(self) -> npt.NDArray[np.int64]:
        return np.array([self.rows, self.columns, self.slab, self.height, self.width], np.int64)

    def first_rows(self) -> npt.NDArray[np.int64]:
        """Return (bands,) the first row of each."""
        slabs = range(0, self.rows, self.slab)
        found = [range(slab, min(slab + self.slab, self.rows), self.height) for slab in slabs]
        return np.array([row for rows in found for row in rows], np.int64)

    def spans(self) -> list[Span]:
        """Return the parts that threads code side by side: one per thread, or fewer of a small tensor."""
        first = self.first_rows()
        parts = min(first.size, threads_for(self.rows * self.columns, THREAD_ELEMENTS))
        bands = [first.size * part // parts for part in range(parts + 1)]
        ends = [*first.tolist(), self.rows]
        return [
            Span(ends[start], ends[stop], start * self.across, stop * self.across) for start, stop in pairwise(bands)
        ]

    def rectangles(self) -> npt.NDArray[np.int64]:
        """Return (tiles, 4) in the order of the streams; see ``Rectangle``."""
        first = self.first_rows()
        last = np.minimum(np.minimum(first + self.height, first // self.slab * self.slab + self.slab), self.rows)
        left = np.arange(0, self.columns, self.width, dtype=np.int64)
        right = np.minimum(left + self.width, self.columns)
        down, along = first.size, left.size
        return np.stack(
            [np.repeat(first, along), np.repeat(last, along), np.tile(left, down), np.tile(right, down)], axis=1
        )


def extent(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor."""
    columns = shape[-1] if len(shape) > 1 else 1
    return math.prod(shape) // columns if columns else 0, columns


def choose_grid(spec: TensorSpec, changed: int) -> Grid:
    """Return the grid that a writer uses for a tensor with ``changed`` changed elements."""
    rows, columns = extent(spec.shape)
    slab = spec.shape[-2] if len(spec.shape) > 2 and spec.shape[-2] * columns >= 16 * MIN_TILE_ELEMENTS else rows
    share = changed / spec.numel
    for cuts in CUTS:
        height, width = _part(slab, cuts), columns if slab >= TALL * columns else _part(columns, cuts)
        if height * width * share >= CHANGES_PER_TILE or slab * columns >= CUT_ELEMENTS[cuts] or columns == 1:
            break
    if height * width < MIN_TILE_ELEMENTS // 16:
        height, width = slab, columns
    if height * width > TILE_ELEMENTS:
        # Each part becomes a slab, whose tiles may have any height.
        slab, height = height, -(-height // -(-height * width // TILE_ELEMENTS))
    if width > TILE_ELEMENTS:
        # One row alone is too large.
        width = _divisor(width, TILE_ELEMENTS)
    return Grid(rows, columns, slab, height, width)


def excess_bytes(spec: TensorSpec, changed: int) -> float:
    """Return the approximate bytes that a tensor takes more in tiles than in codec ``packed``; negative if fewer."""
    return TILE_BYTES * min(choose_grid(spec, changed).tiles, changed) - SAVED_BYTES * changed


def _part(size: int, cuts: int) -> int:
    return size // math.gcd(size, cuts)


def _divisor(size: int, most: int) -> int:
    """Return the largest divisor of ``size`` up to ``most``; ``most`` if that divisor is less than a quarter of it."""
    found = next(size // parts for parts in range(-(-size // most), size + 1) if size % parts == 0)
    return found if 4 * found >= most else most


def read_grid(spec: TensorSpec, cut: tuple[int, int, int], what: str) -> Grid:
    """Return the grid that an object declares; ``cut``: rows of a slab, rows and columns of a tile.

    Raises:
        FormatError: the grid does not fit the tensor, or its tiles are too small or too large.
    """
    slab, height, width = cut
    rows, columns = extent(spec.shape)
    fits = 1 <= height <= slab <= rows and 1 <= width <= columns
    grid = Grid(rows, columns, slab, height, width)
    if not fits or height * width > MAX_TILE_ELEMENTS or (grid.tiles - 1) * MIN_TILE_ELEMENTS > 16 * spec.numel:
        raise FormatError(
            f"{what}: {spec.name!r} of {rows} × {columns} elements is cut into slabs of {slab} rows and tiles of "
            f"{height} × {width}"
        )
    return grid


def select_tiles(grid: Grid, rectangles: Sequence[Rectangle] | None, name: str, what: str) -> npt.NDArray[np.bool_]:
    """Return (tiles,) bool: which tiles lie inside ``rectangles``; None for the whole tensor.

    Raises:
        UnsupportedError: a tile lies partly inside, so it cannot be decoded.
    """
    if rectangles is None:
        return np.ones(grid.tiles, np.bool_)
    tiles = grid.rectangles()
    covered = np.zeros(grid.tiles, np.int64)
    for first, last, left, right in rectangles:
        down = np.minimum(tiles[:, 1], last) - np.maximum(tiles[:, 0], first)
        along = np.minimum(tiles[:, 3], right) - np.maximum(tiles[:, 2], left)
        covered += np.maximum(down, 0) * np.maximum(along, 0)
    areas = (tiles[:, 1] - tiles[:, 0]) * (tiles[:, 3] - tiles[:, 2])
    cut = np.flatnonzero((covered > 0) & (covered != areas))
    if cut.size:
        raise UnsupportedError(
            f"{what}: tensor {name!r} is coded in tiles of {grid.height} × {grid.width}, of which this rank has some "
            "only in part; publish with codec='packed', or serve with fewer ranks, a power of two"
        )
    return covered > 0

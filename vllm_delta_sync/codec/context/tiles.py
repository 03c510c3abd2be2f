"""How a tensor is cut into tiles that codec ``context`` codes one by one.

A tensor is seen as rows of its last dimension; one with a single dimension has rows of one element. Rows form slabs
(the experts of a stacked tensor), which no tile crosses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import FormatError, UnsupportedError
from vllm_delta_sync.format.limits import MAX_TILE_ELEMENTS, MIN_TILE_ELEMENTS
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.bits import Rectangle

CUTS = (16, 8, 4, 2, 1)
"""Into how many equal parts a writer cuts rows and columns, if they divide: tensor parallelism cuts there too."""
CUT_ELEMENTS = {16: 2**24, 8: 2**22, 4: 2**20, 2: 2**19, 1: 0}
"""Slabs of so many elements are cut into that many parts at least: they may well be served by as many ranks."""
CHANGES_PER_TILE = 1024
"""Smaller slabs are cut too where that leaves so many: a tile costs about 8 bytes besides, 1 % of them."""
TILE_BYTES = 8
SAVED_BYTES = 0.35
"""What a changed element takes less in a tile than in codec ``packed``, about."""
BLOCK_BYTES = 800
"""What a block of codec ``packed`` takes besides its changes, about: the names of its planes, and their frames."""
TALL = 8
"""With so many times more rows than columns a tensor is a vocabulary, whose columns nobody cuts."""
TILE_ELEMENTS = 128 * 1024
"""A writer makes no larger tiles: scratch memory on both sides."""


@dataclass(frozen=True)
class Grid:
    """A tensor's rows and columns, rows of a slab, rows and columns of a tile; those at the edges may be smaller."""

    rows: int
    columns: int
    slab: int
    height: int
    width: int

    @property
    def across(self) -> int:
        """Tiles side by side."""
        return -(-self.columns // self.width)

    @property
    def bands(self) -> int:
        """Tiles one below the other."""
        whole, rest = divmod(self.rows, self.slab)
        return whole * -(-self.slab // self.height) + -(-rest // self.height)

    @property
    def tiles(self) -> int:
        return self.bands * self.across

    def array(self) -> npt.NDArray[np.int64]:
        return np.array([self.rows, self.columns, self.slab, self.height, self.width], np.int64)

    def rectangles(self) -> npt.NDArray[np.int64]:
        """(tiles, 4) in the order of the streams, see ``Rectangle``."""
        starts = [
            row for slab in range(0, self.rows, self.slab)
            for row in range(slab, min(slab + self.slab, self.rows), self.height)
        ]  # fmt: skip
        first = np.array(starts, np.int64)
        last = np.minimum(np.minimum(first + self.height, first // self.slab * self.slab + self.slab), self.rows)
        left = np.arange(0, self.columns, self.width, dtype=np.int64)
        right = np.minimum(left + self.width, self.columns)
        down, along = first.size, left.size
        return np.stack(
            [np.repeat(first, along), np.repeat(last, along), np.tile(left, down), np.tile(right, down)], axis=1
        )


def extent(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of a tensor."""
    columns = shape[-1] if len(shape) > 1 else 1
    return math.prod(shape) // columns if columns else 0, columns


def choose_grid(spec: TensorSpec, changed: int) -> Grid:
    """How a writer cuts a tensor of which so many elements changed."""
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
        # A cut becomes a slab, whose tiles may then have any height.
        slab, height = height, -(-height // -(-height * width // TILE_ELEMENTS))
    if height * width > TILE_ELEMENTS:
        width = _divisor(width, TILE_ELEMENTS)
    return Grid(rows, columns, slab, height, width)


def excess_bytes(spec: TensorSpec, changed: int) -> float:
    """How many bytes more a tensor takes in tiles than in codec ``packed``, about; below 0 where it takes fewer."""
    return TILE_BYTES * min(choose_grid(spec, changed).tiles, changed) - SAVED_BYTES * changed


def _part(size: int, cuts: int) -> int:
    return size // math.gcd(size, cuts)


def _divisor(size: int, most: int) -> int:
    """The largest divisor of ``size`` up to ``most``; ``most`` where that would be far smaller."""
    found = next(size // parts for parts in range(-(-size // most), size + 1) if size % parts == 0)
    return found if 4 * found >= most else most


def read_grid(spec: TensorSpec, cut: tuple[int, int, int], what: str) -> Grid:
    """A grid that an object declares: rows of a slab, rows and columns of a tile.

    Raises:
        FormatError: it does not fit the tensor, or its tiles are too small or too large.
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


def select_tiles(grid: Grid, held: Sequence[Rectangle] | None, name: str, what: str) -> npt.NDArray[np.bool_]:
    """(tiles,) which tiles lie in what is held.

    Raises:
        UnsupportedError: one lies there in part: it cannot be decoded without the rest.
    """
    if held is None:
        return np.ones(grid.tiles, np.bool_)
    tiles = grid.rectangles()
    covered = np.zeros(grid.tiles, np.int64)
    for first, last, left, right in held:
        down = np.minimum(tiles[:, 1], last) - np.maximum(tiles[:, 0], first)
        along = np.minimum(tiles[:, 3], right) - np.maximum(tiles[:, 2], left)
        covered += np.maximum(down, 0) * np.maximum(along, 0)
    areas = (tiles[:, 1] - tiles[:, 0]) * (tiles[:, 3] - tiles[:, 2])
    cut = np.flatnonzero((covered > 0) & (covered != areas))
    if cut.size:
        raise UnsupportedError(
            f"{what}: tensor {name!r} is coded in tiles of {grid.height} × {grid.width}, of which this rank holds some "
            "in part only; publish with codec='packed', or serve with fewer ranks, a power of two"
        )
    return covered > 0

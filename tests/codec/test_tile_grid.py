"""The grid of tiles: it parts each tensor, follows from its shape alone, and usual ranks cut no tile of it."""

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.codec.tiling import many_threads
from tests.support import reference_tiles as reference
from vllm_delta_sync.codec.tiles.grid import (
    MOST_RECTANGLES,
    TILE_ELEMENTS,
    Grid,
    TensorView,
    covered_rectangles,
    extent,
    grid_of,
    least_tiles,
    shares_of_threads,
    view_of,
)
from vllm_delta_sync.errors import UnsupportedError
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.changes import Rectangle

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 400_000)),
    st.tuples(st.integers(1, 3000), st.integers(1, 3000)),
    st.tuples(st.integers(1, 40_000), st.integers(60, 300)),
    st.tuples(st.integers(1, 3), st.integers(1, 400_000)),
    st.tuples(st.integers(1, 9), st.integers(1, 600), st.integers(1, 600)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 200), st.integers(1, 200)),
)
RANKS = (2, 3, 4, 6, 8, 16)
VOCABULARIES = list(product((49_152, 128_256, 151_936), (576, 896, 2048, 4096, 8192)))
MATRICES = [(4096, 4096), (8192, 28_672), (7168, 2048), (2048, 7168)]
SMALL_MATRICES = [(576, 576), (576, 1536), (192, 576)]


def tiles_of(grid: Grid) -> list[reference.Tile]:
    return [
        reference.Tile(*band, *part)
        for band in pairwise(grid.row_edges.tolist())
        for part in pairwise(grid.column_edges.tolist())
    ]


@given(shape=SHAPES)
def test_the_grid_is_that_of_the_specification(shape: tuple[int, ...]) -> None:
    grid, rows = grid_of(shape), reference.matrix(shape)
    assert (grid.row_edges.tolist(), grid.column_edges.tolist()) == reference.grid(shape)
    assert extent(shape) == rows == (grid.row_edges[-1], grid.columns)
    assert (grid.tiles, tiles_of(grid)) == (grid.bands * grid.across, reference.tiles_of(shape))


def test_the_grids_of_models_are_those_of_the_specification() -> None:
    """Each list of ranks is the one that is taken for one of these."""
    experts = [(8, 1536, 2048), (128, 768, 2048), (16, 200, 320), (4, 96, 640), (3, 300, 300), (2, 450, 126)]
    others = [(576,), (49_152,), (151_936,), (3 * 2**20,), (5120, 5120), (1280, 1280), (640, 640)]
    # Divided by one number of ranks only.
    others += [(size, size) for size in (4094, 4095, 4100, 1574, 1575, 1580, 802, 801)]
    lower = [(rows, columns) for rows in (96, 192, 288, 320, 384, 450, 512, 600) for columns in (64, 126, 320, 576)]
    for shape in [*VOCABULARIES, *MATRICES, *SMALL_MATRICES, *experts, *others, *lower]:
        grid = grid_of(shape)
        assert (grid.row_edges.tolist(), grid.column_edges.tolist()) == reference.grid(shape), shape


@given(shape=SHAPES)
@example((8192, 28_672))
@example((24_576, 1536))
@example((129_280, 7168))
@example((256, 2048, 7168))
@example((2**31 + 1,))
def test_tiles_part_a_tensor(shape: tuple[int, ...]) -> None:
    """Each has an element at least, and none more than the scratch memory of readers and writers holds."""
    grid, numel = grid_of(shape), int(np.prod(shape, dtype=np.int64))
    for edges, end in ((grid.row_edges, numel // grid.columns), (grid.column_edges, grid.columns)):
        assert edges[0] == 0
        assert edges[-1] == end
        assert np.all(np.diff(edges) > 0)
    sizes = grid.covered(None)
    assert sizes.sum() == numel
    assert sizes.max() < 2 * TILE_ELEMENTS
    assert least_tiles(numel) <= grid.tiles


def shares(size: int, ranks: int) -> list[tuple[int, int]]:
    return [(size * rank // ranks, size * (rank + 1) // ranks) for rank in range(ranks)]


def cut(grid: Grid, parts: list[Rectangle]) -> int:
    whole = grid.covered(None)
    return sum(int(np.sum((found > 0) & (found < whole))) for found in (grid.covered([part]) for part in parts))


ODD_VOCABULARIES = [(32_003, 2048), (50_257, 768), (50_265, 1024), (256_003, 2304)]


def test_ranks_that_share_a_vocabulary_cut_no_tile() -> None:
    """vLLM gives each the same number of rows, once there are so many that 64 divides them."""
    even = [(shape, ranks) for shape, ranks in product(VOCABULARIES, RANKS) if not shape[0] % ranks]
    for (rows, columns), ranks in [*even, *product(ODD_VOCABULARIES, (2, 4, 8, 16))]:
        padded = (rows + 63) // 64 * 64
        parts = [(min(first, rows), min(last, rows), 0, columns) for first, last in shares(padded, ranks)]
        held = [part for part in parts if part[0] < part[1]]
        assert cut(grid_of((rows, columns)), held) == 0, (rows, columns, ranks)


SHARED = [*product(MATRICES, RANKS), *product(SMALL_MATRICES, (3,)), ((576, 1536), 2), ((576, 1536), 4)]
SMALL_ROWS = (192, 576)
"""A projection to few heads, whose rows are shared."""
STACKED = [
    *product([(8, 1536, 4096), (256, 2048, 7168)], RANKS),
    *product([(128, 768, 2048), (4, 2, 1536, 2048)], RANKS[:-1]),
]


def test_ranks_that_share_a_matrix_or_a_vector_cut_no_tile() -> None:
    for (rows, columns), ranks in SHARED:
        grid = grid_of((rows, columns))
        if not rows % ranks:
            assert cut(grid, [(*part, 0, columns) for part in shares(rows, ranks)]) == 0, (rows, columns, ranks)
        if not columns % ranks and (rows, columns) != SMALL_ROWS:
            assert cut(grid, [(0, rows, *part) for part in shares(columns, ranks)]) == 0, (rows, columns, ranks)
    for size, ranks in product([96, 576, 28_672, 151_936, 3 * 2**20], RANKS):
        assert size % ranks or cut(grid_of((size,)), [(0, 1, *part) for part in shares(size, ranks)]) == 0, size


@pytest.mark.parametrize("dim", [-3, -2, -1])
def test_ranks_that_share_stacked_experts_cut_no_tile(dim: int) -> None:
    """By experts, or each expert by rows or by columns."""
    for shape, ranks in ((shape, ranks) for shape, ranks in STACKED if not shape[dim] % ranks):
        grid, (rows, columns), height = grid_of(shape), extent(shape), shape[-2]
        whole, total = grid.covered(None), 0
        for rank in range(ranks):
            held: list[Rectangle] = [(0, rows, *shares(columns, ranks)[rank])]
            if dim < -1:
                # Experts that follow each other, or so many rows of each.
                block = shape[-3] * height if dim == -3 else height
                first, last = shares(block, ranks)[rank]
                held = [(top + first, top + last, 0, columns) for top in range(0, rows, block)]
            found = grid.covered(held)
            assert np.all((found == 0) | (found == whole)), (shape, ranks)
            total += int(found.sum())
        assert total == whole.sum(), (shape, ranks)


# Views as rectangles


@given(data=st.data(), shape=st.sampled_from([(300,), (12, 70), (3, 20, 30), (4, 6, 64), (2, 3, 4, 65), (40, 9)]))
def test_rectangles_of_boxes_are_what_the_boxes_have(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Such as tensor parallelism gives its ranks."""
    spec, dim = TensorSpec("t", "BF16", shape), data.draw(st.integers(0, len(shape) - 1))
    edges = sorted({0, shape[dim], *data.draw(st.lists(st.integers(0, shape[dim]), max_size=4))})
    wanted, views = np.zeros(shape, np.bool_), []
    for first, last in pairwise(edges):
        if data.draw(st.booleans()):
            offsets = tuple(first if place == dim else 0 for place in range(len(shape)))
            box = Box(offsets, tuple(last - first if place == dim else size for place, size in enumerate(shape)), shape)
            wanted[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.shape, strict=True))] = True
            views.append(view_of(box))
    assert_covers(spec, covered_rectangles(spec, views), wanted.reshape(-1))


def assert_covers(spec: TensorSpec, found: tuple[Rectangle, ...] | None, wanted: np.ndarray) -> None:
    if found is None:
        assert wanted.all()
        return
    assert not wanted.all()
    covered = np.zeros(extent(spec.shape), np.int64)
    for top, bottom, left, right in found:
        assert top < bottom
        assert left < right
        covered[top:bottom, left:right] += 1
    assert np.array_equal(covered.reshape(-1), wanted)


def test_a_rank_that_holds_too_many_pieces_is_refused_by_name() -> None:
    spec = TensorSpec("model.odd.weight", "BF16", (MOST_RECTANGLES * 4, 64))
    every_other = TensorView(0, (MOST_RECTANGLES, 64), (128, 1))
    assert len(covered_rectangles(spec, [every_other]) or ()) == MOST_RECTANGLES
    one_more = TensorView(0, (MOST_RECTANGLES + 1, 64), (128, 1))
    with pytest.raises(UnsupportedError, match=r"'model\.odd\.weight' in more than 4096 pieces.*codec='plain'"):
        covered_rectangles(spec, [one_more])
    with pytest.raises(UnsupportedError, match="4096 pieces"):
        covered_rectangles(spec, [TensorView(row * 128, (64,), (1,)) for row in range(MOST_RECTANGLES + 1)])


def test_threads_share_small_tensors_without_a_look_at_each_for_each_thread() -> None:
    looks = 0

    class Grids(list[Grid]):
        def __getitem__(self, place: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().__getitem__(place)

    with many_threads(4):
        assert len(shares_of_threads(Grids([grid_of((64,))] * 1000))) == 4
    assert looks < 100


def test_threads_have_about_as_much_to_do() -> None:
    grids = [grid_of(shape) for shape in ((64,), (1536, 576), (4096, 4096), (576, 1536), (49_152, 576))]
    whole = sum(grid.numel for grid in grids)
    with many_threads(4):
        shares = shares_of_threads(grids)
    for share in shares:
        rows = [(grids[number], grids[number].row_edges[[span.first, span.last]]) for number, span in share]
        elements = sum(int(edges[1] - edges[0]) * grid.columns for grid, edges in rows)
        assert abs(elements - whole / 4) < whole / 100

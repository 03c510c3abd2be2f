"""Codec context: what is encoded comes back bit for bit, whole or tile by tile, and as docs/FORMAT.md reads it."""

import json
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.reference_context import read_block
from vllm_delta_sync.codec import delta_reader, delta_writer
from vllm_delta_sync.codec.context import coder, encode_kernels, tile_threads, tiles
from vllm_delta_sync.codec.context.tables import dropped_bits
from vllm_delta_sync.codec.context.tiles import TILE_ELEMENTS, Grid, choose_grid, extent, read_grid, select_tiles
from vllm_delta_sync.codec.delta_object import DeltaContext, bytes_of
from vllm_delta_sync.codec.packed import zigzag
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import FormatError, UnsupportedError, UsageError
from vllm_delta_sync.format.dtypes import DTYPES
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.bits import BaseLookup, BaseTensor, Rectangle, diff
from vllm_delta_sync.tensors.changes import Changes, Sparse

CONTEXT = DeltaContext("0" * 32, 1, 0)
FLOATS = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "F64")


def changes_of(table: TensorTable, old: list[np.ndarray], new: list[np.ndarray]) -> Changes:
    """What leads from ``old`` to ``new``; flat bits by tensor id."""
    changes, found = Changes(), {}
    for tensor, spec in enumerate(table):
        positions, distances, change = diff(spec.name, spec.element, old[tensor].copy(), new[tensor])
        if positions.size:
            found[tensor] = (positions, distances)
            changes.fingerprints[tensor] = change
    for dtype in sorted({table[tensor].dtype for tensor in found}):
        ids = [tensor for tensor in sorted(found) if table[tensor].dtype == dtype]
        changes.sparse.append(
            Sparse(
                dtype,
                np.array(ids, np.uint32),
                np.array([found[tensor][0].size for tensor in ids], np.int64),
                np.concatenate([found[tensor][0] for tensor in ids]),
                np.concatenate([found[tensor][1] for tensor in ids]),
                True,
            )
        )
    return changes


def whole(bits: list[np.ndarray]) -> BaseLookup:
    return lambda tensor: BaseTensor(bits[tensor])


def held(bits: np.ndarray, *parts: Rectangle) -> BaseLookup:
    return lambda tensor: BaseTensor(bits, parts)


def encoded(table: TensorTable, old: list[np.ndarray], new: list[np.ndarray], how: Compression = "zstd") -> bytes:
    return delta_writer.encode(changes_of(table, old, new), table, "context", how, CONTEXT, whole(old))


def flat(changes: Changes) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    found = {}
    for group in changes.sparse:
        for tensor, positions, data in group.tensors():
            found[tensor] = (positions, data)
    return found


def assert_same(left: Changes, right: Changes) -> None:
    first, second = flat(left), flat(right)
    assert first.keys() == second.keys()
    for tensor, (positions, data) in first.items():
        np.testing.assert_array_equal(positions, second[tensor][0])
        np.testing.assert_array_equal(data, second[tensor][1])
    assert left.fingerprints == right.fingerprints


def trained(
    shape: tuple[int, ...], seed: int, dtype: str = "BF16", share: float = 0.02
) -> tuple[np.ndarray, np.ndarray]:
    """Bits of normal weights before and after a step that changes small ones more often."""
    generator, element = np.random.default_rng(seed), DTYPES[dtype]
    size = int(np.prod(shape, dtype=np.int64))
    old = generator.normal(0, 0.02, size).astype(np.float32).view(np.uint32)
    bits = (
        (old >> np.uint32(32 - 8 * element.itemsize)).astype(element.uint)
        if element.itemsize <= 4
        else old.astype(element.uint) << element.uint.type(32)
    )
    new = bits.copy()
    changed = generator.random(size) < np.minimum(share * 0.01 / np.abs(old.view(np.float32)), 0.9)
    new[changed] += generator.choice(np.array([1, 2, 3], element.uint), int(changed.sum()))
    return bits, new


@given(data=st.data())
def test_any_bits_come_back(data: st.DataObject) -> None:
    element = DTYPES[data.draw(st.sampled_from(sorted(DTYPES)))]
    shapes = data.draw(
        st.lists(st.lists(st.integers(1, 14), min_size=0, max_size=3).map(tuple), min_size=1, max_size=3)
    )
    table = TensorTable([TensorSpec(f"t{i}", element.name, shape) for i, shape in enumerate(shapes)])
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    top = 1 << (8 * element.itemsize)
    old = [generator.integers(0, top, spec.numel, dtype=np.uint64).astype(element.uint) for spec in table]
    share = data.draw(st.sampled_from([0.01, 0.2, 1.0]))
    new = [np.where(generator.random(bits.size) < share, generator.permutation(bits), bits) for bits in old]
    how: Compression = data.draw(st.sampled_from(["zstd", "none"]))
    wanted = changes_of(table, old, new)
    with patch.object(tiles, "SAVED_BYTES", data.draw(st.sampled_from([0.0, 0.35, 1e9]))):
        written = encoded(table, old, new, how)
    assert_same(wanted, delta_reader.decode(written, table, CONTEXT, whole(old)))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_every_pair_of_eight_bit_patterns(dtype: str) -> None:
    table = TensorTable([TensorSpec("t", dtype, (256, 256))])
    old = np.repeat(np.arange(256, dtype=np.uint8), 256)
    new = np.tile(np.arange(256, dtype=np.uint8), 256)
    assert_same(
        changes_of(table, [old], [new]), delta_reader.decode(encoded(table, [old], [new]), table, CONTEXT, whole([old]))
    )


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_sixteen_bit_pattern_on_either_side(dtype: str) -> None:
    table = TensorTable([TensorSpec("t", dtype, (256, 512))])
    every = np.arange(65536, dtype=np.uint16)
    other = np.random.default_rng(0).permutation(every)
    old, new = np.concatenate([every, other]), np.concatenate([other, every])
    assert_same(
        changes_of(table, [old], [new]), delta_reader.decode(encoded(table, [old], [new]), table, CONTEXT, whole([old]))
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_as_the_specification_reads_it(dtype: str) -> None:
    shapes = [(48, 64), (300, 2), (3, 8, 20)]
    table = TensorTable([TensorSpec(f"t{i}", dtype, shape) for i, shape in enumerate(shapes)])
    pairs = [trained(shape, i, dtype, 0.3) for i, shape in enumerate(shapes)]
    old, new = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    container = Container(encoded(table, old, new, "none"))
    assert json.loads(container.metadata["delta_sync"])["blocks"] == [{"dtype": dtype, "kind": "tiles"}]
    tables, streams = (bytes_of(container, f"@0.{part}").tobytes() for part in ("tables", "streams"))
    element = DTYPES[dtype]
    found = read_block(tables, streams, shapes, old, 8 * element.itemsize, element.is_float)
    for tensor, (positions, distances) in flat(changes_of(table, old, new)).items():
        signed = distances.view(f"<i{element.itemsize}")
        assert found[tensor] == dict(zip(positions.tolist(), signed.tolist(), strict=True))


def entries_of(
    group: Sparse, table: TensorTable, grid: Grid, keys: np.ndarray, old: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], int]:
    """Class, gap + 1 and zigzag − 1 of each entry of a tensor."""
    room = group.positions.size + grid.tiles * (keys.size + 1)
    kinds, gaps, values = np.empty(room, np.uint8), np.empty(room, np.uint32), np.empty(room, group.element.uint)
    used = encode_kernels.entries_of_span(
        old, grid.array(), grid.spans()[0], dropped_bits(group.element), keys, group.positions,
        zigzag(group.data, group.element), kinds, gaps, values, np.empty(grid.tiles, np.int64),
    )  # fmt: skip
    return (kinds, gaps, values), used


def test_the_example_of_the_specification() -> None:
    old = np.array([0x3F80, 0x3C00, 0x3F81, 0x3C01, 0xBF80, 0x3C02, 0x3F82, 0xBC03], np.uint16)
    new = old.copy()
    new[[1, 5]] += 1
    new[7] += 1  # a greater magnitude below zero is one less in the order of numbers
    table = TensorTable([TensorSpec("t", "BF16", (2, 4))])
    group = changes_of(table, [old], [new]).sparse[0]
    assert group.data.view(np.int16).tolist() == [1, 1, -1]
    entries, used = entries_of(group, table, Grid(2, 4, 2, 2, 4), np.array([0x7C], np.uint8), old)
    assert [array[:used].tolist() for array in entries] == [[0, 0, 0, 0, 1], [1, 2, 1, 0, 0], [1, 1, 0, 0, 0]]


def held_parts(spec: TensorSpec, ranks: int, by: str) -> list[Rectangle]:
    rows, columns = extent(spec.shape)
    if by == "rows":
        return [(rows * r // ranks, rows * (r + 1) // ranks, 0, columns) for r in range(ranks)]
    return [(0, rows, columns * r // ranks, columns * (r + 1) // ranks) for r in range(ranks)]


@pytest.mark.parametrize("by", ["rows", "columns"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_their_own_tiles(by: str, ranks: int) -> None:
    spec = TensorSpec("t", "BF16", (512, 384))
    table = TensorTable([spec])
    old, new = trained(spec.shape, 1, share=0.05)
    data = encoded(table, [old], [new])
    positions, distances = flat(changes_of(table, [old], [new]))[0]
    seen = 0
    for part in held_parts(spec, ranks, by):
        first, last, left, right = part
        own = np.zeros(spec.shape, np.uint16)
        own[first:last, left:right] = old.reshape(spec.shape)[first:last, left:right]
        # Bits that this rank does not hold are noise: reading them would show.
        own = np.where(own == 0, np.random.default_rng(9).integers(0, 65536, spec.shape, np.uint16), own)
        own[first:last, left:right] = old.reshape(spec.shape)[first:last, left:right]
        found = delta_reader.decode(data, table, CONTEXT, held(own.reshape(-1), part))
        rows, columns = np.divmod(positions, spec.shape[1])
        mine = (rows >= first) & (rows < last) & (columns >= left) & (columns < right)
        np.testing.assert_array_equal(flat(found)[0][0], positions[mine])
        np.testing.assert_array_equal(flat(found)[0][1], distances[mine])
        seen += int(mine.sum())
    assert seen == positions.size


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Three threads code every tensor, however small."""
    with patch.object(tile_threads, "THREADS", 3), patch.object(tiles, "THREAD_ELEMENTS", 1):
        with patch.object(coder, "THREAD_ENTRIES", 1):
            yield


def test_threads_write_the_same_object(request: pytest.FixtureRequest) -> None:
    shapes = [(1536, 384), (5, 96, 64), (7,), (64, 3000)]
    table = TensorTable([TensorSpec(f"t{i}", "BF16", shape) for i, shape in enumerate(shapes)])
    pairs = [trained(shape, i, share=0.05) for i, shape in enumerate(shapes)]
    old, new = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    data = encoded(table, old, new)
    alone = delta_reader.decode(data, table, CONTEXT, whole(old))
    request.getfixturevalue("three_threads")
    grids = [choose_grid(spec, 1000) for spec in table]
    assert max(len(grid.spans()) for grid in grids) == 3
    assert encoded(table, old, new) == data
    assert_same(delta_reader.decode(data, table, CONTEXT, whole(old)), alone)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("changed", [(0, 8), (100, 108), (500, 512), (0, 1)])
def test_tiles_without_changes_are_nothing_but_lengths(changed: tuple[int, int], threads: int) -> None:
    spec = TensorSpec("t", "BF16", (512, 384))
    table = TensorTable([spec])
    old, new = trained(spec.shape, 1, share=0.05)
    kept = np.ones(spec.shape, np.bool_)
    kept[changed[0] : changed[1]] = False
    new = np.where(kept.reshape(-1), old, new)
    with patch.object(tile_threads, "THREADS", threads), patch.object(tiles, "THREAD_ELEMENTS", 1):
        with patch.object(coder, "THREAD_ENTRIES", 1), patch.object(tiles, "CHANGES_PER_TILE", 1):
            assert choose_grid(spec, 100).tiles > 16
            data = encoded(table, [old], [new])
            found = delta_reader.decode(data, table, CONTEXT, whole([old]))
    assert_same(changes_of(table, [old], [new]), found)


@given(shape=st.lists(st.integers(1, 3000), min_size=1, max_size=3).map(tuple), share=st.floats(1e-6, 1.0))
def test_spans_are_the_bands_of_a_tensor_in_order(shape: tuple[int, ...], share: float) -> None:
    spec = TensorSpec("t", "BF16", shape)
    with patch.object(tile_threads, "THREADS", 3), patch.object(tiles, "THREAD_ELEMENTS", 1):
        grid = choose_grid(spec, max(1, round(share * spec.numel)))
        spans = grid.spans()
    first = [*grid.rectangles()[:, 0].tolist(), grid.rows]
    assert [span.first_tile for span in spans] == [0, *(span.last_tile for span in spans[:-1])]
    assert spans[-1].last_tile == grid.tiles
    for span in spans:
        assert (span.first_row, span.last_row) == (first[span.first_tile], first[span.last_tile])


@pytest.mark.usefixtures("three_threads")
def test_an_error_in_any_thread_is_raised() -> None:
    spec = TensorSpec("t", "BF16", (512, 384))
    table = TensorTable([spec])
    old, new = trained(spec.shape, 1, share=0.05)
    data = bytearray(encoded(table, [old], [new], "none"))
    streams = bytes_of(Container(bytes(data)), "@0.streams").tobytes()
    start = bytes(data).index(streams)
    data[start + len(streams) - 40 : start + len(streams)] = bytes(40)
    with pytest.raises(FormatError, match="tile"):
        delta_reader.decode(bytes(data), table, CONTEXT, whole([old]))


def test_a_rank_that_holds_nothing_reads_nothing() -> None:
    table = TensorTable([TensorSpec("t", "BF16", (64, 64))])
    old, new = trained((64, 64), 1)
    found = delta_reader.decode(encoded(table, [old], [new]), table, CONTEXT, held(old))
    assert not found.sparse
    assert found.fingerprints.keys() == {0}


def test_a_tile_held_in_part_is_refused() -> None:
    table = TensorTable([TensorSpec("model.up.weight", "BF16", (512, 384))])
    old, new = trained((512, 384), 1, share=0.05)
    third = (0, 512 // 3, 0, 384)
    with pytest.raises(UnsupportedError, match=r"'model\.up\.weight' is coded in tiles .* only in part"):
        delta_reader.decode(encoded(table, [old], [new]), table, CONTEXT, held(old, third))


def test_other_old_bits_are_found_or_harmless() -> None:
    table = TensorTable([TensorSpec("t", "BF16", (256, 256))])
    old, new = trained((256, 256), 1)
    other = trained((256, 256), 2)[0]
    with pytest.raises(FormatError, match="damaged, or was made against other weights"):
        delta_reader.decode(encoded(table, [old], [new]), table, CONTEXT, whole([other]))


def test_old_bits_are_asked_for() -> None:
    table = TensorTable([TensorSpec("t", "BF16", (8, 8))])
    old, new = trained((8, 8), 1, share=0.5)
    data = encoded(table, [old], [new])
    with pytest.raises(UnsupportedError, match="context"):
        delta_reader.decode(data, table, CONTEXT)
    with pytest.raises(UsageError, match="context"):
        delta_writer.encode(changes_of(table, [old], [new]), table, "context", "zstd", CONTEXT)


@given(shape=st.lists(st.integers(1, 3000), min_size=1, max_size=3).map(tuple), share=st.floats(1e-6, 1.0))
def test_tiles_cover_a_tensor_once(shape: tuple[int, ...], share: float) -> None:
    spec = TensorSpec("t", "BF16", shape)
    grid = choose_grid(spec, max(1, int(share * spec.numel)))
    cut = grid.rectangles()
    assert len(cut) == grid.tiles
    areas = (cut[:, 1] - cut[:, 0]) * (cut[:, 3] - cut[:, 2])
    assert areas.min() >= 1
    assert areas.sum() == spec.numel
    ordered = sorted(map(tuple, cut.tolist()))
    assert len(set(ordered)) == grid.tiles


@given(shape=st.lists(st.integers(1, 300_000), min_size=1, max_size=3).map(tuple), share=st.floats(1e-6, 1.0))
@example((8192, 28672), 0.01)
@example((24576, 1536), 0.01)
@example((129_280, 7168), 0.01)
def test_readers_take_the_grid_of_a_writer(shape: tuple[int, ...], share: float) -> None:
    """Also that of the large tensors of real models, whose tiles have one row more than would fit."""
    spec = TensorSpec("t", "BF16", shape)
    grid = choose_grid(spec, max(1, int(share * spec.numel)))
    assert read_grid(spec, (grid.slab, grid.height, grid.width), "test") == grid
    assert grid.height * grid.width <= TILE_ELEMENTS + grid.width


@pytest.mark.parametrize("share", [0.001, 0.01, 0.2])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shape", [(4096, 4096), (11008, 4096), (4096, 11008), (151936, 1024), (64, 1536, 4096)])
def test_usual_cuts_split_no_tile(shape: tuple[int, ...], ranks: int, share: float) -> None:
    spec = TensorSpec("t", "BF16", shape)
    grid = choose_grid(spec, int(spec.numel * share))
    parts = held_parts(spec, ranks, "rows")
    if len(shape) == 3:
        parts = [
            (expert * shape[1] + shape[1] * r // ranks, expert * shape[1] + shape[1] * (r + 1) // ranks, 0, shape[2])
            for r in range(ranks)
            for expert in range(1)
        ]
    wide = shape[-2] < 8 * shape[-1]
    parts += held_parts(spec, ranks, "columns") if wide else []
    for part in parts:
        assert select_tiles(grid, [part], "t", "test").any()


def test_a_grid_knows_its_tiles() -> None:
    assert Grid(10, 7, 4, 3, 5).rectangles().tolist() == [
        [0, 3, 0, 5], [0, 3, 5, 7], [3, 4, 0, 5], [3, 4, 5, 7],
        [4, 7, 0, 5], [4, 7, 5, 7], [7, 8, 0, 5], [7, 8, 5, 7],
        [8, 10, 0, 5], [8, 10, 5, 7],
    ]  # fmt: skip

"""Parts of tensors: a rank that serves reads the tiles that it holds, one that trains writes what it holds."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.tiling import (
    all_trained,
    by_the_letter,
    classes_at,
    encoded,
    flat,
    many_threads,
    numbers_of,
    one_step,
    signed,
    trained,
    whole,
)
from tests.support import reference_tiles as reference
from tests.support.samples import CONTEXT, changes_between, state_of
from vllm_delta_sync.codec.delta_reader import DeltaReader, decode
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.tiles.grid import TensorView, covered_rectangles, extent, grid_of
from vllm_delta_sync.errors import UnsupportedError
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, InPlace, Matrix, Rectangle

SHAPES = [(384, 384), (256, 192), (520, 130), (3, 200, 128), (70_001,), (90_000, 1), (520, 65), (4, 30, 40)]
KEYS = [115, 118, 119, 121]


def mask_of(shape: tuple[int, ...], parts: Sequence[Rectangle]) -> np.ndarray:
    """(numel,) bool: what rectangles cover."""
    found = np.zeros(extent(shape), np.bool_)
    for top, bottom, left, right in parts:
        found[top:bottom, left:right] = True
    return found.reshape(-1)


def held(bits: Bits, shape: tuple[int, ...], parts: Sequence[Rectangle], seed: int = 9) -> BaseTensor:
    """The bits of some parts; elsewhere is noise: to read it would show."""
    noise = np.resize(np.frombuffer(np.random.default_rng(seed).bytes(1 << 16), bits.dtype), bits.size)
    return BaseTensor(np.where(mask_of(shape, parts), bits, noise), tuple(parts))


def tiles_with_changes(data: bytes) -> dict[int, bool]:
    """Number of each tile with changes → whether it is plain. Compression: none."""
    return {tile: number >> 31 == 1 for tile, number in enumerate(numbers_of(data)) if number}


@given(data=st.data(), shape=st.sampled_from(SHAPES), threads=st.sampled_from([1, 3]))
def test_of_whole_tiles_a_rank_reads_exactly_its_changes(
    data: st.DataObject, shape: tuple[int, ...], threads: int
) -> None:
    table, old, new = one_step(
        shape, data.draw(st.integers(0, 9)), share=data.draw(st.sampled_from([0.001, 0.05, 1.0]))
    )
    tiles = reference.tiles_of(shape)
    parts = data.draw(st.lists(st.sampled_from(tiles), unique=True))
    changes, inside = changes_between(table, [old], [new]), mask_of(shape, parts)
    with classes_at(KEYS), many_threads(threads):
        written = encode(changes, table, "tiled", "zstd", CONTEXT, whole([old]))
        found = decode(written, table, CONTEXT, lambda _: held(old, shape, parts))
        lazy = DeltaReader(written, table, CONTEXT, lambda _: held(old, shape, parts)).take("BF16", 1)
    wanted = {where: step for where, step in signed(changes)[0].items() if inside[where]}
    assert signed(found) == ({0: wanted} if wanted else {})
    assert [group.positions.tolist() for group in lazy if group.positions.size] == ([sorted(wanted)] if wanted else [])
    # What a rank does not hold is declared all the same.
    assert found.fingerprints == changes.fingerprints


def test_a_rank_that_holds_nothing_reads_nothing() -> None:
    table, old, new = one_step((64, 64), 1)
    codecs: list[Codec] = ["tiled", "plain"]
    for codec in codecs:
        found = decode(encoded(table, [old], [new], codec), table, CONTEXT, lambda _: BaseTensor(old, ()))
        assert not found.sparse
        assert found.fingerprints.keys() == {0}


@pytest.mark.parametrize("shape", [(512, 384), (70_001,), (3, 200, 128)])
def test_a_tile_that_is_cut_is_refused_with_the_mend(shape: tuple[int, ...]) -> None:
    spec = TensorSpec("model.up.weight", "BF16", shape)
    table = TensorTable([spec])
    old, new = trained(shape, 1, share=0.05)
    data = encoded(table, [old], [new], "tiled", "none")
    tiles = reference.tiles_of(shape)
    assert tiles_with_changes(data) == dict.fromkeys(range(len(tiles)), False)
    for number, (top, bottom, left, right) in enumerate(tiles):
        part = (top, bottom, left, right - 1)
        wanted = rf"'model\.up\.weight', this rank has only a part of tile {number}, .*publish with codec='plain'"
        with pytest.raises(UnsupportedError, match=wanted):
            decode(data, table, CONTEXT, lambda _, part=part: held(old, shape, [part]))  # type: ignore[misc]


def test_a_tile_that_is_cut_and_does_not_change_is_not_read() -> None:
    shape = (512, 384)
    table, tiles = TensorTable([TensorSpec("t", "BF16", shape)]), reference.tiles_of(shape)
    old, new = trained(shape, 1, share=0.05)
    new = np.where(mask_of(shape, [tiles[3]]), new, old)
    data = encoded(table, [old], [new])
    (top, bottom, left, right), other = tiles[4], tiles[3]
    parts = [(top, bottom, left, right - 1), other]
    assert signed(decode(data, table, CONTEXT, lambda _: held(old, shape, parts))) == signed(
        changes_between(table, [old], [new])
    )


@given(data=st.data(), shape=st.sampled_from(SHAPES), threads=st.sampled_from([1, 3]))
def test_of_plain_tiles_a_rank_reads_all_that_it_meets(
    data: st.DataObject, shape: tuple[int, ...], threads: int
) -> None:
    """It drops what it does not hold: a tile is read from its first change on."""
    table, (rows, columns) = TensorTable([TensorSpec("t", "BF16", shape)]), extent(shape)
    old, new = trained(shape, 1, share=data.draw(st.sampled_from([0.001, 0.05])))
    down = sorted(data.draw(st.lists(st.integers(0, rows), min_size=2, max_size=2, unique=True)))
    along = sorted(data.draw(st.lists(st.integers(0, columns), min_size=2, max_size=2, unique=True)))
    part = (down[0], down[1], along[0], along[1])
    met = [
        tile
        for tile in reference.tiles_of(shape)
        if tile.top < down[1] and down[0] < tile.bottom and tile.left < along[1] and along[0] < tile.right
    ]
    changes, inside = changes_between(table, [old], [new]), mask_of(shape, met)
    with many_threads(threads):
        written = encode(changes, table, "plain", "zstd", CONTEXT)
        found = decode(written, table, CONTEXT, lambda _: held(old, shape, [part]))
    wanted = {where: step for where, step in signed(changes)[0].items() if inside[where]}
    assert signed(found) == ({0: wanted} if wanted else {})


# Ranks of a trainer

TRAINED = TensorTable(
    [
        TensorSpec("a.weight", "BF16", (512, 512)),
        TensorSpec("b.weight", "BF16", (1300, 70)),
        TensorSpec("c.experts", "BF16", (3, 130, 128)),
        TensorSpec("d.bias", "BF16", (501,)),
        TensorSpec("e.master", "F32", (180, 160)),
    ]
)


def rows_of(spec: TensorSpec, ranks: int) -> list[list[tuple[int, int]]]:
    """As FSDP gives them: rows of the first dimension, as many to each; fewer or none to the last ones."""
    size, each = spec.shape[0], -(-spec.shape[0] // ranks)
    inner = spec.numel // size
    return [[(min(each * rank, size) * inner, min(each * (rank + 1), size) * inner)] for rank in range(ranks)]


def flat_ranges_of(spec: TensorSpec, ranks: int) -> list[list[tuple[int, int]]]:
    """As ZeRO gives them: ranges of elements of all tensors together, that begin and end anywhere."""
    start = sum(other.numel for other in TRAINED if other.name < spec.name)
    each = -(-sum(other.numel for other in TRAINED) // ranks)
    edges = [min(max(each * rank - start, 0), spec.numel) for rank in range(ranks + 1)]
    return [[piece] for piece in pairwise(edges)]


def blocks_of(spec: TensorSpec, ranks: int) -> list[list[tuple[int, int]]]:
    """As a two-dimensional layout gives them: pieces of rows, in turn."""
    edges = np.linspace(0, spec.numel, 6 * ranks + 1).astype(np.int64).tolist()
    pieces = list(pairwise(edges))
    return [pieces[rank::ranks] for rank in range(ranks)]


Layout = Callable[[TensorSpec, int], list[list[tuple[int, int]]]]
"""Per rank, the flat ranges of a tensor that it holds."""
LAYOUTS: list[tuple[Layout, int]] = [
    (rows_of, 3), (rows_of, 4), (rows_of, 7), (flat_ranges_of, 3), (flat_ranges_of, 5), (blocks_of, 2),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS, ids=[f"{how.__name__}-{ranks}" for how, ranks in LAYOUTS])
def test_ranks_of_a_trainer_write_what_one_writer_does(layout: Layout, ranks: int) -> None:
    old, new = all_trained(TRAINED, 0.05)
    changes, objects, pieces = changes_between(TRAINED, old, new), [], 0
    parts = {tensor: layout(spec, ranks) for tensor, spec in enumerate(TRAINED)}
    for rank in range(ranks):
        mine, bases = [], []
        for tensor, spec in enumerate(TRAINED):
            ranges = [piece for piece in parts[tensor][rank] if piece[0] < piece[1]]
            inside = np.zeros(spec.numel, np.bool_)
            for first, last in ranges:
                inside[first:last] = True
            mine.append(np.where(inside, new[tensor], old[tensor]))
            views = [TensorView(first, (last - first,), (1,)) for first, last in ranges]
            rectangles = covered_rectangles(spec, views)
            rows, columns = extent(spec.shape)
            whole_or_parts = [(0, rows, 0, columns)] if rectangles is None else rectangles
            assert np.array_equal(mask_of(spec.shape, whole_or_parts), inside)
            noise = held(old[tensor], spec.shape, whole_or_parts, rank).bits
            bases.append(BaseTensor(noise, rectangles))
        own = changes_between(TRAINED, old, mine)
        if own.changed:
            with many_threads(1 + ranks % 2), classes_at(KEYS):
                data = encode(own, TRAINED, "tiled", "none", CONTEXT, bases.__getitem__)
                # The same if this rank's bits have the changes already, and if it has nothing but one rectangle.
                for tensor, base in enumerate(bases):
                    moved, in_place = np.where(mine[tensor] != old[tensor], mine[tensor], base.bits), None
                    if base.rectangles is not None and len(base.rectangles) == 1:
                        [(top, bottom, left, right)] = base.rectangles
                        part = moved.reshape(extent(TRAINED[tensor].shape))[top:bottom, left:right].copy()
                        stride = right - left
                        in_place = InPlace(Matrix(part.reshape(-1), -top * stride - left, stride), nullcontext)
                        pieces += 1
                    bases[tensor] = BaseTensor(moved, base.rectangles, in_place, after=True)
                assert encode(own, TRAINED, "tiled", "none", CONTEXT, bases.__getitem__) == data
            # Of a tile that is cut, a rank cannot know the classes.
            assert_plain_where_cut(data, bases)
            assert by_the_letter(data, TRAINED, old) == signed(own)
            objects.append(data)
    assert len(objects) > 1
    assert (pieces > 1) == (layout is rows_of)
    together = state_of(TRAINED, old)
    found: dict[int, reference.Changed] = {}
    for data in objects:
        piece = decode(data, TRAINED, CONTEXT, whole(old))
        together.apply(piece)
        for tensor, changed in signed(piece).items():
            assert not found.get(tensor, {}).keys() & changed.keys()
            found[tensor] = found.get(tensor, {}) | changed
    one = state_of(TRAINED, old)
    one.apply(decode(encoded(TRAINED, old, new), TRAINED, CONTEXT, whole(old)))
    for ours, theirs, wanted in zip(together.bits, one.bits, new, strict=True):
        assert ours.tobytes() == theirs.tobytes() == wanted.tobytes()
    assert together.fingerprint == one.fingerprint
    assert found == signed(changes)
    assert_served(objects, old, found)


def assert_plain_where_cut(data: bytes, bases: list[BaseTensor]) -> None:
    metadata, entries = reference.entries_of(data)
    for block in range(len(metadata["blocks"])):
        numbers, start = numbers_of(data, block), 0
        for tensor in np.frombuffer(entries[f"@{block}.ids"], "<u4").tolist():
            grid = grid_of(TRAINED[tensor].shape)
            whole_tiles = grid.covered(None) == grid.covered(bases[tensor].rectangles)
            own = np.array(numbers[start : start + grid.tiles])
            assert np.all(own[~whole_tiles.reshape(-1)] >> 31 == (own[~whole_tiles.reshape(-1)] > 0))
            assert np.all(own[whole_tiles.reshape(-1)] >> 31 == 0)
            start += grid.tiles


def assert_served(objects: list[bytes], old: list[Bits], wanted: dict[int, reference.Changed]) -> None:
    """A server on two ranks reads in the objects of a trainer's ranks what it holds, and drops what it does not."""
    spec = TRAINED[0]
    rows, columns = spec.shape
    for part in ((0, rows // 2, 0, columns), (0, rows, columns // 2, columns)):
        inside = mask_of(spec.shape, [part])
        found: reference.Changed = {}

        def lookup(tensor: int, part: Rectangle = part) -> BaseTensor:
            return held(old[0], spec.shape, [part]) if tensor == 0 else BaseTensor(old[tensor])

        for data in objects:
            read = flat(decode(data, TRAINED, CONTEXT, lookup)).get(0)
            if read is not None:
                steps = read[1].view(np.int16).tolist()
                found |= {where: step for where, step in zip(read[0].tolist(), steps, strict=True) if inside[where]}
        assert found == {where: step for where, step in wanted[0].items() if inside[where]}


TRAINERS, SERVERS = (3, 7), (1, 2, 3, 4, 6, 8, 16)
HEADS = [(49_152, 64), (50_257, 64)]


def shares(size: int, ranks: int) -> list[tuple[int, int]]:
    """How torch divides rows between the ranks of FSDP: all have the same number, but for the last ones."""
    each = -(-size // ranks)
    return [(min(rank * each, size), min((rank + 1) * each, size)) for rank in range(ranks)]


@pytest.mark.parametrize("trainers", TRAINERS)
@pytest.mark.parametrize(
    ("shape", "by"), [*((head, "rows") for head in HEADS), ((3072, 3072), "rows"), ((3072, 3072), "columns")]
)
def test_servers_of_any_size_read_what_trainers_of_any_size_write(
    shape: tuple[int, int], by: str, trainers: int
) -> None:
    """FSDP's ranks cut rows anywhere; those of a server share a head, or a matrix by rows or columns."""
    table, (rows, columns) = TensorTable([TensorSpec("t", "BF16", shape)]), shape
    old, new = trained(shape, 1, share=0.001)
    written = []
    for top, bottom in shares(rows, trainers):
        part = (top, bottom, 0, columns)
        mine = np.where(mask_of(shape, [part]), new, old)
        changes = changes_between(table, [old], [mine])
        written.append(encode(changes, table, "tiled", "zstd", CONTEXT, lambda _, part=part: held(old, shape, [part])))  # type: ignore[misc]
    expected = signed(changes_between(table, [old], [new]))[0]
    coded = 0
    for servers in SERVERS:
        size = rows if by == "rows" else columns
        # vLLM pads a vocabulary to whole multiples of 64 rows.
        padded = -(-size // 64) * 64 if shape in HEADS else size
        if padded % servers:
            continue
        seen: reference.Changed = {}
        for rank in range(servers):
            first, last = (min(size, padded * number // servers) for number in (rank, rank + 1))
            part = (first, last, 0, columns) if by == "rows" else (0, rows, first, last)
            base, inside = held(old, shape, [part]), mask_of(shape, [part])
            for data in written:
                found = signed(decode(data, table, CONTEXT, lambda _, base=base: base)).get(0, {})  # type: ignore[misc]
                # A plain tile is read whole.
                seen |= {where: step for where, step in found.items() if inside[where]}
        assert seen == expected
        coded += 1
    assert coded >= 5


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((384, 1024), (0, 384, 256, 768)),
        ((384, 1024), (100, 301, 0, 1000)),
        ((384, 1024), (0, 384, 0, 1024)),
        ((200_000,), (0, 1, 40_000, 170_001)),
        ((4, 160, 256), (160, 480, 0, 256)),
    ],
)
def test_a_part_in_memory_of_its_own_is_written_as_from_a_whole_tensor(
    shape: tuple[int, ...], part: Rectangle, after: bool
) -> None:
    table = TensorTable([TensorSpec("t", "BF16", shape)])
    old, new = trained(shape, 1, share=0.02)
    mine = np.where(mask_of(shape, [part]), new, old)
    changes, bits = changes_between(table, [old], [mine]), mine if after else old
    top, bottom, left, right = part
    stride, own = right - left, bits.reshape(extent(shape))[top:bottom, left:right].copy().reshape(-1)
    in_place = InPlace(Matrix(own, -top * stride - left, stride), nullcontext)
    with classes_at(KEYS):
        written = [
            encode(changes, table, "tiled", "none", CONTEXT, lambda _, base=base: base)  # type: ignore[misc]
            for base in (BaseTensor(bits, (part,), after=after), BaseTensor(own, (part,), in_place, after))
        ]
    assert written[0] == written[1]
    assert any(number and not number >> 31 for number in numbers_of(written[0]))

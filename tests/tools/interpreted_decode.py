"""The kernels that decode tiles against the loops for CPUs, tile by tile: run with TRITON_INTERPRET=1, or on a GPU.

Blocks come from the encoder and from the golden run, whole and as a rank holds them in other layouts, and as damaged
as streams can be. Each array is as large as it must be, between bytes that have to stay.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tests.codec.tiling import classes_at, encoded, trained
from tests.golden.regenerate import TILES, tiles_versions
from tests.support import reference_tiles as reference
from tests.support.samples import CONTEXT
from vllm_delta_sync.client import open_run
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_reader import DeltaReader, TilesReader
from vllm_delta_sync.codec.tiles import decode_kernels
from vllm_delta_sync.codec.tiles.alphabets import CLASSES, SYMBOLS, TABLES
from vllm_delta_sync.codec.tiles.coder import Decoding, decoding, key_limits, magnitude_mask
from vllm_delta_sync.codec.tiles.grid import CutTileError, Grid, grid_of
from vllm_delta_sync.engine.model import decode_triton
from vllm_delta_sync.engine.model.decode_triton import (
    DecodeArrays,
    OldBits,
    TileBatch,
    array_shapes,
    decode_tiles,
    joined_tiles,
    tile_fields,
)
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.kernels import read_only
from vllm_delta_sync.format.table import DTYPES, DType, TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, Rectangle

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
SHORT, NO_CODE, OUTSIDE = decode_kernels.SHORT, decode_kernels.NO_CODE, decode_kernels.OUTSIDE
TOO_MANY, WIDE, TWICE = decode_kernels.TOO_MANY, decode_kernels.WIDE, decode_kernels.TWICE
MARGIN, MARK = 64, 0xA5
DTYPES_HERE = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "I8", "U16", "I32")
EDGES: list[tuple[tuple[int, ...], float]] = [
    # One row, also one in which all elements change.
    ((50,), 0.3), ((70,), 1.0), ((98_303,), 0.001), ((1, 50_001), 0.001),
    # Narrow; a tile of one row; rows of one word, of a word and one more element, and of many.
    ((200, 63), 0.01), ((3, 20_000), 0.003), ((60, 64), 0.02), ((40, 65), 0.02), ((9, 5000), 0.002),
    # A vocabulary, slabs, three tiles by three.
    ((640, 64), 0.004), ((3, 130, 128), 0.004), ((384, 390), 0.002),
]  # fmt: skip
"""Shapes, and shares of elements that change."""


@dataclass(frozen=True)
class Sample:
    """The tiles of one tensor as a block has them.

    Attributes:
        old: all old bits, on the host. held: where they lie in ``memory`` of the device; None where they do not.
    """

    element: DType
    grid: Grid
    tables: Decoding
    thresholds: np.ndarray
    plain: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    streams: np.ndarray
    old: Bits
    held: list[OldBits] | None = None
    memory: tuple[torch.Tensor, ...] = ()

    @property
    def matrix(self) -> np.ndarray:
        return self.old.reshape(int(self.grid.row_edges[-1]), self.grid.columns)


def samples_of(data: bytes, table: TensorTable, context: DeltaContext, old: Sequence[Bits]) -> Iterator[Sample]:
    """Yield the tensors of an object whose elements have fewer than 64 bits."""
    for reader in DeltaReader(data, table, context, lambda tensor: BaseTensor(old[tensor]))._readers:
        assert isinstance(reader, TilesReader)
        block = reader.open()
        for row, tensor in enumerate(reader.directory.ids.tolist()):
            tiles, element = slice(block._firsts[row], block._firsts[row + 1]), DTYPES[reader.dtype]
            if element.itemsize < 8:
                yield Sample(
                    element, grid_of(table[tensor].shape), block._tables, block._thresholds, block._plain[tiles],
                    block._starts[tiles], block._sizes[tiles], block._streams, old[tensor],
                )  # fmt: skip


def encoded_samples(
    shapes: Sequence[tuple[tuple[int, ...], float]], dtype: str, keys: Sequence[int], seed: int, codec: Codec = "tiled"
) -> list[Sample]:
    """Random bits of any kind and those of normal weights, of which a share moves; all tensors in one block."""
    table = TensorTable([TensorSpec(f"t{i}", dtype, shape) for i, (shape, _) in enumerate(shapes)])
    generator, element = np.random.default_rng(seed), DTYPES[dtype]
    old, new = [], []
    for number, (spec, (_, share)) in enumerate(zip(table, shapes, strict=True)):
        bits = trained(spec.shape, seed, dtype)[0]
        if number % 2:
            bits = np.frombuffer(generator.bytes(spec.nbytes), element.uint)
        far = np.frombuffer(generator.bytes(spec.nbytes), element.uint) | element.uint.type(1)
        by = np.where(generator.random(bits.size) < 0.2, far, generator.choice(np.array([1, 2, 255]), bits.size))
        old.append(bits)
        new.append(np.where(generator.random(bits.size) < share, bits + by.astype(element.uint), bits))
    with classes_at(keys):
        return list(samples_of(encoded(table, old, new, codec, "none"), table, CONTEXT, old))


class Guarded:
    """Arrays on the device that lie between marks, and that kernels must keep within."""

    def __init__(self) -> None:
        self._blocks: list[tuple[torch.Tensor, int]] = []

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        block = torch.full((like.nbytes + 2 * MARGIN,), MARK, dtype=torch.uint8, device=DEVICE)
        self._blocks.append((block, like.nbytes))
        return block[MARGIN : MARGIN + like.nbytes].view(like.dtype).view(like.shape)

    def check(self) -> None:
        for block, nbytes in self._blocks:
            assert (block[:MARGIN] == MARK).all()
            assert (block[MARGIN + nbytes :] == MARK).all()


def fill(batch: TileBatch, payload: np.ndarray, arrays: DecodeArrays) -> None:
    inputs = batch.fields, batch.parts, batch.limits.view(np.int32), batch.tables.view(np.int16)
    for array, known in zip((arrays.fields, arrays.parts, arrays.limits, arrays.tables), inputs, strict=True):
        array.copy_(torch.from_numpy(known))
    arrays.streams.view(torch.uint8)[: payload.size].copy_(torch.from_numpy(payload))


Found = tuple[int, list[int], list[int]]
"""Number of changes or an error; positions and distances."""


def by_cpu(sample: Sample, payload: np.ndarray, starts: np.ndarray, tile: int) -> Found:
    """Decode one tile by the loops for CPUs."""
    only, band = np.zeros(sample.grid.tiles, np.bool_), tile // sample.grid.across
    only[tile] = True
    room = int(sample.grid.covered(None).reshape(-1)[tile])
    positions, distances = np.empty(room, np.int64), np.empty(room, sample.element.uint)
    found, _ = decode_kernels.decode_bands(
        read_only(sample.old), 0, sample.grid.columns, sample.grid.row_edges, sample.grid.column_edges, band, band + 1,
        magnitude_mask(sample.element), key_limits(sample.thresholds, sample.element), only & (sample.sizes > 0),
        ~sample.plain, starts, sample.sizes, payload, sample.tables, positions, distances,
    )  # fmt: skip
    kept = slice(max(found, 0))
    return int(found), positions[kept].tolist(), distances[kept].tolist()


def check(samples: Sequence[Sample], narrow: bool = False, lacking: int | None = 0) -> Counter[int]:
    """Decode all samples at once, and compare each tile → how many tiles had each error, and 0 for none.

    Args:
        narrow: positions have 32 bits. lacking: for so many changes there is no room; None: there is more than enough.
    """
    payload, firsts = np.empty(0, np.uint8), []
    for sample in samples:
        # Streams of a block need not begin where a word of the device does.
        firsts.append(8 * payload.size + 24)
        payload = np.concatenate([payload, np.full(3, 0xFF, np.uint8), sample.streams])
    payload = np.concatenate([payload, np.zeros(decode_triton.PADDING, np.uint8)])
    tiles: list[tuple[np.ndarray, np.ndarray]] = []
    wanted: list[Found] = []
    for number, (sample, first) in enumerate(zip(samples, firsts, strict=True)):
        described = sample.grid, sample.element, number, sample.plain, sample.starts + first, sample.sizes, sample.held
        numbers, *mine = tile_fields(*described)
        tiles.append((mine[0], mine[1]))
        wanted += [by_cpu(sample, payload, sample.starts + first, tile) for tile in numbers.tolist()]
    batch = TileBatch.of(
        samples[0].element,
        joined_tiles(tiles),
        [sample.tables for sample in samples],
        [sample.thresholds for sample in samples],
    )
    room = batch.room if lacking is None else sum(max(code, 0) for code, _, _ in wanted) - lacking
    guarded, shapes = Guarded(), array_shapes(batch, payload.size, torch.int32 if narrow else torch.int64)
    shapes[-2:] = [((room,), dtype) for _, dtype in shapes[-2:]]
    arrays = DecodeArrays(*(guarded.empty(torch.empty(shape, dtype=dtype)) for shape, dtype in shapes))
    fill(batch, payload, arrays)
    lying = [part.clone() for sample in samples for part in sample.memory]
    decode_tiles(batch, arrays)
    guarded.check()
    assert all(map(torch.equal, lying, (part for sample in samples for part in sample.memory)))
    where, steps = arrays.positions.cpu().numpy(), arrays.distances.cpu().numpy().view(samples[0].element.uint)
    said: Counter[int] = Counter()
    before = 0
    for (code, right, moved), found, end in zip(wanted, arrays.found.tolist(), arrays.ends.tolist(), strict=True):
        if code > 0 and end > room:
            assert found == TOO_MANY
        else:
            assert found == code, (found, code)
            changes = slice(end - max(code, 0), end)
            assert code == TWICE or changes.start == before
            assert (where[changes].tolist(), steps[changes].tolist()) == (right, moved)
        said[min(found, 0)] += 1
        before = end
    return said


# Where old bits lie


def placed(sample: Sample, rectangles: Sequence[Rectangle], how: str) -> Sample:
    """The sample with old bits of some rectangles only, each in memory of its own: by rows or columns, with gaps."""
    held, memory = [], list[torch.Tensor]()
    for top, bottom, left, right in rectangles:
        bits = sample.matrix[top:bottom, left:right].view(f"<i{sample.element.itemsize}")
        part = torch.from_numpy(bits.copy()).to(DEVICE)
        if how == "by columns":
            part = part.t().contiguous().t()
        elif how == "among others":
            # As in a fused weight; a row's end is followed by another one's.
            wide = torch.full((bottom - top + 2, right - left + 3), -1, dtype=part.dtype, device=DEVICE)
            wide[1:-1, 2:-1] = part
            part = wide[1:-1, 2:-1]
        elif how == "upside down":
            part = part.flip(0).contiguous()
        memory.append(part)
        address, row_step = part.data_ptr(), part.stride(0)
        if how == "upside down":
            address, row_step = address + part.element_size() * row_step * (part.shape[0] - 1), -row_step
        held.append(OldBits((top, bottom, left, right), address, row_step, part.stride(1)))
    return replace(sample, held=held, memory=tuple(memory))


def everywhere(sample: Sample) -> Rectangle:
    return 0, int(sample.grid.row_edges[-1]), 0, sample.grid.columns


def check_encoded() -> None:
    """Blocks of the encoder, of each dtype and layout, with classes at several keys."""
    layouts = ("by rows", "by columns", "among others", "upside down")
    thresholds = [(0, 0, 0, 0), (115, 118, 119, 121), (0, 0, 100, 255), (90, 90, 120, 120), (255, 255, 255, 255)]
    for number, dtype in enumerate(DTYPES_HERE):
        shapes = EDGES if number == 0 else EDGES[number % 3 :: 3]
        coded = [
            sample
            for seed, keys in enumerate(thresholds if number == 0 else [thresholds[number % 5], thresholds[1]])
            for sample in encoded_samples(shapes[seed % 2 :: 2] if number == 0 else shapes, dtype, keys, seed)
        ]
        samples = [placed(sample, [everywhere(sample)], layouts[place % 4]) for place, sample in enumerate(coded)]
        samples += encoded_samples(shapes[::2], dtype, (0, 0, 0, 0), 7, "plain")
        assert check(samples, narrow=number % 2 == 0).keys() == {0}


def check_parts() -> None:
    """Ranks that hold some tiles, in several pieces, and a plain tile that a rank holds only a part of."""
    shape = (384, 390)
    (sample,) = encoded_samples([(shape, 0.002)], "BF16", (115, 118, 119, 121), 3)
    rows, columns = sample.grid.row_edges.tolist(), sample.grid.columns
    parts: list[list[Rectangle]] = [
        [(0, rows[1], 0, columns)],
        [(rows[1], rows[2], 0, 130), (rows[2], rows[3], 130, 390)],
        [(0, 384, 260, 390), (0, rows[1], 0, 130)],
    ]
    layouts = ("among others", "by columns", "by rows")
    assert (rows, sample.grid.column_edges.tolist()) == ([0, 128, 256, 384], [0, 130, 260, 390])
    assert check([placed(sample, part, how) for part, how in zip(parts, layouts, strict=True)]) == {0: 10}
    cut = placed(sample, [(0, 384, 0, 131)], "by rows")
    with pytest.raises(CutTileError, match="no part on the device has all old bits of tile 1,"):
        check([cut])
    with pytest.raises(CutTileError, match="no part on the device has all old bits of tile 0,"):
        check([sample])
    plain = replace(cut, plain=np.arange(9) % 3 == 1, sizes=np.where(np.arange(9) % 3 == 1, 5, 0))
    assert check([plain], lacking=None).total() == 3


def check_golden() -> None:
    """All versions of the golden run at once: all floats of one width."""
    run, samples = open_run(str(TILES)), dict[int, list[Sample]]()
    for version in (1, 2, 3):
        old = tiles_versions()[version - 1]
        for ref in run.manifest(version).objects:
            context = DeltaContext(run.info.run, version, version - 1)
            for sample in samples_of(bytes(run.fetch(ref)), run.table, context, old):
                mine = samples.setdefault(sample.element.itemsize, [])
                mine.append(placed(sample, [everywhere(sample)], "by rows"))
    assert {width: check(mine) for width, mine in samples.items()} == {1: {0: 11}, 2: {0: 34}, 4: {0: 49}}


# Damage


def damaged(sample: Sample, generator: np.random.Generator) -> Sample:
    """Streams of random bytes, cut ones, others' bits, codes for any symbol, or other weights."""
    kind, tiles = int(generator.integers(0, 6)), sample.grid.tiles
    streams, sizes, tables = sample.streams.copy(), sample.sizes, sample.tables
    thresholds, plain = sample.thresholds, sample.plain
    if kind < 2:
        # Codes for any symbol; or of small gaps and values only, so that tiles have many changes and no bits left over.
        lengths = np.full((TABLES, 2, SYMBOLS), 8, np.uint8)
        if kind == 0:
            lengths = np.zeros_like(lengths)
            lengths[:, 0, [0, 1, 3, 4, 6, 7, 9, 10]] = 3
        tables = decoding(lengths)
        most = np.minimum(sample.grid.covered(None).reshape(-1), 30)
        sizes = 3 * generator.integers(1, most + 1) + kind * generator.integers(0, 3, tiles)
        plain = generator.random(tiles) < 0.2
    elif kind == 2:
        sizes = np.maximum(sizes + generator.integers(-9, 9, tiles), 1)
    elif kind == 3 and streams.size:
        for _ in range(4):
            streams[generator.integers(0, streams.size)] ^= np.uint8(1 << generator.integers(0, 8))
    elif kind == 4:
        thresholds = np.sort(generator.integers(0, 256, CLASSES)).astype(np.uint8)
    elif kind == 5:
        sizes, plain = generator.permutation(sizes), generator.random(tiles) < 0.5
    ends = np.cumsum(sizes)
    missing = max(0, (int(ends[-1]) + 7) // 8 - streams.size)
    streams = np.concatenate([streams, np.zeros(missing, np.uint8)])
    if kind < 2:
        streams = np.frombuffer(generator.bytes(streams.size), np.uint8)
    return replace(
        sample, streams=streams, sizes=sizes, starts=ends - sizes, tables=tables, thresholds=thresholds, plain=plain
    )


def check_damaged() -> None:
    """Any error of a CPU is an error here, the same one, and nothing else is harmed."""
    said: Counter[int] = Counter()
    shapes = [((500,), 0.2), ((3, 70), 0.3), ((2, 65, 80), 0.01), ((30, 20), 0.1)]
    for seed, dtype in enumerate(("BF16", "F32", "I8", "F8_E4M3", "I32", "U16")):
        generator = np.random.default_rng(seed)
        good = [
            placed(sample, [everywhere(sample)], "by rows")
            for keys in ((100, 115, 118, 121), (0, 0, 0, 100), (40, 90, 110, 140))
            for sample in encoded_samples(shapes, dtype, keys, seed)
        ]
        said += check([damaged(sample, generator) for sample in good], lacking=None)
    assert said.keys() == {0, SHORT, NO_CODE, OUTSIDE, WIDE, TWICE}


def one_change(dtype: str, numel: int, gap: int, zigzag: int, length: int) -> Sample:
    """One tile whose elements are all of the first class, and whose codes have ``length`` bits."""
    lengths, table = np.zeros((TABLES, 2, SYMBOLS), np.uint8), 0
    (gap_token, gap_bits), (token, bits) = reference.token_of(gap), reference.token_of(zigzag - 3)
    lengths[table, 0, 3 * gap_token + 2] = lengths[table, 1, token] = length
    code = "0" * length
    stream = code + reference.low_bits(gap, gap_bits) + code + reference.low_bits(zigzag - 3, bits)
    grid, element = grid_of((numel,)), DTYPES[dtype]
    assert grid.tiles == 1
    sample = Sample(
        element, grid, decoding(lengths), np.full(CLASSES, 255, np.uint8), np.zeros(1, np.bool_), np.zeros(1, np.int64),
        np.array([len(stream)]), np.packbits(np.array([int(bit) for bit in stream], np.uint8), bitorder="little"),
        np.zeros(numel, element.uint),
    )  # fmt: skip
    return placed(sample, [everywhere(sample)], "by rows")


def check_long_changes() -> None:
    """Changes that take more than 64 bits, the largest zigzags, and those just beyond, at any bit of a word."""
    for dtype, width in (("F32", 32), ("I32", 32), ("BF16", 16), ("I8", 8)):
        largest = (1 << width) - 1
        for zigzag, right in ((largest, 0), (largest - 1, 0), (largest + 1, WIDE), ((1 << 64) + 2, WIDE)):
            far = [one_change(dtype, 49_157, gap, zigzag, 11) for gap in (70_000, 98_313) for _ in range(2)]
            near = [one_change(dtype, numel, numel - 1, zigzag, 1) for numel in (1, 5, 7, 11, 13)]
            assert check(far + near) == {right: len(far + near)}
    assert check([one_change("BF16", 49_157, 98_314, 5, 11)]) == {OUTSIDE: 1}


def check_most_changes() -> None:
    """As many changes as the bits allow, and more than there are elements, which are named by class and among all."""
    for length, bits, right in ((1, 11, 0), (1, 12, OUTSIDE), (1, 22, OUTSIDE), (3, 33, 0), (3, 4, SHORT)):
        lengths = np.zeros((TABLES, 2, SYMBOLS), np.uint8)
        lengths[:, 0, 0] = length
        sample = replace(one_change("BF16", 11, 0, 3, 1), tables=decoding(lengths), streams=np.zeros(5, np.uint8))
        assert check([replace(sample, sizes=np.array([bits]))], lacking=None) == {right: 1}


def check_room() -> None:
    """Changes that do not fit are not written, and no others are harmed."""
    samples = encoded_samples([((200,), 0.5), ((96,), 1.0), ((7,), 1.0)], "BF16", (0, 0, 0, 0), 0, "plain")
    for lacking in (1, 7, 8, 60, 150):
        said = check(samples, lacking=lacking)
        assert said[TOO_MANY] > 0
        assert said[0] > 0


def main() -> None:
    check_room()
    check_parts()
    if DEVICE.type == "cpu":
        # Larger vectors are interpreted faster.
        decode_triton.LANES, decode_triton.MASK_WORDS, decode_triton.CHANGES = 256, 512, 512
    check_damaged()
    check_long_changes()
    check_most_changes()
    check_golden()
    check_encoded()
    print("equal")


if __name__ == "__main__":
    main()

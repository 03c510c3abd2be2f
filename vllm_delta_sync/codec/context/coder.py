"""Codec ``context``: ``encode`` writes blocks of kind tiles, ``ContextBlock`` reads them.

Changes are coded by the base bits. The elements of a tile are split into classes by their old exponents. In each class,
positions are gaps between its members and values are ULP distances, each with its own tables. Entries of block k:
``@k.ids`` U32, ``@k.counts`` U64, ``@k.tables`` U8, ``@k.streams`` U8. docs/FORMAT.md specifies every byte.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.codec import packed
from vllm_delta_sync.codec.context.tables import (
    KEYS,
    STATE_BITS,
    STATES,
    TOKENS,
    Decoding,
    choose_thresholds,
    decoding,
    dropped_bits,
    encoding,
    normalized,
    token_ranges,
)
from vllm_delta_sync.codec.context.tile_threads import on_threads, threads_for
from vllm_delta_sync.codec.context.tiles import (
    BLOCK_BYTES,
    Grid,
    Span,
    choose_grid,
    excess_bytes,
    read_grid,
    select_tiles,
)
from vllm_delta_sync.codec.delta_object import Arrays, Block, BlockEntries, Directory, block_ranges, bytes_of
from vllm_delta_sync.codec.zstd import Compression, compress, declared_size, decompress
from vllm_delta_sync.errors import FormatError, TensorMismatchError
from vllm_delta_sync.format.dtypes import DType
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.bits import BaseLookup, BaseTensor, Bits, Positions
from vllm_delta_sync.tensors.changes import Sparse

BLOCK_CHANGES = 256 * 1024
"""A writer closes a block at this many changes; its tables then take less than 1 %."""
MAX_CLASSES = 16
"""Limit that readers enforce. A writer makes fewer classes, since each takes time to decode."""
THREAD_ENTRIES = 16 * 1024
"""A thread codes so many entries at least: one that has less to do takes longer to start."""
SAMPLED_ELEMENTS = 256 * 1024
"""Elements of a tensor whose keys are counted to choose classes. A worse choice costs bytes, not exactness."""

_WRONG = {-1: "ends too early", -2: "has bytes after its end", -3: "names an element outside its class",
          -4: "has more elements than the counts say", -5: "has a distance outside its dtype"}  # fmt: skip


def encode(
    blocks: BlockEntries, groups: list[Sparse], table: TensorTable, compression: Compression, old: BaseLookup
) -> None:
    """Append relative groups as blocks, first those of kind tiles.

    Args:
        compression: of the entries besides the streams. old: the bits at the base version.

    Raises:
        TensorMismatchError: ``old`` returns bits of another size or width.
    """
    rest: list[Sparse] = []
    for whole in groups:
        pairs = zip(whole.ids.tolist(), whole.counts.tolist(), strict=True)
        excess = np.array([excess_bytes(table[tensor], count) for tensor, count in pairs])
        # Tensors that take more bytes in tiles go to codec packed, unless that costs more than a block's overhead.
        tiled = (excess < 0) | (excess[excess >= 0].sum() < BLOCK_BYTES)
        rest.append(packed.select_tensors(whole, ~tiled))
        group = packed.select_tensors(whole, tiled)
        for first, last in block_ranges(group.counts, BLOCK_CHANGES):
            blocks.add(group.element, "tiles", _encode_block(group.rows(first, last), table, compression, old))
    packed.encode(blocks, rest, table, compression)


class _Entries(NamedTuple):
    """Changes of some tiles in coding order: (n,) class, gap + 1, zigzag − 1; (tiles,) entries of each tile."""

    kinds: npt.NDArray[np.uint8]
    gaps: npt.NDArray[np.uint32]
    values: Bits
    sizes: npt.NDArray[np.int64]


def _encode_block(group: Sparse, table: TensorTable, compression: Compression, old: BaseLookup) -> Arrays:
    specs = [table[tensor] for tensor in group.ids.tolist()]
    grids = [choose_grid(spec, count) for spec, count in zip(specs, group.counts.tolist(), strict=True)]
    zigzags = packed.zigzag(group.data, group.element)
    drop = dropped_bits(group.element)
    thresholds = _thresholds(group, specs, zigzags, drop, old, sum(grid.tiles for grid in grids))
    entries: list[_Entries] = []
    start = 0
    for spec, grid, count in zip(specs, grids, group.counts.tolist(), strict=True):
        bits, changed = _whole_tensor(old, table, spec, group.element), slice(start, start + count)
        entries += _entries(bits, grid, drop, thresholds, group.positions[changed], zigzags[changed])
        start += count
    joined = _Entries(*(np.concatenate(arrays) for arrays in zip(*entries, strict=True)))
    frequencies, lengths, streams = _coded(joined, thresholds.size + 1)
    cuts = np.array([(grid.slab, grid.height, grid.width) for grid in grids], "<u8")
    keys = np.append(np.uint8(thresholds.size), thresholds)
    tables = [keys, _planes(cuts.T), _planes(frequencies.astype("<u2")), _planes(lengths.astype("<u4"))]
    return {
        "ids": ("U32", group.ids),
        "counts": ("U64", group.counts.astype("<u8")),
        "tables": ("U8", compress(np.concatenate(tables), compression)),
        "streams": ("U8", streams),
    }


def _entries(
    bits: Bits, grid: Grid, drop: np.uint64, thresholds: npt.NDArray[np.uint8], positions: Positions, zigzags: Bits
) -> list[_Entries]:
    """Return the entries of a tensor, in parts that threads made."""
    from vllm_delta_sync.codec.context import encode_kernels as kernels

    def run(span: Span) -> _Entries:
        first, last = np.searchsorted(
            positions, [row * grid.columns for row in (span.first_row, span.last_row)]
        ).tolist()
        sizes = np.empty(span.last_tile - span.first_tile, np.int64)
        room = last - first + min(sizes.size, last - first) * (thresholds.size + 1)
        kinds, gaps, values = np.empty(room, np.uint8), np.empty(room, np.uint32), np.empty(room, bits.dtype)
        used = kernels.entries_of_span(
            bits, grid.array(), span, drop, thresholds, positions[first:last], zigzags[first:last], kinds, gaps, values,
            sizes,
        )  # fmt: skip
        return _Entries(kinds[:used], gaps[:used], values[:used], sizes)

    return on_threads(run, grid.spans())


def _coded(
    entries: _Entries, classes: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return (2 · classes, TOKENS) frequencies, (tiles,) bytes of each tile's stream, all streams."""
    from vllm_delta_sync.codec.context import encode_kernels as kernels

    ends = np.concatenate([[0], np.cumsum(entries.sizes)])
    parts = threads_for(int(ends[-1]), THREAD_ENTRIES)
    # The last tiles may have no entries, and count all the same.
    inner = np.searchsorted(ends, [ends[-1] * part // parts for part in range(1, parts)]).tolist()
    cuts = [0, *inner, entries.sizes.size]
    pieces = [
        _Entries(
            entries.kinds[ends[first] : ends[last]],
            entries.gaps[ends[first] : ends[last]],
            entries.values[ends[first] : ends[last]],
            entries.sizes[first:last],
        )
        for first, last in pairwise(cuts)
    ]

    def count(piece: _Entries) -> npt.NDArray[np.int64]:
        counts = np.zeros((classes, 2, TOKENS), np.int64)
        kernels.tally(piece.kinds, piece.gaps, piece.values, counts)
        return counts

    counts = on_threads(count, pieces)
    frequencies = np.stack([normalized(row) for row in np.sum(counts, axis=0).reshape(-1, TOKENS)])
    tables = tuple(encoding(frequencies))
    raw = token_ranges()[1].astype(np.int64)

    def run(part: tuple[_Entries, npt.NDArray[np.int64]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        piece, found = part
        # An upper bound: each entry has two symbols of at most STATE_BITS bits, and the raw bits of both numbers.
        gap_bits = int((found[:, 0, 1:] * (STATE_BITS + raw[:-1])).sum() + STATE_BITS * found[:, 0, 0].sum())
        room = (gap_bits + int((found[:, 1] * (STATE_BITS + raw)).sum())) // 8 + 4 * piece.sizes.size + 8
        streams, lengths = np.empty(room, np.uint8), np.empty(piece.sizes.size, np.int64)
        used = kernels.encode_tiles(piece.sizes, piece.kinds, piece.gaps, piece.values, tables, streams, lengths)
        return lengths, streams[:used]

    lengths, streams = zip(*on_threads(run, list(zip(pieces, counts, strict=True))), strict=True)
    return frequencies, np.concatenate(lengths), np.concatenate(streams)


def _thresholds(
    group: Sparse, specs: list[TensorSpec], zigzags: Bits, drop: np.uint64, old: BaseLookup, tiles: int
) -> npt.NDArray[np.uint8]:
    from vllm_delta_sync.codec.context import encode_kernels as kernels

    owned = np.zeros(KEYS)
    tokens = np.zeros((KEYS, TOKENS), np.int64)
    start = 0
    for tensor, spec, count in zip(group.ids.tolist(), specs, group.counts.tolist(), strict=True):
        changed = slice(start, start + count)
        bits = old(tensor).bits
        step = max(1, spec.numel // SAMPLED_ELEMENTS)
        sampled = np.zeros(KEYS, np.int64)
        kernels.count_keys(bits, step, drop, sampled)
        owned += sampled * (spec.numel / max(1, int(sampled.sum())))
        kernels.count_tokens(bits, group.positions[changed], zigzags[changed], drop, tokens)
        start += count
    return choose_thresholds(np.maximum(owned, tokens.sum(axis=1)), tokens, min(tiles, group.positions.size))


def _whole_tensor(old: BaseLookup, table: TensorTable, spec: TensorSpec, element: DType) -> Bits:
    found = old(table.index(spec.name))
    if found.rectangles is not None:
        raise TensorMismatchError(f"base bits of {spec.name!r} are only a part of the tensor; encoding needs all of it")
    return _checked(found, spec, element)


def _checked(found: BaseTensor, spec: TensorSpec, element: DType) -> Bits:
    if found.bits.shape != (spec.numel,) or found.bits.dtype != element.uint:
        raise TensorMismatchError(
            f"base bits of {spec.name!r} are {found.bits.shape} of {found.bits.dtype}; "
            f"({spec.numel},) of {element.uint} expected"
        )
    return found.bits


def _planes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the lowest bytes of all values, then the second bytes, and so on."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return np.ascontiguousarray(flat.view(np.uint8).reshape(flat.size, flat.itemsize).T).reshape(-1)


class _NumberReader:
    """Reads numbers from a decompressed entry, one array after the other."""

    def __init__(self, container: Container, name: str, compression: Compression, what: str) -> None:
        data = bytes_of(container, name)
        self._bytes = decompress(data, declared_size(data, compression, what), compression, what)
        self._cursor, self._what = 0, what

    def numbers(self, count: int, width: int) -> npt.NDArray[Any]:
        """Return the next ``count`` numbers of ``width`` bytes, stored as byte planes; a copy."""
        planes = self._bytes[self._cursor :][: count * width]
        self._cursor += count * width
        if planes.size != count * width:
            raise FormatError(f"{self._what} end after {self._bytes.size} bytes, at least {self._cursor} expected")
        return np.array(planes.reshape(width, count).T, order="C").reshape(-1).view(f"<u{width}")

    def end(self) -> None:
        if self._cursor != self._bytes.size:
            raise FormatError(f"{self._what} have {self._bytes.size} bytes, {self._cursor} expected")


@dataclass
class ContextBlock:
    """A block of kind tiles whose entries, except the streams, have been read and checked.

    Attributes:
        directory: its tensors.
    """

    directory: Directory
    _block: Block
    _table: TensorTable
    _what: str
    _thresholds: npt.NDArray[np.uint8]
    _grids: list[Grid]
    _ends: npt.NDArray[np.int64]
    _streams: npt.NDArray[np.uint8]
    _tables: Decoding

    @classmethod
    def open(
        cls, container: Container, table: TensorTable, block: Block, directory: Directory, compression: Compression,
        what: str,
    ) -> "ContextBlock":  # fmt: skip
        """Read a block's tables.

        Raises:
            FormatError, LimitError: one of them is malformed.
        """
        specs = [table[tensor] for tensor in directory.ids.tolist()]
        tables = _NumberReader(container, f"{block.name}.tables", compression, f"{what}: tables")
        thresholds = tables.numbers(int(tables.numbers(1, 1)[0]), 1)
        if thresholds.size >= MAX_CLASSES or np.any(thresholds[1:] <= thresholds[:-1]) or 0 in thresholds[:1]:
            raise FormatError(f"{what}: keys {thresholds[:20].tolist()} are not ascending from 1, or more than 15")
        cuts = tables.numbers(3 * len(specs), 8).reshape(3, -1).T
        grids = [read_grid(spec, tuple(row), what) for spec, row in zip(specs, cuts.tolist(), strict=True)]
        frequencies = tables.numbers(2 * (thresholds.size + 1) * TOKENS, 2).reshape(-1, TOKENS)
        if np.any(~np.isin(frequencies.sum(axis=1, dtype=np.int64), (0, STATES))):
            raise FormatError(f"{what}: frequencies of a table do not add up to {STATES} or 0")
        lengths = tables.numbers(sum(grid.tiles for grid in grids), 4).astype(np.int64)
        tables.end()
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        streams = bytes_of(container, f"{block.name}.streams")
        if ends[-1] != streams.size:
            raise FormatError(f"{what}: streams have {streams.size} bytes, their lengths add up to {ends[-1]}")
        return cls(directory, block, table, what, thresholds, grids, ends, streams, decoding(frequencies))

    def take(self, first: int, last: int, old: BaseLookup) -> Sparse:
        """Decode tensors ``first`` to ``last`` − 1 of the block, limited to the parts that ``old`` has.

        Raises:
            FormatError: a stream is damaged, or was made against other bits.
            UnsupportedError: ``old`` has only a part of a tile. TensorMismatchError: its bits have another size.
        """
        from vllm_delta_sync.codec.context.decode_kernels import SLACK

        element, rows = self._block.element, slice(first, last)
        room = int(self.directory.counts[rows].sum())
        positions, distances = np.empty(room + SLACK, np.int64), np.empty(room + SLACK, element.uint)
        counts, used = np.zeros(last - first, np.int64), 0
        tile = sum(grid.tiles for grid in self._grids[:first])
        for row in range(first, last):
            grid, tensor, count = self._grids[row], int(self.directory.ids[row]), int(self.directory.counts[row])
            into = positions[used : used + count + SLACK], distances[used : used + count + SLACK]
            counts[row - first] = self._decode(self._table[tensor], old(tensor), grid, tile, into)
            used += int(counts[row - first])
            tile += grid.tiles
        kept = counts > 0
        return Sparse(
            element.name, self.directory.ids[rows][kept], counts[kept], positions[:used], distances[:used], True
        )

    def _decode(self, spec: TensorSpec, base: BaseTensor, grid: Grid, tile: int, into: tuple[Positions, Bits]) -> int:
        """Write a tensor's positions and distances → how many.

        Args:
            tile: the tensor's first one in the block. into: room for the changed elements that the block declares, and
                ``decode_kernels.SLACK`` more.
        """
        from vllm_delta_sync.codec.context import decode_kernels as kernels
        from vllm_delta_sync.format.kernels import read_only

        firsts, count = token_ranges()[0], into[0].size - kernels.SLACK
        bits = read_only(_checked(base, spec, self._block.element))
        wanted = select_tiles(grid, base.rectangles, spec.name, self._what)
        ends = self._ends[tile : tile + grid.tiles + 1]
        payload = np.zeros(int(ends[-1] - ends[0]) + kernels.PADDING, np.uint8)
        payload[: -kernels.PADDING] = self._streams[ends[0] : ends[-1]]
        spans = grid.spans()

        def run(span: Span) -> tuple[int, int, tuple[Positions, Bits]]:
            # Of several spans, only the first one's place is known; memory is used as far as it is written.
            mine = into if span is spans[0] else (np.empty_like(into[0]), np.empty_like(into[1]))
            found, where = kernels.decode_span(
                bits, grid.array(), span, dropped_bits(self._block.element), self._thresholds, wanted, ends - ends[0],
                payload, self._tables, firsts, *mine,
            )  # fmt: skip
            return found, where, mine

        parts = on_threads(run, spans)
        for found, where, _ in parts:
            if found < 0:
                self._refuse(spec, found, where, count)
        total = sum(found for found, _, _ in parts)
        if total > count or (total != count and base.rectangles is None):
            self._refuse(spec, total, 0, count)
        start = parts[0][0]
        for found, _, mine in parts[1:]:
            into[0][start : start + found], into[1][start : start + found] = mine[0][:found], mine[1][:found]
            start += found
        return total

    def _refuse(self, spec: TensorSpec, found: int, tile: int, count: int) -> NoReturn:
        wrong = f"tile {tile} {_WRONG[found]}" if found < 0 else f"{found} changed elements, the counts say {count}"
        raise FormatError(
            f"{self._what}: {spec.name!r}: {wrong}; it is damaged, or was made against other weights than these"
        )


def compile_decoder(elements: Iterable[DType]) -> None:
    """Compile the loops of ``ContextBlock``, for these element types, now."""
    from vllm_delta_sync.codec.context import decode_kernels as kernels
    from vllm_delta_sync.format.kernels import read_only

    tables, grid = decoding(np.empty((0, TOKENS), np.uint16)), Grid(0, 0, 1, 1, 1)
    for element in elements:
        mine = np.empty(kernels.SLACK, np.int64), np.empty(kernels.SLACK, element.uint)
        kernels.decode_span(
            read_only(np.empty(0, element.uint)), grid.array(), Span(0, 0, 0, 0), dropped_bits(element),
            np.empty(0, np.uint8), np.empty(0, np.bool_), np.empty(0, np.int64), np.zeros(kernels.PADDING, np.uint8),
            tables, token_ranges()[0], *mine,
        )  # fmt: skip

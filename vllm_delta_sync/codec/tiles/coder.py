"""Blocks of kind tiles: ``encode`` writes them, ``TilesBlock`` reads them.

A tile is coded by its old bits, which writer and reader both have: changed elements by their ranks in classes of old
magnitudes. A plain tile is coded without them. Entries of block k: ``@k.ids`` U32, ``@k.counts`` U64, ``@k.tables`` U8,
``@k.streams`` U8. docs/FORMAT.md specifies every byte.

Classes: a weight changes if its update exceeds half the distance to the next number, and the weight's exponent
determines that distance. So small weights change often, and large ones hardly ever. Elements of one class share tables.

Prefix codes: a number of any size is split into a token and raw bits. A symbol is a gap's token with the kind of the
value that follows it, so that most changes take one step: +1 and −1, the most frequent distances, are kinds of their
own. Codes are canonical (D. A. Huffman, 1952; lengths suffice to know the codes, as in RFC 1951) and at most LONGEST
bits long.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.codec.delta_object import Arrays, Block, BlockEntries, Directory, block_ranges, bytes_of
from vllm_delta_sync.codec.tiles.alphabets import CLASSES, LONGEST, SYMBOLS, TABLES
from vllm_delta_sync.codec.tiles.grid import (
    CutTileError,
    Grid,
    Span,
    extent,
    grid_of,
    least_tiles,
    on_threads,
    shares_of_threads,
    threads_for,
)
from vllm_delta_sync.codec.zstd import Compression, compress, declared_size, decompress
from vllm_delta_sync.errors import FormatError, TensorMismatchError, UnsupportedError, UsageError
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.format.table import DType, TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseLookup, BaseTensor, Bits, Matrix, Positions, Sparse

Counts = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.uint8]
"""(TABLES, 2, SYMBOLS) code lengths, of gaps with kinds and of values; 0 for a symbol without a code."""
Decoding = npt.NDArray[np.uint16]
"""(TABLES, 2, 2^LONGEST) entries by the next LONGEST bits. Fields from the lowest bit: length of the code (4 bits, 0
for no code); of a gap its kind (2), then raw bits (5), then the bits above them (3); of a value raw bits (6), then the
bits above them (3)."""


def code_lengths(counts: Counts) -> Lengths:
    """Return the best code lengths of (TABLES, 2, SYMBOLS) counts, but for the limit of LONGEST."""
    from vllm_delta_sync.codec.tiles import shared_kernels

    lengths = np.zeros(counts.shape, np.uint8)
    for row, found in zip(counts.reshape(-1, SYMBOLS), lengths.reshape(-1, SYMBOLS), strict=True):
        shared_kernels.assign_lengths(row, found)
    return lengths


def code_words(lengths: Lengths) -> npt.NDArray[np.uint16]:
    """Return the codes of these lengths, first bit lowest."""
    from vllm_delta_sync.codec.tiles import shared_kernels

    words = np.zeros(lengths.shape, np.uint16)
    for row, found in zip(lengths.reshape(-1, SYMBOLS), words.reshape(-1, SYMBOLS), strict=True):
        shared_kernels.assign_words(row, found)
    return words


def overfull(lengths: Lengths) -> bool:
    """Return whether a table has a code that is too long, or more codes than there can be."""
    used = np.where(lengths > 0, 1 << (LONGEST - np.minimum(lengths, LONGEST).astype(np.int64)), 0).sum(axis=-1)
    return bool(np.any(lengths > LONGEST) or np.any(used > 1 << LONGEST))


def decoding(lengths: Lengths) -> Decoding:
    """Return decoding tables; of a table without codes, all entries are 0."""
    from vllm_delta_sync.codec.tiles import shared_kernels

    tables = np.zeros((lengths.shape[0], 2, 1 << LONGEST), np.uint16)
    shared_kernels.fill_tables(lengths, code_words(lengths), tables)
    return tables


KEYS = 256
VALUE_TOKENS = 64
"""Values are counted by the tokens of small numbers, and all others together."""
TABLE_BITS = 200.0
"""Approximate cost of adding a class: one gap table of about 35 tokens."""
TOKEN_BITS = 4.0
"""Approximate cost of each value token that a class has."""
_SMALL = 1e-12


def key_shift(element: DType) -> int:
    """Return by how many bits an element's magnitude is shifted right to get its key."""
    return max(8 * element.itemsize - dropped_bits(element) - 8, 0)


def key_limits(thresholds: npt.NDArray[np.uint8], element: DType) -> npt.NDArray[np.unsignedinteger]:
    """Return (CLASSES,), of the element's width: the least magnitudes with these keys."""
    return (thresholds.astype(np.uint64) << np.uint64(key_shift(element))).astype(element.uint)


def dropped_bits(element: DType) -> int:
    """Return the number of highest bits that a magnitude lacks: 1, the sign, for a float, else 0."""
    return 1 if element.is_float else 0


def magnitude_mask(element: DType) -> np.unsignedinteger:
    """Return the bits that a magnitude has, of the element's width."""
    found: np.unsignedinteger = element.uint.type(((1 << 8 * element.itemsize) - 1) >> dropped_bits(element))
    return found


def choose_thresholds(owned: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return the keys at which the classes end: the cheapest partition, by dynamic programming.

    Args:
        owned: (KEYS,) elements of each key, at least the changed ones. tokens: (KEYS, VALUE_TOKENS) value tokens of the
            changed elements.

    Returns:
        (CLASSES,) ascending; 0 for a class that there is not.
    """
    used = np.flatnonzero(owned > 0)
    thresholds = np.zeros(CLASSES, np.uint8)
    if used.size < 2:
        return thresholds
    tokens = tokens[:, tokens.any(axis=0)]
    owned_sums = np.concatenate([[0.0], np.cumsum(owned[used])])
    token_sums = np.concatenate([np.zeros((1, tokens.shape[1]), np.int64), np.cumsum(tokens[used], axis=0)])
    best = np.full((CLASSES + 1, used.size), np.inf)
    cuts = np.zeros(best.shape, np.int64)
    best[0, 0] = 0.0
    # The pairs by their second key: those that end at key k begin at k · (k − 1) / 2.
    stops, starts = np.tril_indices(used.size, -1)
    costs = _bits(owned_sums[stops] - owned_sums[starts], token_sums[stops] - token_sums[starts])
    for stop in range(1, used.size):
        first = stop * (stop - 1) // 2
        totals = best[:-1, :stop] + costs[first : first + stop]
        cuts[1:, stop] = np.argmin(totals, axis=1)
        best[1:, stop] = np.min(totals, axis=1)
    # The others' gaps count all elements.
    best += _bits(np.full(used.size, owned_sums[-1]), token_sums[-1] - token_sums[:-1])
    count, stop = (int(index) for index in np.unravel_index(np.argmin(best), best.shape))
    for number in range(count, 0, -1):
        thresholds[CLASSES - 1 - (count - number)] = used[stop]
        stop = int(cuts[number, stop])
    return thresholds


def _bits(owned: npt.NDArray[np.float64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return bits that classes with these elements and value tokens take: positions, values, tables."""
    changed = tokens.sum(axis=1)
    share = np.clip(changed / np.maximum(owned, 1.0), _SMALL, 1 - _SMALL)
    positions = -owned * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    shares = tokens / np.maximum(changed, 1)[:, None]
    values = -changed * (shares * np.log2(np.maximum(shares, _SMALL))).sum(axis=1)
    return positions + values + TABLE_BITS + TOKEN_BITS * (tokens > 0).sum(axis=1)


BLOCK_CHANGES = 1024 * 1024
"""A writer closes a block at this many changes; its tables then take less than 1 %."""
THREAD_CHANGES = 16 * 1024
"""A thread codes so many changes at least: one that has less to do takes longer to start."""
PIECE_CHANGES = 64 * 1024
"""Changes of a large tensor that are coded at once: what bounds the memory."""
GROUP_ELEMENTS = 8 * 1024 * 1024
"""Elements of tensors that are coded at once, but for a larger one; copies of their old bits are in memory together."""
SMALL_ELEMENTS = 64 * 1024
"""Tensors with fewer elements are plain: they are few of a model's, and ranks may divide them finer than tiles."""
SAMPLED_ELEMENTS = 256 * 1024
"""Elements of a block's tensors whose keys are counted to choose classes. A worse choice costs bytes, not exactness."""
SAMPLED_CHANGES = 64 * 1024
"""Changes of a block that are counted for the same purpose: each is a read from old bits that no cache holds."""
PLAIN_TILE = np.uint32(1 << 31)
"""Marks a plain tile in the number that otherwise is the bits of its stream."""

_WRONG = {
    -1: "ends too early",
    -2: "has no code for its bits",
    -3: "names an element outside the tile",
    -4: "has more elements than the counts say",
    -5: "has a distance outside its dtype",
    -6: "and those beside it name an element twice",
}


def encode(
    blocks: BlockEntries, groups: list[Sparse], table: TensorTable, compression: Compression, old: BaseLookup | None
) -> None:
    """Append relative groups as blocks.

    Args:
        compression: of the tables. old: the bits at the base version; where they are a part of a tensor, tiles that are
            not inside it are plain. None makes all tiles plain.

    Raises:
        TensorMismatchError: ``old`` returns bits of another size or width. UsageError: a distance is 0.
    """
    for group in groups:
        for first, last in block_ranges(group.counts, BLOCK_CHANGES):
            blocks.add(group.element, "tiles", _encode_block(group.rows(first, last), table, compression, old))


class _Gaps(NamedTuple):
    """Changes of some tiles by rank: (n,) table, gap and zigzag; (tiles,) changes of each tile."""

    kinds: npt.NDArray[np.uint8]
    gaps: npt.NDArray[np.uint32]
    values: Bits
    sizes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, changes: int, tiles: int, element: DType) -> "_Gaps":
        """Return room for so many."""
        return cls(
            np.empty(changes, np.uint8),
            np.empty(changes, np.uint32),
            np.empty(changes, element.uint),
            np.empty(tiles, np.int64),
        )


def _encode_block(group: Sparse, table: TensorTable, compression: Compression, old: BaseLookup | None) -> Arrays:
    specs = [table[tensor] for tensor in group.ids.tolist()]
    if not group.data.all():
        raise UsageError("a change has the distance 0, so it is none; leave it out")
    thresholds = np.zeros(CLASSES, np.uint8) if old is None else _thresholds(group, specs, old)
    found = _Gaps.of(group.positions.size, sum(grid_of(spec.shape).tiles for spec in specs), group.element)
    plain = np.ones(found.sizes.size, np.bool_)
    classes, limits = bool(thresholds.any()), key_limits(thresholds, group.element)
    start = tile = elements = 0
    tensors: list[_OldTensor] = []
    for tensor, spec, count in zip(group.ids.tolist(), specs, group.counts.tolist(), strict=True):
        grid = grid_of(spec.shape)
        changed, tiles = Span(start, start + count), slice(tile, tile + grid.tiles)
        start, tile = start + count, tile + grid.tiles
        # Before the next bits are read, so that two large tensors are never held at once.
        if elements and elements + spec.numel > GROUP_ELEMENTS:
            _find_gaps(tensors, limits, plain, group.positions, group.data, group.element, found)
            tensors, elements = [], 0
        after, matrix = False, Matrix(np.empty(0, group.element.uint), 0, grid.columns)
        # Without classes, all tiles are plain, and need no old bits.
        if old is not None and classes and spec.numel >= SMALL_ELEMENTS:
            base = old(tensor)
            after, matrix = base.after, _matrix_of(base, spec)
            plain[tiles] = False
            if base.rectangles is not None:
                held, cut = grid.held(base.rectangles)
                plain[tiles] = ~held | cut
            del base  # and its bits, before the next ones are read
        tensors.append(_OldTensor(matrix, after, grid, tiles.start, changed))
        elements += spec.numel
    _find_gaps(tensors, limits, plain, group.positions, group.data, group.element, found)
    lengths, sizes, streams = _coded(found)
    return {
        "ids": ("U32", group.ids),
        "counts": ("U64", group.counts.astype("<u8")),
        "tables": ("U8", _tables(thresholds, lengths, sizes, plain, compression)),
        "streams": ("U8", streams),
    }


def _tables(
    thresholds: npt.NDArray[np.uint8],
    lengths: Lengths,
    sizes: npt.NDArray[np.uint32],
    plain: npt.NDArray[np.bool_],
    compression: Compression,
) -> npt.NDArray[np.uint8]:
    numbers = np.where((sizes > 0) & plain, sizes | PLAIN_TILE, sizes).astype("<u4")
    return compress(np.concatenate([thresholds, lengths.reshape(-1), _planes(numbers)]), compression)


class LargeTensor:
    """Codes the changes of one tensor in plain tiles, piece by piece, in a block of its own.

    Args:
        pieces: returns positions (n,) int64, ascending, and ULP distances (n,), piece by piece; called twice.
    """

    def __init__(self, spec: TensorSpec, pieces: Callable[[], Iterable[tuple[Positions, Bits]]]) -> None:
        self._spec, self._pieces, self._grid = spec, pieces, grid_of(spec.shape)
        counts = np.zeros((TABLES, 2, SYMBOLS), np.int64)
        for found in self._gaps():
            counts += _counts(found)
        self._lengths = code_lengths(counts)
        self._sizes: list[npt.NDArray[np.uint32]] = []

    def streams(self) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the bytes of the entry ``streams``."""
        from vllm_delta_sync.codec.tiles import encode_kernels as kernels

        rest, bits = np.zeros(24, np.uint8), 0
        for found in self._gaps():
            sizes, streams, used = _streams(found, _counts(found), self._lengths)
            self._sizes.append(sizes)
            joined = np.zeros((bits + used) // 8 + 24, np.uint8)
            joined[0] = rest[0]
            kernels.append_bits(joined, np.uint64(bits), streams, np.uint64(used))
            whole, bits = divmod(bits + used, 8)
            yield joined[:whole]
            rest = joined[whole:]
        yield rest[: 1 if bits else 0]

    def tables(self, compression: Compression) -> npt.NDArray[np.uint8]:
        """Return the entry ``tables``, after all streams."""
        sizes = np.concatenate(self._sizes)
        return _tables(np.zeros(CLASSES, np.uint8), self._lengths, sizes, np.ones(sizes.size, np.bool_), compression)

    def _gaps(self) -> Iterator[_Gaps]:
        """Yield the gaps of a piece's bands but for the last, which may go on; of a tensor of one row, of its tiles."""
        grid, element = self._grid, self._spec.element
        starts = grid.column_edges if grid.is_row else grid.row_edges * grid.columns
        positions, distances = np.empty(0, np.int64), np.empty(0, element.uint)
        done = 0
        for piece in self._pieces():
            for start in range(0, piece[0].size, PIECE_CHANGES):
                part = slice(start, start + PIECE_CHANGES)
                positions = np.concatenate([positions, piece[0][part]])
                distances = np.concatenate([distances, piece[1][part]])
                last = int(np.searchsorted(starts, positions[-1], "right")) - 1
                if last > done:
                    cut = int(np.searchsorted(positions, starts[last]))
                    yield self._gaps_of(Span(done, last), positions[:cut], distances[:cut])
                    positions, distances, done = positions[cut:], distances[cut:], last
        yield self._gaps_of(Span(done, starts.size - 1), positions, distances)

    def _gaps_of(self, span: Span, positions: Positions, distances: Bits) -> _Gaps:
        """Return the gaps of some bands, or of some tiles of a tensor of one row."""
        from vllm_delta_sync.codec.tiles import encode_kernels as kernels

        grid, element = self._grid, self._spec.element
        if grid.is_row:
            grid, span = Grid(grid.row_edges, grid.column_edges[span.first : span.last + 1]), Span(0, 1)
        found = _Gaps.of(positions.size, (span.last - span.first) * grid.across, element)
        edges, edges_at = _edges_of([grid])
        kernels.gaps_of_tensors(
            np.array([(0, 0, 0, 0, 0, *edges_at, 0, *span, 0, positions.size)]), edges, magnitude_mask(element),
            np.zeros(CLASSES, element.uint), np.ones(found.sizes.size, np.bool_), positions, distances, *found,
        )  # fmt: skip
        return found


class _OldTensor(NamedTuple):
    """Old bits of a tensor in a block, or those after the changes; its first tile there, and its changes."""

    matrix: Matrix
    after: bool
    grid: Grid
    tile: int
    changed: Span


def _find_gaps(
    tensors: list[_OldTensor], limits: npt.NDArray[np.unsignedinteger], plain: npt.NDArray[np.bool_],
    positions: Positions, distances: Bits, element: DType, into: _Gaps,
) -> None:  # fmt: skip
    """Write the gaps of some tensors, on several threads if they are large.

    Args:
        plain, positions, distances, into: of the block.
    """
    from vllm_delta_sync.codec.tiles import encode_kernels as kernels

    grids = [tensor.grid for tensor in tensors]
    edges, edges_at = _edges_of(grids)

    def run(share: list[tuple[int, Span]]) -> None:
        # Here, since a thread that goes on after an interrupt must have the arrays whose addresses it is given.
        jobs = []
        for number, span in share:
            (bits, origin, stride), after, grid, tile, (start, stop) = tensors[number]
            if span.last - span.first < grid.bands:
                ends = [int(grid.row_edges[band]) * grid.columns for band in span]
                start, stop = (start + np.searchsorted(positions[start:stop], ends)).tolist()
            address = bits.__array_interface__["data"][0]
            tile += span.first * grid.across
            edges_here = edges_at[2 * number : 2 * number + 3]
            jobs.append((address, bits.size, origin, stride, after, *edges_here, tile, *span, start, stop))
        kernels.gaps_of_tensors(
            np.array(jobs, np.int64), edges, magnitude_mask(element), limits, plain, positions, distances, *into
        )

    on_threads(run, shares_of_threads(grids))


def _edges_of(grids: Sequence[Grid]) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Return the row and column edges of each grid, one after the other, and where each begins, then the end."""
    each = [edges for grid in grids for edges in (grid.row_edges, grid.column_edges)]
    return np.concatenate(each), [0, *itertools.accumulate(edges.size for edges in each)]


def _coded(
    found: _Gaps,
) -> tuple[Lengths, npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Return code lengths, (tiles,) bits of each tile's stream, all streams."""
    from vllm_delta_sync.codec.tiles import encode_kernels as kernels

    ends = np.concatenate([[0], np.cumsum(found.sizes)])
    parts = threads_for(int(ends[-1]), THREAD_CHANGES)
    # The last tiles may have no changes, and count all the same.
    inner = np.searchsorted(ends, [ends[-1] * part // parts for part in range(1, parts)]).tolist()
    cuts = [0, *inner, found.sizes.size]
    pieces = [
        _Gaps(
            found.kinds[ends[first] : ends[last]],
            found.gaps[ends[first] : ends[last]],
            found.values[ends[first] : ends[last]],
            found.sizes[first:last],
        )
        for first, last in pairwise(cuts)
    ]
    counts = on_threads(_counts, pieces)
    lengths = code_lengths(np.sum(counts, axis=0))
    written = on_threads(lambda part: _streams(*part, lengths), list(zip(pieces, counts, strict=True)))
    streams, used = written[0][1], written[0][2]
    if len(written) > 1:
        streams, used = np.zeros(sum(bits for _, _, bits in written) // 8 + 24, np.uint8), 0
        for _, part, bits in written:
            kernels.append_bits(streams, np.uint64(used), part, np.uint64(bits))
            used += bits
    return lengths, np.concatenate([sizes for sizes, _, _ in written]), streams[: (used + 7) >> 3]


def _counts(found: _Gaps) -> npt.NDArray[np.int64]:
    """Return (TABLES, 2, SYMBOLS): how often each symbol occurs."""
    from vllm_delta_sync.codec.tiles import encode_kernels as kernels

    counts = np.zeros((TABLES, 2, SYMBOLS), np.int64)
    kernels.tally(found.kinds, found.gaps, found.values, counts)
    return counts


def _streams(
    found: _Gaps, counts: npt.NDArray[np.int64], lengths: Lengths
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], int]:
    """Return (tiles,) bits of each tile's stream, the streams with at least 8 bytes after them, and their bits."""
    from vllm_delta_sync.codec.tiles import encode_kernels as kernels

    streams = np.zeros(int((counts * (lengths + _RAW_BITS)).sum()) // 8 + 24, np.uint8)
    sizes = np.empty(found.sizes.size, np.uint32)
    used = kernels.write_streams(
        found.sizes, found.kinds, found.gaps, found.values, code_words(lengths), lengths, streams, sizes
    )
    return sizes, streams, int(used)


_RAW_BITS = np.maximum(np.stack([np.arange(SYMBOLS) // 3, np.arange(SYMBOLS)]) // 4, 1) - 1
"""(2, SYMBOLS) raw bits that follow a symbol."""


def _thresholds(group: Sparse, specs: list[TensorSpec], old: BaseLookup) -> npt.NDArray[np.uint8]:
    from vllm_delta_sync.codec.tiles import encode_kernels as kernels
    from vllm_delta_sync.format.kernels import read_only

    owned, tokens = np.zeros(KEYS), np.zeros((KEYS, VALUE_TOKENS), np.int64)
    how = magnitude_mask(group.element), np.uint64(key_shift(group.element))
    step = max(1, sum(spec.numel for spec in specs) // SAMPLED_ELEMENTS)
    every = max(1, group.positions.size // SAMPLED_CHANGES)
    start = 0
    for tensor, spec, count in zip(group.ids.tolist(), specs, group.counts.tolist(), strict=True):
        changed = slice(start, start + count)
        start += count
        if spec.numel < SMALL_ELEMENTS:
            continue
        base = old(tensor)
        matrix = _matrix_of(base, spec)
        bits = read_only(matrix.flat)
        sampled = np.zeros(KEYS, np.int64)
        held = bits.size
        if base.rectangles is None or base.in_place is not None:
            kernels.count_keys(bits, step, *how, sampled)
        else:
            rows, columns = extent(spec.shape)
            held, rows_apart = 0, max(1, step // 64)
            for top, bottom, left, right in base.rectangles:
                held += (bottom - top) * (right - left)
                within = bits.reshape(rows, columns)[top:bottom:rows_apart, left:right]
                part = np.ascontiguousarray(within).reshape(-1)
                kernels.count_keys(read_only(part), 1, *how, sampled)
                del within, part
        owned += sampled * (held / max(1, int(sampled.sum())))
        where = group.positions[changed][::every]
        if base.in_place is not None:
            columns = extent(spec.shape)[1]
            where = matrix.origin + where // columns * matrix.stride + where % columns
        kernels.count_tokens(
            bits, np.ascontiguousarray(where), np.ascontiguousarray(group.data[changed][::every]), *how, tokens
        )
        # Before the next bits are read.
        del base, bits, matrix
    tokens *= every
    return choose_thresholds(np.maximum(owned, tokens.sum(axis=1)), tokens)


def zigzag(distances: Bits, element: DType) -> Bits:
    """Map two's complement 0, −1, 1, −2 … → 0, 1, 2, 3 …, in the same width."""
    signed = distances.view(f"<i{element.itemsize}")
    found: Bits = (signed << 1).view(element.uint)
    found ^= (signed >> (8 * element.itemsize - 1)).view(element.uint)
    return found


def _matrix_of(base: BaseTensor, spec: TensorSpec) -> Matrix:
    """Return base bits where they are, or as a matrix of the whole tensor; raises as ``checked``."""
    if base.in_place is not None:
        return base.in_place.matrix
    return Matrix(np.ascontiguousarray(checked(base, spec, spec.element)), 0, extent(spec.shape)[1])


def checked(found: BaseTensor, spec: TensorSpec, element: DType) -> Bits:
    """Return base bits; raises TensorMismatchError if they are of another size or width."""
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


@dataclass(frozen=True)
class CodedTensor:
    """The tiles of one tensor as a block has them, not decoded.

    Attributes:
        tensor: its id. count: elements that changed, as the block declares.
        thresholds: (CLASSES,) uint8, and tables: those of the block.
        plain, starts, sizes: (tiles,) whether each tile is plain; first bit in ``streams``, and bits, of its stream.
        streams: uint8, of the whole block.
    """

    tensor: int
    spec: TensorSpec
    count: int
    thresholds: npt.NDArray[np.uint8]
    tables: Decoding
    plain: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    streams: npt.NDArray[np.uint8]
    _what: str

    def refuse(self, found: int, tile: int) -> NoReturn:
        """Raise the FormatError of what was decoded: an error of ``decode_kernels`` in a tile, or a wrong number."""
        wrong = (
            f"tile {tile} {_WRONG[found]}" if found < 0 else f"{found} changed elements, the counts say {self.count}"
        )
        raise FormatError(
            f"{self._what}: {self.spec.name!r}: {wrong}; it is damaged, or was made against other weights than these"
        )


class _DecodingBatch(NamedTuple):
    """What decoding any of some tensors of a block takes.

    Attributes:
        magnitudes, limits: see ``mask_tiles``.
        first: number in the block of the first of the tensors' tiles.
        wanted: (tiles,) whether to decode a tile, which has changes. coded: and whether it is not plain.
        starts, sizes: (tiles,) first bit in ``streams``, and bits, of each stream. streams: PADDING bytes follow.
    """

    magnitudes: np.unsignedinteger
    limits: npt.NDArray[np.unsignedinteger]
    first: int
    wanted: npt.NDArray[np.bool_]
    coded: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    streams: npt.NDArray[np.uint8]


_Part = tuple[list[tuple[int, Span]], npt.NDArray[np.int64], tuple[Positions, Bits]]
"""What one thread decodes: its share, how many elements it found of each tensor, and room for them."""


@dataclass
class TilesBlock:
    """A block of kind tiles whose entries, except the streams, have been read and checked.

    Attributes:
        directory: its tensors.
    """

    directory: Directory
    _block: Block
    _specs: list[TensorSpec]
    _grids: list[Grid]
    _what: str
    _thresholds: npt.NDArray[np.uint8]
    _firsts: list[int]
    _plain: npt.NDArray[np.bool_]
    _starts: npt.NDArray[np.int64]
    _sizes: npt.NDArray[np.int64]
    _streams: npt.NDArray[np.uint8]
    _tables: Decoding

    @classmethod
    def open(
        cls, container: Container, table: TensorTable, block: Block, directory: Directory, compression: Compression,
        what: str,
    ) -> "TilesBlock":  # fmt: skip
        """Read a block's tables.

        Raises:
            FormatError, LimitError: one of them is malformed.
        """
        data, name = bytes_of(container, f"{block.name}.tables"), f"{what}: tables"
        size = declared_size(data, compression, name)
        # Before any grid is made: a table may have tensors of any size.
        if 4 * sum(least_tiles(numel) for numel in directory.numels.tolist()) > size:
            raise FormatError(f"{name} have {size} bytes, too few for the tiles of its tensors")
        specs = [table[tensor] for tensor in directory.ids.tolist()]
        grids = [grid_of(spec.shape) for spec in specs]
        tiles = [grid.tiles for grid in grids]
        lengths_at = CLASSES
        sizes_at = lengths_at + TABLES * 2 * SYMBOLS
        expected = sizes_at + 4 * sum(tiles)
        if size != expected:
            raise FormatError(f"{name} have {size} bytes, {expected} expected")
        tables = decompress(data, size, compression, name)
        thresholds = tables[:lengths_at].copy()
        if np.any(thresholds[1:] < thresholds[:-1]):
            raise FormatError(f"{name} have keys {thresholds.tolist()}, which do not ascend")
        lengths = tables[lengths_at:sizes_at].reshape(TABLES, 2, SYMBOLS)
        if overfull(lengths):
            raise FormatError(f"{name} have code lengths that no prefix code has")
        numbers = np.ascontiguousarray(tables[sizes_at:].reshape(4, -1).T).reshape(-1).view("<u4")
        sizes = (numbers & ~PLAIN_TILE).astype(np.int64)
        ends = np.cumsum(sizes)
        streams = bytes_of(container, f"{block.name}.streams")
        if (int(ends[-1]) + 7) >> 3 != streams.size:
            raise FormatError(f"{what}: streams have {streams.size} bytes, their sizes add up to {ends[-1]} bits")
        firsts = np.concatenate([[0], np.cumsum(tiles)]).tolist()
        # A change takes a bit at least: what is declared must fit before it is allocated.
        many = np.flatnonzero(np.add.reduceat(sizes, firsts[:-1]) < directory.counts)
        if many.size:
            row = int(many[0])
            raise FormatError(
                f"{what}: {specs[row].name!r} has fewer bits than the counts say changes: {directory.counts[row]}"
            )
        return cls(
            directory, block, specs, grids, what, thresholds, firsts, (numbers & PLAIN_TILE) > 0, ends - sizes, sizes,
            streams, decoding(lengths.copy()),
        )  # fmt: skip

    @cached_property
    def all_plain(self) -> bool:
        """Whether no tile needs old bits."""
        return bool(np.all(self._plain | (self._sizes == 0)))

    def coded(self, row: int) -> CodedTensor:
        """Return the block's tensor number ``row`` as it is."""
        tensor, tiles = int(self.directory.ids[row]), slice(self._firsts[row], self._firsts[row + 1])
        return CodedTensor(
            tensor, self._specs[row], int(self.directory.counts[row]), self._thresholds, self._tables,
            self._plain[tiles], self._starts[tiles], self._sizes[tiles], self._streams, self._what,
        )  # fmt: skip

    def take(self, wanted: deque[tuple[int, BaseTensor | None]]) -> Sparse:
        """Decode tensors of the block, limited to the parts whose base bits are there.

        Args:
            wanted: their numbers in the directory, ascending, and base bits; None decodes a whole tensor whose tiles
                are plain. Empty afterwards, so that bits are freed on the way.

        Raises:
            FormatError: a stream is damaged, or was made against other bits.
            CutTileError: only a part of a tile's base bits is there, and it is not plain.
            UnsupportedError: there are none, and a tile is not plain.
            TensorMismatchError: they have another size.
        """
        from vllm_delta_sync.codec.tiles import decode_kernels as kernels
        from vllm_delta_sync.format.kernels import read_only

        element = self._block.element
        rows = [row for row, _ in wanted]
        room = int(self.directory.counts[rows].sum())
        positions, distances = np.empty(room, np.int64), np.empty(room, element.uint)
        counts, used = np.zeros(len(rows), np.int64), 0
        tiles = slice(self._firsts[rows[0]], self._firsts[rows[-1] + 1])
        starts, sizes = self._starts[tiles], self._sizes[tiles]
        begin, end = int(starts[0]) >> 3, (int(starts[-1] + sizes[-1]) + 7) >> 3
        payload = self._streams[begin : end + kernels.PADDING]
        if payload.size < end - begin + kernels.PADDING:
            payload = np.concatenate([payload, np.zeros(kernels.PADDING, np.uint8)])
        batch = _DecodingBatch(
            magnitude_mask(element), key_limits(self._thresholds, element), tiles.start, sizes > 0,
            ~self._plain[tiles] & (sizes > 0), starts - 8 * begin, sizes, read_only(payload),
        )  # fmt: skip
        ends, done, elements = np.cumsum(self.directory.numels[rows]), 0, 0
        while wanted:
            last = max(int(np.searchsorted(ends, elements + GROUP_ELEMENTS, "right")), done + 1)
            group = [wanted.popleft() for _ in range(done, last)]
            found = self._decode(group, batch, (positions[used:], distances[used:]))
            counts[done:last] = found
            done, elements, used = last, int(ends[last - 1]), used + int(found.sum())
        kept = counts > 0
        return Sparse(
            element.name, self.directory.ids[rows][kept], counts[kept], positions[:used], distances[:used], True
        )

    def _decode(
        self, group: list[tuple[int, BaseTensor | None]], batch: _DecodingBatch, into: tuple[Positions, Bits]
    ) -> npt.NDArray[np.int64]:
        """Write the positions and distances of some tensors → how many of each.

        Args:
            group: see ``take``. into: room for the changed elements that the block declares.
        """
        from vllm_delta_sync.codec.tiles import decode_kernels as kernels

        element = self._block.element
        rows = [row for row, _ in group]
        grids, rooms = [self._grids[row] for row in rows], self.directory.counts[rows].tolist()
        firsts = [self._firsts[row] - batch.first for row in rows]
        for (row, base), grid, first in zip(group, grids, firsts, strict=True):
            if base is not None and base.rectangles is not None:
                tiles = slice(first, first + grid.tiles)
                held, cut = grid.held(base.rectangles)
                batch.wanted[tiles] &= held
                batch.coded[tiles] &= held
                if np.any(batch.coded[tiles] & cut):
                    raise CutTileError(
                        f"{self._what}: of tensor {self._specs[row].name!r}, this rank has only a part of tile "
                        f"{np.flatnonzero(batch.coded[tiles] & cut)[0]}, which is coded as a whole; publish with "
                        "codec='plain', or serve with other numbers of ranks"
                    )
        reading: Callable[[], AbstractContextManager[None]] = nullcontext
        nothing, matrices = np.empty(0, element.uint), []
        ends = [first + grid.tiles for first, grid in zip(firsts, grids, strict=True)]
        coded = np.concatenate([[0], np.cumsum(batch.coded[firsts[0] : ends[-1]])])
        coded_tiles = coded[np.array(ends) - firsts[0]] - coded[np.array(firsts) - firsts[0]]
        for (row, base), grid, count in zip(group, grids, coded_tiles.tolist(), strict=True):
            if count == 0:
                matrices.append(Matrix(nothing, 0, grid.columns))
            elif base is None:
                raise UnsupportedError(f"{self._what}: {self._specs[row].name!r} can be decoded only with its old bits")
            else:
                matrices.append(_matrix_of(base, self._specs[row]))
                reading = reading if base.in_place is None else base.in_place.reading
        edges, edges_at = _edges_of(grids)
        parts: list[_Part] = []
        for share in shares_of_threads(grids):
            room = sum(rooms[number] for number, _ in share)
            # Of several shares, only the first one's place is known; memory is used as far as it is written.
            place = (np.empty(room, np.int64), np.empty(room, element.uint)) if parts else into
            parts.append((share, np.zeros(len(share), np.int64), place))

        def run(part: _Part) -> tuple[int, int, int]:
            share, counts, place = part
            # Here, since a thread that goes on after an interrupt must have the arrays whose addresses it is given.
            jobs = [
                (
                    matrices[number].flat.__array_interface__["data"][0], matrices[number].flat.size,
                    matrices[number].origin, matrices[number].stride, *edges_at[2 * number : 2 * number + 3],
                    firsts[number], *span, rooms[number],
                )
                for number, span in share
            ]  # fmt: skip
            return kernels.decode_tensors(
                np.array(jobs, np.int64), edges, batch.magnitudes, batch.limits, batch.wanted, batch.coded,
                batch.starts, batch.sizes, batch.streams, self._tables, *place, counts,
            )  # fmt: skip

        with reading():
            errors = on_threads(run, parts)
        for (job, error, tile), (share, *_) in zip(errors, parts, strict=True):
            if error < 0:
                self.coded(group[share[job][0]][0]).refuse(error, tile)
        totals = np.zeros(len(group), np.int64)
        for share, counts, _ in parts:
            np.add.at(totals, [number for number, _ in share], counts)
        for (row, base), total, room in zip(group, totals.tolist(), rooms, strict=True):
            if total > room or (total != room and (base is None or base.rectangles is None)):
                self.coded(row).refuse(total, 0)
        start = 0
        for number, (_, counts, place) in enumerate(parts):
            found = int(counts.sum())
            if number:
                into[0][start : start + found], into[1][start : start + found] = place[0][:found], place[1][:found]
            start += found
        return totals


def compile_encoder(element: DType) -> None:
    """Compile the loops of ``encode`` and ``LargeTensor``, for an element type, now."""
    from vllm_delta_sync.codec.tiles import encode_kernels as kernels
    from vllm_delta_sync.format.kernels import read_only

    bits, how = np.zeros(64, element.uint), (magnitude_mask(element), np.uint64(key_shift(element)))
    kernels.count_keys(read_only(bits), 1, *how, np.zeros(KEYS, np.int64))
    changed = np.zeros(1, np.int64), np.ones(1, element.uint)
    kernels.count_tokens(read_only(bits), *changed, *how, np.zeros((KEYS, VALUE_TOKENS), np.int64))
    list(LargeTensor(TensorSpec("t", element.name, (64,)), lambda: [changed]).streams())


def compile_decoder(elements: Iterable[DType]) -> None:
    """Compile the loops of ``TilesBlock``, for these element types, now."""
    from vllm_delta_sync.codec.tiles import decode_kernels as kernels
    from vllm_delta_sync.format.kernels import read_only

    none, tables = np.empty(0, np.int64), decoding(np.zeros((TABLES, 2, SYMBOLS), np.uint8))
    for element in elements:
        kernels.decode_tensors(
            np.empty((0, 11), np.int64), none, magnitude_mask(element), np.zeros(CLASSES, element.uint),
            np.empty(0, np.bool_), np.empty(0, np.bool_), none, none, read_only(np.zeros(kernels.PADDING, np.uint8)),
            tables, none, np.empty(0, element.uint), none,
        )  # fmt: skip

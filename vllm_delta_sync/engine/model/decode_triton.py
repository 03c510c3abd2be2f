"""``decode_tiles`` decodes tiles on the device where the old weights lie; imported only where Triton is.

So only streams, about a byte per change, need to be uploaded. Three kernels do what ``codec/tiles/decode_kernels.py``
does on a CPU: ``mask_kernel`` finds the classes of all elements, ``stream_kernel`` reads each tile's stream in a lane
of its own, and ``place_kernel`` turns ranks into positions, all changes at once. No tile waits for another one, and
nothing is read back in between. Elements of 64 bits are left to the CPU.

Streams are not trusted: for any bytes, a kernel ends and writes only inside the arrays that it was given.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from vllm_delta_sync.codec.tiles import alphabets, decode_kernels
from vllm_delta_sync.codec.tiles.alphabets import CLASSES, LONGEST, TABLES
from vllm_delta_sync.codec.tiles.coder import Decoding, key_limits, magnitude_mask
from vllm_delta_sync.codec.tiles.grid import CutTileError, Grid
from vllm_delta_sync.engine.model.commit_triton import WIDTHS
from vllm_delta_sync.format.table import DType
from vllm_delta_sync.tensors.changes import Rectangle
from vllm_delta_sync.tensors.torch_views import SIGNED

MASK_WORDS = 64
"""Words of 32 elements that a program of ``mask_kernel`` compares at a time."""
LANES = 32
"""Tiles per program of ``stream_kernel``: one for each thread of a warp."""
CHANGES = 128
"""Changes that a program of ``place_kernel`` places at a time."""
PADDING = decode_kernels.PADDING
"""Bytes that must follow the last stream: one damaged symbol can read so far beyond its end."""

Fields = npt.NDArray[np.int64]
"""(fields, tiles): what the kernels know of each tile, as int32 on the device. Its rows have the numbers below."""
Parts = npt.NDArray[np.int64]
"""(parts, fields): what tiles of one part of a tensor have in common. Its columns have the numbers below."""

# Triton reads globals only as constexpr.
START = tl.constexpr(0)  # first bit of its stream
BITS = tl.constexpr(1)  # of its stream
PART = tl.constexpr(2)  # twice the number of its part, and 1 for a plain tile
TOP = tl.constexpr(3)  # row of its first element in the tensor
LEFT = tl.constexpr(4)  # column of it
HEIGHT = tl.constexpr(5)
WIDTH = tl.constexpr(6)
ROOM = tl.constexpr(7)  # where its changes begin in ``ranks`` and ``steps``
WORDS = tl.constexpr(8)  # words of one class before its own in ``masks`` and ``before``

BLOCK = tl.constexpr(0)  # its block's place in ``tables`` and ``limits``
COLUMNS = tl.constexpr(1)  # of the tensor
OFFSET = tl.constexpr(2)  # of position 0 in the tensor
ADDRESS = tl.constexpr(3)  # of old bits, were the tensor's element (0, 0) there; the steps are from it
ROW_STEP = tl.constexpr(4)  # from one row of old bits to the next, in elements
COLUMN_STEP = tl.constexpr(5)  # from one column of old bits to the next, in elements
_OF_PART = tl.constexpr(6)

_OTHERS = tl.constexpr(alphabets.OTHERS)
_PLAIN_TABLE = tl.constexpr(alphabets.PLAIN)
_CLASSES = tl.constexpr(CLASSES)
_KINDS = tl.constexpr(alphabets.KINDS)
_ENTRIES = tl.constexpr(1 << LONGEST)
_BLOCK_ENTRIES = tl.constexpr(TABLES * 2 << LONGEST)
_SHORT = tl.constexpr(decode_kernels.SHORT)
_NO_CODE = tl.constexpr(decode_kernels.NO_CODE)
_OUTSIDE = tl.constexpr(decode_kernels.OUTSIDE)
_TOO_MANY = tl.constexpr(decode_kernels.TOO_MANY)
_WIDE = tl.constexpr(decode_kernels.WIDE)
_TWICE = tl.constexpr(decode_kernels.TWICE)


@triton.jit
def _field(fields, count, number: tl.constexpr, tile):
    """Return a field of a tile, or of several, as int32; 0 beyond the last tile."""
    return tl.load(fields + number * count + tile, mask=tile < count, other=0)


@triton.jit
def _of_part(fields, count, parts, number: tl.constexpr, tile):
    """Return a field of the parts of a tile, or of several, as int64; 0 beyond the last tile."""
    part = _field(fields, count, PART, tile) // 2
    return tl.load(parts + part * _OF_PART + number, mask=tile < count, other=0)


@triton.jit
def _ones(word):
    """Count the set bits of uint32, as int64."""
    sums = word - ((word >> 1) & 0x55555555)
    sums = (sums & 0x33333333) + ((sums >> 2) & 0x33333333)
    sums = (sums + (sums >> 4)) & 0x0F0F0F0F
    return ((sums * 0x01010101) >> 24).to(tl.int64)


@triton.jit
def _select(word, rank):
    """Return the index of set bit number ``rank`` of uint32, which must have that many; both as int32."""
    twos = word - ((word >> 1) & 0x55555555)
    fours = (twos & 0x33333333) + ((twos >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    low = ((eights + (eights >> 8)) & 0xFF).to(tl.int32)
    bit = tl.where(rank >= low, 16, 0)
    rank = tl.where(rank >= low, rank - low, rank)
    low = ((eights >> bit.to(tl.uint32)) & 0xFF).to(tl.int32)
    bit = tl.where(rank >= low, bit + 8, bit)
    rank = tl.where(rank >= low, rank - low, rank)
    low = ((fours >> bit.to(tl.uint32)) & 0xF).to(tl.int32)
    bit = tl.where(rank >= low, bit + 4, bit)
    rank = tl.where(rank >= low, rank - low, rank)
    low = ((twos >> bit.to(tl.uint32)) & 3).to(tl.int32)
    bit = tl.where(rank >= low, bit + 2, bit)
    rank = tl.where(rank >= low, rank - low, rank)
    low = ((word >> bit.to(tl.uint32)) & 1).to(tl.int32)
    return tl.where(rank >= low, bit + 1, bit)


@triton.jit(do_not_specialize=["count"])
def mask_kernel(
    fields, count: tl.int32, parts, limits, masks, before, members, MAGNITUDE: tl.constexpr, ELEMENT: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Compute a tile's class masks; see ``DecodeArrays``. Words of the tile: 32 elements of one row each, row by row.

    A class's words lie together, and the tile's classes one after the other.
    """
    tile = tl.program_id(0)
    width = _field(fields, count, WIDTH, tile)
    across = (width + 31) // 32
    words = _field(fields, count, HEIGHT, tile) * across
    words = tl.where(_field(fields, count, PART, tile) % 2 == 0, words, 0)
    first_word = _CLASSES * _field(fields, count, WORDS, tile).to(tl.int64)
    masks += first_word
    before += first_word
    row_step = _of_part(fields, count, parts, ROW_STEP, tile)
    column_step = _of_part(fields, count, parts, COLUMN_STEP, tile)
    bits = _of_part(fields, count, parts, ADDRESS, tile).to(tl.pointer_type(ELEMENT))
    bits += _field(fields, count, TOP, tile).to(tl.int64) * row_step
    bits += _field(fields, count, LEFT, tile).to(tl.int64) * column_step
    limits += _CLASSES * _of_part(fields, count, parts, BLOCK, tile)
    limit0 = tl.load(limits).to(tl.uint32, bitcast=True)
    limit1 = tl.load(limits + 1).to(tl.uint32, bitcast=True)
    limit2 = tl.load(limits + 2).to(tl.uint32, bitcast=True)
    limit3 = tl.load(limits + 3).to(tl.uint32, bitcast=True)
    place = tl.arange(0, 32)[None, :]
    value = tl.full([1, 32], 1, tl.uint32) << place.to(tl.uint32)
    # Of two classes in one number, 32 bits each.
    passed01 = tl.full([], 0, tl.int64)
    passed23 = tl.full([], 0, tl.int64)
    for start in range(0, words, SIZE):
        word = start + tl.arange(0, SIZE)
        inside = word < words
        row = word // across
        column = (word - row * across)[:, None] * 32 + place
        valid = inside[:, None] & (column < width)
        index = row.to(tl.int64)[:, None] * row_step + column.to(tl.int64) * column_step
        # A signed integer is extended by its sign, which the mask takes away.
        magnitude = tl.load(bits + index, mask=valid, other=0).to(tl.uint32) & MAGNITUDE
        mask0 = tl.sum(tl.where(valid & (magnitude < limit0), value, 0), 1)
        below1 = tl.sum(tl.where(valid & (magnitude < limit1), value, 0), 1)
        below2 = tl.sum(tl.where(valid & (magnitude < limit2), value, 0), 1)
        below3 = tl.sum(tl.where(valid & (magnitude < limit3), value, 0), 1)
        mask1, mask2, mask3 = below1 & ~mask0, below2 & ~below1, below3 & ~below2
        tl.store(masks + word, mask0.to(tl.int32, bitcast=True), mask=inside)
        tl.store(masks + words + word, mask1.to(tl.int32, bitcast=True), mask=inside)
        tl.store(masks + 2 * words + word, mask2.to(tl.int32, bitcast=True), mask=inside)
        tl.store(masks + 3 * words + word, mask3.to(tl.int32, bitcast=True), mask=inside)
        ones01 = _ones(mask0) | (_ones(mask1) << 32)
        ones23 = _ones(mask2) | (_ones(mask3) << 32)
        counts01 = passed01 + tl.cumsum(ones01, 0) - ones01
        counts23 = passed23 + tl.cumsum(ones23, 0) - ones23
        # The lower half of a number is what remains in 32 bits.
        tl.store(before + word, counts01.to(tl.int32), mask=inside)
        tl.store(before + words + word, (counts01 >> 32).to(tl.int32), mask=inside)
        tl.store(before + 2 * words + word, counts23.to(tl.int32), mask=inside)
        tl.store(before + 3 * words + word, (counts23 >> 32).to(tl.int32), mask=inside)
        passed01 += tl.sum(ones01, 0)
        passed23 += tl.sum(ones23, 0)
    members += _CLASSES * tile
    tl.store(members, passed01.to(tl.int32))
    tl.store(members + 1, (passed01 >> 32).to(tl.int32))
    tl.store(members + 2, passed23.to(tl.int32))
    tl.store(members + 3, (passed23 >> 32).to(tl.int32))


@triton.jit
def _window(streams, place, mask):
    """Return the 64 bits from each bit ``place`` on."""
    word = streams + (place >> 6)
    shift = (place & 63).to(tl.uint64)
    low = tl.load(word, mask=mask, other=0).to(tl.uint64, bitcast=True)
    high = tl.load(word + 1, mask=mask, other=0).to(tl.uint64, bitcast=True)
    return (low >> shift) | ((high << 1) << (63 - shift))


@triton.jit(do_not_specialize=["count"])
def stream_kernel(
    fields, count: tl.int32, parts, streams, tables, members, ranks, steps, found, LANES: tl.constexpr,
):  # fmt: skip
    """Read a stream in each lane: ascending ranks, and signed distances; see ``decode_kernels.read_stream``."""
    width: tl.constexpr = steps.dtype.element_ty.primitive_bitwidth
    tile = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = tile < count
    plain = _field(fields, count, PART, tile) % 2 != 0
    # Where the elements of each class end among all ranks; nowhere in a plain tile.
    end0 = tl.load(members + _CLASSES * tile, mask=inside, other=0)
    end1 = end0 + tl.load(members + _CLASSES * tile + 1, mask=inside, other=0)
    end2 = end1 + tl.load(members + _CLASSES * tile + 2, mask=inside, other=0)
    end3 = end2 + tl.load(members + _CLASSES * tile + 3, mask=inside, other=0)
    size = _field(fields, count, HEIGHT, tile) * _field(fields, count, WIDTH, tile)
    elements = end3 + size
    tables += _BLOCK_ENTRIES * _of_part(fields, count, parts, BLOCK, tile)
    ranks += _field(fields, count, ROOM, tile)
    steps += _field(fields, count, ROOM, tile)
    place = _field(fields, count, START, tile).to(tl.int64)
    end = place + _field(fields, count, BITS, tile)
    following = tl.zeros([LANES], tl.int32)
    done = tl.zeros([LANES], tl.int32)
    error = tl.zeros([LANES], tl.int32)
    active = place < end
    while tl.max(active.to(tl.int32), 0) > 0:
        error = tl.where(active & ((following >= elements) | (done >= size)), _OUTSIDE, error)
        active &= error == 0
        table = (following >= end0).to(tl.int32) + (following >= end1).to(tl.int32) + (following >= end2).to(tl.int32)
        table = tl.where(following < end3, table, tl.where(plain, _PLAIN_TABLE, _OTHERS))
        entries = tables + table * (2 * _ENTRIES)
        ahead = _window(streams, place, active)
        entry = tl.load(entries + (ahead & (_ENTRIES - 1)).to(tl.int32), mask=active, other=0).to(tl.int32) & 0xFFFF
        length = entry & 15
        error = tl.where(active & (length == 0), _NO_CODE, error)
        active &= error == 0
        raw = (entry >> 6) & 31
        ahead >>= length.to(tl.uint64)
        rest = (ahead & ((tl.full([LANES], 1, tl.uint64) << raw.to(tl.uint64)) - 1)).to(tl.int32)
        gap = ((entry >> 11) << raw) | rest
        place += tl.where(active, length + raw, 0)
        value = (((entry >> 4) & 3) + 1).to(tl.uint64)
        large = active & (value == _KINDS)
        # With an element of 32 bits, a change may have more bits than a window.
        if width > 16:
            ahead = _window(streams, place, large)
        else:
            ahead >>= raw.to(tl.uint64)
        more = entries + _ENTRIES + (ahead & (_ENTRIES - 1)).to(tl.int32)
        entry = tl.load(more, mask=large, other=0).to(tl.int32) & 0xFFFF
        length = entry & 15
        error = tl.where(large & (length == 0), _NO_CODE, error)
        raw = (entry >> 4) & 63
        ahead >>= length.to(tl.uint64)
        rest = ahead & ((tl.full([LANES], 1, tl.uint64) << raw.to(tl.uint64)) - 1)
        far = (((entry >> 10).to(tl.uint64) << raw.to(tl.uint64)) | rest) + _KINDS
        value = tl.where(large, far, value)
        place += tl.where(large, length + raw, 0)
        # A token has two bits above the raw ones. Where there are too many, the window may lack some, and the sum wrap.
        wide = large & ((raw > width - 3) | (value >> width != 0))
        error = tl.where((error == 0) & wide, _WIDE, error)
        error = tl.where((error == 0) & active & (gap >= elements - following), _OUTSIDE, error)
        active &= error == 0
        following += tl.where(active, gap, 0)
        zigzag = value.to(tl.int64)
        step = (zigzag >> 1) ^ -(zigzag & 1)
        tl.store(ranks + done, following, mask=active)
        tl.store(steps + done, step.to(steps.dtype.element_ty), mask=active)
        following += active.to(tl.int32)
        done += active.to(tl.int32)
        active &= place < end
    error = tl.where((error == 0) & (place != end), _SHORT, error)
    tl.store(found + tile, tl.where(error == 0, done, error), mask=inside)


@triton.jit
def _first_from(ranks, first, last, value):
    """Return, for each value, the index of the first of the ascending ranks[first:last] that is not below it."""
    at = value * 0 + first
    left = last - first
    while left > 1:
        half = left // 2
        passed = tl.load(ranks + at + (half - 1)) < value
        at = tl.where(passed, at + half, at)
        left -= half
    passed = (tl.load(ranks + at, mask=at < last, other=0) < value) & (at < last)
    return at + passed.to(tl.int32)


@triton.jit(do_not_specialize=["count", "room"])
def place_kernel(
    fields, count: tl.int32, parts, masks, before, members, ranks, steps, found, ends, room: tl.int64, positions,
    distances, SIZE: tl.constexpr,
):  # fmt: skip
    """Write a tile's changes, ascending by position, so that they end at its ``ends``; or an error to ``found``.

    Before a change lie those changes of each class, and of the others, whose elements come before its own. Ranks
    ascend, so each of these numbers is found by halving; nothing is sorted.
    """
    tile = tl.program_id(0)
    changes = tl.load(found + tile)
    if changes > 0:
        target = tl.load(ends + tile) - changes
        if target + changes > room:
            tl.store(found + tile, _TOO_MANY)
        else:
            positions += target
            distances += target
            columns = _of_part(fields, count, parts, COLUMNS, tile)
            first = _field(fields, count, TOP, tile) * columns + _field(fields, count, LEFT, tile)
            first -= _of_part(fields, count, parts, OFFSET, tile)
            ranks += _field(fields, count, ROOM, tile)
            steps += _field(fields, count, ROOM, tile)
            width = _field(fields, count, WIDTH, tile)
            if _field(fields, count, PART, tile) % 2 != 0:
                for start in range(0, changes, SIZE):
                    index = start + tl.arange(0, SIZE)
                    inside = index < changes
                    element = tl.load(ranks + index, mask=inside, other=0)
                    row = element // width
                    position = first + row.to(tl.int64) * columns + (element - row * width)
                    tl.store(positions + index, position.to(positions.dtype.element_ty), mask=inside)
                    tl.store(distances + index, tl.load(steps + index, mask=inside, other=0), mask=inside)
            else:
                across = (width + 31) // 32
                words = _field(fields, count, HEIGHT, tile) * across
                first_word = _CLASSES * _field(fields, count, WORDS, tile).to(tl.int64)
                masks += first_word
                before += first_word
                # Of each class and of the others: the first rank, and the first change.
                base1 = tl.load(members + _CLASSES * tile)
                base2 = base1 + tl.load(members + _CLASSES * tile + 1)
                base3 = base2 + tl.load(members + _CLASSES * tile + 2)
                others = base3 + tl.load(members + _CLASSES * tile + 3)
                from1 = _first_from(ranks, 0, changes, base1)
                from2 = _first_from(ranks, from1, changes, base2)
                from3 = _first_from(ranks, from2, changes, base3)
                from_others = _first_from(ranks, from3, changes, others)
                bases = (0, base1, base2, base3)
                begins = (0, from1, from2, from3, from_others)
                twice = tl.zeros([SIZE], tl.int32)
                for start in range(0, changes, SIZE):
                    index = start + tl.arange(0, SIZE)
                    inside = index < changes
                    rank = tl.load(ranks + index, mask=inside, other=0)
                    classed = rank < others
                    kind = (rank >= base1).to(tl.int32) + (rank >= base2).to(tl.int32) + (rank >= base3).to(tl.int32)
                    base = tl.where(rank < base2, base1, tl.where(rank < base3, base2, base3))
                    base = tl.where(rank < base1, 0, base)
                    own = rank - tl.where(classed, base, others)
                    classed &= inside
                    # The last word that no more elements of the class come before has this one.
                    word = tl.where(classed, kind, 0) * words
                    left = words
                    while left > 1:
                        half = left // 2
                        passed = classed & (tl.load(before + word + half, mask=classed, other=0) <= own)
                        word = tl.where(passed, word + half, word)
                        left -= half
                    mask = tl.load(masks + word, mask=classed, other=0).to(tl.uint32, bitcast=True)
                    bit = _select(mask, own - tl.load(before + word, mask=classed, other=0))
                    word -= tl.where(classed, kind, 0) * words
                    row = word // across
                    element = tl.where(classed, row * width + (word - row * across) * 32 + bit, own)
                    row = element // width
                    column = element - row * width
                    word = row * across + column // 32
                    shift = (column % 32).to(tl.uint32)
                    bits_before = (tl.full([SIZE], 1, tl.uint32) << shift) - 1
                    order = _first_from(ranks, from_others, changes, others + element) - from_others
                    for each in tl.static_range(_CLASSES):
                        mask = tl.load(masks + each * words + word, mask=inside, other=0).to(tl.uint32, bitcast=True)
                        passed = tl.load(before + each * words + word, mask=inside, other=0)
                        rank_here = bases[each] + passed + _ones(mask & bits_before).to(tl.int32)
                        at = _first_from(ranks, begins[each], begins[each + 1], rank_here)
                        order += at - begins[each]
                        # One of the others may be an element of this class too, and have been named there.
                        named = inside & (rank >= others) & (((mask >> shift) & 1) != 0) & (at < begins[each + 1])
                        named &= tl.load(ranks + at, mask=named, other=-1) == rank_here
                        twice |= named.to(tl.int32)
                    position = first + row.to(tl.int64) * columns + column
                    tl.store(positions + order, position.to(positions.dtype.element_ty), mask=inside)
                    tl.store(distances + order, tl.load(steps + index, mask=inside, other=0), mask=inside)
                if tl.max(twice, 0) > 0:
                    tl.store(found + tile, _TWICE)


class OldBits(NamedTuple):
    """Where the old bits of a part of a tensor lie on the device.

    Attributes:
        rectangle: of the tensor as the matrix that ``Grid`` cuts.
        address: of its first element, in bytes.
        row_step, column_step: from one row or column to the next, in elements.
    """

    rectangle: Rectangle
    address: int
    row_step: int
    column_step: int


def tile_fields(
    grid: Grid, element: DType, block: int, plain: npt.NDArray[np.bool_], starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64], held: Sequence[OldBits] | None,
) -> tuple[npt.NDArray[np.int64], Fields, Parts]:  # fmt: skip
    """Describe the tiles of a tensor that have changes and meet what this process holds.

    Args:
        grid: of a tensor with fewer than 2^31 rows and columns.
        block: place of the tensor's block among those of the ``TileBatch``.
        plain, starts, sizes: (tiles,) whether each tile is plain; first bit, and bits, of its stream.
        held: disjoint parts; None if all tiles are plain, and all are wanted.

    Returns:
        (n,) numbers of these tiles, ascending; (7, n) fields, all but the last two; (parts, 6) those of the parts.

    Raises:
        CutTileError: no part has all old bits of a tile that is not plain.
    """
    wanted = sizes > 0
    if held is not None:
        wanted &= grid.held([part.rectangle for part in held])[0]
    numbers = np.flatnonzero(wanted)
    bands, places = np.divmod(numbers, grid.across)
    top, bottom = grid.row_edges[bands], grid.row_edges[bands + 1]
    left, right = grid.column_edges[places], grid.column_edges[places + 1]
    owner, found = np.zeros(numbers.size, np.int64), plain[numbers]
    parts = np.zeros((max(1, len(held or ())), _OF_PART.value), np.int64)
    parts[:, BLOCK.value], parts[:, COLUMNS.value] = block, grid.columns
    for number, part in enumerate(held or ()):
        first_row, last_row, first_column, last_column = part.rectangle
        inside = (top >= first_row) & (bottom <= last_row) & (left >= first_column) & (right <= last_column)
        owner[inside] = number
        found = found | inside
        before = first_row * part.row_step + first_column * part.column_step
        parts[number, ADDRESS.value] = part.address - element.itemsize * before
        parts[number, ROW_STEP.value], parts[number, COLUMN_STEP.value] = part.row_step, part.column_step
    if not found.all():
        raise CutTileError(f"no part on the device has all old bits of tile {numbers[~found][0]}, which is not plain")
    part_of = 2 * owner + plain[numbers]
    return numbers, np.stack([starts[numbers], sizes[numbers], part_of, top, left, bottom - top, right - left]), parts


def joined_tiles(tiles: Sequence[tuple[Fields, Parts]]) -> tuple[Fields, Parts]:
    """Join what ``tile_fields`` returned of several tensors."""
    before = np.cumsum([0, *(len(parts) for _, parts in tiles)])
    fields = np.concatenate([each for each, _ in tiles], axis=1)
    fields[PART.value] += 2 * np.repeat(before[:-1], [each.shape[1] for each, _ in tiles])
    return fields, np.concatenate([parts for _, parts in tiles])


@dataclass(frozen=True)
class TileBatch:
    """Tiles that are decoded together, of any number of tensors and blocks, in host memory.

    Attributes:
        element: of all tensors, or another one of their width that is a float as they are; of at most 32 bits.
        fields: (9, tiles). parts: (parts, 6). tables: (blocks, TABLES, 2, 2^LONGEST). limits: (blocks, CLASSES).
        room: changes that the streams may have, at most. words: of 32 elements in all tiles that are not plain.
    """

    element: DType
    fields: Fields
    parts: Parts
    tables: Decoding
    limits: npt.NDArray[np.uint32]
    room: int
    words: int

    @classmethod
    def of(
        cls,
        element: DType,
        tiles: tuple[Fields, Parts],
        tables: Sequence[Decoding],
        thresholds: Sequence[npt.NDArray[np.uint8]],
    ) -> "TileBatch":
        """Return the batch of what ``tile_fields`` returned; ``tables`` and ``thresholds`` are those of each block."""
        fields, parts = tiles
        every = np.stack(tables)
        numbers, plain = np.divmod(fields[PART.value], 2)
        # A change takes at least the shortest code of its block.
        lengths = every[:, :, 0].reshape(len(tables), -1) & 15
        shortest = np.where(lengths > 0, lengths, LONGEST).min(axis=1).astype(np.int64)[parts[numbers, BLOCK.value]]
        bits, height, width = fields[[BITS.value, HEIGHT.value, WIDTH.value]]
        rooms = np.minimum(-(-bits // shortest), height * width)
        words = np.where(plain > 0, 0, height * (-(-width // 32)))
        before = [np.cumsum(rooms) - rooms, np.cumsum(words) - words]
        limits = np.stack([key_limits(each, element) for each in thresholds]).astype(np.uint32)
        return cls(element, np.concatenate([fields, before]), parts, every, limits, int(rooms.sum()), int(words.sum()))

    @property
    def tiles(self) -> int:
        return self.fields.shape[1]


@dataclass(frozen=True)
class DecodeArrays:
    """What the kernels read and write beside the weights: arrays on the device, in this order.

    Attributes:
        fields, parts, limits, tables: as in ``TileBatch``; int32, int64, int32, int16.
        streams: (words,) int64: streams, at least PADDING bytes after the last one.
        masks: (CLASSES · words,) int32: for each tile that is not plain and each class, a bit for each element.
        before: (CLASSES · words,) int32: elements of the class in the tile before each word.
        members: (tiles, CLASSES) int32: elements of each class; 0 in a plain tile.
        ranks: (room,) int32: for each tile, the ranks of its changes, ascending.
        steps: (room,) signed integers of the element's width: their distances.
        found: (tiles,) int32: how many elements changed, or a negative error of ``decode_kernels``.
        ends: (tiles,) int64: where the changes of each tile end in the result.
        positions: (n,) int32 or int64: the result, flat indices in the tensors. distances: (n,), as ``steps``.
    """

    fields: torch.Tensor
    parts: torch.Tensor
    limits: torch.Tensor
    tables: torch.Tensor
    streams: torch.Tensor
    masks: torch.Tensor
    before: torch.Tensor
    members: torch.Tensor
    ranks: torch.Tensor
    steps: torch.Tensor
    found: torch.Tensor
    ends: torch.Tensor
    positions: torch.Tensor
    distances: torch.Tensor


INPUTS = 5
"""Of these arrays, so many are filled by the caller."""


def array_shapes(batch: TileBatch, stream_bytes: int, index: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each of ``DecodeArrays``, with room for all changes that the streams may have.

    Args:
        stream_bytes: PADDING included. index: of ``positions``.
    """
    distance = SIGNED[batch.element.itemsize]
    return [
        (batch.fields.shape, torch.int32), (batch.parts.shape, torch.int64), (batch.limits.shape, torch.int32),
        (batch.tables.shape, torch.int16), ((-(-stream_bytes // 8),), torch.int64),
        ((CLASSES * batch.words,), torch.int32), ((CLASSES * batch.words,), torch.int32),
        ((batch.tiles, CLASSES), torch.int32), ((batch.room,), torch.int32),
        ((batch.room,), distance), ((batch.tiles,), torch.int32), ((batch.tiles,), torch.int64),
        ((batch.room,), index), ((batch.room,), distance),
    ]  # fmt: skip


def decode_tiles(batch: TileBatch, arrays: DecodeArrays) -> None:
    """Decode a batch on the thread's current stream; reads nothing back, and ``arrays.found`` says what was found.

    The changes of a tile lie together, ascending by position; tiles have the batch's order. So those of a band of tiles
    are not merged row by row, as on a CPU. A tile with an error has no changes, or, if it names an element twice,
    undefined ones. The tile whose changes do not fit, and those after it that have any, get ``TOO_MANY``; whether a
    tensor has as many as its block declares is left to the caller.

    Args:
        batch: at least one tile.
    """
    count, room = batch.tiles, min(arrays.positions.numel(), arrays.distances.numel())
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.cuda.device_of(arrays.streams):
        mask_kernel[(count,)](
            arrays.fields, count, arrays.parts, arrays.limits, arrays.masks, arrays.before, arrays.members,
            MAGNITUDE=int(magnitude_mask(batch.element)), ELEMENT=WIDTHS[arrays.steps.dtype][0], SIZE=MASK_WORDS,
        )  # fmt: skip
        stream_kernel[(triton.cdiv(count, LANES),)](
            arrays.fields, count, arrays.parts, arrays.streams, arrays.tables, arrays.members, arrays.ranks,
            arrays.steps, arrays.found, LANES=LANES, num_warps=1,
        )  # fmt: skip
        torch.cumsum(arrays.found.clamp(min=0), 0, out=arrays.ends)
        place_kernel[(count,)](
            arrays.fields, count, arrays.parts, arrays.masks, arrays.before, arrays.members, arrays.ranks, arrays.steps,
            arrays.found, arrays.ends, room, arrays.positions, arrays.distances, SIZE=CHANGES,
        )  # fmt: skip

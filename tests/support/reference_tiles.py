"""Blocks of kind tiles, read and written by the letter of docs/FORMAT.md, section 11: one element after the other.

Nothing here imports the modules under test. Bits and distances are Python integers. ``read_object`` reads what the
product writes; ``write_block`` writes blocks that the product has to read, with codes other than the product's.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import zstandard

LARGEST, LEAST = 49_152, 16_384
"""*T* and *L*."""
LISTS = ((16, 8, 6, 4, 3, 2), (8, 6, 4, 3, 2), (4, 3, 2), (3,))
LISTS_OF_ROWS = ((4, 3, 2), (3, 2), (2,))
CLASSES, OTHERS, PLAIN, TABLES, SYMBOLS, LONGEST = 4, 4, 5, 6, 252, 11
SIZES_AT = CLASSES + TABLES * 2 * SYMBOLS
"""Where the sizes of streams begin in a block's tables, behind keys and lengths of codes."""
WIDTHS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I64": 64, "U64": 64,
    "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")

Shape = tuple[int, ...]
Changed = dict[int, int]
"""Flat index in a tensor → signed ULP distance."""
Old = Callable[[int], Sequence[int] | np.ndarray]
"""Tensor id → its flat bits."""


class Malformed(ValueError):
    """A reader must refuse this."""


class Tile(NamedTuple):
    """Rows ``top`` to ``bottom`` − 1, columns ``left`` to ``right`` − 1."""

    top: int
    bottom: int
    left: int
    right: int


# Grid


def matrix(shape: Shape) -> tuple[int, int]:
    """Rows and columns."""
    numel = math.prod(shape)
    if len(shape) < 2 or shape[-1] < 64:
        return 1, numel
    return numel // shape[-1], shape[-1]


def cuts(size: int, ranks: Iterable[int]) -> list[int]:
    return sorted({i * size // n for n in ranks if size % n == 0 for i in range(1, n)})


def edges(size: int, at: list[int], step: int) -> list[int]:
    away, fixed, found = max(1, step // 2), [0, *at, size], {0, *at, size}
    for first, last in pairwise(fixed):
        found |= {multiple for multiple in range(0, last, step) if first + away <= multiple <= last - away}
    return sorted(found)


def grid(shape: Shape) -> tuple[list[int], list[int]]:
    """Row edges and column edges."""
    rows, columns = matrix(shape)
    if rows == 1:
        return [0, 1], edges(columns, cuts(columns, LISTS[0]), LARGEST)
    slab = shape[-2] if len(shape) > 2 and shape[-2] * columns >= LEAST else rows
    vocabulary = slab == rows >= 6 * columns
    column_cuts: list[int] = []
    row_cuts: list[int] = []
    for number, ranks in enumerate([*LISTS, *LISTS_OF_ROWS]):
        across = [] if vocabulary or number >= len(LISTS) else cuts(columns, ranks)
        down = [at for at in cuts((slab + 63) // 64 * 64, ranks) if at < slab] if vocabulary else cuts(slab, ranks)
        tiles = (len(across) + 1) * (len(down) + 1)
        narrowest = min(right - left for left, right in pairwise([0, *across, columns]))
        if tiles > 1 and LEAST * tiles <= slab * columns and narrowest >= 64:
            column_cuts, row_cuts = across, down
            break
    column_edges = edges(columns, column_cuts, LARGEST)
    widest = max(right - left for left, right in pairwise(column_edges))
    step = 2 ** int(math.log2(max(1, LARGEST // widest)))
    of_slab = edges(slab, row_cuts, step)
    return [first + edge for first in range(0, rows, slab) for edge in of_slab[:-1]] + [rows], column_edges


def tiles_of(shape: Shape) -> list[Tile]:
    """All tiles by number."""
    down, across = grid(shape)
    bands = pairwise(down)
    return [Tile(*band, *part) for band in bands for part in pairwise(across)]


def places(shape: Shape, tile: Tile) -> list[int]:
    """Flat indices of a tile's elements in row-major order."""
    columns = matrix(shape)[1]
    return [row * columns + column for row in range(*tile[:2]) for column in range(*tile[2:])]


# Classes and ranks


def class_of(bits: int, keys: Sequence[int], dtype: str) -> int:
    """The class of an element with these old bits; OTHERS for none."""
    width = WIDTHS[dtype] - (dtype in FLOATS)
    key = (bits & ((1 << width) - 1)) >> max(0, width - 8)
    return next((number for number, least in enumerate(keys) if least > key), OTHERS)


def ranks_of(elements: list[int], classes: Sequence[int] | None) -> list[tuple[int, int]]:
    """By rank: (table, element). ``classes``: of the elements; None for a plain tile."""
    if classes is None:
        return [(PLAIN, element) for element in elements]
    members = [
        (number, element)
        for number in range(CLASSES)
        for element, own in zip(elements, classes, strict=True)
        if own == number
    ]
    return members + [(OTHERS, element) for element in elements]


# Numbers and codes


def token_of(value: int) -> tuple[int, int]:
    """Token, and how many bits follow raw."""
    if value < 8:
        return value, 0
    exponent = value.bit_length() - 1
    return 4 * exponent - 4 + (value >> (exponent - 2) & 3), exponent - 2


def least_of(token: int) -> tuple[int, int]:
    """The smallest number with a token, and how many bits follow raw."""
    if token < 8:
        return token, 0
    exponent = (token + 4) // 4
    return (4 + token % 4) << (exponent - 2), exponent - 2


def zigzag(distance: int) -> int:
    return 2 * distance if distance >= 0 else -2 * distance - 1


def distance_of(zigzag: int) -> int:
    return zigzag // 2 if zigzag % 2 == 0 else -(zigzag + 1) // 2


def codes_of(lengths: Sequence[int]) -> dict[int, str]:
    """Symbol → its code, first bit first, as RFC 1951 assigns them."""
    if max(lengths) > LONGEST or sum(2.0**-length for length in lengths if length) > 1:
        raise Malformed("no prefix code has these lengths")
    found, number = {}, 0
    for length in range(1, LONGEST + 1):
        number *= 2
        for symbol, own in enumerate(lengths):
            if own == length:
                found[symbol] = format(number, f"0{length}b")
                number += 1
    return found


Codes = list[list[dict[int, str]]]
"""Per table: of symbols, of tokens of large values."""


class BitReader:
    """Reads the bits of one stream."""

    def __init__(self, bits: str) -> None:
        self.bits, self.place = bits, 0

    def take(self, count: int) -> str:
        if self.place + count > len(self.bits):
            raise Malformed("the stream ends within a change")
        self.place += count
        return self.bits[self.place - count : self.place]

    def number(self, count: int) -> int:
        """Lowest bit first."""
        return int(self.take(count)[::-1] or "0", 2)

    def symbol(self, meanings: dict[str, int]) -> int:
        code = ""
        while code not in meanings:
            if len(code) == LONGEST:
                raise Malformed("bits without a code")
            code += self.take(1)
        return meanings[code]

    def value(self, token: int) -> int:
        least, raw = least_of(token)
        return least + self.number(raw)


def read_tile(bits: str, codes: Codes, ranks: list[tuple[int, int]], width: int) -> Changed:
    """Element → distance, of one stream."""
    meanings = [[{code: symbol for symbol, code in half.items()} for half in table] for table in codes]
    reader, rank, found = BitReader(bits), 0, {}
    while reader.place < len(bits):
        if rank >= len(ranks):
            raise Malformed("a rank beyond the last one of the tile")
        table = meanings[ranks[rank][0]]
        symbol = reader.symbol(table[0])
        rank += reader.value(symbol // 3)
        value = symbol % 3 + 1
        if value == 3:
            value += reader.value(reader.symbol(table[1]))
        if rank >= len(ranks):
            raise Malformed("a rank beyond the last one of the tile")
        if value >> width:
            raise Malformed("a zigzag that the dtype does not hold")
        if ranks[rank][1] in found:
            raise Malformed("an element named twice")
        found[ranks[rank][1]] = distance_of(value)
        rank += 1
    return found


def write_tile(changed: Changed, codes: Codes, ranks: list[tuple[int, int]]) -> str:
    """The stream of a tile. Each element is named by the first of its ranks."""
    first: dict[int, int] = {}
    for rank, (_, element) in enumerate(ranks):
        first.setdefault(element, rank)
    bits, following = "", 0
    for rank in sorted(first[element] for element in changed):
        table = codes[ranks[following][0]]
        value = zigzag(changed[ranks[rank][1]])
        token, raw = token_of(rank - following)
        bits += table[0][3 * token + min(value - 1, 2)] + low_bits(rank - following, raw)
        if value >= 3:
            token, raw = token_of(value - 3)
            bits += table[1][token] + low_bits(value - 3, raw)
        following = rank + 1
    return bits


def low_bits(value: int, count: int) -> str:
    return "".join(str(value >> place & 1) for place in range(count))


# Blocks and objects


class Tensor(NamedTuple):
    """A tensor of a block. ``old``: its flat bits, which plain tiles do without."""

    shape: Shape
    changed: int
    old: Sequence[int] | np.ndarray | None


def read_block(tables: bytes, streams: bytes, tensors: Sequence[Tensor], dtype: str, plain: bool) -> list[Changed]:
    """What changed in each tensor. ``tables``: not compressed. ``plain``: whether the codec is ``plain``."""
    grids = [tiles_of(tensor.shape) for tensor in tensors]
    total, at = sum(map(len, grids)), SIZES_AT
    if len(tables) != at + 4 * total:
        raise Malformed("tables of another size than the tiles need")
    keys = list(tables[:CLASSES])
    if keys != sorted(keys):
        raise Malformed("keys descend")
    halves = [list(tables[place : place + SYMBOLS]) for place in range(CLASSES, at, SYMBOLS)]
    codes = [[codes_of(one), codes_of(two)] for one, two in zip(halves[::2], halves[1::2], strict=True)]
    planes = [tables[at + plane * total : at + (plane + 1) * total] for plane in range(4)]
    numbers = [sum(planes[plane][tile] << 8 * plane for plane in range(4)) for tile in range(total)]
    sizes = [number & 0x7FFFFFFF for number in numbers]
    if len(streams) != (sum(sizes) + 7) // 8:
        raise Malformed("streams of another size than the tiles need")
    bits = "".join(format(byte, "08b")[::-1] for byte in streams)
    found, number, place = [], 0, 0
    for tensor, tiles in zip(tensors, grids, strict=True):
        changed: Changed = {}
        for tile in tiles:
            if sizes[number]:
                elements, own = places(tensor.shape, tile), numbers[number] >> 31 == 1
                if plain and not own:
                    raise Malformed("a tile of codec plain that is not plain")
                classes = None if own else [class_of(int(tensor.old[i]), keys, dtype) for i in elements]  # type: ignore[index]
                stream = bits[place : place + sizes[number]]
                changed |= read_tile(stream, codes, ranks_of(elements, classes), WIDTHS[dtype])
            place += sizes[number]
            number += 1
        if len(changed) != tensor.changed:
            raise Malformed("more or fewer changed elements than the counts say")
        found.append(changed)
    return found


def write_block(
    tensors: Sequence[tuple[Tensor, Changed]], dtype: str, keys: Sequence[int], plain: Callable[[int], bool]
) -> tuple[bytes, bytes]:
    """``tables``, not compressed, and ``streams``. ``plain``: whether the tile of that number in the block is plain.

    All codes of a table have one length, and there is one for each symbol that any table uses.
    """
    lengths = [8] * SYMBOLS
    codes: Codes = [[codes_of(lengths), codes_of(lengths)] for _ in range(TABLES)]
    streams, numbers = "", list[int]()
    for tensor, changed in tensors:
        for tile in tiles_of(tensor.shape):
            elements = places(tensor.shape, tile)
            mine = {element: changed[element] for element in elements if element in changed}
            own, classes = plain(len(numbers)), None
            if mine and not own:
                assert tensor.old is not None
                classes = [class_of(int(tensor.old[element]), keys, dtype) for element in elements]
            stream = write_tile(mine, codes, ranks_of(elements, classes)) if mine else ""
            numbers.append(len(stream) + (1 << 31) * (own and bool(mine)))
            streams += stream
    streams += "0" * (-len(streams) % 8)
    planes = bytes(number >> 8 * plane & 255 for plane in range(4) for number in numbers)
    packed = bytes(int(streams[place : place + 8][::-1], 2) for place in range(0, len(streams), 8))
    return bytes(keys) + bytes(lengths * 2 * TABLES) + planes, packed


def entries_of(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The metadata of an object, and its entries by name."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata = json.loads(header.pop("__metadata__")["delta_sync"])
    rest = data[8 + size :]
    return metadata, {name: rest[slice(*entry["data_offsets"])] for name, entry in header.items()}


def read_object(data: bytes, table: Sequence[tuple[str, Shape]], old: Old | None) -> dict[int, Changed]:
    """What the blocks of kind tiles of an object change, by tensor id.

    ``table``: dtype and shape of the run's tensors. ``old``: None for codec ``plain``.
    """
    metadata, entries = entries_of(data)
    found: dict[int, Changed] = {}
    for number, block in enumerate(metadata["blocks"]):
        if block["kind"] != "tiles":
            continue
        own = {part: entries[f"@{number}.{part}"] for part in ("ids", "counts", "tables", "streams")}
        ids, counts = np.frombuffer(own["ids"], "<u4").tolist(), np.frombuffer(own["counts"], "<u8").tolist()
        tensors = [
            Tensor(table[i][1], count, None if old is None else old(i)) for i, count in zip(ids, counts, strict=True)
        ]
        tables = zstandard.decompress(own["tables"]) if metadata["compression"] == "zstd" else own["tables"]
        changed = read_block(tables, own["streams"], tensors, block["dtype"], metadata["codec"] == "plain")
        found |= dict(zip(ids, changed, strict=True))
    return found

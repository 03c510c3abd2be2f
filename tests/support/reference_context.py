"""Codec context, read by the letter of docs/FORMAT.md: plain numpy and Python integers, one element after the other."""

from collections.abc import Iterator

import numpy as np


def token_number(token: int, read: "BitReader") -> int:
    if token < 8:
        return token
    exponent = (token + 4) // 4
    first = (4 + (token + 4) % 4) << (exponent - 2)
    return first + read.bits(exponent - 2)


class BitReader:
    def __init__(self, data: bytes) -> None:
        self.number, self.left = int.from_bytes(data, "little"), 8 * len(data)

    def bits(self, count: int) -> int:
        found = self.number & ((1 << count) - 1)
        self.number >>= count
        self.left -= count
        return found


class Table:
    """State → (token, number)."""

    def __init__(self, frequencies: list[int]) -> None:
        tokens, state = [0] * 1024, 0
        for token, frequency in enumerate(frequencies):
            for _ in range(frequency):
                tokens[state] = token
                state = (state + 643) % 1024
        self.rows, seen = [], dict(enumerate(frequencies))
        for token in tokens:
            self.rows.append((token, seen[token]))
            seen[token] += 1

    def step(self, state: int, read: BitReader) -> tuple[int, int]:
        token, number = self.rows[state]
        count = 10 - (number.bit_length() - 1)
        return token, (number << count) - 1024 + read.bits(count)


def tiles_of(shape: tuple[int, ...], slab: int, height: int, width: int) -> Iterator[list[int]]:
    """Flat indices of each tile's elements, in order."""
    columns = shape[-1] if len(shape) > 1 else 1
    rows = int(np.prod(shape, dtype=np.int64)) // columns
    for top in range(0, rows, slab):
        for row in range(top, min(top + slab, rows), height):
            last = min(row + height, top + slab, rows)
            for left in range(0, columns, width):
                yield [r * columns + c for r in range(row, last) for c in range(left, min(left + width, columns))]


def read_tile(data: bytes, classes: list[int], tables: list[Table]) -> dict[int, int]:
    """Number inside the tile → zigzag of its distance."""
    read, found = BitReader(data), {}
    state = read.bits(10)
    for kind in sorted(set(classes)):
        members = [number for number, of in enumerate(classes) if of == kind]
        place = 0
        while True:
            token, state = tables[2 * kind].step(state, read)
            if token == 0:
                break
            place += token_number(token - 1, read)
            token, state = tables[2 * kind + 1].step(state, read)
            found[members[place]] = token_number(token, read) + 1
            place += 1
    if state or not 0 <= read.left < 8 or read.number:
        raise ValueError("the stream does not end as it should")
    return found


def read_block(
    tables: bytes, streams: bytes, shapes: list[tuple[int, ...]], old: list[np.ndarray], width: int, is_float: bool
) -> list[dict[int, int]]:
    """Per tensor: flat index → signed ULP distance. ``tables``: not compressed. ``old``: flat bits."""
    cursor = 0

    def numbers(count: int, size: int) -> list[int]:
        nonlocal cursor
        planes = tables[cursor : cursor + count * size]
        cursor += count * size
        return [int.from_bytes(planes[i::count], "little") for i in range(count)]

    keys = numbers(numbers(1, 1)[0], 1)
    cuts = numbers(3 * len(shapes), 8)
    frequencies = numbers(2 * (len(keys) + 1) * 256, 2)
    coding = [Table(frequencies[i : i + 256]) for i in range(0, len(frequencies), 256)]
    lengths = numbers((len(tables) - cursor) // 4, 4)
    found, tile, place = [], 0, 0
    for index, shape in enumerate(shapes):
        changed: dict[int, int] = {}
        for where in tiles_of(shape, *cuts[index :: len(shapes)]):
            data = streams[place : place + lengths[tile]]
            place, tile = place + lengths[tile], tile + 1
            if not data:
                continue
            shifted = [int(old[index][i]) << is_float & ((1 << width) - 1) for i in where]
            classes = [sum(key <= bits >> (width - 8) for key in keys) for bits in shifted]
            for number, zigzag in read_tile(data, classes, coding).items():
                changed[where[number]] = zigzag >> 1 if zigzag % 2 == 0 else -(zigzag + 1) // 2
        found.append(changed)
    return found

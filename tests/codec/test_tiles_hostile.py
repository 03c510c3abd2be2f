"""Blocks of kind tiles as an attacker or a broken disk would have them: each flaw is one error, which names it."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.codec.tiling import block, by_the_letter, classes_at, encoded, many_threads, signed, trained, whole
from tests.support import reference_tiles as reference
from tests.support.samples import CONTEXT
from vllm_delta_sync.codec.delta_reader import DeltaReader, decode, pieces_of
from vllm_delta_sync.codec.tiles.decode_kernels import NO_CODE, OUTSIDE, SHORT, TOO_MANY, TWICE, WIDE
from vllm_delta_sync.errors import DeltaSyncError, FormatError
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Bits

Lengths = Mapping[tuple[int, int], Mapping[int, int]]
"""(table, 0 for symbols or 1 for large values) → length of the code of each symbol."""
CLASSES, OTHERS, PLAIN, TABLES = reference.CLASSES, reference.OTHERS, reference.PLAIN, reference.TABLES
ONE_CLASS = (*[0] * (CLASSES - 1), 124)
"""Keys of a tile whose elements below key 124 are of the last class, and the others of none."""
ELEVEN = np.array([0x3F80, 0x3C00, 0x3F81, 0x3C01, 0xBF80, 0x3C02, 0x3F82, 0xBC03, 0x3F83, 0x3F84, 0x3F85], np.uint16)
"""Old bits of one tile. Below key 124 are 1, 3, 5 and 7."""


def tables_of(lengths: Lengths, numbers: list[int], keys: Sequence[int] = (0,) * CLASSES) -> bytes:
    every = np.zeros((TABLES, 2, 252), np.uint8)
    for (table, half), symbols in lengths.items():
        for symbol, length in symbols.items():
            every[table, half, symbol] = length
    planes = np.array(numbers, "<u4").view(np.uint8).reshape(-1, 4).T
    return bytes(keys) + every.tobytes() + planes.tobytes()


def bytes_of(bits: str) -> bytes:
    padded = bits + "0" * (-len(bits) % 8)
    return bytes(int(padded[place : place + 8][::-1], 2) for place in range(0, len(padded), 8))


def one(*shape: int, dtype: str = "BF16") -> TensorTable:
    return TensorTable([TensorSpec("model.w", dtype, shape)])


def refused(data: bytes, table: TensorTable, match: str, old: Bits | None = None, by_reference: bool = True) -> None:
    """However it is read, and by the letter of docs/FORMAT.md."""
    base = None if old is None else whole([old])
    with pytest.raises(FormatError, match=match) as caught:
        decode(data, table, CONTEXT, base)
    assert "delta object of version 1, block 0" in str(caught.value)
    with pytest.raises(FormatError, match=match):
        list(pieces_of([DeltaReader(data, table, CONTEXT, base)]))
    if by_reference:
        with pytest.raises(reference.Malformed):
            by_the_letter(data, table, None if old is None else [old])


# Tables


def good_parts() -> tuple[TensorTable, bytes, bytes]:
    """Two tensors of several tiles, of which each first element moves by one; tables and streams."""
    table = TensorTable([TensorSpec("a", "BF16", (96,)), TensorSpec("b", "BF16", (10,))])
    tiles = [len(reference.tiles_of(spec.shape)) for spec in table]
    return table, tables_of({(PLAIN, 0): {1: 2}}, [1 << 31 | 2] * sum(tiles)), bytes_of("00" * sum(tiles))


def test_the_starting_point_is_good() -> None:
    table, tables, streams = good_parts()
    found = signed(decode(block(table, tables, streams, [20, 2]), table, CONTEXT))
    assert found == by_the_letter(block(table, tables, streams, [20, 2]), table, None)
    assert [len(found[tensor]) for tensor in (0, 1)] == [20, 2]
    assert set(found[1].values()) == {1}


@pytest.mark.parametrize("more", [-2611, -4, -1, 1, 4, 100])
def test_tables_of_another_size_than_the_tiles_need(more: int) -> None:
    table, tables, streams = good_parts()
    size = len(tables) + more
    wrong = block(table, (tables + bytes(200))[:size], streams, [20, 2])
    refused(wrong, table, f"tables have {size} bytes, {len(tables)} expected")


@pytest.mark.parametrize("shape", [(2**48,), (2**24, 2**24), (2**24, 2**12, 2**12), (2**16, 1, 2**32)])
def test_tables_too_small_for_a_huge_tensor_are_refused_before_its_grid_is_made(shape: tuple[int, ...]) -> None:
    """It has 2^31 tiles, or more."""
    for codec in ("plain", "tiled"):
        table = one(*shape)
        data = block(table, tables_of({}, [0]), b"", [1], codec)  # type: ignore[arg-type]
        refused(data, table, f"tables have {reference.SIZES_AT + 4} bytes, too few for the tiles", by_reference=False)
        with pytest.raises(FormatError, match="too few for the tiles"):
            DeltaReader(data, table, CONTEXT).check()


@pytest.mark.parametrize("keys", [[1, 0, 0, 0], [0, 0, 1, 0], [5, 4, 6, 6], [0, 255, 0, 254]])
def test_keys_that_descend(keys: list[int]) -> None:
    table, tables, streams = good_parts()
    wrong = block(table, bytes(keys) + tables[CLASSES:], streams, [20, 2])
    refused(wrong, table, re.escape(f"keys {keys}, which do not ascend"))


@pytest.mark.parametrize("lengths", [{0: 12}, {0: 255}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 2, 251: 2, 9: 11}])
@pytest.mark.parametrize("table", range(TABLES))
def test_lengths_that_no_prefix_code_has(lengths: dict[int, int], table: int) -> None:
    """Also in a table that no tile uses."""
    specs, tables, streams = good_parts()
    for half in (0, 1):
        damaged = np.frombuffer(tables, np.uint8).copy()
        place = CLASSES + 252 * (2 * table + half)
        for symbol, length in lengths.items():
            damaged[place + symbol] = length
        wrong = block(specs, damaged.tobytes(), streams, [20, 2])
        refused(wrong, specs, "code lengths that no prefix code has")


@pytest.mark.parametrize("streams", [0, 5, 7, 400])
def test_streams_of_another_size_than_their_tiles_need(streams: int) -> None:
    table, tables, good = good_parts()
    assert len(good) == 6
    wrong = block(table, tables, bytes(streams), [20, 2])
    refused(wrong, table, f"streams have {streams} bytes, their sizes add up to 44 bits")


def test_a_stream_of_two_to_the_31_bits() -> None:
    table, tables, streams = good_parts()
    damaged = np.frombuffer(tables, np.uint8).copy()
    damaged[-22:] = 0xFF
    refused(block(table, damaged.tobytes(), streams, [20, 2]), table, r"their sizes add up to \d{11} bits")


def test_tables_are_checked_without_old_bits() -> None:
    table, tables, streams = good_parts()
    wrong = DeltaReader(block(table, tables[:-1], streams, [20, 2], "tiled"), table, CONTEXT)
    with pytest.raises(FormatError, match="tables have"):
        wrong.check()
    DeltaReader(block(table, tables, streams, [20, 2], "tiled"), table, CONTEXT).check()


def test_a_tile_of_codec_plain_that_is_not_plain() -> None:
    """It could not be read without old bits, which codec plain promises."""
    table = one(11)
    tables = tables_of({(OTHERS, 0): {0: 1}}, [1])
    assert signed(decode(block(table, tables, b"\0", [1], "tiled"), table, CONTEXT, whole([ELEVEN]))) == {0: {0: -1}}
    wrong = block(table, tables, b"\0", [1], "plain")
    refused(wrong, table, "codec 'plain' has a tile that is not plain")
    refused(wrong, table, "codec 'plain' has a tile that is not plain", ELEVEN)
    with pytest.raises(FormatError, match="not plain"):
        DeltaReader(wrong, table, CONTEXT).check()


# Streams

Case = tuple[int, str, Lengths, str, dict[str, Any]]
FAR = "0" + reference.low_bits(11, 1)
"""The code of a gap's token, and the raw bit of 11."""
STREAMS: dict[str, Case] = {
    "ends before the raw bits of a gap": (SHORT, "ends too early", {(PLAIN, 0): {24: 1}}, "0", {}),
    "ends before a large value": (SHORT, "ends too early", {(PLAIN, 0): {2: 1}, (PLAIN, 1): {0: 1}}, "0", {}),
    "ends before the raw bits of a value": (
        SHORT, "ends too early", {(PLAIN, 0): {2: 1}, (PLAIN, 1): {20: 1}}, "00", {},
    ),
    "ends within a code": (SHORT, "ends too early", {(PLAIN, 0): {0: 2, 1: 2}}, "000", {"counts": 2}),
    "a gap without a code": (NO_CODE, "has no code for its bits", {(PLAIN, 0): {0: 1}}, "1", {}),
    "a table without codes": (NO_CODE, "has no code for its bits", {(OTHERS, 0): {0: 1}}, "0", {}),
    "a value without a code": (
        NO_CODE, "has no code for its bits", {(PLAIN, 0): {2: 1}, (PLAIN, 1): {0: 1}}, "01", {},
    ),
    "values without codes": (NO_CODE, "has no code for its bits", {(PLAIN, 0): {2: 1}}, "00", {}),
    "a class without codes": (
        NO_CODE, "has no code for its bits", {(PLAIN, 0): {0: 1}, (OTHERS, 0): {0: 1}}, "0", {"keys": ONE_CLASS},
    ),
    "a gap beyond the tile": (OUTSIDE, "an element outside the tile", {(PLAIN, 0): {27: 1}}, FAR, {}),
    "a gap of 2^21": (OUTSIDE, "an element outside the tile", {(PLAIN, 0): {249: 1}}, "0" * 20, {}),
    "a gap beyond the tile after a change": (
        OUTSIDE, "an element outside the tile", {(PLAIN, 0): {0: 1, 24: 1}}, "00" + "1" + "1", {"counts": 3},
    ),
    "a change after the last element": (
        OUTSIDE, "an element outside the tile", {(PLAIN, 0): {0: 1}}, "0" * 12, {"counts": 11},
    ),
    "a rank beyond those among all": (
        OUTSIDE, "an element outside the tile", {(OTHERS - 1, 0): {45: 1}}, "0" + "11", {"keys": ONE_CLASS},
    ),
    "more changes than elements": (
        OUTSIDE, "an element outside the tile", {(OTHERS - 1, 0): {0: 1}, (OTHERS, 0): {0: 1}}, "0" * 12,
        {"keys": ONE_CLASS, "counts": 11},
    ),
    "more than the counts say": (
        TOO_MANY, "has more elements than the counts say", {(PLAIN, 0): {0: 1}}, "000", {"counts": 2},
    ),
    "a zigzag of 2^16": (
        WIDE, "a distance outside its dtype", {(PLAIN, 0): {2: 1}, (PLAIN, 1): {59: 1}},
        "00" + reference.low_bits(2**16 - 3, 13), {},
    ),
    "a zigzag of 2^8": (
        WIDE, "a distance outside its dtype", {(PLAIN, 0): {2: 1}, (PLAIN, 1): {27: 1}},
        "00" + reference.low_bits(2**8 - 3, 5), {"dtype": "I8"},
    ),
    "a zigzag of 2^32": (
        WIDE, "a distance outside its dtype", {(PLAIN, 0): {2: 1}, (PLAIN, 1): {123: 1}},
        "00" + reference.low_bits(2**32 - 3, 29), {"dtype": "F32"},
    ),
    "a zigzag of 2^64": (
        WIDE, "a distance outside its dtype", {(PLAIN, 0): {2: 1}, (PLAIN, 1): {251: 1}},
        "00" + reference.low_bits(2**64 - 3, 61), {"dtype": "F64"},
    ),
    "a zigzag of 2^64 + 2": (
        WIDE, "a distance outside its dtype", {(PLAIN, 0): {2: 1}, (PLAIN, 1): {251: 1}},
        "00" + reference.low_bits(2**64 - 1, 61), {"dtype": "F64"},
    ),
    # Of the last class is element 1, which is the second one among all.
    "an element named in its class and among all": (
        TWICE, "name an element twice", {(OTHERS - 1, 0): {0: 1, 12: 1}}, "01", {"keys": ONE_CLASS, "counts": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_wrong(name: str) -> None:
    _, message, lengths, bits, how = STREAMS[name]
    dtype, keys = how.get("dtype", "BF16"), how.get("keys", (0,) * CLASSES)
    number = len(bits) | (0 if any(keys) else 1 << 31)
    tables = tables_of(lengths, [number], keys)
    codec: Codec = "tiled" if any(keys) else "plain"
    table = one(11, dtype=dtype)
    data = block(table, tables, bytes_of(bits), [how.get("counts", 1)], codec)
    wrong = rf"'model\.w': tile 0 .*{message}; it is damaged, or was made against other"
    refused(data, table, wrong, ELEVEN if any(keys) else None)


def test_each_error_of_the_decoder_is_met() -> None:
    assert {case[0] for case in STREAMS.values()} == {SHORT, NO_CODE, OUTSIDE, TOO_MANY, WIDE, TWICE}


@pytest.mark.parametrize(
    ("dtype", "zigzag"), [("I8", 255), ("BF16", 65_535), ("F32", 2**32 - 1), ("F64", 2**64 - 1), ("F64", 2**64 - 2)]
)
def test_the_largest_zigzag_of_a_dtype_is_none(dtype: str, zigzag: int) -> None:
    table, (token, raw) = one(11, dtype=dtype), reference.token_of(zigzag - 3)
    bits = "00" + reference.low_bits(zigzag - 3, raw)
    tables = tables_of({(PLAIN, 0): {2: 1}, (PLAIN, 1): {token: 1}}, [1 << 31 | len(bits)])
    found = decode(block(table, tables, bytes_of(bits), [1]), table, CONTEXT)
    assert signed(found) == {0: {0: reference.distance_of(zigzag)}}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("counts", "found"), [([20, 1], 2), ([20, 3], 2), ([19, 2], 20), ([21, 2], 20)])
def test_counts_that_streams_do_not_have(counts: list[int], found: int, threads: int) -> None:
    table, tables, streams = good_parts()
    fewer = sum(counts) < 22
    wrong = "has more elements than the counts say" if fewer else f"{found} changed elements, the counts say"
    with many_threads(threads):
        refused(block(table, tables, streams, counts), table, wrong)
        # More elements than streams have bits.
        refused(block(table, tables, streams, [20, 10]), table, "fewer bits than the counts say changes: 10")


@pytest.mark.parametrize("counts", [1, 2, 3])
def test_more_changes_in_all_bands_than_the_counts_say(counts: int) -> None:
    """Each thread finds no more than they say."""
    shape = (1024, 1024)
    table, tiles = one(*shape), reference.tiles_of(shape)
    numbers = [1 << 31 | 1 if tile.left == 0 and tile.top % 256 == 0 else 0 for tile in tiles]
    assert sum(number & 1 for number in numbers) == 4
    tables = tables_of({(PLAIN, 0): {0: 1}}, numbers)
    with many_threads(4):
        refused(block(table, tables, b"\0", [counts]), table, f"4 changed elements, the counts say {counts}")
        found = signed(decode(block(table, tables, b"\0", [4]), table, CONTEXT))[0]
    assert sorted(found) == [0, 256 * 1024, 512 * 1024, 768 * 1024]


def test_an_element_named_twice_in_a_band_of_several_tiles() -> None:
    """The band is named by its first tile: its tiles are decoded together."""
    shape = (512, 384)
    table, tiles = one(*shape), reference.tiles_of(shape)
    assert [tile.top for tile in tiles] == [0, 0, 0, 256, 256, 256]
    old = np.full(512 * 384, 0x3F80, np.uint16)
    # All elements are of class 0, so the first one has the ranks 0 and one behind all of the tile.
    size = math.prod((tiles[4].bottom - tiles[4].top, tiles[4].right - tiles[4].left))
    token, raw = reference.token_of(size - 1)
    bits = "0" + "1" + reference.low_bits(size - 1, raw)
    numbers = [0] * len(tiles)
    numbers[3], numbers[4] = 1 << 31 | 1, len(bits)
    lengths = {(PLAIN, 0): {0: 1}, (0, 0): {0: 1, 3 * token: 1}}
    data = block(table, tables_of(lengths, numbers, (255,) * CLASSES), bytes_of("0" + bits), [3], "tiled")
    refused(data, table, "tile 3 and those beside it name an element twice", old)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_any_band_is_raised(threads: int) -> None:
    shape = (512, 384)
    table = one(*shape)
    old, new = trained(shape, 1, share=0.05)
    data = encoded(table, [old], [new], "tiled", "none")
    _, entries = reference.entries_of(data)
    for place in (20, len(entries["@0.streams"]) // 2, len(entries["@0.streams"]) - 60):
        damaged = bytearray(entries["@0.streams"])
        damaged[place : place + 40] = bytes(40)
        count = np.frombuffer(entries["@0.counts"], "<u8").tolist()
        wrong = block(table, entries["@0.tables"], bytes(damaged), count, "tiled")
        with many_threads(threads):
            refused(wrong, table, "damaged, or was made against other weights", old, by_reference=False)


# Anything


@given(data=st.data(), codec=st.sampled_from(["tiled", "plain"]), dtype=st.sampled_from(["BF16", "F32", "I8"]))
def test_damage_is_read_or_refused_as_the_specification_says(data: st.DataObject, codec: Codec, dtype: str) -> None:
    """Bytes of tables and streams are changed, and both readers find the same changes, or refuse."""
    element = DTYPES[dtype]
    table = TensorTable(
        [TensorSpec("a", dtype, (96,)), TensorSpec("b", dtype, (256, 192)), TensorSpec("c", dtype, (7,))]
    )
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    old = [np.frombuffer(generator.bytes(spec.nbytes), element.uint) for spec in table]
    new = [bits + (generator.random(bits.size) < 0.05).astype(bits.dtype) * bits.dtype.type(5) for bits in old]
    new[0] = old[0] + np.uint8(1).astype(element.uint)
    new[2] = old[2] + np.uint8(200).astype(element.uint)
    with classes_at([40, 90, 110, 140]):
        written = encoded(table, old, new, codec, "none")
    _, entries = reference.entries_of(written)
    parts = {name: bytearray(entries[f"@0.{name}"]) for name in ("tables", "streams")}
    for _ in range(data.draw(st.integers(0, 2))):
        name = data.draw(st.sampled_from(["tables", "streams", "streams"]))
        # Places of tables that say something: keys, codes in use, numbers of tiles.
        telling = [i for i, byte in enumerate(parts[name]) if byte] if name == "tables" else range(len(parts[name]))
        place = data.draw(st.sampled_from(telling))
        parts[name][place] = data.draw(st.one_of(st.integers(0, 255), st.just(parts[name][place] ^ 1)))
    counts = np.frombuffer(entries["@0.counts"], "<u8").tolist()
    counts[data.draw(st.integers(0, 2))] += data.draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
    assume(min(counts) >= 1 and all(count <= spec.numel for count, spec in zip(counts, table, strict=True)))
    damaged = block(table, bytes(parts["tables"]), bytes(parts["streams"]), counts, codec)
    base = old if codec == "tiled" else None
    try:
        wanted: object = by_the_letter(damaged, table, base)
    except reference.Malformed:
        wanted = FormatError
    try:
        found: object = signed(decode(damaged, table, CONTEXT, None if base is None else whole(base)))
    except DeltaSyncError as error:
        found = type(error)
    assert found == wanted

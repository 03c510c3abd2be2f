"""Blocks of kind tiles: what is encoded comes back bit for bit, and as docs/FORMAT.md reads it, in few bytes."""

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.codec.tiling import (
    FLOATS,
    all_trained,
    assert_same,
    block,
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
from tests.support.running import counted, run_python
from tests.support.samples import CONTEXT, changes_between
from tests.support.seeds import few_by_default
from vllm_delta_sync.codec.delta_object import BlockEntries
from vllm_delta_sync.codec.delta_reader import DeltaReader, decode
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.tiles import coder, decode_kernels, encode_kernels
from vllm_delta_sync.codec.tiles.alphabets import CLASSES, SYMBOLS, TABLES
from vllm_delta_sync.codec.tiles.coder import LargeTensor
from vllm_delta_sync.codec.tiles.grid import grid_of, shares_of_threads
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import TensorMismatchError, UnsupportedError, UsageError
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, Changes, Positions, Rectangle, Sparse

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 3000)),
    # Narrow: one row.
    st.tuples(st.integers(1, 200), st.integers(1, 63)),
    st.tuples(st.integers(1, 150), st.integers(64, 200)),
    # Tall: vocabularies.
    st.tuples(st.integers(512, 700), st.integers(64, 80)),
    # Stacked experts, which are slabs of their own or too small for that.
    st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 130)),
    st.tuples(st.integers(2, 3), st.integers(128, 136), st.integers(128, 140)),
    # Several tiles side by side in a band: the last one.
    st.sampled_from([(60_000,), (98_303,), (1, 50_001), (2, 2, 60, 120), (7, 5000), (193, 257), (256, 192)]),
)
KEYS_OF_CLASSES = st.lists(st.integers(0, 255), min_size=CLASSES, max_size=CLASSES).map(sorted)
CODECS: list[Codec] = ["tiled", "plain"]
SMALL_ELEMENTS = coder.SMALL_ELEMENTS


@pytest.fixture
def small_are_plain(classes_in_small_tensors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for users."""
    monkeypatch.setattr(coder, "SMALL_ELEMENTS", SMALL_ELEMENTS)


@given(data=st.data(), codec=st.sampled_from(CODECS), dtype=st.sampled_from(sorted(DTYPES)))
@few_by_default(15)
def test_what_is_encoded_comes_back_and_is_what_the_specification_reads(
    data: st.DataObject, codec: Codec, dtype: str
) -> None:
    """Any dtype, shape and bits, few and many changes, and classes that end anywhere."""
    element = DTYPES[dtype]
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=3))
    table = TensorTable([TensorSpec(f"t{i}", dtype, shape) for i, shape in enumerate(shapes)])
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    old = [np.frombuffer(generator.bytes(spec.nbytes), element.uint) for spec in table]
    share, far = data.draw(st.sampled_from([0.001, 0.1, 1.0])), data.draw(st.booleans())
    new = []
    for bits in old:
        other = generator.permutation(bits) if far else bits + generator.integers(1, 4, bits.size).astype(bits.dtype)
        new.append(np.where(generator.random(bits.size) < share, other, bits))
    changes = changes_between(table, old, new)
    compression: Compression = data.draw(st.sampled_from(["zstd", "none"]))
    with classes_at(data.draw(KEYS_OF_CLASSES)):
        written = encoded(table, old, new, codec, compression)
        assert encode(changes, table, codec, compression, CONTEXT, whole(new, after=True)) == written
    base = whole(old) if codec == "tiled" else None
    assert_same(changes, decode(written, table, CONTEXT, base))
    assert by_the_letter(written, table, old if codec == "tiled" else None) == signed(changes)
    # Tensor by tensor, too.
    lazy, found = DeltaReader(written, table, CONTEXT, base), Changes(fingerprints=changes.fingerprints)
    for stop in range(1, len(table) + 1):
        found.sparse += lazy.take(dtype, stop)
    assert_same(changes, found)


@given(data=st.data(), dtype=st.sampled_from(sorted(DTYPES)))
def test_blocks_of_another_writer_are_read(data: st.DataObject, dtype: str) -> None:
    """Its codes are not the best ones, and any of its tiles are plain."""
    element = DTYPES[dtype]
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=2))
    keys = data.draw(KEYS_OF_CLASSES)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    table = TensorTable([TensorSpec(f"t{i}", dtype, shape) for i, shape in enumerate(shapes)])
    old = [np.frombuffer(generator.bytes(spec.nbytes), element.uint) for spec in table]
    tensors = []
    for spec, bits in zip(table, old, strict=True):
        where = generator.choice(spec.numel, min(spec.numel, int(generator.integers(1, 300))), replace=False)
        top = 1 << (8 * element.itemsize - 1)
        values = generator.choice([1, -1, 2, -2, 3, -3, 100, -100, top - 1, -top, top // 3], where.size)
        changed = dict(zip(where.tolist(), [int(value) for value in values], strict=True))
        tensors.append((reference.Tensor(spec.shape, len(changed), bits), changed))
    shares = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    planes, streams = reference.write_block(tensors, dtype, keys, lambda tile: bool(generator.random() < shares))
    written = block(table, planes, streams, [tensor.changed for tensor, _ in tensors], "tiled")
    found = decode(written, table, CONTEXT, whole(old))
    assert signed(found) == {tensor: changed for tensor, (_, changed) in enumerate(tensors)}


@pytest.mark.parametrize("dtype", FLOATS)
def test_classes_that_the_writer_chooses_are_read_as_the_specification_says(dtype: str) -> None:
    shapes = [(256, 256), (520, 65), (33_000,), (2, 130, 128), (30_000, 1)]
    table = TensorTable([TensorSpec(f"t{i}", dtype, shape) for i, shape in enumerate(shapes)])
    old, new = all_trained(table, 0.03)
    changes, data = changes_between(table, old, new), encoded(table, old, new, "tiled", "none")
    # Only tiles without changes have a number without classes.
    assert all(number < 1 << 31 for number in numbers_of(data))
    assert reference.entries_of(data)[1]["@0.tables"][2] > 0
    assert by_the_letter(data, table, old) == signed(changes)
    assert_same(changes, decode(data, table, CONTEXT, whole(old)))


@pytest.mark.usefixtures("small_are_plain")
def test_small_tensors_are_plain_and_need_no_old_bits() -> None:
    """They are few of a model's, and the ranks of a trainer may divide them anywhere."""
    table = TensorTable([TensorSpec("large", "BF16", (256, 256)), TensorSpec("small", "BF16", (255, 257))])
    old, new = all_trained(table)
    data = encoded(table, old, new, "tiled", "none")
    tiles = grid_of((256, 256)).tiles
    kinds = [number >> 31 for number in numbers_of(data)]
    assert kinds == [0] * tiles + [1] * (len(kinds) - tiles)
    only = encode(
        changes_between(table, [old[0], old[1]], [old[0], new[1]]), table, "tiled", "none", CONTEXT, whole(old)
    )
    found = decode(only, table, CONTEXT)
    assert signed(found) == signed(changes_between(table, old, [old[0], new[1]]))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "BF16", "F16"])
def test_every_pattern_on_either_side(dtype: str, codec: Codec) -> None:
    """Of eight bits every pair."""
    element = DTYPES[dtype]
    every = np.arange(256**element.itemsize).astype(element.uint)
    one, other = every, np.random.default_rng(0).permutation(every)
    if element.itemsize == 1:
        one, other = np.repeat(every, 128), np.tile(every, 128)
    old, new = [np.concatenate([one, other])], [np.concatenate([other, one])]
    table = TensorTable([TensorSpec("t", dtype, (256, old[0].size // 256))])
    with classes_at([50, 100, 150, 200] if element.itemsize == 2 else [20, 60, 80, 100]):
        data = encoded(table, old, new, codec)
    assert_same(changes_between(table, old, new), decode(data, table, CONTEXT, whole(old)))


def test_the_reader_reads_the_example_of_the_specification() -> None:
    """The one of docs/FORMAT.md, with three elements more at the end, since eleven are one tile."""
    old = [0x3F80, 0x3C00, 0x3F81, 0x3C01, 0xBF80, 0x3C02, 0x3F82, 0xBC03, 0x3F83, 0x3F84, 0x3F85]
    moved, lengths = {0: 3, 1: 1, 5: 1, 7: -1}, np.zeros((TABLES, 2, SYMBOLS), np.uint8)
    assert reference.tiles_of((11,)) == [(0, 1, 0, 11)]
    lengths[3, 0, [0, 1, 4]] = 2, 2, 1
    lengths[4, 0, 2] = lengths[4, 1, 3] = 1
    tables = bytes([0, 0, 0, 0x7C]) + lengths.tobytes() + b"\x07\0\0\0"
    table = TensorTable([TensorSpec("t", "BF16", (11,))])
    data = block(table, tables, b"\x0b", [4], "tiled")
    bits = [np.array(old, np.uint16)]
    assert signed(decode(data, table, CONTEXT, whole(bits))) == by_the_letter(data, table, bits) == {0: moved}


# Blocks, threads and pieces


def test_tiles_without_changes_are_nothing_but_a_number() -> None:
    table, old, new = one_step((512, 384), 1, share=0.05)
    tiles = reference.tiles_of((512, 384))
    for number in (0, 5, len(tiles) - 1):
        inside = np.zeros(old.size, np.bool_)
        inside[reference.places((512, 384), tiles[number])] = True
        moved = np.where(inside, new, old)
        for threads in (1, 3):
            with many_threads(threads):
                data = encoded(table, [old], [moved], "tiled", "none")
                found = decode(data, table, CONTEXT, whole([old]))
            assert [tile for tile, bits in enumerate(numbers_of(data)) if bits] == [number]
            assert_same(changes_between(table, [old], [moved]), found)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("threads", [2, 3, 4])
def test_threads_write_and_read_the_same(threads: int, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(1536, 384), (5, 96, 128), (7,), (64, 3000), (70_001,)]
    table = TensorTable([TensorSpec(f"t{i}", "BF16", shape) for i, shape in enumerate(shapes)])
    old, new = all_trained(table, 0.05)
    with many_threads(1):
        assert len(shares_of_threads([grid_of(shape) for shape in shapes])) == 1
        data = encoded(table, old, new, codec)
        alone = decode(data, table, CONTEXT, whole(old))
    with many_threads(threads):
        assert len(shares_of_threads([grid_of(shape) for shape in shapes])) == threads
        assert encoded(table, old, new, codec) == data
        changes = changes_between(table, old, new)
        written = encode(changes, table, codec, "zstd", CONTEXT, whole(new, after=True))
        assert_same(decode(written, table, CONTEXT, whole(old)), alone)
        assert_same(decode(data, table, CONTEXT, whole(old)), alone)
        for elements in (1, 100_000):
            monkeypatch.setattr(coder, "GROUP_ELEMENTS", elements)
            assert encoded(table, old, new, codec) == data
            assert_same(decode(data, table, CONTEXT, whole(old)), alone)
    assert_same(changes_between(table, old, new), alone)


@pytest.mark.parametrize("part", [None, ((0, 1024, 0, 64),)], ids=["whole", "a part"])
def test_old_bits_of_large_tensors_are_not_held_at_once(
    part: tuple[Rectangle, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coder, "GROUP_ELEMENTS", 1)
    table = TensorTable([TensorSpec(f"t{i}", "BF16", (2048, 64)) for i in range(4)])
    old, new = all_trained(table, 0.05)
    made: list[weakref.ref[Bits]] = []
    held = []

    def copy(tensor: int) -> Bits:
        held.append(sum(bits() is not None for bits in made))
        found = old[tensor].copy()
        made.append(weakref.ref(found))
        return found

    with classes_at([0x20, 0x40, 0x50, 0x60]):
        changes = changes_between(table, old, new)
        data = encode(changes, table, "tiled", "zstd", CONTEXT, lambda tensor: BaseTensor(copy(tensor), part))
        assert held == [0] * 8
        decode(data, table, CONTEXT, lambda tensor: BaseTensor(partial(copy, tensor), part))
        assert held == [0] * 12


@pytest.mark.parametrize(
    ("kernels", "name"), [(encode_kernels, "gaps_of_tensors"), (decode_kernels, "decode_tensors")], ids=["en", "de"]
)
def test_threads_that_go_on_after_an_interrupt_have_their_old_bits(
    kernels: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt hits the thread that waits for the others; what it raises frees what that thread alone has."""
    table, old, new = one_step((1536, 384), 1)
    changes, data = changes_between(table, [old], [new]), encoded(table, [old], [new])
    loop, begins, ends = getattr(kernels, name), threading.Event(), threading.Event()
    freed: list[bool] = []

    def base(tensor: int) -> BaseTensor:
        copied = old.copy()
        weakref.finalize(copied, lambda: freed.append(ends.is_set()))
        return BaseTensor(copied)

    def late(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            begins.set()
            ends.wait()
        return loop(*arguments)

    def interrupted(thread: threading.Thread) -> None:
        begins.wait()
        raise KeyboardInterrupt

    calls: dict[ModuleType, Callable[[], object]] = {
        encode_kernels: lambda: encode(changes, table, "tiled", "zstd", CONTEXT, base),
        decode_kernels: lambda: decode(data, table, CONTEXT, base),
    }
    with many_threads(2), monkeypatch.context() as patch:
        patch.setattr(kernels, name, late)
        patch.setattr(threading.Thread, "join", interrupted)
        others = set(threading.enumerate())
        with pytest.raises(KeyboardInterrupt):
            calls[kernels]()
        (thread,) = set(threading.enumerate()) - others
    gc.collect()
    ends.set()
    thread.join()
    del thread
    gc.collect()
    # An encoder reads them before, too, to choose classes.
    assert freed[-1]


def test_tensors_are_decoded_without_a_look_at_all_tiles_of_their_block() -> None:
    """What is looked at is copied, and so seen as memory: a block may have millions of tiles, and be read in pieces."""
    table = TensorTable([TensorSpec(f"t{i}", "BF16", (64,)) for i in range(40_000)])
    old = [np.zeros(64, np.uint16)] * len(table)
    reader = DeltaReader(encoded(table, old, [bits + 1 for bits in old], "tiled", "none"), table, CONTEXT, whole(old))
    assert reader.take("BF16", 1)[0].positions.size == 64
    with counted() as most:
        assert reader.take("BF16", 2)[0].positions.size == 64
    assert most[0] < 5 * len(table)


def test_a_block_ends_where_its_tables_are_worth_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coder, "BLOCK_CHANGES", 1000)
    table = TensorTable([TensorSpec(f"t{i}", "BF16", (700,)) for i in range(5)])
    old = [np.zeros(700, np.uint16) for _ in table]
    new = [np.where(np.arange(700) < size, np.uint16(1), np.uint16(0)) for size in (700, 300, 1, 400, 600)]
    data = encoded(table, old, new, "plain", "none")
    entries = reference.entries_of(data)[1]
    ids = [np.frombuffer(entries[f"@{block}.ids"], "<u4").tolist() for block in range(2)]
    assert (ids, "@2.ids" in entries) == ([[0, 1], [2, 3, 4]], False)
    assert by_the_letter(data, table, None) == signed(changes_between(table, old, new))


@given(data=st.data(), dtype=st.sampled_from(sorted(DTYPES)), how=st.sampled_from(["zstd", "none"]))
def test_a_tensor_in_pieces_is_the_block_of_the_whole(data: st.DataObject, dtype: str, how: Compression) -> None:
    """Wherever the pieces end, also within a band or a tile, and where some are empty."""
    shape, element = data.draw(SHAPES), DTYPES[dtype]
    table = TensorTable([TensorSpec("t", dtype, shape)])
    numel = table[0].numel
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    share = data.draw(st.sampled_from([0.001, 0.1, 1.0]))
    positions = np.flatnonzero(generator.random(numel) < share) if share < 1 else np.arange(numel)
    positions = positions if positions.size else np.array([numel // 2])
    distances = np.frombuffer(generator.bytes(positions.size * element.itemsize), element.uint).copy()
    distances[distances == 0] = 1
    group = Sparse(dtype, np.zeros(1, np.uint32), np.array([positions.size]), positions, distances, True)
    blocks = BlockEntries()
    coder.encode(blocks, [group], table, how, None)
    cuts = sorted(data.draw(st.lists(st.integers(0, positions.size), max_size=6)))

    def pieces() -> list[tuple[Positions, Bits]]:
        return list(zip(np.split(positions, cuts), np.split(distances, cuts), strict=True))

    large = LargeTensor(table[0], pieces)
    streams = np.concatenate(list(large.streams()))
    assert streams.tobytes() == blocks.arrays["@0.streams"][1].tobytes()
    assert large.tables(how).tobytes() == blocks.arrays["@0.tables"][1].tobytes()


@pytest.mark.parametrize("shape", [(2**20,), (2**16, 16), (2**12, 256)])
def test_a_tensor_in_pieces_takes_the_memory_of_a_few(shape: tuple[int, ...]) -> None:
    """Also one that is a single row of tiles, such as experts in blocks of 4 bits."""
    spec, ones = TensorSpec("t", "U8", shape), np.ones(coder.PIECE_CHANGES, np.uint8)
    large = LargeTensor(spec, lambda: ((np.arange(at, at + ones.size), ones) for at in range(0, spec.numel, ones.size)))
    with counted() as most:
        assert sum(piece.size for piece in large.streams()) >= spec.numel // 8
    assert most[0] < 5 * 2**20


# Old bits


def test_old_bits_are_asked_for() -> None:
    table, old, new = one_step((256, 256), 1, share=0.5)
    data = encoded(table, [old], [new])
    with pytest.raises(UnsupportedError, match="codec 'tiled' and can be decoded only with the weights of its base"):
        decode(data, table, CONTEXT)
    with pytest.raises(UsageError, match="codec 'tiled' needs the bits of the base version"):
        encode(changes_between(table, [old], [new]), table, "tiled", "zstd", CONTEXT)


@pytest.mark.parametrize("other", [np.zeros(65_535, np.uint16), np.zeros(65_536, np.uint32)])
def test_old_bits_of_another_size_or_width_are_refused(other: Bits) -> None:
    table, old, new = one_step((256, 256), 1)
    with pytest.raises(TensorMismatchError, match=r"base bits of 't' are .* \(65536,\) of uint16 expected"):
        decode(encoded(table, [old], [new]), table, CONTEXT, whole([other]))
    with pytest.raises(TensorMismatchError, match=r"base bits of 't' are .* \(65536,\) of uint16 expected"):
        encode(changes_between(table, [old], [new]), table, "tiled", "zstd", CONTEXT, whole([other]))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.usefixtures("small_are_plain")
def test_old_bits_are_read_only_where_tiles_need_them(codec: Codec) -> None:
    """Those of a tensor that did not change, or whose tiles are plain, may lie on a disk."""
    table = TensorTable([TensorSpec(f"t{i}", "BF16", (256, 256)) for i in range(2)] + [TensorSpec("u", "BF16", (9,))])
    old = [trained(spec.shape, i)[0] for i, spec in enumerate(table)]
    new = [trained((256, 256), 0)[1], old[1], old[2] + np.uint16(1)]
    read: list[int] = []

    def lookup(tensor: int) -> BaseTensor:
        def bits() -> Bits:
            read.append(tensor)
            return old[tensor]

        return BaseTensor(bits)

    data = encode(changes_between(table, old, new), table, codec, "zstd", CONTEXT, lookup)
    assert set(read) == ({0} if codec == "tiled" else set())
    read.clear()
    assert signed(decode(data, table, CONTEXT, lookup)) == signed(changes_between(table, old, new))
    assert read == ([0] if codec == "tiled" else [])


@pytest.mark.parametrize("codec", CODECS)
def test_a_change_of_nothing_is_not_written(codec: Codec) -> None:
    table = TensorTable([TensorSpec("t", "BF16", (9,))])
    group = Sparse("BF16", np.zeros(1, np.uint32), np.array([2]), np.array([1, 5]), np.array([3, 0], np.uint16), True)
    changes = Changes([group], fingerprints={0: Fingerprint()})
    with pytest.raises(UsageError, match="distance 0"):
        encode(changes, table, codec, "none", CONTEXT, whole([np.zeros(9, np.uint16)]))


# Sizes


@pytest.mark.parametrize(
    ("share", "most"), [(0.001, 1.04), (0.005, 1.04), (0.02, 1.04), (0.1, 1.04), (0.5, 1.04), (0.95, 1.1)]
)
def test_size_is_near_the_entropy_of_positions_and_values(share: float, most: float) -> None:
    random = np.random.default_rng(1)
    numel = int(min(4e7, 60_000 / share))
    positions = np.cumsum(random.geometric(share, int(numel * share * 1.01))) - 1
    positions = positions[positions < numel]
    steps = random.choice(
        np.array([-1, 1, -2, 2, 3, -9], np.int16), positions.size, p=[0.45, 0.44, 0.04, 0.04, 0.02, 0.01]
    )
    group = Sparse("BF16", np.zeros(1, np.uint32), np.array([positions.size]), positions, steps.view(np.uint16), True)
    blocks = BlockEntries()
    coder.encode(blocks, [group], TensorTable([TensorSpec("t", "BF16", (numel,))]), "zstd", None)
    p = positions.size / numel
    bits = -p * np.log2(p) - (1 - p) * np.log2(1 - p)
    weights = np.unique(steps, return_counts=True)[1] / steps.size
    bound = numel * bits / 8 - positions.size * float((weights * np.log2(weights)).sum()) / 8
    assert sum(array.nbytes for _, array in blocks.arrays.values()) < most * bound


def test_classes_save_bytes_and_no_others_save_more() -> None:
    """They are chosen by an estimate from samples, which may cost a little."""
    table, old, new = one_step((512, 1024), 4, share=0.02)
    chosen = len(encoded(table, [old], [new]))
    assert chosen < 0.9 * len(encoded(table, [old], [new], "plain"))
    keys = np.unique(old >> np.uint16(7) & np.uint16(255))
    generator = np.random.default_rng(0)
    for _ in range(40):
        with classes_at(sorted(generator.choice(keys, CLASSES).tolist())):
            assert chosen < 1.01 * len(encoded(table, [old], [new]))


def test_classes_are_chosen_from_the_parts_that_a_rank_holds() -> None:
    """Not from what lies around them, which is undefined."""
    table, old, new = one_step((1024, 512), 5)
    part = (256, 768, 0, 512)
    inside = np.zeros((1024, 512), np.bool_)
    inside[256:768] = True
    new = np.where(inside.reshape(-1), new, old)
    changes, keys = changes_between(table, [old], [new]), []
    for around in (0x0001, 0x7FFF):
        held = np.where(inside.reshape(-1), old, np.uint16(around))
        data = encode(changes, table, "tiled", "none", CONTEXT, lambda _, held=held: BaseTensor(held, (part,)))  # type: ignore[misc]
        keys.append(list(reference.entries_of(data)[1]["@0.tables"][:CLASSES]))
        assert signed(decode(data, table, CONTEXT, whole([old]))) == signed(changes)
    assert keys[0] == keys[1]
    assert keys[0][-1] > 0


def test_what_is_read_is_its_own() -> None:
    """Arrays of one object do not change when the next one is read."""
    table, old, new = one_step((256, 256), 1)
    found = decode(encoded(table, [old], [new]), table, CONTEXT, whole([old]))
    before = {tensor: (where.copy(), data.copy()) for tensor, (where, data) in flat(found).items()}
    decode(encoded(table, [new], [old]), table, CONTEXT, whole([new]))
    for tensor, (where, data) in flat(found).items():
        np.testing.assert_array_equal(where, before[tensor][0])
        np.testing.assert_array_equal(data, before[tensor][1])


SELECTS = [
    pytest.param(
        decode_kernels.select_by_deposit,
        marks=[] if decode_kernels.DEPOSITS else pytest.mark.skip(reason="this processor has no fast PDEP"),
    ),
    decode_kernels.select_by_counting,
]


@pytest.mark.parametrize("select", SELECTS)
def test_set_bits_are_found_by_their_rank(select: Callable[[np.uint64, np.uint64], int]) -> None:
    random = np.random.default_rng(1)
    sparse = [int.from_bytes(random.bytes(8)) & int.from_bytes(random.bytes(8)) for _ in range(30)]
    for word in (1, 1 << 63, (1 << 64) - 1, 0x8000000000000001, *sparse):
        places = [place for place in range(64) if word >> place & 1]
        assert [int(select(np.uint64(word), np.uint64(rank))) for rank in range(len(places))] == places


@pytest.mark.parametrize("limit", [{"NUMBA_CPU_NAME": "generic"}, {"NUMBA_CPU_FEATURES": "-bmi2"}])
def test_loops_are_compiled_for_the_processor_that_numba_is_limited_to(limit: dict[str, str], tmp_path: Path) -> None:
    """LLVM ends the process that asks for an instruction which its target lacks."""
    code = (
        "import numpy as np\n"
        "from vllm_delta_sync.codec.tiles import decode_kernels\n"
        "print(decode_kernels._select(np.uint64(0b1011000), np.uint64(1)))\n"
    )
    assert run_python("-c", code, environment={**limit, "NUMBA_CACHE_DIR": str(tmp_path)}).stdout == "4\n"

"""What the tests of tiles share: weights that a step has moved, and objects in which small tensors have classes too."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import zstandard

from tests.support import reference_tiles as reference
from tests.support.samples import CONTEXT, changes_between
from vllm_delta_sync.codec.delta_object import Arrays
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.tiles import coder, grid
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.format.base_document import dump_canonical
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.safetensors_file import write_container
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseLookup, BaseTensor, Bits, Changes

FLOATS = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "F64")


def trained(shape: tuple[int, ...], seed: int, dtype: str = "BF16", share: float = 0.02) -> tuple[Bits, Bits]:
    """Bits of normal weights before and after a step that changes small ones more often."""
    generator, element = np.random.default_rng(seed), DTYPES[dtype]
    size = int(np.prod(shape, dtype=np.int64))
    old = generator.normal(0, 0.02, size).astype(np.float32).view(np.uint32)
    if element.itemsize <= 4:
        bits = (old >> np.uint32(32 - 8 * element.itemsize)).astype(element.uint)
    else:
        bits = old.astype(element.uint) << element.uint.type(32)
    new = bits.copy()
    changed = generator.random(size) < np.minimum(share * 0.01 / np.abs(old.view(np.float32)), 0.9)
    new[changed] += generator.choice(
        np.array([1, 2, 3, 40], element.uint), int(changed.sum()), p=[0.6, 0.3, 0.05, 0.05]
    )
    return bits, new


def one_step(shape: tuple[int, ...], seed: int, share: float = 0.02) -> tuple[TensorTable, Bits, Bits]:
    """A table of one tensor in BF16, and its bits before and after a step."""
    return TensorTable([TensorSpec("t", "BF16", shape)]), *trained(shape, seed, share=share)


def all_trained(table: TensorTable, share: float = 0.02) -> tuple[list[Bits], list[Bits]]:
    pairs = [trained(spec.shape, number, spec.dtype, share) for number, spec in enumerate(table)]
    return [old for old, _ in pairs], [new for _, new in pairs]


@contextmanager
def classes_at(keys: Sequence[int]) -> Iterator[None]:
    """Code all tensors, however small, in classes that end at these keys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coder, "SMALL_ELEMENTS", 0)
        patch.setattr(coder, "choose_thresholds", lambda owned, tokens: np.array(keys, np.uint8))
        yield


@contextmanager
def many_threads(number: int = 3) -> Iterator[None]:
    """So many threads code every tensor, however small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "THREADS", number)
        patch.setattr(grid, "THREAD_ELEMENTS", 1)
        patch.setattr(coder, "THREAD_CHANGES", 1)
        yield


def whole(bits: Sequence[Bits], after: bool = False) -> BaseLookup:
    return lambda tensor: BaseTensor(bits[tensor], after=after)


def encoded(
    table: TensorTable, old: list[Bits], new: list[Bits], codec: Codec = "tiled", how: Compression = "zstd"
) -> bytes:
    return encode(changes_between(table, old, new), table, codec, how, CONTEXT, whole(old))


def block(
    table: TensorTable, tables: bytes, streams: bytes, counts: Sequence[int], codec: Codec = "plain",
    how: Compression = "none",
) -> bytes:  # fmt: skip
    """An object of one block of all tensors, with these very bytes."""
    metadata = {
        "format_version": 2, "run": CONTEXT.run, "version": 1, "base_version": 0, "codec": codec, "compression": how,
        "blocks": [{"dtype": table[0].dtype, "kind": "tiles"}],
    }  # fmt: skip
    arrays: Arrays = {
        "@0.ids": ("U32", np.arange(len(table), dtype=np.uint32)),
        "@0.counts": ("U64", np.array(counts, np.uint64)),
        "@0.tables": ("U8", np.frombuffer(tables, np.uint8)),
        "@0.streams": ("U8", np.frombuffer(streams, np.uint8)),
        "@fingerprints": ("U64", np.zeros((len(table), 2), np.uint64)),
    }
    return write_container(arrays, {"delta_sync": dump_canonical(metadata).decode()})


def flat(changes: Changes) -> dict[int, tuple[np.ndarray, Bits]]:
    return {tensor: (where, data) for group in changes.sparse for tensor, where, data in group.tensors()}


def signed(changes: Changes) -> dict[int, reference.Changed]:
    """Distances by tensor id and position, as Python integers."""
    found = {}
    for tensor, (positions, distances) in flat(changes).items():
        numbers = distances.view(f"<i{distances.itemsize}").tolist()
        found[tensor] = dict(zip(positions.tolist(), numbers, strict=True))
    return found


def assert_same(left: Changes, right: Changes) -> None:
    first, second = flat(left), flat(right)
    assert first.keys() == second.keys()
    for tensor, (positions, data) in first.items():
        np.testing.assert_array_equal(positions, second[tensor][0])
        np.testing.assert_array_equal(data, second[tensor][1])
    assert left.fingerprints == right.fingerprints


def by_the_letter(data: bytes, table: TensorTable, old: Sequence[Bits] | None) -> dict[int, reference.Changed]:
    """What docs/FORMAT.md reads in an object."""
    rows = [(spec.dtype, spec.shape) for spec in table]
    return reference.read_object(data, rows, None if old is None else lambda tensor: old[tensor])


def numbers_of(data: bytes, block: int = 0) -> list[int]:
    """The numbers of a block's tiles: bit 31 for a plain one, and how many bits each stream has."""
    metadata, entries = reference.entries_of(data)
    tables = entries[f"@{block}.tables"]
    if metadata["compression"] == "zstd":
        tables = zstandard.decompress(tables)
    planes = np.frombuffer(tables[reference.SIZES_AT :], np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view("<u4").tolist()

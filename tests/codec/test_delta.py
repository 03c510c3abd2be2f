"""Delta objects: what is encoded comes back bit by bit, whatever the dtype, codec, compression and pattern."""

import itertools
from typing import cast

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from tests.support.samples import CONTEXT, changes_between, every_dtype_table, nudge, patterns, random_bits, state_of
from tests.support.seeds import few_by_default
from vllm_delta_sync.codec.delta_object import required_features
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, Changes, Sparse

COMPRESSIONS: list[Compression] = ["zstd", "none"]
CODECS: list[Codec] = ["tiled", "plain"]
WAYS: list[tuple[Codec, Compression]] = [*itertools.product(CODECS, COMPRESSIONS), ("raw", "none")]
ways = pytest.mark.parametrize(("codec", "compression"), WAYS)


def check_round_trip(
    table: TensorTable, old: list[Bits], new: list[Bits], codec: Codec, compression: Compression, full: list[int]
) -> bytes:
    changes = changes_between(table, old, new, codec, full)
    # Only codec tiled needs the bits before.
    base = (lambda tensor: BaseTensor(old[tensor])) if codec == "tiled" else None
    data = encode(changes, table, codec, compression, CONTEXT, base)
    found = decode(data, table, CONTEXT, base)
    assert found.changed == changes.changed
    assert found.fingerprints == changes.fingerprints
    assert found.fingerprint == changes.fingerprint
    state = state_of(table, old)
    state.apply(found)
    for tensor in range(len(table)):
        assert np.array_equal(state.bits[tensor], new[tensor]), table[tensor].name
    assert state.fingerprints == state_of(table, new).fingerprints
    assert encode(changes, table, codec, compression, CONTEXT, base) == data
    return data


@given(st.sampled_from(sorted(DTYPES)), st.sampled_from(WAYS), st.data())
@few_by_default(75)  # 16 dtypes, each in five ways
def test_any_patterns_of_any_dtype(dtype: str, way: tuple[Codec, Compression], data: st.DataObject) -> None:
    table = TensorTable([TensorSpec("w", dtype, (2, 15)), TensorSpec("v", dtype, (30,)), TensorSpec("s", dtype, ())])
    values = st.lists(patterns(dtype), min_size=30, max_size=30)
    old = [np.array(data.draw(values)[: spec.numel], spec.element.uint) for spec in table]
    new = []
    for bits in old:
        chosen = data.draw(st.lists(st.booleans(), min_size=bits.size, max_size=bits.size))
        other = np.array(data.draw(values)[: bits.size], bits.dtype)
        new.append(np.where(chosen, other, bits))
    full = [tensor for tensor in range(3) if data.draw(st.booleans())]
    check_round_trip(table, old, new, *way, full)


@ways
@pytest.mark.parametrize("share", [0.0, 0.005, 0.3, 1.0])
def test_every_dtype_in_one_object(codec: Codec, compression: Compression, share: float) -> None:
    table = every_dtype_table()
    random = np.random.default_rng(5)
    old = random_bits(table, random)
    check_round_trip(table, old, nudge(old, random, share), codec, compression, full=[])
    check_round_trip(table, old, nudge(old, random, share), codec, compression, full=list(range(len(table))))


def table_of_one() -> TensorTable:
    return TensorTable([TensorSpec("w", "BF16", (4,))])


def one_change() -> tuple[list[Bits], list[Bits]]:
    return [np.zeros(4, np.uint16)], [np.array([0, 0x8000, 0, 5], np.uint16)]


def test_anyone_reads_raw() -> None:
    table = TensorTable([TensorSpec("model.w", "F32", (2, 3))])
    old, new = [np.zeros(6, np.uint32)], [np.array([0, 0, 0x3F800000, 0, 0, 0xBF800000], np.uint32)]
    data = encode(changes_between(table, old, new, "raw"), table, "raw", "none", CONTEXT)
    found = safetensors.numpy.load(data)
    assert found["model.w.indices"].dtype == np.int32
    assert found["model.w.indices"].tolist() == [2, 5]
    assert found["model.w.values"].tolist() == [1.0, -1.0]


def test_raw_takes_wide_indices_where_a_tensor_needs_them() -> None:
    for numel, dtype in ((2**31 - 1, "I32"), (2**31, "I64")):
        table = TensorTable([TensorSpec("w", "U8", (numel,))])
        one = np.array([numel - 1], np.int64)
        group = Sparse("U8", np.array([0], np.uint32), np.array([1]), one, np.array([7], np.uint8), False)
        fingerprints = changes_between(table_of_one(), *one_change()).fingerprints
        found = Container(encode(Changes([group], [], fingerprints), table, "raw", "none", CONTEXT))
        assert found.entries["w.indices"].dtype.name == dtype


def test_misuse_of_the_codecs() -> None:
    table = table_of_one()
    old, new = one_change()
    for codec in ("plain", "raw"):
        other: Codec = "raw" if codec == "plain" else "plain"
        with pytest.raises(UsageError, match=f"codec '{other}' takes"):
            encode(changes_between(table, old, new, codec), table, other, "none", CONTEXT)
    clash = TensorTable([TensorSpec("w", "BF16", (4,)), TensorSpec("w.values", "BF16", (4,))])
    with pytest.raises(UsageError, match=r"a tensor named 'w\.values'; use codec='plain'"):
        encode(Changes(), clash, "raw", "none", CONTEXT)
    with pytest.raises(UsageError, match="codec 'later' is unknown to the encoder"):
        encode(Changes(), table, cast(Codec, "later"), "none", CONTEXT)
    with pytest.raises(UsageError, match="codec 'tiled' needs the bits of the base version"):
        encode(Changes(), table, "tiled", "none", CONTEXT)


def test_what_a_manifest_must_require() -> None:
    assert required_features("plain", "zstd") == ["plain", "zstd"]
    assert required_features("plain", "none") == ["plain"]
    assert required_features("raw", "zstd") == ["raw"]

"""Tensors in full: blocks of byte planes, read when they are asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.samples import CONTEXT, patterns
from vllm_delta_sync.codec import full
from vllm_delta_sync.codec.delta_object import BlockEntries, open_blocks, parse_blocks
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.full import FullReader, LazyFullTensors
from vllm_delta_sync.codec.zstd import COMPRESSIONS, Compression
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.safetensors_file import Container, write_container
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Changes, Full


@given(st.data(), st.sampled_from(sorted(DTYPES)), st.sampled_from(COMPRESSIONS), st.sampled_from([1, 20, 10**6]))
def test_tensors_in_full_come_back(data: st.DataObject, dtype: str, compression: Compression, most: int) -> None:
    numels = data.draw(st.lists(st.sampled_from([0, 1, 9, 33]), min_size=1, max_size=4))
    table = TensorTable([TensorSpec(f"w{i}", dtype, (numel,)) for i, numel in enumerate(numels)])
    tensors = []
    for tensor, numel in enumerate(numels):
        bits = data.draw(st.lists(patterns(dtype), min_size=numel, max_size=numel))
        tensors.append(Full(tensor, np.array(bits, DTYPES[dtype].uint)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full, "BLOCK_ELEMENTS", most)
        written = BlockEntries(3)
        full.encode(written, tensors[::-1], table, compression)
    arrays, rows = written.arrays, written.rows
    assert all(name.startswith(tuple(f"@{3 + row}." for row in range(len(rows)))) for name in arrays)
    blocks = parse_blocks([{"dtype": dtype, "kind": "full"}] * 3 + rows, "object")[3:]
    assert full.entry_names(blocks) == set(arrays)
    container = Container(write_container(arrays, {}))
    opened = open_blocks(container, table, blocks, sum(numels), "object")
    assert len(opened) == 1 if most == 10**6 else len(opened) <= len(numels)
    lazy = LazyFullTensors([], [FullReader(container, item, compression) for item in opened])
    assert sorted(lazy) == list(range(len(numels)))
    assert len(lazy) == len(numels)
    for wanted in tensors + tensors[::-1]:
        assert lazy[wanted.id].bits.tobytes() == wanted.bits.tobytes()
        assert lazy[wanted.id].bits.dtype == wanted.bits.dtype
    with pytest.raises(KeyError):
        lazy[len(numels)]


def test_planes_are_those_of_the_specification() -> None:
    table = TensorTable([TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (1, 1))])
    written = BlockEntries()
    tensors = [Full(1, np.array([0x09AB0CDE], np.uint32)), Full(0, np.array([0x01020304, 0xF1F2F3F4], np.uint32))]
    full.encode(written, tensors, table, "none")
    assert written.rows == [{"dtype": "F32", "kind": "full"}]
    assert written.arrays.pop("@0.ids")[1].tolist() == [0, 1]
    assert {name: array.tolist() for name, (_, array) in written.arrays.items()} == {
        "@0.bits.0": [0x04, 0xF4, 0xDE],
        "@0.bits.1": [0x03, 0xF3, 0x0C],
        "@0.bits.2": [0x02, 0xF2, 0xAB],
        "@0.bits.3": [0x01, 0xF1, 0x09],
    }


def test_a_tensor_in_full_is_compressed() -> None:
    table = TensorTable([TensorSpec("w", "BF16", (300, 300))])
    weights = np.random.default_rng(2).standard_normal(90_000).astype(np.float32)
    bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
    changes = Changes(full=[Full(0, bits)], fingerprints={0: Fingerprint(1, 2)})
    sizes = {}
    for compression in COMPRESSIONS:
        data = encode(changes, table, "plain", compression, CONTEXT)  # type: ignore[arg-type]
        found = decode(data, table, CONTEXT)
        assert [tensor.bits.tobytes() for tensor in found.full] == [bits.tobytes()]
        assert found.fingerprints == changes.fingerprints
        sizes[compression] = len(data)
    assert sizes["zstd"] < 0.75 * bits.nbytes < bits.nbytes < sizes["none"]

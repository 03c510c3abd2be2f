"""The container: interchangeable with the safetensors library, and refused unless it describes its bytes exactly."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.support.samples import every_dtype_table, random_bits
from vllm_delta_sync.errors import FormatError, LimitError, StoreError, TensorMismatchError
from vllm_delta_sync.torch_bits import TORCH_DTYPES, bits_of, dtype_name, tensor_from_bits
from vllm_delta_sync.wire.anchor import read_anchor, write_anchor
from vllm_delta_sync.wire.container import Container, aligned, write_container
from vllm_delta_sync.wire.dtypes import DTYPES
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=12)


def container(header: object, data: bytes = b"", metadata: object = None) -> bytes:
    """A file with any header, well-formed or not."""
    if isinstance(header, dict) and metadata is not None:
        header = {"__metadata__": metadata, **header}
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@given(
    st.dictionaries(
        NAMES.filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    ),
    st.dictionaries(NAMES, st.text(max_size=20), max_size=3),
)
@settings(deadline=None)
def test_round_trip(entries: dict[str, tuple[str, list[int]]], metadata: dict[str, str]) -> None:
    random = np.random.default_rng(0)
    arrays = {}
    for name, (dtype, shape) in entries.items():
        count = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
        arrays[name] = (dtype, np.frombuffer(random.bytes(count), DTYPES[dtype].uint).reshape(shape))
    data = write_container(arrays, metadata)
    found = Container(data)
    assert found.metadata == metadata
    assert set(found.entries) == set(arrays)
    for name, (dtype, array) in arrays.items():
        assert found.entries[name].dtype.name == dtype
        assert found.entries[name].shape == array.shape
        assert np.array_equal(found.bits(name), array.reshape(-1))
        assert aligned(found.bits(name)).flags.aligned
    assert write_container(dict(reversed(arrays.items())), dict(reversed(metadata.items()))) == data


def test_the_safetensors_library_reads_what_is_written_here(tmp_path: Path) -> None:
    table = every_dtype_table(24)
    bits = random_bits(table, np.random.default_rng(3))
    bits[table.index("layers.bool.weight")] %= 2
    path = tmp_path / "anchor.safetensors"
    pairs = [(spec.name, bits[tensor]) for tensor, spec in enumerate(table)]
    write_anchor(path, table, reversed(pairs))
    with safe_open(path, "pt") as opened:
        assert sorted(opened.keys()) == sorted(spec.name for spec in table)
        assert opened.metadata() == {"format": "pt"}
    loaded = safetensors.torch.load_file(path)
    for tensor, spec in enumerate(table):
        assert loaded[spec.name].dtype == TORCH_DTYPES[spec.dtype]
        assert tuple(loaded[spec.name].shape) == spec.shape
        assert np.array_equal(bits_of(loaded[spec.name]), bits[tensor])
        back = tensor_from_bits(bits[tensor], spec)
        assert dtype_name(back.dtype, spec.name) == spec.dtype
        assert np.array_equal(bits_of(back), bits[tensor])
    found = read_anchor(path.read_bytes(), table, "anchor")
    assert set(found.entries) == set(loaded)


def test_files_of_the_safetensors_library_are_read_here(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5).to(torch.bfloat16),
        "a": torch.arange(7, dtype=torch.int64),
        "odd": torch.randint(0, 255, (3,), dtype=torch.uint8),
        "f": torch.tensor(float("nan")),
        "none": torch.zeros(0, 4),
        "e": torch.randn(5).to(torch.float8_e4m3fn),
    }
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path, {"format": "pt", "by": "them"})
    found = Container(np.memmap(path, np.uint8, mode="r"))
    assert found.metadata == {"format": "pt", "by": "them"}
    assert set(found.entries) == set(tensors)
    for name, tensor in tensors.items():
        assert found.entries[name].shape == tuple(tensor.shape)
        assert np.array_equal(found.bits(name), bits_of(tensor))
    assert Container(safetensors.numpy.save({})).entries == {}


HOSTILE = {
    "empty file": b"",
    "too short": b"\x01\x00\x00",
    "header longer than file": (1000).to_bytes(8, "little") + b"{}",
    "empty header": container(b""),
    "not json": container(b"{garbage"),
    "not an object": container([1]),
    "space before the header": container(b' {"a":1}'),
    "not utf-8": container(b'{"\xff":1}'),
    "half a surrogate pair as name": container({"\ud800": entry()}, b"1234"),
    "half a surrogate pair in metadata": container({}, metadata={"a": "\udc00"}),
    "metadata is a list": container({}, metadata=[]),
    "metadata value is a number": container({}, metadata={"a": 1}),
    "metadata is nested": container({}, metadata={"a": {"b": "c"}}),
    "duplicate entry": container(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), b"1234"),
    "duplicate metadata": container(b'{"__metadata__":{},"__metadata__":{}}'),
    "entry is a string": container({"a": "U8"}),
    "entry lacks shape": container({"a": {"dtype": "U8", "data_offsets": [0, 0]}}),
    "entry with a fourth field": container({"a": {**entry(), "extra": 1}}, b"1234"),
    "unknown dtype": container({"a": entry("Q4")}, b"1234"),
    "dtype is a number": container({"a": entry(8)}, b"1234"),  # type: ignore[arg-type]
    "shape is a number": container({"a": entry(shape=4)}, b"1234"),
    "shape holds a float": container({"a": entry(shape=[4.0])}, b"1234"),
    "shape holds a bool": container({"a": entry(shape=[True], offsets=[0, 1])}, b"1"),
    "shape holds a string": container({"a": entry(shape=["4"])}, b"1234"),
    "shape holds NaN": container(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', b"1234"),
    "three offsets": container({"a": entry(offsets=[0, 2, 4])}, b"1234"),
    "offsets backwards": container({"a": entry(offsets=[4, 0])}, b"1234"),
    "offset negative": container({"a": entry(offsets=[-4, 0])}, b"1234"),
    "offset beyond the end": container({"a": entry(offsets=[0, 5], shape=[5])}, b"1234"),
    "offset of 2^70": container({"a": entry(offsets=[0, 2**70])}, b"1234"),
    "shape against offsets": container({"a": entry(shape=[3])}, b"1234"),
    "hole": container({"a": entry(shape=[1], offsets=[0, 1]), "b": entry(shape=[1], offsets=[2, 3])}, b"123"),
    "hole at the start": container({"a": entry(shape=[3], offsets=[1, 4])}, b"1234"),
    "overlap": container({"a": entry(shape=[3], offsets=[0, 3]), "b": entry(shape=[2], offsets=[2, 4])}, b"1234"),
    "the same bytes twice": container({"a": entry(), "b": entry()}, b"1234"),
    "bytes after the last entry": container({"a": entry()}, b"12345"),
    "bytes without entries": container({}, b"1"),
    "deep nesting": container(b'{"a":' + b"[" * 100_000),
}
OVER_LIMITS = {
    "header of 2^60": (2**60).to_bytes(8, "little") + b"{}",
    "header of 2^64 - 1": b"\xff" * 8 + b"{}",
    "dimension of 2^49": container({"a": entry(shape=[2**49])}, b"1234"),
    "shape 2^47 x 2^47": container({"a": entry(shape=[2**47, 2**47])}, b"1234"),
    "negative dimensions": container({"a": entry(shape=[-2, -2])}, b"1234"),
    "17 dimensions": container({"a": entry(shape=[1] * 16 + [4])}, b"1234"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_bytes_are_a_format_error(case: str) -> None:
    with pytest.raises(FormatError, match=r"^this file"):
        Container(HOSTILE[case], "this file")


@pytest.mark.parametrize("case", OVER_LIMITS)
def test_declared_sizes_are_checked_before_allocation(case: str) -> None:
    if case == "shape 2^47 x 2^47":
        # Each dimension is inside its limit; their product is far beyond the bytes that are there.
        with pytest.raises(FormatError, match="does not take 4 bytes"):
            Container(OVER_LIMITS[case], "this file")
        return
    with pytest.raises(LimitError, match=r"^this file"):
        Container(OVER_LIMITS[case], "this file")


def test_a_missing_entry_is_named() -> None:
    with pytest.raises(FormatError, match="entry 'b' is missing"):
        Container(container({"a": entry()}, b"1234")).bits("b")


TABLE = TensorTable([TensorSpec("w", "BF16", (2, 2)), TensorSpec("z", "F32", (0,))])


def test_anchors_hold_each_tensor_once(tmp_path: Path) -> None:
    path = tmp_path / "anchor"
    good, none = np.arange(4, dtype=np.uint16), np.zeros(0, np.uint32)
    write_anchor(path, TABLE, [("z", none), ("w", good)])
    assert safetensors.torch.load_file(path)["z"].shape == (0,)
    wrong: dict[str, list[tuple[str, np.ndarray]]] = {
        "tensor 'z' is missing": [("w", good)],
        "'w' has 4 elements": [("w", good), ("w", good)],
        "'w' has 3 elements": [("w", good[:3])],
        "of uint32; the table says": [("w", good.astype(np.uint32))],
        "'x' is not in this run's tensor table": [("x", good)],
    }
    for message, pairs in wrong.items():
        with pytest.raises(TensorMismatchError, match=message):
            write_anchor(path, TABLE, pairs)


def test_an_anchor_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="'anchor' cannot be written"):
        write_anchor(tmp_path / "missing" / "anchor", TABLE, [])


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ({"w": ("BF16", np.zeros((4, 1), np.uint16))}, TensorMismatchError),
        ({"w": ("F16", np.zeros((2, 2), np.uint16))}, TensorMismatchError),
        ({"v": ("BF16", np.zeros((2, 2), np.uint16))}, TensorMismatchError),
        ({}, FormatError),
    ],
)
def test_anchors_of_another_model_are_refused(
    entries: dict[str, tuple[str, np.ndarray]], error: type[Exception]
) -> None:
    with pytest.raises(error):
        read_anchor(write_container(entries, {}), TABLE, "anchor")

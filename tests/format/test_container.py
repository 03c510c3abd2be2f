"""The container: interchangeable with the safetensors library, and refused unless it describes its bytes exactly."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.support.hostile import HEADERS, container, entry
from tests.support.samples import every_dtype_table, random_bits
from vllm_delta_sync.errors import DeltaSyncError, FormatError, StoreError, TensorMismatchError
from vllm_delta_sync.format.safetensors_file import Container, aligned, read_anchor, write_anchor, write_container
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, bits_of, dtype_name, tensor_from_bits

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=12)


@given(
    st.dictionaries(
        NAMES.filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    ),
    st.dictionaries(NAMES, st.text(max_size=20), max_size=3),
)
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


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_bytes_are_a_format_error(case: str) -> None:
    """Or, where a declared size is beyond its limit, a limit error: before anything is allocated."""
    kind, data = HEADERS[case]
    with pytest.raises(DeltaSyncError, match=r"^this file") as caught:
        Container(data, "this file")
    assert caught.value.kind == kind


def test_a_missing_entry_is_named() -> None:
    with pytest.raises(FormatError, match="entry 'b' is missing"):
        Container(container(b'{"a":%s}' % entry(), b"x")).bits("b")


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

"""Checkpoint directories of the Hugging Face kind, read tensor by tensor as bit patterns."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vllm_delta_sync.errors import FormatError, NotFoundError, StoreError, TensorMismatchError
from vllm_delta_sync.tensors.checkpoint import Checkpoint
from vllm_delta_sync.tensors.torch_views import bits_of

TENSORS = {
    "a": torch.randn(3, 4).to(torch.bfloat16),
    "b": torch.arange(5, dtype=torch.uint8),
    "c": torch.randn(7),
}


def sharded(path: Path) -> Path:
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, path / "model-00001-of-00002.safetensors")
    save_file({"c": TENSORS["c"]}, path / "model-00002-of-00002.safetensors")
    places = {"a": 1, "b": 1, "c": 2}
    weight_map = {name: f"model-0000{number}-of-00002.safetensors" for name, number in places.items()}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
    return path


def single(path: Path) -> Path:
    save_file(TENSORS, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("layout", [single, sharded])
def test_bits_are_those_of_the_file(layout: object, tmp_path: Path) -> None:
    checkpoint = Checkpoint(str(layout(tmp_path)))  # type: ignore[operator]
    assert {name: spec.shape for name, spec in checkpoint.specs.items()} == {"a": (3, 4), "b": (5,), "c": (7,)}
    assert checkpoint.specs["a"].dtype == "BF16"
    for name, tensor in TENSORS.items():
        found = checkpoint.bits(name)
        assert found.flags.aligned
        assert np.array_equal(found, bits_of(tensor))
    with pytest.raises(TensorMismatchError, match="has no tensor 'd'"):
        checkpoint.bits("d")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        Checkpoint(tmp_path / "missing")
    with pytest.raises(NotFoundError, match=r"neither model\.safetensors nor"):
        Checkpoint(tmp_path)
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"'model-00002-of-00002\.safetensors' is missing"):
        Checkpoint(tmp_path)


BAD_INDEXES = (
    *(b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"weight_map":5}', b'{"weight_map":["a"]}'),
    *(b'{"weight_map":{"a":["b"]}}', b'{"weight_map":{"a":7}}', b'{"weight_map":{"a":"../model.safetensors"}}'),
    *(b'{"weight_map":{"a":"/model.safetensors"}}', b'{"weight_map":{"a":"..","b":"."}}'),
    b'{"weight_map":{"a":"x","a":"y"}}',
)


def test_files_that_are_none(tmp_path: Path) -> None:
    for index in BAD_INDEXES:
        (tmp_path / "model.safetensors.index.json").write_bytes(index)
        with pytest.raises(FormatError, match=r"model\.safetensors\.index\.json"):
            Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    for content in (b"", b"\x01", b"\xff" * 80):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(FormatError, match=r"model\.safetensors"):
            Checkpoint(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    save_file(TENSORS, sharded(tmp_path) / "model-00002-of-00002.safetensors")
    with pytest.raises(FormatError, match="is in two files"):
        Checkpoint(tmp_path)


def test_a_file_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map":{"a":"shard"}}')
    (tmp_path / "shard").mkdir()
    with pytest.raises(StoreError, match="'shard' cannot be read"):
        Checkpoint(tmp_path)

"""Checkpoint directories that are damaged or hostile: one clear error. Whole ones are in trainer/ and e2e/."""

from pathlib import Path

import pytest

from vllm_delta_sync.errors import FormatError, StoreError
from vllm_delta_sync.tensors.checkpoint import Checkpoint

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


def test_a_file_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map":{"a":"shard"}}')
    (tmp_path / "shard").mkdir()
    with pytest.raises(StoreError, match="'shard' cannot be read"):
        Checkpoint(tmp_path)

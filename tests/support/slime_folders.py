"""slime's folders as ``vllm_delta_sync.codec.slime`` describes them, written and read without the product's code."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.support.exporting import tensors_in

INDEX = "model.safetensors.index.json"


def folder_of(root: Path, version: int) -> Path:
    return root / f"weight_v{version:06d}"


def index_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
    return document


def is_delta(folder: Path) -> bool:
    return "delta_encoding" in index_of(folder)["metadata"]


def versions(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("weight_v")) for path in root.glob("weight_v*"))


def deltas(root: Path) -> list[int]:
    return [version for version in versions(root) if is_delta(folder_of(root, version))]


def rebuilt(root: Path, version: int) -> dict[str, bytes]:
    """Name → bytes of a version, as a new reader has them: from the newest whole checkpoint, delta by delta."""
    folder = folder_of(root, version)
    index = index_of(folder)
    places: dict[str, str] = index["weight_map"]
    files = {path.name for path in folder.glob("*.safetensors")}
    assert set(places.values()) == files
    stored = tensors_in(*(folder / name for name in sorted(files)))
    assert set(stored) == set(places)
    assert index["metadata"]["version"] == f"{version:06d}"
    if not is_delta(folder):
        return stored
    assert index["metadata"] == {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    weights = rebuilt(root, version - 1)
    for name, frame in stored.items():
        changes = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8)
        old = weights[name]
        assert len(changes) == len(old)
        assert changes.any(), "a tensor that did not change"
        weights[name] = (changes ^ np.frombuffer(old, np.uint8)).tobytes()
        with safe_open(folder / places[name], "np") as file:
            assert file.metadata()[name] == f"{zlib.adler32(weights[name]):08x}"
    return weights


def write_delta(
    root: Path, version: int, old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], **metadata: str
) -> Path:
    """Write a delta between (n,) bytes of tensors, in one file. Args: metadata: what its index says otherwise."""
    folder = folder_of(root, version)
    folder.mkdir(parents=True)
    changed = {name: bits for name, bits in new.items() if not np.array_equal(bits, old[name])}
    frames = {
        name: np.frombuffer(zstandard.ZstdCompressor(level=1).compress((bits ^ old[name]).tobytes()), np.uint8)
        for name, bits in changed.items()
    }
    sums = {name: f"{zlib.adler32(bits.tobytes()):08x}" for name, bits in changed.items()}
    if frames:
        save_file(frames, folder / "model-00000-of-00001.safetensors", metadata=sums)
    says = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    places = dict.fromkeys(frames, "model-00000-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": says | metadata, "weight_map": places}))
    return folder

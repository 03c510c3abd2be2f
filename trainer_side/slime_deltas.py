"""``new_tensors`` turns a delta that slime wrote (``codec.slime``) into the tensors that it leads to."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from vllm_delta_sync.codec.slime import FOLDER, SlimeIndex, check_sum, decode
from vllm_delta_sync.errors import FormatError, StoreError
from vllm_delta_sync.format.limits import MAX_JSON_BYTES, check_limit
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.tensors.checkpoint import INDEX_NAME
from vllm_delta_sync.tensors.torch_views import tensor_from_bits

Frames = Iterator[tuple[str, torch.Tensor]]
"""Tensor name → its (n,) bytes in the delta."""


def delta_index(folder: Path) -> SlimeIndex | None:
    """Return what a folder's index says of a delta; None if the folder is none.

    Raises:
        FormatError: it contradicts the folder's name, or is malformed. UnsupportedError: the delta cannot be read.
        LimitError: it is too large. StoreError: it cannot be read.
    """
    path = folder / INDEX_NAME
    try:
        check_limit(f"{path}: size in bytes", path.stat().st_size, MAX_JSON_BYTES, "MAX_JSON_BYTES")
        with path.open("rb") as file:
            index = SlimeIndex.from_bytes(file.read(MAX_JSON_BYTES), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    named = FOLDER.fullmatch(folder.resolve().name)
    if index is not None and named is not None and int(named[1]) != index.version:
        raise FormatError(f"{path} says that it is version {index.version}, and its folder is named {named[0]}")
    return index


def check_frames(index: SlimeIndex, found: Mapping[str, str], specs: Mapping[str, TensorSpec], folder: Path) -> None:
    """Raise FormatError unless the files have exactly the tensors that the index names, as bytes.

    Args:
        found: tensor → file that has it.
    """
    wrong = sorted(name for name in {*found, *index.places} if found.get(name) != index.places.get(name))
    wrong += [name for name, spec in specs.items() if spec.dtype != "U8" or len(spec.shape) != 1]
    if extra := {path.name for path in folder.glob("*.safetensors")} - set(index.places.values()):
        raise FormatError(f"delta {str(folder)!r} has {min(extra)[:120]!r}, which its {INDEX_NAME} does not name")
    if wrong:
        raise FormatError(f"delta {str(folder)!r}: tensor {wrong[0][:120]!r} is not where and as {INDEX_NAME} says")


def new_tensors(
    index: SlimeIndex, frames: Frames, sums: Mapping[str, str], table: TensorTable, old: Callable[[int], Bits]
) -> Frames:
    """Yield (name, tensor) of each tensor that a delta changes, with the checksum that it declares.

    Args:
        frames: read lazily, one at a time. sums: tensor → declared checksum of its new bytes.
        table: the run's tensors. old: tensor id → (numel,) bits of the version that the delta builds on.

    Raises:
        TensorMismatchError: the run has no such tensor. FormatError, LimitError: a frame is damaged.
        FingerprintError: new bytes have another checksum. Earlier tensors were then already yielded.
    """
    for name, frame in frames:
        spec, what = table.by_name(name), f"version {index.version}, tensor {name[:120]!r}"
        before = np.ascontiguousarray(old(table.index(name))).view(np.uint8)
        new = decode(index.encoding, frame.numpy(), before, what)
        check_sum(index.checksum, new, sums.get(name), what)
        yield name, tensor_from_bits(new.view(spec.element.uint), spec)

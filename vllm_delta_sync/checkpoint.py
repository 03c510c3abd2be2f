"""Read a Hugging Face checkpoint directory as bit patterns: one tensor at a time, from memory maps."""

from pathlib import Path

import numpy as np

from vllm_delta_sync.errors import FormatError, NotFoundError, StoreError, TensorMismatchError
from vllm_delta_sync.wire.bits import Bits
from vllm_delta_sync.wire.canonical import load_json
from vllm_delta_sync.wire.container import Container, aligned
from vllm_delta_sync.wire.table import TensorSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class Checkpoint:
    """The safetensors files of a checkpoint directory.

    Attributes:
        path: the directory.
        specs: name → dtype and shape, of every tensor in it.

    Raises:
        NotFoundError: no such directory, or no safetensors checkpoint in it.
        FormatError, LimitError: a file is malformed, or a tensor is in two files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise NotFoundError(f"checkpoint directory {str(path)!r} does not exist; give the path of a local one")
        self._containers = {name: _open(self.path / name) for name in _file_names(self.path)}
        self._home: dict[str, Container] = {}
        self.specs: dict[str, TensorSpec] = {}
        for file_name, container in self._containers.items():
            for name, entry in container.entries.items():
                if name in self._home:
                    raise FormatError(f"checkpoint {str(path)!r}: tensor {name!r} stands twice, also in {file_name}")
                self._home[name] = container
                self.specs[name] = TensorSpec(name, entry.dtype.name, entry.shape)

    def bits(self, name: str) -> Bits:
        """Flat (numel,) bit pattern of a tensor, read only; pages are read when touched.

        Raises:
            TensorMismatchError: the checkpoint has no such tensor.
        """
        if name not in self._home:
            raise TensorMismatchError(f"checkpoint {str(self.path)!r} has no tensor {name[:120]!r}")
        return aligned(self._home[name].bits(name))


def _file_names(path: Path) -> list[str]:
    index = path / INDEX_NAME
    if index.is_file():
        try:
            names = set(load_json(index.read_bytes(), INDEX_NAME)["weight_map"].values())
        except OSError as error:
            raise StoreError(f"{INDEX_NAME} in {str(path)!r} cannot be read: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{INDEX_NAME} in {str(path)!r} has no readable 'weight_map': {error}") from error
        bad = [name for name in names if not isinstance(name, str) or "/" in name or name.startswith(".")]
        if bad:
            raise FormatError(f"{INDEX_NAME} in {str(path)!r} names a file outside the directory: {bad[0]!r}")
        return sorted(names)
    if (path / SINGLE_NAME).is_file():
        return [SINGLE_NAME]
    raise NotFoundError(f"{str(path)!r} holds neither {SINGLE_NAME} nor {INDEX_NAME}; only safetensors is read")


def _open(path: Path) -> Container:
    try:
        if path.stat().st_size == 0:
            raise FormatError(f"checkpoint file {path.name!r} is empty: truncated")
        return Container(np.memmap(path, np.uint8, mode="r"), path.name)
    except FileNotFoundError as error:
        raise NotFoundError(f"checkpoint file {path.name!r} is missing from {str(path.parent)!r}") from error
    except (OSError, ValueError) as error:
        raise StoreError(f"checkpoint file {path.name!r} cannot be read: {error}") from error

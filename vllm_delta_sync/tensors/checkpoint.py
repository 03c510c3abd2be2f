"""``Checkpoint`` reads a Hugging Face checkpoint directory tensor by tensor, as bit patterns from memory maps.

``resolve_base`` finds the directory of a base, which may be a public model on the Hub.
"""

import os
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_delta_sync.errors import FormatError, NotFoundError, StoreError, TensorMismatchError, UsageError
from vllm_delta_sync.format.base_document import load_json
from vllm_delta_sync.format.limits import MAX_JSON_BYTES, check_limit
from vllm_delta_sync.format.manifest import Base
from vllm_delta_sync.format.safetensors_file import Container, TruncatedFileError, aligned
from vllm_delta_sync.format.table import DRAFT_PREFIX, TensorSpec
from vllm_delta_sync.tensors.changes import Bits

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
MODULES_NAME = "modules.json"
"""Names the modules of a Sentence Transformers model. Their settings, such as how to pool, lie in subfolders."""
DRAFT_FOLDER = "draft"
"""Subfolder with the checkpoint of the model that drafts for the one in the folder. Its tensors have ``DRAFT_PREFIX``
before their names, as in a run. vLLM and transformers do not look into subfolders."""
ADAPTER_CONFIG_NAME = "adapter_config.json"
"""Configuration of a LoRA adapter, as PEFT writes it; the run of an adapter keeps it."""
ADAPTER_NAME = "adapter_model.safetensors"
"""The weights of an adapter, as PEFT writes them beside its configuration."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")

# No '..' in a revision: it becomes a path below the Hub's cache, and may come from an untrusted manifest.
_MODEL = re.compile(r"(?:hf:)?([A-Za-z0-9._-]+/[A-Za-z0-9._-]+)@(?!/|(?:.*/)?\.\.?(?:/|$))([A-Za-z0-9._/-]+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
MODEL_FILE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Configuration, tokenizer, chat template and generation settings. Never code: the bucket may be untrusted."""
EXPORT_NAME = "delta_sync_export.json"
"""File about the weights that ``delta-sync export`` writes beside them."""
# The export's record, the state of a trainer, and a file that makes transformers load an adapter.
_NOT_THE_MODEL = (EXPORT_NAME, "trainer_state.json", ADAPTER_CONFIG_NAME)
# recipe.yaml says how a quantized checkpoint was made.
_WANTED = ["*.safetensors", "recipe.yaml", *(f"*{suffix}" for suffix in MODEL_FILE_SUFFIXES)]


@dataclass(frozen=True)
class ResolvedBase:
    """A base on this machine.

    Attributes:
        path: checkpoint directory. model, revision: public model id and commit; None if a directory was given.
    """

    path: Path
    model: str | None = None
    revision: str | None = None

    @property
    def recorded(self) -> Base:
        """The base as version 0 records it."""
        return Base(location=str(self.path.resolve()), model=self.model, revision=self.revision)


def is_model_file(name: str) -> bool:
    """Return whether a file name is that of a small model file: configuration, tokenizer, …"""
    # Some file systems ignore case in names.
    lower = name.lower()
    return (
        name.endswith(MODEL_FILE_SUFFIXES)
        and not lower.endswith((".index.json", ".index.txt"))
        and not name.startswith(".")
        and lower not in _NOT_THE_MODEL
    )


def missing_files(names: Collection[str]) -> list[str]:
    """Return which of ``config.json`` and ``tokenizer`` are missing among file names; a server needs both."""
    missing = [] if CONFIG_NAME in names else [CONFIG_NAME]
    if not any(name in _TOKENIZERS or name.endswith(".tiktoken") for name in names):
        missing.append("tokenizer")
    return missing


def model_files(folder: Path) -> dict[str, Path]:
    """Return name → path of the small files of a model folder, by name, without its subfolders. Raises StoreError."""
    try:
        found = sorted(folder.iterdir())
    except OSError as error:
        raise StoreError(f"folder {str(folder)!r} cannot be read: {error.strerror}") from error
    try:
        return {path.name: path for path in found if is_model_file(path.name) and _is_file(path)}
    except OSError as error:  # a link into a folder that this user may not enter
        raise StoreError(f"{error.filename!r} cannot be read: {error.strerror}") from error


def read_small_file(path: Path, most: int = -1) -> bytes:
    """Return a file's content, at most its first ``most`` bytes. Raises StoreError: it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be read: {error.strerror}") from error


def resolve_base(text: str | Path, weights: bool = True) -> ResolvedBase:
    """Find a base: a directory, or else a public model ``org/name@revision`` (or ``hf:org/name@revision``).

    A model is looked up in the cache of ``huggingface_hub`` and downloaded if missing, only weights and small files.

    Args:
        weights: False: without the weights.

    Raises:
        NotFoundError: the Hub has no such model or revision. StoreError: the Hub cannot be reached, and the model is
            not in the cache. UsageError: huggingface_hub is not installed, or the model's name is invalid.
    """
    match = _MODEL.fullmatch(str(text))
    if match is None or not names_model(text):
        return ResolvedBase(Path(text))
    model, revision = match.groups()
    folder = _download(model, revision, _WANTED if weights else _WANTED[1:])
    # The cache names a snapshot by its commit; a branch or tag may move.
    commit = folder.name if _COMMIT.fullmatch(folder.name) else revision
    return ResolvedBase(folder, model, commit)


def names_model(text: str | Path) -> bool:
    """Return whether a base names a public model: it has the form of one, and no such path exists."""
    return _MODEL.fullmatch(str(text)) is not None and not os.path.exists(text)


def _download(model: str, revision: str, wanted: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise UsageError(
            f"base {model}@{revision} is a public model, but huggingface_hub is not installed; install it, or give the "
            "path of a checkpoint directory"
        ) from error
    try:
        # Only the top folder: subfolders have copies in other layouts.
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except HFValidationError as error:
        raise UsageError(f"base {model}@{revision} is not a valid model name: {error}") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise NotFoundError(
            f"the Hub has no model {model} at revision {revision}, or it is private: {error}"
        ) from error
    except Exception as error:  # the client also raises errors of its HTTP library and of the system
        raise StoreError(
            f"model {model} at revision {revision} is not in the cache, and downloading it failed: {error}"
        ) from error


class Checkpoint:
    """The safetensors files of a checkpoint directory, and of a draft in ``DRAFT_FOLDER``.

    Attributes:
        path: the directory.
        files: path below it → the file's container.
        specs: name → dtype and shape, of every tensor in it.

    Raises:
        NotFoundError: no such directory, or no safetensors checkpoint in it.
        FormatError, LimitError: a file is malformed, or a tensor is in two files. StoreError: one cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not os.path.isdir(self.path):
            raise NotFoundError(
                f"checkpoint directory {str(path)!r} does not exist; give the path of a local one, or org/name@revision"
            )
        self.files = {name: _open(self.path / name) for name in weight_files(self.path)}
        self._places: dict[str, tuple[Container, str]] = {}
        self.specs: dict[str, TensorSpec] = {}
        for file_name, container in self.files.items():
            prefix = name_prefix(file_name)
            for name_there, entry in container.entries.items():
                name = prefix + name_there
                if name in self._places:
                    raise FormatError(f"checkpoint {str(path)!r}: tensor {name!r} is in two files, also {file_name}")
                self._places[name] = container, name_there
                self.specs[name] = TensorSpec(name, entry.dtype.name, entry.shape)

    def bits(self, name: str) -> Bits:
        """Return a tensor's flat (numel,) bits, read only; its pages are read on access.

        Raises TensorMismatchError if the checkpoint has no such tensor.
        """
        if name not in self._places:
            raise TensorMismatchError(f"checkpoint {str(self.path)!r} has no tensor {name[:120]!r}")
        container, name_there = self._places[name]
        return aligned(container.bits(name_there))


def name_prefix(file_name: str) -> str:
    """Return what a file's tensors have before their names there. Args: file_name: as of ``weight_files``."""
    return DRAFT_PREFIX if file_name.startswith(f"{DRAFT_FOLDER}/") else ""


def weight_files(path: Path) -> list[str]:
    """Return the paths of a checkpoint's safetensors files below its folder, those of its draft last.

    Raises:
        NotFoundError: there is none. FormatError, LimitError: an index is malformed. StoreError: it is unreadable.
    """
    draft = path / DRAFT_FOLDER
    try:
        drafts = _weight_files(draft) if any(_is_file(draft / name) for name in (SINGLE_NAME, INDEX_NAME)) else []
        return [*_weight_files(path), *(f"{DRAFT_FOLDER}/{name}" for name in drafts)]
    except OSError as error:
        raise StoreError(f"checkpoint {str(path)!r} cannot be read: {error.strerror}") from error


def _weight_files(path: Path) -> list[str]:
    """Return the names of the safetensors files in a folder: those that its index names, or the single one.

    Raises:
        NotFoundError: there is neither. FormatError, LimitError: the index is malformed. OSError.
    """
    index = path / INDEX_NAME
    if _is_file(index):
        try:
            with index.open("rb") as file:
                check_limit(
                    f"{INDEX_NAME}: size in bytes", os.fstat(file.fileno()).st_size, MAX_JSON_BYTES, "MAX_JSON_BYTES"
                )
                names = set(load_json(file.read(MAX_JSON_BYTES), INDEX_NAME)["weight_map"].values())
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{INDEX_NAME} in {str(path)!r} has no readable 'weight_map': {error}") from error
        bad = [name for name in names if not _is_file_name(name)]
        if bad:
            raise FormatError(
                f"{INDEX_NAME} in {str(path)!r} names {str(bad[0])[:80]!r}, which cannot be a file of that directory"
            )
        return sorted(names)
    if _is_file(path / SINGLE_NAME):
        return [SINGLE_NAME]
    raise NotFoundError(f"{str(path)!r} has neither {SINGLE_NAME} nor {INDEX_NAME}; only safetensors can be read")


def _is_file(path: Path) -> bool:
    """As ``Path.is_file`` before Python 3.14, which raises OSError where a disk fails; since then it returns False."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_file_name(name: object) -> bool:
    # Printable, because error messages contain it.
    return isinstance(name, str) and name.isprintable() and "/" not in name and not name.startswith(".")


def _open(path: Path) -> Container:
    try:
        if path.stat().st_size == 0:
            raise TruncatedFileError(f"checkpoint file {path.name!r} is empty: truncated")
        return Container(np.memmap(path, np.uint8, mode="r"), path.name)
    except FileNotFoundError as error:
        raise NotFoundError(f"checkpoint file {path.name!r} is missing from {str(path.parent)!r}") from error
    except (OSError, ValueError) as error:
        raise StoreError(f"checkpoint file {path.name!r} cannot be read: {error}") from error

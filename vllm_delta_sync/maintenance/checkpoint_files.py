"""``WeightFiles`` are the safetensors files of a checkpoint folder, mapped into memory to be filled or changed.

``model_files_of_run`` collects the configuration and the tokenizer that belong beside them.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path

import numpy as np

from vllm_delta_sync.durable_files import sync_path
from vllm_delta_sync.errors import DeltaSyncError, DigestError, FormatError, LimitError, NotFoundError, StoreError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.format.safetensors_file import Entry, header_bytes, layout, shard_tables
from vllm_delta_sync.format.table import DRAFT_PREFIX, TensorSpec, TensorTable
from vllm_delta_sync.run.model_files import fetch_run_file, write_file
from vllm_delta_sync.run.restore import open_branch_source
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.tensors.checkpoint import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    DRAFT_FOLDER,
    INDEX_NAME,
    MODULES_NAME,
    SINGLE_NAME,
    is_model_file,
    missing_files,
    model_files,
    resolve_base,
)

SHARD_BYTES = 5 * 10**9
"""Default bytes of tensors in one file, the size that transformers long used."""
WEIGHTS_SUFFIX = ".safetensors"
DRAFT_FILE = f"{DRAFT_FOLDER}/{SINGLE_NAME}"
"""The weights of a draft with a checkpoint of its own, under their names there."""


class WeightFiles:
    """The safetensors files of a checkpoint of one model, by name.

    Args:
        shard_bytes: bytes of tensors in one file; a larger tensor gets its own file.
        adapter: the tensors are those of a LoRA adapter, which PEFT keeps in one file of another name.

    Attributes:
        shards: paths of the safetensors files below the folder → what is in them. names: those paths, and the index, if
            there are several without the draft's.
        shard_of: per tensor id, the path of its file.

    Raises:
        LimitError: ``shard_bytes`` is so small that there would be too many files.
    """

    def __init__(self, table: TensorTable, shard_bytes: int, adapter: bool = False) -> None:
        served = TensorTable(spec for spec in table if not spec.name.startswith(DRAFT_PREFIX))
        draft = TensorTable(spec for spec in table if spec.name.startswith(DRAFT_PREFIX))
        tables = [served] if adapter else shard_tables(served, shard_bytes) or [served]
        count = len(tables)
        names = [f"model-{number:05d}-of-{count:05d}{WEIGHTS_SUFFIX}" for number in range(1, count + 1)]
        self.shards = dict(
            zip([ADAPTER_NAME if adapter else SINGLE_NAME] if count == 1 else names, tables, strict=True)
        )
        if len(draft):
            self.shards[DRAFT_FILE] = draft
        self.names = [*self.shards, *([INDEX_NAME] if count > 1 else [])]
        self.shard_of = [""] * len(table)
        for name, shard in self.shards.items():
            for spec in shard:
                self.shard_of[table.index(spec.name)] = name
        self._table = table

    def create(self, folder: Path) -> list[Bits]:
        """Create the files with their headers; return the (numel,) bits of each tensor, to be filled.

        Raises:
            StoreError: there is no room on the disk.
        """
        found: dict[int, Bits] = {}
        for name in self.shards:
            header, size = self._header(name), self._size(name)
            try:
                (folder / name).parent.mkdir(exist_ok=True)
                # A second attempt gets new files, so that maps of the first attempt keep their pages.
                (folder / name).unlink(missing_ok=True)
                with (folder / name).open("wb+") as file:
                    # Reserve the space now: on a full disk, a later write to the map would kill the process.
                    os.posix_fallocate(file.fileno(), 0, size)
                    file.write(header)
            except OSError as error:
                raise StoreError(
                    f"no room for {size:,} bytes of weights in {str(folder)!r}: {error.strerror or error}; free "
                    "space there, or name a folder on another disk"
                ) from error
            found.update(self.open(folder, name, writable=True))
        return [found[tensor] for tensor in range(len(self._table))]

    def open(self, folder: Path, name: str, writable: bool = False) -> dict[int, Bits]:
        """Map one of the files; return tensor id → its (numel,) bits.

        Raises:
            FormatError: the file has another size or header. StoreError: it cannot be read.
        """
        header, size = self._header(name), self._size(name)
        try:
            if (folder / name).stat().st_size != size:
                raise FormatError(f"{name} in {str(folder)!r} does not have {size:,} bytes")
            memory = np.memmap(folder / name, np.uint8, mode="r+" if writable else "r")
        except OSError as error:
            raise StoreError(f"{name} in {str(folder)!r} cannot be read: {error.strerror or error}") from error
        if memory[: len(header)].tobytes() != header:
            raise FormatError(f"{name} in {str(folder)!r} does not have the header of this model's file")
        placed = self._layout(name)
        tensors: dict[int, Bits] = {}
        for spec in self.shards[name]:
            start = len(header) + placed[_name_there(name, spec)].start
            tensors[self._table.index(spec.name)] = memory[start : start + spec.nbytes].view(spec.element.uint)
        return tensors

    def fingerprints(self, folder: Path) -> list[Fingerprint]:
        """Return the fingerprint of each tensor, by reading all files; raises as ``open``."""
        found: dict[int, Fingerprint] = {}
        for name in self.shards:
            for tensor, bits in self.open(folder, name).items():
                found[tensor] = fingerprint_tensor(self._table[tensor].name, bits)
        return [found[tensor] for tensor in range(len(self._table))]

    def finish(self, folder: Path) -> None:
        """Sync the files to disk, and write the index if there are several. Raises StoreError."""
        try:
            for name in self.shards:
                sync_path(folder / name)  # pages that were changed through maps, too
                if name == DRAFT_FILE:
                    sync_path((folder / name).parent)
        except OSError as error:
            raise StoreError(f"weights in {str(folder)!r} cannot be written: {error.strerror or error}") from error
        if INDEX_NAME in self.names:
            served = {name: shard for name, shard in self.shards.items() if name != DRAFT_FILE}
            index = {
                "metadata": {"total_size": sum(shard.full_bytes for shard in served.values())},
                "weight_map": {spec.name: name for name, shard in served.items() for spec in shard},
            }
            write_file(folder / INDEX_NAME, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())

    def _layout(self, name: str) -> dict[str, Entry]:
        return layout({_name_there(name, spec): (spec.element, spec.shape) for spec in self.shards[name]})

    def _header(self, name: str) -> bytes:
        return header_bytes(self._layout(name), {"format": "pt"})

    def _size(self, name: str) -> int:
        return len(self._header(name)) + self.shards[name].full_bytes


def is_adapter(run: RunReader) -> bool:
    """Return whether a run is that of a LoRA adapter."""
    return any(item.name == ADAPTER_CONFIG_NAME for item in run.info.files)


def missing_model_files(run: RunReader, names: Collection[str]) -> list[str]:
    """Return which of the files that engines need beside the weights are missing among file names."""
    if is_adapter(run):
        return [] if ADAPTER_CONFIG_NAME in names else [ADAPTER_CONFIG_NAME]
    return missing_files(names)


def files_in(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _name_there(file: str, spec: TensorSpec) -> str:
    """Return the name of a tensor in a file."""
    return spec.name.removeprefix(DRAFT_PREFIX) if file == DRAFT_FILE else spec.name


def model_files_of_run(
    run: RunReader, base: str | Path | None, looked_in: list[str], notes: list[str]
) -> dict[str, bytes]:
    """Return name → content of the model's small files: those that the run keeps, and missing ones from its base.

    Of an adapter they are its configuration alone: its base is another model.

    Args:
        base: checkpoint of version 0, if it is not at the recorded place.
        looked_in: gets where files were searched, and why something there could not be read. That is no error, because
            weights without a configuration are useful too. notes: gets what is wrong with them.
    """
    found: dict[str, bytes] = {}
    adapter = is_adapter(run)
    kept = [
        item for item in run.info.files if is_model_file(item.name) or (adapter and item.name == ADAPTER_CONFIG_NAME)
    ]
    looked_in.append(f"run {run.info.run}, which keeps {', '.join(item.name for item in kept) or 'no files'}")
    for item in kept:
        try:
            found[item.name] = fetch_run_file(run, item)
        except (NotFoundError, DigestError, LimitError) as error:
            notes.append(f"{item.name} of the run cannot be used: {error.message}")
    if not adapter and missing_files(found):
        found = _of_base(run, base, looked_in, notes) | found
    if MODULES_NAME in found:
        notes.append(
            f"the subfolders that {MODULES_NAME} names, such as 1_Pooling, are not written, and without them engines "
            "pool in another way: copy them from the model's folder"
        )
    return found


def _of_base(run: RunReader, base: str | Path | None, looked_in: list[str], notes: list[str]) -> dict[str, bytes]:
    """Return the small files of the given base, else of the recorded base; for a branch, those of its source run."""
    try:
        first = run.manifest(0)
        recorded = first.base
        if recorded is not None and recorded.run is not None:
            with open_branch_source(run, first, base) as (source, _, further):
                return model_files_of_run(source, further, looked_in, notes)
        if base is not None:
            folder = resolve_base(base, weights=False).path
        elif recorded is None:
            return {}
        elif recorded.model is not None and not os.path.isdir(recorded.location):
            folder = resolve_base(f"{recorded.model}@{recorded.revision}", weights=False).path
        else:
            folder = Path(recorded.location)
            if not any(os.path.isfile(folder / name) for name in (SINGLE_NAME, INDEX_NAME)):
                # A run must not cause copies of arbitrary local folders: the base must be a checkpoint.
                looked_in.append(f"base {str(folder)!r}, which is not a checkpoint on this machine")
                return {}
        looked_in.append(f"base {str(folder)!r}")
        return {name: path.read_bytes() for name, path in model_files(folder).items()}
    except (DeltaSyncError, OSError) as error:
        looked_in.append(f"its base, which cannot be read: {error}")
        return {}

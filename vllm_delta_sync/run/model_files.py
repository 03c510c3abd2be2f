"""Read a run's files (the model's configuration, tokenizer, generation settings) and a version's sidecars.

``write_files`` writes the run's files to a model folder.
"""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from vllm_delta_sync.bucket.verified import fetch_object
from vllm_delta_sync.durable_files import write_atomically
from vllm_delta_sync.errors import DataError, NotFoundError, StoreError
from vllm_delta_sync.format.manifest import RUN_KEY, Manifest, RunFile, Sidecar
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.checkpoint import is_model_file

logger = guarded_logger(__name__)

_Item = TypeVar("_Item", RunFile, Sidecar)


def read_file(run: RunReader, name: str) -> bytes:
    """Return the bytes of one of the run's files, with size and SHA-256 checked.

    Raises:
        NotFoundError: the run has no file of that name, or the bucket lost it.
        DigestError, LimitError: it is not what run.json lists. StoreError: the store failed.
    """
    return fetch_run_file(run, _named(run.info.files, name, "the run has no file"))


def _named(items: Sequence[_Item], name: str, absent: str) -> _Item:
    """Return the item of a name. Raises NotFoundError, whose message begins with ``absent`` and names the others."""
    found = next((item for item in items if item.name == name), None)
    if found is None:
        names = ", ".join(repr(item.name) for item in items)
        raise NotFoundError(f"{absent} {name!r}; it has {names or 'none'}")
    return found


def fetch_run_file(run: RunReader, item: RunFile) -> bytes:
    """Return the bytes of a file that run.json lists; raises as ``read_file``."""
    try:
        return fetch_object(run.bucket, item)
    except DataError as error:
        raise type(error)(f"{error.message} (file {item.name!r} of the run)") from error


def write_files(run: RunReader, folder: Path) -> list[str]:
    """Write the run's files to a folder; a file that has the right content already is not touched.

    Only files that belong in a model folder are written (``checkpoint.is_model_file``), never code or weights.

    Args:
        folder: created if it does not exist.

    Returns:
        names of the files.

    Raises:
        NotFoundError, DigestError, LimitError: a file is missing from the bucket, or damaged. StoreError: the store
            failed, or the folder cannot be written to.
    """
    written = []
    for item in run.info.files:
        if not is_model_file(item.name):
            logger.warning("%s lists file %r, which no model folder needs; it was not written", RUN_KEY, item.name)
            continue
        write_file(folder / item.name, fetch_run_file(run, item))
        written.append(item.name)
    return written


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically, unless it has that content already. Raises StoreError."""
    try:
        if path.is_file() and not path.is_symlink() and path.read_bytes() == data:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data, path.with_name(f".part-{secrets.token_hex(8)}"), mode=0o644)
    except OSError as error:
        raise StoreError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def read_sidecar(run: RunReader, manifest: Manifest, name: str) -> bytes:
    """Return the bytes of one sidecar of a version, with size and SHA-256 checked.

    Raises:
        NotFoundError: the version has no sidecar of that name, or retention removed it.
        DigestError, LimitError: it is not what the manifest lists. StoreError: the store failed.
    """
    found = _named(manifest.sidecars, name, f"version {manifest.version} has no sidecar")
    try:
        return fetch_object(run.bucket, found)
    except NotFoundError as error:
        record = run.retention()
        if record is not None and record.gave_up(manifest.version):
            raise NotFoundError(
                f"sidecar {name!r} of version {manifest.version} was removed with the version by retention; tag the "
                "versions that you want to keep (delta-sync tag set)"
            ) from error
        raise NotFoundError(
            f"sidecar {name!r} of version {manifest.version}, {found.key}, is missing: {error.message}"
        ) from error

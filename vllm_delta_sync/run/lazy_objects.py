"""Read the objects of a step through scratch files, for whoever cannot hold them decoded: mapped, tensor by tensor."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.hash_timing import hashing
from vllm_delta_sync.bucket.verified import check_stored_size, damaged
from vllm_delta_sync.codec.delta_reader import LazyDelta
from vllm_delta_sync.errors import FormatError, LimitError, StoreError
from vllm_delta_sync.format.limits import check_limit
from vllm_delta_sync.format.manifest import ObjectRef
from vllm_delta_sync.run.checks import object_limit
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.objects import open_parts
from vllm_delta_sync.run.plan import Step
from vllm_delta_sync.tensors.bits import BaseLookup

MAPPED_BYTES = 64 * 1024 * 1024
"""A larger object is not read into memory where it can be mapped."""
SCRATCH_PREFIX = "delta-sync-scratch-"
LOCK_NAME = "lock"


def open_step(step: Step, folder: Path, old: BaseLookup | None = None) -> list[LazyDelta]:
    """A step's objects, fetched to ``folder``, checked and mapped.

    Args:
        old: see ``LazyDelta``.

    Raises:
        NotFoundError, DigestError: an object is missing or damaged. Else as ``open_parts``.
    """
    table = step.run.table

    def read(ref: ObjectRef) -> np.ndarray:
        data = mapped(step.run, ref)
        if data is None:
            data = np.memmap(fetch_file(step.run.bucket, ref, folder, object_limit(table)), np.uint8, mode="r")
        return data

    return open_parts(step.document, table, map(read, step.objects), old)


@contextmanager
def scratch_folder(parent: str | Path | None, purpose: str, needed: int) -> Iterator[Path]:
    """A folder for ``needed`` bytes, removed at the end. Those of processes that were killed are removed before.

    Args:
        parent: where to make it; None for the system's temporary directory.

    Raises:
        StoreError: it cannot be made, or there is less room than needed.
    """
    place = Path(tempfile.gettempdir() if parent is None else parent)
    mend = "set TMPDIR" if parent is None else "name another folder"
    with ExitStack() as stack:
        try:
            _sweep(place)
            free = shutil.disk_usage(place).free
            if free < needed:
                raise StoreError(
                    f"{purpose} needs {needed:,} bytes of scratch in {str(place)!r}, {free:,} are free; free space "
                    f"there or {mend}"
                )
            folder = tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=place, ignore_cleanup_errors=True)
            path = Path(stack.enter_context(folder))
            lock = stack.enter_context((path / "new").open("wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Under this name only once it is locked: who sees it and gets the lock knows that the owner is gone.
            os.rename(path / "new", path / LOCK_NAME)
        except OSError as error:
            raise StoreError(
                f"scratch folder in {str(place)!r} cannot be made: {error.strerror}; {mend} that can be written to"
            ) from error
        yield path


def _sweep(place: Path) -> None:
    """Remove scratch folders of this user whose owners ended without doing so."""
    for path in place.glob(f"{SCRATCH_PREFIX}*"):
        try:
            if path.is_symlink() or path.lstat().st_uid != os.geteuid():
                continue
            with (path / LOCK_NAME).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            # In use, without a lock yet, or somebody else is removing it.
            continue


def fetch_file(bucket: Bucket, ref: ObjectRef, folder: Path, limit: int) -> Path:
    """Copy an object to a file of ``folder`` and check it, with bounded memory.

    Args:
        limit: bytes that an object of this model may have.

    Raises:
        NotFoundError: it is gone. LimitError, DigestError: it is not what the document lists. FormatError: it is empty.
    """
    check_stored_size(bucket, ref)
    if ref.bytes > limit:
        raise LimitError(
            f"object {ref.key} has {ref.bytes} bytes, more than the {limit} that one of this model may have"
        )
    if ref.bytes == 0:
        raise FormatError(f"object {ref.key} is empty")
    path = folder / ref.sha256
    bucket.get_file(ref.key, path)
    digest = file_digest(path)
    if digest != ref.sha256 or path.stat().st_size != ref.bytes:
        raise damaged(ref, digest)
    return path


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file, hashing():
        return hashlib.file_digest(file, "sha256").hexdigest()


def mapped(run: RunDocuments, ref: ObjectRef) -> np.ndarray | None:
    """An object of a run, checked and mapped from the cache; None: there is no cache for it, or it is empty.

    Raises:
        As ``RunDocuments.fetch``.
    """
    if run.cache is None or ref.bytes == 0:
        return None
    check_limit(f"{ref.key}: bytes", ref.bytes, object_limit(run.table), "object_limit")
    file = run.cache.open(ref, run.bucket)
    if file is None:
        return None
    with file:
        return np.memmap(file, np.uint8, mode="r")

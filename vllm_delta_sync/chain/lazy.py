"""Read the objects of a step through scratch files, for whoever cannot hold them decoded: mapped, tensor by tensor."""

import fcntl
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.chain.checks import context_of, object_limit
from vllm_delta_sync.chain.plan import Step
from vllm_delta_sync.errors import ChainError, DigestError, FormatError, LimitError, StoreError
from vllm_delta_sync.wire.fingerprint import Fingerprint
from vllm_delta_sync.wire.lazy import LazyDelta
from vllm_delta_sync.wire.manifest import ObjectRef
from vllm_delta_sync.wire.table import TensorTable

READ_BYTES = 4 * 1024 * 1024
SCRATCH_PREFIX = "delta-sync-scratch-"
LOCK_NAME = "lock"


def open_step(step: Step, folder: Path) -> list[LazyDelta]:
    """A step's objects, fetched to ``folder``, checked and mapped.

    Raises:
        NotFoundError, DigestError: an object is missing or damaged. UnsupportedError: it has another codec.
        FormatError: the objects are not what the document says, or carry a tensor in full and once more.
    """
    table, context = step.run.table, context_of(step.document)
    if context is None:
        raise ChainError(f"{step.key} holds whole tensors, and no changes")
    parts = []
    for ref in step.objects:
        path = fetch_file(step.run.bucket, ref, folder, object_limit(table))
        parts.append(LazyDelta(np.memmap(path, np.uint8, mode="r"), table, context))
    changed = sum(part.changed for part in parts)
    if changed != step.changed:
        raise FormatError(f"{step.key}: objects carry {changed} elements, it says {step.changed}")
    _refuse_twice(step, parts, table)
    return parts


def _refuse_twice(step: Step, parts: list[LazyDelta], table: TensorTable) -> None:
    full = Counter(tensor for part in parts for tensor in part.full)
    sparse = {int(tensor) for part in parts for ids, _ in part.directory.values() for tensor in ids}
    twice = {tensor for tensor, times in full.items() if times > 1 or tensor in sparse}
    if twice:
        raise FormatError(f"{step.key}: tensor {table[min(twice)].name!r} is carried in full and once more")


def declared(part: LazyDelta) -> Fingerprint:
    """What an object declares that it adds to the model's fingerprint."""
    return sum(part.fingerprints.values(), Fingerprint())


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
    size = bucket.stat(ref.key).bytes
    if size != ref.bytes:
        raise DigestError(f"object {ref.key} has {size} bytes, {ref.bytes} are listed: truncated or replaced")
    if size > limit:
        raise LimitError(f"object {ref.key} has {size} bytes, more than the {limit} that one of this model may have")
    if size == 0:
        raise FormatError(f"object {ref.key} is empty")
    path = folder / ref.sha256
    bucket.get_file(ref.key, path)
    digest = file_digest(path)
    if digest != ref.sha256 or path.stat().st_size != size:
        raise DigestError(f"object {ref.key} has SHA-256 {digest}: its bytes are damaged; fetch it again")
    return path


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex."""
    digest = sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()

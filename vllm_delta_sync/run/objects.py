"""The objects of one document, opened: read tensor by tensor, or only asked what they carry."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.hash_timing import hashing
from vllm_delta_sync.bucket.verified import check_stored_size, damaged
from vllm_delta_sync.codec.delta_reader import LazyDelta
from vllm_delta_sync.errors import ChainError, FormatError, LimitError, StoreError
from vllm_delta_sync.format.documents import MergedDelta
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.limits import check_limit
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.format.safetensors_file import Buffer
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.run.checks import decode_objects, delta_context, describe_document, object_limit
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.read_plan import Step
from vllm_delta_sync.tensors.base_bits import Old
from vllm_delta_sync.tensors.changes import Changes

MAPPED_BYTES = 64 * 1024 * 1024
"""A larger object is not read into memory where it can be mapped."""
SCRATCH_PREFIX = "delta-sync-scratch-"
LOCK_NAME = "lock"


def needs_base_bits(document: Manifest | MergedDelta) -> bool:
    """Whether its objects are read with the weights at hand that they build on."""
    return "context" in document.requires


def open_objects(
    document: Manifest | MergedDelta, table: TensorTable, objects: Iterable[Buffer], old: Old | None = None
) -> list[LazyDelta]:
    """The objects (already checked by digest) that a document lists, to be read tensor by tensor.

    Args:
        objects: in the document's order. old: see ``LazyDelta``.

    Raises:
        UnsupportedError: one has codec ``raw``. ChainError: the document holds whole tensors.
        FormatError: they are not what the document says, or carry a tensor in full and once more.
    """
    context, what = delta_context(document), describe_document(document)
    if context is None:
        raise ChainError(f"{what} holds whole tensors, and no changes")
    parts = [LazyDelta(data, table, context, old) for data in objects]
    changed = sum(part.changed for part in parts)
    if changed != document.changed:
        raise FormatError(f"{what}: objects carry {changed} elements, it says {document.changed}")
    _refuse_twice(what, parts, table)
    return parts


def _refuse_twice(what: str, parts: list[LazyDelta], table: TensorTable) -> None:
    full = Counter(tensor for part in parts for tensor in part.full)
    sparse = {int(tensor) for part in parts for ids, _ in part.directory.values() for tensor in ids}
    twice = {tensor for tensor, times in full.items() if times > 1 or tensor in sparse}
    if twice:
        raise FormatError(f"{what}: tensor {table[min(twice)].name!r} is carried in full and once more")


def declared_fingerprint(part: LazyDelta) -> Fingerprint:
    """What an object declares that it adds to the model's fingerprint."""
    return sum(part.fingerprints.values(), Fingerprint())


@dataclass(frozen=True)
class ChangeSummary:
    """What a document changes, without the changes.

    Attributes:
        counts: elements carried, by tensor id. full: tensors in full. fingerprints: declared changes, by tensor id.
    """

    counts: dict[int, int]
    full: frozenset[int]
    fingerprints: dict[int, Fingerprint]

    @property
    def changes(self) -> Changes:
        """What is declared of them."""
        return Changes(fingerprints=self.fingerprints)


def summarize_changes(document: Manifest | MergedDelta, table: TensorTable, objects: Sequence[Buffer]) -> ChangeSummary:
    """What a document changes, for whoever has not the weights that it builds on.

    Everything is checked that can be: all, or, where objects have codec ``context``, all but their streams.

    Args:
        objects: already checked by digest.

    Raises:
        DeltaSyncError: see ``decode_objects`` and ``open_objects``.
    """
    counts: Counter[int] = Counter()
    if not needs_base_bits(document):
        changes = decode_objects(document, table, objects)
        for group in changes.sparse:
            counts.update(dict(zip(group.ids.tolist(), group.counts.tolist(), strict=True)))
        counts.update({full.id: full.bits.size for full in changes.full})
        return ChangeSummary(counts, frozenset(full.id for full in changes.full), changes.fingerprints)
    sums: dict[int, Fingerprint] = {}
    parts = open_objects(document, table, objects)
    for part in parts:
        part.check()
        for ids, sizes in part.directory.values():
            counts.update(dict(zip(ids.tolist(), sizes.tolist(), strict=True)))
        counts.update({tensor: table[tensor].numel for tensor in part.full})
        for tensor, change in part.fingerprints.items():
            sums[tensor] = sums.get(tensor, Fingerprint()) + change
    return ChangeSummary(counts, frozenset(tensor for part in parts for tensor in part.full), sums)


def open_step_objects(step: Step, folder: Path, old: Old | None = None) -> list[LazyDelta]:
    """A step's objects, fetched to ``folder``, checked and mapped.

    Args:
        old: see ``LazyDelta``.

    Raises:
        NotFoundError, DigestError: an object is missing or damaged. Else as ``open_objects``.
    """
    table = step.run.table

    def read(ref: ObjectRef) -> np.ndarray:
        data = map_cached_object(step.run, ref)
        if data is None:
            data = np.memmap(fetch_object_file(step.run.bucket, ref, folder, object_limit(table)), np.uint8, mode="r")
        return data

    return open_objects(step.document, table, map(read, step.objects), old)


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


def fetch_object_file(bucket: Bucket, ref: ObjectRef, folder: Path, limit: int) -> Path:
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


def map_cached_object(run: RunDocuments, ref: ObjectRef) -> np.ndarray | None:
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

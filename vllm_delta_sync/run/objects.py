"""Fetch objects: ``read_object`` returns the bytes of one, ``open_step_objects`` opens those of a step.

``read_steps`` reads small ones ahead.

``summarize_changes`` says what they change.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.ranged import PIECE_BYTES
from vllm_delta_sync.bucket.threads import PARALLEL, in_parallel
from vllm_delta_sync.bucket.verified import (
    check_stored_size,
    count_hashing,
    download_object,
    hashing_seconds,
    time_hashing,
)
from vllm_delta_sync.codec.delta_reader import DeltaReader, pieces_of
from vllm_delta_sync.errors import FormatError, StoreError
from vllm_delta_sync.format.codecs import BASE_CODECS
from vllm_delta_sync.format.documents import MergedDelta
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.limits import check_limit
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.format.safetensors_file import Buffer
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.process_folders import ProcessFolder, temporary_directory
from vllm_delta_sync.run.checks import object_limit
from vllm_delta_sync.run.decode import declared_changes, open_objects
from vllm_delta_sync.run.read_plan import Step
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.changes import BaseLookup

MAPPED_BYTES = 64 * 1024 * 1024
"""Objects above this size are mapped, not read into memory, where that is possible (``read_object``)."""


def needs_base_bits(document: Manifest | MergedDelta) -> bool:
    """Return whether decoding the document's objects needs their base bits."""
    return not BASE_CODECS.isdisjoint(document.requires)


def read_object(
    run: RunReader, ref: ObjectRef, folder: Callable[[], Path] | None = None, map_all: bool = False
) -> Buffer:
    """Return the bytes of an object, checked by size and SHA-256.

    Objects above ``MAPPED_BYTES`` are mapped: from the cache, so that processes of a node share memory, or from a
    scratch file. Others are read into memory.

    Args:
        folder: returns the folder for the scratch file of an object that no cache holds; None reads it into memory.
        map_all: map objects of any size, for callers that keep many of them open.

    Raises:
        StoreError: the store failed, or there is no scratch space. Otherwise as ``RunReader.fetch``.
    """
    if map_all or ref.bytes > MAPPED_BYTES:
        limit = object_limit(run.table)
        if run.cache is not None and ref.bytes:
            # Before the cache makes room for it.
            check_limit(f"{ref.key}: bytes", ref.bytes, limit, "object_limit")
            cached = run.cache.open(ref, run.bucket)
            if cached is not None:
                with cached:
                    return np.memmap(cached, np.uint8, mode="r")
        if folder is not None:
            return np.memmap(fetch_object_file(run.bucket, ref, folder(), limit), np.uint8, mode="r")
    return run.fetch(ref)


def read_steps(
    steps: Sequence[Step], most: int | None = None, folder: Callable[[], Path] | None = None, map_all: bool = False
) -> Iterator[list[Buffer | None]]:
    """Yield the objects of each step; None for one that the caller has to read.

    On a distant store, objects below ``PIECE_BYTES`` are read several at once, ahead of the step that is yielded: each
    takes little more than a round trip. Larger ones are fetched in parallel ranges, and keep the link busy alone.

    Args:
        most: changed elements of a step up to which it is read ahead; None: any.
        folder, map_all: as ``read_object``.

    Raises:
        As ``read_object``, at the step of the object.
    """
    wanted = [(step, ref) for step in steps for ref in step.objects]
    if len(wanted) < 2 or not steps[0].run.is_remote:
        for step in steps:
            yield [None for _ in step.objects]
        return

    def read(item: tuple[Step, ObjectRef]) -> tuple[Buffer | None, float]:
        step, ref = item
        if ref.bytes >= PIECE_BYTES or (most is not None and step.changed > most):
            return None, 0.0
        began = hashing_seconds()
        return read_object(step.run, ref, folder, map_all), hashing_seconds() - began

    found = in_parallel(read, wanted, PARALLEL)
    for step in steps:
        objects: list[Buffer | None] = []
        for _ in step.objects:
            data, seconds = next(found)
            count_hashing(seconds)
            objects.append(data)
        yield objects


def step_objects(
    step: Step,
    read: Sequence[Buffer | None] | None = None,
    folder: Callable[[], Path] | None = None,
    map_all: bool = False,
) -> Iterator[Buffer]:
    """Yield the objects of a step. Args: read: of ``read_steps``. folder, map_all: as ``read_object``, which it calls
    for the others."""
    for ref, data in zip(step.objects, read or [None] * len(step.objects), strict=True):
        yield read_object(step.run, ref, folder, map_all) if data is None else data


def declared_change(parts: Iterable[DeltaReader]) -> Fingerprint:
    """Return the change of the model's fingerprint that objects declare, in the direction that they are read in."""
    return sum((change for part in parts for change in part.fingerprints.values()), Fingerprint())


@dataclass(frozen=True)
class ChangeSummary:
    """What a document changes, without the values.

    Attributes:
        counts: elements carried, by tensor id. full: ids of tensors carried in full.
        fingerprints: declared changes of fingerprint, by tensor id.
    """

    counts: dict[int, int]
    full: frozenset[int]
    fingerprints: dict[int, Fingerprint]


def summarize_changes(document: Manifest | MergedDelta, table: TensorTable, objects: Sequence[Buffer]) -> ChangeSummary:
    """Summarize what a document changes, without its base bits.

    Checks everything; of objects of codec ``tiled``, everything except their streams. Takes the memory
    of a few tensors.

    Args:
        objects: with checked digests.

    Raises:
        DeltaSyncError: see ``open_objects`` and ``DeltaReader.take``.
    """
    counts: Counter[int] = Counter()
    parts = open_objects(document, table, objects)
    for part in parts:
        part.check()
        for ids, sizes in part.directory.values():
            counts.update(dict(zip(ids.tolist(), sizes.tolist(), strict=True)))
        counts.update({tensor: table[tensor].numel for tensor in part.full})
    full = frozenset(tensor for part in parts for tensor in part.full)
    summary = ChangeSummary(counts, full, declared_changes(parts))
    if not needs_base_bits(document):
        for _ in pieces_of(parts):
            pass
    return summary


def open_step_objects(
    step: Step, folder: Path, old: BaseLookup | None = None, read: Sequence[Buffer | None] | None = None
) -> list[DeltaReader]:
    """Open a step's objects for reading tensor by tensor; all of them are mapped, from the cache or from ``folder``.

    Args:
        old: see ``DeltaReader``. read: of ``read_steps``.

    Raises:
        NotFoundError, DigestError: an object is missing or damaged. Otherwise as ``open_objects``.
    """
    read = read or next(read_steps([step], None, lambda: folder, map_all=True))
    objects = step_objects(step, read, lambda: folder, map_all=True)
    return open_objects(step.document, step.run.table, objects, old, step.backwards)


@contextmanager
def scratch_folder(parent: str | Path | None, purpose: str, needed: int) -> Iterator[Path]:
    """Make a folder with room for ``needed`` bytes, and remove it at the end of the block.

    Args:
        parent: the folder to make it in; None for the system's temporary directory.

    Raises:
        StoreError: it cannot be made, or there is less room than needed.
    """
    with ProcessFolder(parent) as folder:
        free = shutil.disk_usage(folder.path).free
        if free < needed:
            remedy = "set TMPDIR to a folder" if parent is None else "name another folder"
            raise StoreError(
                f"{purpose} needs {needed:,} bytes of scratch space in {str(temporary_directory(parent))!r}, {free:,} "
                f"are free; free space there, or {remedy} with enough"
            )
        yield folder.path


def fetch_object_file(bucket: Bucket, ref: ObjectRef, folder: Path, limit: int) -> Path:
    """Copy an object to a file in ``folder`` and check it, in bounded memory.

    Args:
        limit: the most bytes that an object of this model may have.

    Raises:
        NotFoundError: it is missing. FormatError: it is empty.
        LimitError, DigestError: it is not what the document lists.
    """
    check_stored_size(bucket, ref)
    check_limit(f"{ref.key}: bytes", ref.bytes, limit, "object_limit")
    if ref.bytes == 0:
        raise FormatError(f"object {ref.key} is empty")
    path = folder / ref.sha256
    try:
        return download_object(bucket, ref, path, lambda: path if file_digest(path) == ref.sha256 else None)
    except OSError as error:
        raise StoreError(
            f"cannot copy {ref.key} of {bucket.url} to {path}: {error.strerror or error}; check the space on its disk"
        ) from error


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, hex."""
    with path.open("rb") as file, time_hashing():
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Manifests of versions (``full``, ``delta``), and the files of an anchor."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from trainer_side.diff.baseline import Baseline
from vllm_delta_sync.bucket.threads import start_call, wait_for_call
from vllm_delta_sync.codec.delta_object import required_features
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import LimitError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.codecs import BASE_CODECS, RELATIVE_CODECS, Codec
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Base, Break, Manifest, ObjectRef, Quarantine
from vllm_delta_sync.format.safetensors_file import shard_tables, write_anchor
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.process_folders import ProcessFolder
from vllm_delta_sync.tensors.changes import Bits

SHARD_BYTES = 1024**3
"""Bytes of tensors in one object of an anchor; a larger tensor gets its own object."""


Put = Callable[[ObjectRef, Path], None]

PARALLEL_UPLOADS = 2
"""Shards that upload at once, while the next one is written to disk."""


@dataclass(frozen=True)
class FullState:
    """All weights of a version: its tensors, and the fingerprint of each in table order."""

    table: TensorTable
    fingerprints: list[Fingerprint]

    @property
    def by_name(self) -> dict[str, str]:
        """Tensor name → fingerprint as documents write it."""
        return {spec.name: value.hex() for spec, value in zip(self.table, self.fingerprints, strict=True)}


class Shards:
    """Files of an anchor: each is written to a temporary folder, and stored while the next one is written.

    Leaving the context waits until all are stored.

    Args:
        put: stores one file; called from other threads, ``PARALLEL_UPLOADS`` at once.

    Raises:
        StoreError: the disk is full or not writable. Otherwise whatever ``put`` raises, after all uploads have ended.
    """

    def __init__(self, put: Put) -> None:
        self._put = put
        self._uploads: deque[Future[None]] = deque()
        self._count = 0
        # After an interrupt, files may be removed while they are uploaded: the threads end with the process.
        self._folder = ProcessFolder()

    def add(self, table: TensorTable, tensors: Iterable[tuple[str, Bits]]) -> ObjectRef:
        """Write one file and begin to store it; ``tensors`` as in ``write_anchor``."""
        path = self._folder.path / f"{self._count}.safetensors"
        self._count += 1
        write_anchor(path, table, tensors)
        ref = ObjectRef.of(path)
        if len(self._uploads) == PARALLEL_UPLOADS:
            wait_for_call(self._uploads[0])
            self._uploads.popleft().result()

        def store() -> None:
            self._put(ref, path)
            path.unlink()

        try:
            self._uploads.append(start_call(store))
        except RuntimeError:  # there are too many threads
            store()
        return ref

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # No upload may outlive the block, except after an interrupt, which must not wait.
        with self._folder:
            if error is None or isinstance(error, Exception):
                for upload in self._uploads:
                    wait_for_call(upload)
            if error is None:
                for upload in self._uploads:
                    upload.result()


def put_shards(baseline: Baseline, shard_bytes: int, put: Put) -> list[ObjectRef]:
    """Store all tensors as an anchor's objects."""
    with Shards(put) as files:
        return [files.add(table, baseline.tensors(table)) for table in shard_tables(baseline.table, shard_bytes)]


def full(
    run: str, state: FullState, objects: list[ObjectRef], base: Base | None = None, version: int = 0, **members: Any
) -> Manifest:
    """Return a version with all tensors in ``objects``, or without any if its weights equal ``base``."""
    return Manifest(
        run=run,
        version=version,
        kind="anchor" if base is None else "reference",
        base=base,
        objects=objects,
        changed=state.table.total if base is None else 0,
        total=state.table.total,
        payload_bytes=sum(ref.bytes for ref in objects),
        full_bytes=state.table.full_bytes,
        fingerprint=sum(state.fingerprints, Fingerprint()).hex(),
        tensor_fingerprints=state.by_name,
        created_at=timestamp(),
        **members,
    )


def check_breaks(breaks: list[Break]) -> None:
    """Raise LimitError if a run with these breaks cannot have another one."""
    if len(breaks) >= limits.MAX_BREAKS:
        raise LimitError(f"the run has {len(breaks)} breaks (MAX_BREAKS); branch it, or start a new run")


def with_break(breaks: list[Break], version: int, base_version: int | None) -> list[Break]:
    """Return the breaks of a run up to a version that builds on an earlier one, or on none; raises as above."""
    check_breaks(breaks)
    return [*breaks, Break(version=version, base_version=base_version)]


def quarantine(reasons: Sequence[str], before: Manifest | None) -> Quarantine | None:
    """Return why a version is quarantined; None without reasons. Args: before: the newest good version before it."""
    sound = None if before is None else before.sound
    return Quarantine(reasons=list(reasons), sound=sound) if reasons else None


def delta(
    parent: Manifest, base: Manifest, reports: list[Any], coding: tuple[Codec, Compression], reasons: Sequence[str],
    **members: Any,
) -> Manifest:  # fmt: skip
    """Return the version after ``parent``.

    Args:
        base: the version that the objects change; if it is not ``parent``, the run gets a break.
        reports: of each rank, what it has stored: ``objects``, none if nothing changed; ``changed``, ``fingerprint``
            and ``reversible``: elements in them, what these add to the fingerprint, and whether they can be reverted.
        coding: of the objects. reasons: why the version is quarantined, if it is.
        members: of the manifest: ``step``, ``epoch``, ``sidecars`` and ``held_back``.

    Raises:
        LimitError: the run has too many breaks.
    """
    objects = [ObjectRef(**ref) for item in reports for ref in item["objects"]]
    change = sum((Fingerprint.from_hex(item["fingerprint"]) for item in reports), Fingerprint())
    reversible = all(item["reversible"] for item in reports)
    codec, compression = coding
    version, breaks = parent.version + 1, parent.breaks
    if base.version != parent.version:
        breaks = with_break(breaks, version, base.version)
    return Manifest(
        run=parent.run,
        version=version,
        kind="delta",
        base_version=base.version,
        parent=parent.digest,
        breaks=breaks,
        # Codec tiled needs the base bits to decode, which is just what a revert has to produce.
        reversible=reversible and not (objects and codec in BASE_CODECS),
        quarantine=quarantine(reasons, parent),
        codec=codec if objects else None,
        compression=(compression if codec in RELATIVE_CODECS else "none") if objects else None,
        requires=required_features(codec, compression) if objects else [],
        objects=objects,
        changed=sum(item["changed"] for item in reports),
        total=parent.total,
        payload_bytes=sum(ref.bytes for ref in objects),
        full_bytes=parent.full_bytes,
        fingerprint=(base.model_fingerprint + change).hex(),
        created_at=timestamp(),
        **members,
    )

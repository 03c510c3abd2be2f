"""Read a run: its head, its log, its objects; every step verified before it is handed on."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.checkpoint import Checkpoint
from vllm_delta_sync.errors import (
    ChainError,
    DigestError,
    FingerprintError,
    FormatError,
    NotFoundError,
    TensorMismatchError,
)
from vllm_delta_sync.wire import limits
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.anchor import read_anchor
from vllm_delta_sync.wire.bits import Bits
from vllm_delta_sync.wire.changes import Changes, Full
from vllm_delta_sync.wire.container import aligned
from vllm_delta_sync.wire.delta import DeltaContext, decode
from vllm_delta_sync.wire.fingerprint import Fingerprint
from vllm_delta_sync.wire.limits import check_limit
from vllm_delta_sync.wire.manifest import Head, Manifest, ObjectRef, RunInfo
from vllm_delta_sync.wire.state import ModelState
from vllm_delta_sync.wire.table import TensorTable

if TYPE_CHECKING:
    import torch


@dataclass
class VerifyReport:
    """Outcome of ``Run.verify``.

    Attributes:
        versions: how many versions were walked, from 0 to the head.
        head: newest version number.
        objects, bytes: objects read, and their size in all.
        replayed: True if weights were rebuilt and compared with every version's fingerprint; False if the run's
            base is not at hand, in which case digests, chain and declared fingerprints were checked.
    """

    versions: int = 0
    head: int = -1
    objects: int = 0
    bytes: int = 0
    replayed: bool = False
    notes: list[str] = field(default_factory=list)


def open_run(url: str) -> "Run":
    """Open a run for reading.

    Args:
        url: run URL, such as ``file:///data/runs/a`` or a plain path.

    Raises:
        UsageError: the URL's scheme is not understood.
        NotFoundError: there is no run at the URL.
        FormatError: run.json or tensors.json is malformed.
    """
    return Run(open_bucket(url))


class Run:
    """One run in a bucket, read only.

    Attributes:
        bucket: where it lies. info: run.json. table: tensors.json.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        try:
            data = bucket.get(keys.RUN_KEY, max_bytes=limits.MAX_JSON_BYTES)
        except NotFoundError as error:
            raise NotFoundError(
                f"no run at {bucket.url!r}: it has no {keys.RUN_KEY}; start a publisher there, or check the URL"
            ) from error
        self.info = RunInfo.from_bytes(data, keys.RUN_KEY)
        table = bucket.get(keys.TABLE_KEY, max_bytes=limits.MAX_JSON_BYTES)
        self.table = TensorTable.from_bytes(table)
        if self.table.digest != self.info.tensors:
            raise DigestError(f"{keys.TABLE_KEY} has SHA-256 {self.table.digest}, run.json says {self.info.tensors}")
        if self.info.total != self.table.total or self.info.full_bytes != self.table.full_bytes:
            raise FormatError(
                f"{keys.RUN_KEY}: total {self.info.total} or full_bytes {self.info.full_bytes} contradicts "
                f"{keys.TABLE_KEY}"
            )

    def is_current(self) -> bool:
        """Whether run.json is still the one this object was opened from; False if another run took its place.

        Raises:
            NotFoundError: the run is gone. StoreError: the store failed.
        """
        return self.bucket.get(keys.RUN_KEY, max_bytes=limits.MAX_JSON_BYTES) == self.info.to_bytes()

    def manifest(self, version: int) -> Manifest:
        """The manifest of one version.

        Raises:
            NotFoundError: the version was never published, or is no longer kept.
            FormatError, UnsupportedError, ChainError: malformed, too new, or of another run.
        """
        check_limit("version", version, limits.MAX_VERSION, "MAX_VERSION")
        key = keys.version_key(version)
        manifest = Manifest.from_bytes(self.bucket.get(key, max_bytes=limits.MAX_JSON_BYTES), key)
        if manifest.run != self.info.run or manifest.version != version:
            raise ChainError(
                f"{key} belongs to run {manifest.run} version {manifest.version}, expected {self.info.run}"
            )
        if manifest.total != self.table.total or manifest.full_bytes != self.table.full_bytes:
            raise ChainError(f"{key}: total {manifest.total} or full_bytes {manifest.full_bytes} contradicts the table")
        check_tensor_fingerprints(manifest, self.table)
        return manifest

    def head(self) -> Manifest:
        """The newest committed manifest. HEAD.json may lag, so what follows it is probed.

        Raises:
            NotFoundError: nothing is published yet.
        """
        manifest = self._pointed_at()
        with suppress(NotFoundError):
            while True:
                manifest = self.manifest(manifest.version + 1)
        return manifest

    def _pointed_at(self) -> Manifest:
        try:
            data = self.bucket.get(keys.HEAD_KEY, max_bytes=limits.MAX_HEAD_BYTES)
        except NotFoundError:
            return self.manifest(0)
        head = Head.from_bytes(data, keys.HEAD_KEY)
        if head.run != self.info.run:
            raise ChainError(f"{keys.HEAD_KEY} points into run {head.run}, this is {self.info.run}")
        manifest = self.manifest(head.version)
        if manifest.digest != head.manifest:
            raise ChainError(
                f"{keys.HEAD_KEY} points at manifest {head.manifest} as version {head.version}, which has digest "
                f"{manifest.digest}: one of them was rewritten"
            )
        return manifest

    def log(self) -> Iterator[Manifest]:
        """Manifests from version 0 to the head, each proven to follow its parent.

        Raises:
            ChainError: a parent digest or base version does not fit.
        """
        last = self.head().version
        parent: Manifest | None = None
        for version in range(last + 1):
            manifest = self.manifest(version)
            if parent is not None:
                check_follows(parent, manifest)
            yield manifest
            parent = manifest

    def fetch(self, ref: ObjectRef) -> bytes:
        """An object's bytes, with size and SHA-256 checked.

        Raises:
            NotFoundError: the object is gone. DigestError: it is not what the manifest lists.
        """
        check_limit(f"{ref.key}: bytes", ref.bytes, object_limit(self.table), "object_limit")
        data = self.bucket.get(ref.key, max_bytes=ref.bytes)
        check_object(ref, data)
        return data

    def changes(self, manifest: Manifest) -> Changes:
        """Everything a version changes, fetched, verified and decoded.

        For an anchor that is every tensor in full, with no declared changes of fingerprint.

        Raises:
            NotFoundError, DigestError, FormatError, TensorMismatchError, ChainError: see ``fetch`` and
                ``wire.delta.decode``; also when the objects do not add up to what the manifest declares.
        """
        return decode_version(manifest, self.table, [self.fetch(ref) for ref in manifest.objects])

    def snapshot(self, version: int | None = None, base: str | Path | None = None) -> ModelState:
        """Rebuild a version in memory: O(model) bytes.

        Args:
            version: None for the head.
            base: checkpoint directory of version 0, where the run refers to one that is not at the recorded path.

        Raises:
            NotFoundError: the base is not at hand. FingerprintError: weights do not come out as declared.
        """
        head = self.head().version
        wanted = head if version is None else version
        if 0 <= wanted <= head:
            for manifest, state in self._replay(base):
                if manifest.version == wanted:
                    return state
        raise NotFoundError(f"version {wanted} is not published; the newest is {head}")

    def tensors(
        self, version: int | None = None, base: str | Path | None = None
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """(checkpoint name, tensor) of a version, bit-exact, in the served dtypes. Arguments as ``snapshot``."""
        from vllm_delta_sync.torch_bits import tensor_from_bits

        state = self.snapshot(version, base)
        for spec, bits in zip(self.table, state.bits, strict=True):
            yield spec.name, tensor_from_bits(bits, spec)

    def _replay(self, base: str | Path | None) -> Iterator[tuple[Manifest, ModelState]]:
        state: ModelState | None = None
        for manifest in self.log():
            if manifest.kind == "delta" and state is not None:
                state.apply(self.changes(manifest))
            else:
                state = ModelState(self.table, self._full_tensors(manifest, self.changes(manifest), base))
            check_fingerprint(manifest, state.fingerprint)
            yield manifest, state

    def _full_tensors(
        self, manifest: Manifest, changes: Changes, base: str | Path | None
    ) -> Iterator[tuple[str, Bits]]:
        if manifest.kind == "anchor":
            for full in changes.full:
                yield self.table[full.id].name, full.bits
            return
        location = base or (manifest.base.location if manifest.base else None)
        if location is None or not Path(location).is_dir():
            raise NotFoundError(
                f"version 0 refers to the checkpoint {str(location)!r}, which is not here; pass base= with its path"
            )
        checkpoint = Checkpoint(location)
        for spec in self.table:
            yield spec.name, checkpoint.bits(spec.name)

    def verify(
        self, base: str | Path | None = None, progress: Callable[[VerifyReport], None] | None = None
    ) -> VerifyReport:
        """Walk the run from version 0 to the head and check all of it: chain, digests, objects, fingerprints.

        Args:
            base: as ``snapshot``. progress: called with the report so far after each version.

        Raises:
            DeltaSyncError: the first thing that does not hold, naming version, object or tensor.
        """
        report = VerifyReport()
        state: ModelState | None = None
        parent: Manifest | None = None
        for manifest in self.log():
            changes = self.changes(manifest)
            if manifest.kind != "delta":
                state = self._state_or_note(manifest, changes, base, report)
            elif parent is not None:
                check_declared(parent, manifest, changes)
                if state is not None:
                    state.apply(changes)
            if state is not None:
                check_fingerprint(manifest, state.fingerprint)
            report.versions += 1
            report.head = manifest.version
            report.objects += len(manifest.objects)
            report.bytes += manifest.payload_bytes
            report.replayed = state is not None
            parent = manifest
            if progress is not None:
                progress(report)
        return report

    def _state_or_note(
        self, manifest: Manifest, changes: Changes, base: str | Path | None, report: VerifyReport
    ) -> ModelState | None:
        try:
            state = ModelState(self.table, self._full_tensors(manifest, changes, base))
        except NotFoundError as error:
            report.notes.append(f"weights were not rebuilt: {error}")
            return None
        declared = manifest.tensor_fingerprints or {}
        for spec, value in zip(self.table, state.fingerprints, strict=True):
            if declared.get(spec.name) != value.hex():
                raise FingerprintError(
                    f"version {manifest.version}: tensor {spec.name!r} has fingerprint {value.hex()}, the manifest "
                    f"says {declared.get(spec.name)}"
                )
        return state


def object_limit(table: TensorTable) -> int:
    """Bytes that an object of this model may have: twice the model plus headers; a larger one makes no sense."""
    return 2 * table.full_bytes + 4096 * len(table) + (1 << 20)


def check_object(ref: ObjectRef, data: bytes) -> None:
    """Raise DigestError unless ``data`` has the size and SHA-256 that the manifest lists."""
    if len(data) != ref.bytes:
        raise DigestError(
            f"object {ref.key} has {len(data)} bytes, the manifest says {ref.bytes}: truncated or replaced"
        )
    digest = sha256(data).hexdigest()
    if digest != ref.sha256:
        raise DigestError(f"object {ref.key} has SHA-256 {digest}: its bytes are damaged; fetch it again")


def check_follows(parent: Manifest, manifest: Manifest) -> None:
    """Raise ChainError unless ``manifest`` is the version after ``parent`` and names it by digest."""
    if manifest.parent != parent.digest:
        raise ChainError(
            f"version {manifest.version} names parent {manifest.parent}, version {parent.version} is {parent.digest}: "
            "the history was rewritten"
        )
    if manifest.kind == "delta" and manifest.base_version != parent.version:
        raise ChainError(
            f"version {manifest.version} builds on version {manifest.base_version}, held is {parent.version}"
        )


def check_tensor_fingerprints(manifest: Manifest, table: TensorTable) -> None:
    """Raise unless the fingerprints per tensor, where a manifest has them, are the table's tensors and add up.

    Raises:
        TensorMismatchError: a tensor is missing or not in the table. FingerprintError: the sum is another.
    """
    declared = manifest.tensor_fingerprints
    if declared is None:
        return
    odd = next((spec.name for spec in table if spec.name not in declared), None)
    odd = odd or next((name for name in declared if name not in table), None)
    if odd is not None:
        raise TensorMismatchError(
            f"version {manifest.version}: tensor {odd[:120]!r} is in only one of tensor_fingerprints and the table"
        )
    total = sum((Fingerprint.from_hex(value) for value in declared.values()), Fingerprint())
    if total != manifest.model_fingerprint:
        raise FingerprintError(
            f"version {manifest.version}: tensor_fingerprints add up to {total.hex()}, fingerprint says "
            f"{manifest.fingerprint}"
        )


def check_declared(parent: Manifest, manifest: Manifest, changes: Changes) -> None:
    """Raise FingerprintError unless the declared changes lead from the parent's fingerprint to the manifest's."""
    reached = parent.model_fingerprint + changes.fingerprint
    if reached != manifest.model_fingerprint:
        raise FingerprintError(
            f"version {manifest.version}: objects lead to fingerprint {reached.hex()}, the manifest says "
            f"{manifest.fingerprint}"
        )


def check_fingerprint(manifest: Manifest, measured: Fingerprint) -> None:
    """Raise FingerprintError unless ``measured`` is the manifest's."""
    if measured != manifest.model_fingerprint:
        raise FingerprintError(
            f"version {manifest.version}: weights have fingerprint {measured.hex()}, the manifest says "
            f"{manifest.fingerprint}"
        )


def decode_version(manifest: Manifest, table: TensorTable, objects: list[bytes]) -> Changes:
    """Decode a version's objects (already checked by digest) into one Changes.

    Raises:
        FormatError: counts differ from the manifest, or an anchor lacks a tensor; also what ``decode`` raises.
    """
    merged = Changes()
    for ref, data in zip(manifest.objects, objects, strict=True):
        if manifest.base_version is None:
            container = read_anchor(data, table, ref.key)
            merged.full += [Full(table.index(name), aligned(container.bits(name))) for name in container.entries]
            continue
        context = DeltaContext(manifest.run, manifest.version, manifest.base_version)
        part = decode(data, table, context)
        merged.sparse += part.sparse
        merged.full += part.full
        for tensor, change in part.fingerprints.items():
            merged.fingerprints[tensor] = merged.fingerprints.get(tensor, Fingerprint()) + change
    if manifest.kind == "anchor" and sorted(full.id for full in merged.full) != list(range(len(table))):
        raise FormatError(f"anchor of version {manifest.version} does not hold each of {len(table)} tensors once")
    in_full = Counter(full.id for full in merged.full)
    twice = set(in_full) & {tensor for group in merged.sparse for tensor in group.ids.tolist()}
    twice |= {tensor for tensor, times in in_full.items() if times > 1}
    if twice:
        raise FormatError(
            f"version {manifest.version}: tensor {table[min(twice)].name!r} is carried in full and once more"
        )
    if merged.changed != manifest.changed:
        raise FormatError(
            f"version {manifest.version}: objects carry {merged.changed} elements, the manifest says {manifest.changed}"
        )
    return merged

"""Read a run: its head, its log, its objects; every step verified before it is handed on."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.chain_checks import (
    check_base,
    check_declared,
    check_fingerprint,
    check_follows,
    check_object,
    check_tensor_fingerprints,
    check_tensors,
    decode_version,
    object_limit,
)
from vllm_delta_sync.checkpoint import Checkpoint
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    DigestError,
    FingerprintError,
    FormatError,
    NotFoundError,
    StoreError,
    TensorMismatchError,
)
from vllm_delta_sync.wire import limits
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.bits import Bits
from vllm_delta_sync.wire.changes import Changes
from vllm_delta_sync.wire.limits import check_limit
from vllm_delta_sync.wire.manifest import Head, Manifest, ObjectRef, RunInfo
from vllm_delta_sync.wire.state import ModelState
from vllm_delta_sync.wire.table import TensorTable

if TYPE_CHECKING:
    import torch

__all__ = [
    "Run",
    "VerifyReport",
    "check_declared",
    "check_follows",
    "decode_version",
    "object_limit",
    "open_run",
]

VERSION_KEY = re.compile(re.escape(keys.VERSIONS_PREFIX) + r"([0-9]{10})\.json")


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
            DeltaSyncError: HEAD.json, or a manifest that it points at or that follows, is damaged.
        """
        manifest, error = self.reachable_head()
        if error is not None:
            raise error
        return manifest

    def reachable_head(self) -> tuple[Manifest, DeltaSyncError | None]:
        """The newest good manifest, and what is wrong with the one after it: None if there is none after it.

        Follows the chain from HEAD.json on. Where HEAD.json or its target is bad, the newest good manifest before
        that is looked for in a listing of the bucket.

        Raises:
            NotFoundError: nothing is published yet. StoreError: the store failed, so nothing can be said.
            DeltaSyncError: no manifest is good; the first error met.
        """
        end = limits.MAX_VERSION + 1
        try:
            head = self._pointer()
            if head is not None:
                end = head.version
            manifest = self._pointed_at(head)
        except StoreError:
            raise
        except DeltaSyncError as error:
            return self._newest_before(end, error), error
        while True:
            try:
                following = self.manifest(manifest.version + 1)
                check_follows(manifest, following)
            except NotFoundError:
                return manifest, None
            except DeltaSyncError as error:
                return manifest, error
            manifest = following

    def _pointer(self) -> Head | None:
        try:
            data = self.bucket.get(keys.HEAD_KEY, max_bytes=limits.MAX_HEAD_BYTES)
        except NotFoundError:
            return None
        head = Head.from_bytes(data, keys.HEAD_KEY)
        if head.run != self.info.run:
            raise ChainError(f"{keys.HEAD_KEY} points into run {head.run}, this is {self.info.run}")
        return head

    def _pointed_at(self, head: Head | None) -> Manifest:
        manifest = self.manifest(0 if head is None else head.version)
        if head is not None and manifest.digest != head.manifest:
            raise ChainError(
                f"{keys.HEAD_KEY} points at manifest {head.manifest} as version {head.version}, which has digest "
                f"{manifest.digest}: one of them was rewritten"
            )
        return manifest

    def _newest_before(self, end: int, reason: DeltaSyncError) -> Manifest:
        """The newest good manifest of a version below ``end``; raises ``reason`` if there is none.

        From a listing, because a damaged HEAD.json may name a version far beyond those that exist.
        """
        found = [VERSION_KEY.fullmatch(item.key) for item in self.bucket.list(keys.VERSIONS_PREFIX)]
        for version in sorted((int(match[1]) for match in found if match), reverse=True):
            if version < end:
                try:
                    return self.manifest(version)
                except StoreError:
                    raise
                except DeltaSyncError:
                    continue
        raise reason

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
            NotFoundError: the base is not at hand.
            FingerprintError, TensorMismatchError: weights, or those of the base, are not as declared.
        """
        check_base(base)
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
                state = self._whole_state(manifest, self.changes(manifest), base)
            check_fingerprint(manifest, state.fingerprint)
            yield manifest, state

    def _whole_state(self, manifest: Manifest, changes: Changes, base: str | Path | None) -> ModelState:
        """Weights of an anchor or a reference, each tensor held against the manifest."""
        try:
            state = ModelState(self.table, self._full_tensors(manifest, changes, base))
            check_tensors(manifest, state)
        except (FingerprintError, TensorMismatchError) as error:
            if manifest.kind == "anchor":
                raise
            raise type(error)(
                f"{error}: the checkpoint in {str(self._location(manifest, base))!r} is not the one that the run "
                "started from, or was overwritten since; pass --base (base= in Python) with the original checkpoint"
            ) from error
        return state

    def _location(self, manifest: Manifest, base: str | Path | None) -> str | Path | None:
        """Where version 0 lies: the base given, else the one recorded."""
        return base if base is not None or manifest.base is None else manifest.base.location

    def _full_tensors(
        self, manifest: Manifest, changes: Changes, base: str | Path | None
    ) -> Iterator[tuple[str, Bits]]:
        if manifest.kind == "anchor":
            for full in changes.full:
                yield self.table[full.id].name, full.bits
            return
        location = self._location(manifest, base)
        if location is None or not Path(location).is_dir():
            raise NotFoundError(
                f"version 0 refers to the checkpoint {str(location)!r}, which is not here; pass base= with its path "
                "(--base on the command line)"
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
            NotFoundError: ``base`` is given and not there. Without one, a recorded base that is not at hand is noted.
            DeltaSyncError: the first thing that does not hold, naming version, object, tensor or base.
        """
        check_base(base)
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
            return self._whole_state(manifest, changes, base)
        except NotFoundError as error:
            # Somebody who names a base wants the weights rebuilt; only the recorded one may be elsewhere.
            if base is not None:
                raise
            report.notes.append(f"weights were not rebuilt: {error}")
            return None

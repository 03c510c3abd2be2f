"""``Mirror`` restores what a run lacks from a copy, but only what digests or intact documents prove to be correct.

With trusted keys, documents without a valid signature are not restored.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.verified import fetch_object
from vllm_delta_sync.errors import ChainError, ConflictError, DataError, NotFoundError, UsageError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import (
    FOLDS_PREFIX,
    KEYS_KEY,
    RETENTION_KEY,
    Anchor,
    Claim,
    MergedDelta,
    Retention,
    Tag,
    anchor_key,
    anchor_of_key,
    claim_of_key,
    merged_delta_of_key,
    tag_of_key,
)
from vllm_delta_sync.format.manifest import (
    HEAD_KEY,
    RUN_KEY,
    TABLE_KEY,
    VERSIONS_PREFIX,
    Head,
    Manifest,
    ObjectRef,
    RunFile,
    RunInfo,
    Sidecar,
    version_key,
    version_of_key,
)
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.maintenance.keys import check_signer, newest_file
from vllm_delta_sync.run.checks import check_follows, check_tensor_fingerprints, object_limit
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.objects import fetch_object_file
from vllm_delta_sync.run.read_plan import GapError
from vllm_delta_sync.run.verifier import RunVerifier
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.head import make_head
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.report import Finding


class Mirror:
    """A copy of a run in another bucket, which may be damaged itself.

    Args:
        run: the run to repair. bucket: the copy. audit: the documents of ``run``.
    """

    def __init__(self, run: RunDocuments, bucket: Bucket, audit: DocumentAudit) -> None:
        self._run, self._bucket, self._audit = run, bucket, audit

    def restore_head(self) -> str | None:
        """Restore a missing HEAD.json, which the audit does not report. See ``restore``.

        If the mirror's HEAD.json names a newer version, that version is restored first.
        """
        return self._first([self._same_head])

    def restore(self, finding: Finding) -> str | None:
        """Restore the subject of a finding.

        Returns:
            the key that was put; None if the mirror has nothing that is proven correct.

        Raises:
            StoreError: one of the stores failed.
        """
        attempts: list[Callable[[], str | None]]
        version = version_of_key(finding.key)
        if finding.ref is not None:
            attempts = [partial(self._object, finding.ref), partial(self._retention, finding)]
        elif (stored := finding.sidecar or finding.run_file) is not None:
            attempts = [partial(self._stored_file, stored)]
        elif isinstance(finding.error, GapError) and version is not None:
            attempts = [partial(self._standalone, key) for key in self._missing_standalone_keys(version)]
        elif version is not None:
            attempts = [partial(self._manifest, version), *([partial(self._manifest, version - 1)] if version else [])]
        elif finding.key == HEAD_KEY:
            # Only HEAD.json names the newest manifest, which may be damaged although the audit did not report it.
            attempts = [partial(self._manifest, self._audit.top), self._same_head]
        else:
            attempts = [partial(self._standalone, finding.key)]
        return self._first(attempts)

    @staticmethod
    def _first(attempts: "list[Callable[[], str | None]]") -> str | None:
        for attempt in attempts:
            try:
                key = attempt()
            except (DataError, UsageError, ConflictError):
                # The copy is damaged or cannot be listed, there is no key to sign with, or a publisher was first.
                continue
            if key is not None:
                return key
        return None

    def _object(self, ref: ObjectRef) -> str:
        with tempfile.TemporaryDirectory(prefix="delta-sync-", ignore_cleanup_errors=True) as folder:
            path = fetch_object_file(self._bucket, ref, Path(folder), object_limit(self._run.table))
            self._run.bucket.put(ref.key, path)
        return ref.key

    def _stored_file(self, item: Sidecar | RunFile) -> str:
        self._run.bucket.put(item.key, fetch_object(self._bucket, item))
        return item.key

    def _retention(self, finding: Finding) -> str | None:
        """Restore a missing retention.json if the mirror's shows that the object was removed on purpose."""
        if self._stored(RETENTION_KEY) is not None or finding.document is None:
            return None
        data = self._bucket.get(RETENTION_KEY, max_bytes=limits.MAX_JSON_BYTES)
        version = version_of_key(finding.document)
        if version is None or not Retention.from_bytes(data, RETENTION_KEY).is_gone(version):
            return None
        return self._standalone(RETENTION_KEY)

    def _missing_standalone_keys(self, version: int) -> list[str]:
        """Return the keys of standalone documents that lead to a version and are only in the mirror."""
        listed = [item.key for item in self._bucket.list(FOLDS_PREFIX)]
        folds = [key for key in listed if (pair := merged_delta_of_key(key)) is not None and pair[1] == version]
        return [key for key in (anchor_key(version), *folds) if self._stored(key) is None]

    def _manifest(self, version: int) -> str | None:
        key = version_key(version)
        if version in self._audit.confirmed:
            return None
        data = self._bucket.get(key, max_bytes=limits.MAX_JSON_BYTES)
        manifest = Manifest.from_bytes(data, key)
        if (manifest.run, manifest.version) != (self._run.info.run, version):
            return None
        self._run.verifier.check_manifest(manifest, key)
        if data == self._stored(key):
            return self._head(manifest)
        if manifest.digest not in self._audit.acceptable_digests(version) and not self._continues(manifest):
            return None
        self._run.bucket.put(key, data)
        return key

    def _continues(self, manifest: Manifest) -> bool:
        """Return whether a manifest is the newest although its proof here is damaged: only HEAD.json here names the
        version, the manifest follows the one before, and the mirror's HEAD.json names it."""
        version = manifest.version
        if not self._audit.only_head_names(version) or version - 1 not in self._audit.digests:
            return False
        before = self._run.manifest(version - 1)
        check_follows(before, manifest)
        head = Head.from_bytes(self._bucket.get(HEAD_KEY, max_bytes=limits.MAX_HEAD_BYTES), HEAD_KEY)
        self._run.verifier.check_head(head, HEAD_KEY)
        return (head.run, head.version, head.manifest) == (manifest.run, version, manifest.digest)

    def _head(self, manifest: Manifest) -> str | None:
        """Restore HEAD.json if it alone contradicts a manifest that both buckets have."""
        if manifest.version in self._audit.digests or not self._audit.only_head_names(manifest.version):
            return None
        try:
            data = self._bucket.get(HEAD_KEY, max_bytes=limits.MAX_HEAD_BYTES)
            if self._names(data) == (manifest.version, manifest.digest):
                self._run.bucket.put(HEAD_KEY, data)
                return HEAD_KEY
        except DataError:
            pass  # the mirror's HEAD.json is damaged, or its signature is not valid
        check_signer(self._run)
        self._run.bucket.put(HEAD_KEY, make_head(manifest, self._run.keyring).to_bytes())
        return HEAD_KEY

    def _same_head(self) -> str | None:
        """Restore HEAD.json if the mirror's names the newest good version; if a newer one, restore a version first."""
        data = self._bucket.get(HEAD_KEY, max_bytes=limits.MAX_HEAD_BYTES)
        newest = max(self._audit.digests, default=-1)
        named = self._names(data)
        if newest >= 0 and named is not None and named[0] > newest:
            return self._following(newest)
        if newest < 0 or named != (newest, self._audit.digests[newest]):
            return None
        if data == self._stored(HEAD_KEY):
            return None
        self._run.bucket.put(HEAD_KEY, data)
        return HEAD_KEY

    def _following(self, newest: int) -> str | None:
        """Restore the version after the newest good one, which the mirror's HEAD.json proves to have existed."""
        key = version_key(newest + 1)
        if self._stored(key) is not None:
            return None
        data = self._bucket.get(key, max_bytes=limits.MAX_JSON_BYTES)
        manifest = Manifest.from_bytes(data, key)
        self._run.verifier.check_manifest(manifest, key)
        if (manifest.run, manifest.version) != (self._run.info.run, newest + 1):
            return None
        check_follows(self._run.manifest(newest), manifest)
        self._run.bucket.put(key, data, if_absent=True)
        return key

    def _names(self, data: bytes) -> tuple[int, str] | None:
        """Return the version and manifest digest that a valid HEAD.json names; None if it is of another run."""
        head = Head.from_bytes(data, HEAD_KEY)
        self._run.verifier.check_head(head, HEAD_KEY)
        return (head.version, head.manifest) if head.run == self._run.info.run else None

    def _stored(self, key: str) -> bytes | None:
        try:
            return self._run.bucket.get(key, max_bytes=limits.MAX_JSON_BYTES)
        except NotFoundError:
            return None

    def _standalone(self, key: str) -> str | None:
        data = self._bucket.get(key, max_bytes=limits.MAX_JSON_BYTES)
        if data == self._stored(key) or not self._fits(key, data):
            return None
        self._run.bucket.put(key, data)
        return key

    def _fits(self, key: str, data: bytes) -> bool:
        """Return whether a standalone document belongs to this run and names the manifests that are here."""
        digests, fingerprints = self._audit.digests, self._audit.fingerprints
        document: Anchor | MergedDelta | Tag | Claim | Retention
        ends: list[tuple[int, str, str | None]]
        if (version := anchor_of_key(key)) is not None:
            document = anchor = Anchor.from_bytes(data, key)
            check_tensor_fingerprints(anchor, self._run.table)
            self._run.verifier.check_standalone(anchor, version, key)
            ends = [(version, anchor.manifest, anchor.fingerprint)]
        elif (pair := merged_delta_of_key(key)) is not None:
            document = merged = MergedDelta.from_bytes(data, key)
            self._run.verifier.check_standalone(merged, pair[1], key)
            ends = [
                (pair[0], merged.first_manifest, merged.first_fingerprint),
                (pair[1], merged.last_manifest, merged.last_fingerprint),
            ]
        elif tag_of_key(key) is not None:
            document = tag = Tag.from_bytes(data, key)
            if tag.name != tag_of_key(key):
                raise ChainError(f"{key} contains tag {tag.name!r}")
            self._run.verifier.check_standalone(tag, tag.version, key)
            ends = [(tag.version, tag.manifest, None)]
        elif (epoch := claim_of_key(key)) is not None:
            document = claim = Claim.from_bytes(data, key)
            ends = [(claim.version, claim.manifest, None)]
            if claim.epoch != epoch or claim.version >= self._audit.epochs.get(epoch, limits.MAX_VERSION):
                return False
        elif key == RETENTION_KEY:
            document, ends = Retention.from_bytes(data, key), []
        else:
            return False
        return document.run == self._run.info.run and all(
            digests.get(version) == digest and fingerprint in (None, fingerprints[version])
            for version, digest, fingerprint in ends
        )


def restore_keys(bucket: Bucket, mirror: Bucket | None, keyring: Keyring) -> list[str]:
    """Restore the newest keys.json that a trusted key has signed, from a change here or from the mirror.

    Does nothing without trusted keys, because the right list is then unknown.

    Returns:
        one line of text for what was put.

    Raises:
        StoreError: one of the stores failed.
    """
    info = _parsed(bucket, RUN_KEY)
    info = info or (None if mirror is None else _parsed(mirror, RUN_KEY))
    if info is None or not keyring.checks_signatures:
        return []
    here = newest_file(bucket, keyring, info.run)
    there = None if mirror is None else newest_file(mirror, keyring, info.run)
    newest, source = here, "from the newest change in keys/"
    if there is not None and (here is None or there.sequence > here.sequence):
        newest, source = there, "from the mirror"
    try:
        stored = bucket.get(KEYS_KEY, max_bytes=limits.MAX_SIDE_BYTES)
    except DataError:
        stored = b""
    if newest is None or newest.to_bytes() == stored:
        return []
    bucket.put(KEYS_KEY, newest.to_bytes())
    return [f"{KEYS_KEY}: {source}, with sequence {newest.sequence}"]


def restore_identity(bucket: Bucket, mirror: Bucket, keyring: Keyring) -> list[str]:
    """Restore run.json and tensors.json, without which a run cannot be opened; return the keys that were put.

    run.json must belong to the run whose manifests are here and, with trusted keys, have a valid signature. The digest
    in run.json proves tensors.json.

    Raises:
        StoreError: one of the stores failed.
    """
    restored = []
    info = _parsed(bucket, RUN_KEY)
    if info is None or not _has_valid_signature(bucket, keyring, info):
        info = _parsed(mirror, RUN_KEY)
        if info is None or not _is_run(bucket, info) or not _has_valid_signature(bucket, keyring, info):
            return []
        bucket.put(RUN_KEY, info.to_bytes())
        restored.append(RUN_KEY)
    if _table(bucket, info) is None:
        table = _table(mirror, info)
        if table is not None:
            bucket.put(TABLE_KEY, table)
            restored.append(TABLE_KEY)
    return restored


def _has_valid_signature(bucket: Bucket, keyring: Keyring, info: RunInfo) -> bool:
    try:
        RunVerifier(bucket, keyring, info)
    except DataError:
        return False
    return True


def _parsed(bucket: Bucket, key: str) -> RunInfo | None:
    try:
        return RunInfo.from_bytes(bucket.get(key, max_bytes=limits.MAX_JSON_BYTES), key)
    except DataError:
        return None


def _is_run(bucket: Bucket, info: RunInfo) -> bool:
    """Return whether the first readable manifest in a bucket belongs to this run."""
    for item in bucket.list(VERSIONS_PREFIX):
        try:
            manifest = Manifest.from_bytes(bucket.get(item.key, max_bytes=limits.MAX_JSON_BYTES), item.key)
        except DataError:
            continue
        return (manifest.run, manifest.total, manifest.full_bytes) == (info.run, info.total, info.full_bytes)
    return False


def _table(bucket: Bucket, info: RunInfo) -> bytes | None:
    try:
        data = bucket.get(TABLE_KEY, max_bytes=limits.MAX_JSON_BYTES)
        return data if TensorTable.from_bytes(data).digest == info.tensors else None
    except DataError:
        return None

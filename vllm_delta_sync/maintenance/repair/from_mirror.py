"""Bring back from a mirror what a run lacks: only what digests, or documents that are whole, prove to be right.

Where trusted keys are set, no document is taken that is not validly signed.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.verified import fetch_object
from vllm_delta_sync.errors import ChainError, DeltaSyncError, NotFoundError, StoreError
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
from vllm_delta_sync.maintenance.key_list import check_signer, newest_file
from vllm_delta_sync.run.checks import check_follows, check_tensor_fingerprints, object_limit
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.lazy_objects import fetch_file
from vllm_delta_sync.run.plan import GapError
from vllm_delta_sync.run.report import Finding
from vllm_delta_sync.run.verifier import RunVerifier
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.head import head_of
from vllm_delta_sync.verify.document_audit import DocumentAudit


class Mirror:
    """A copy of a run in another bucket, which may be damaged itself.

    Args:
        run: the run to mend. bucket: the copy. census: the documents of ``run``.
    """

    def __init__(self, run: RunDocuments, bucket: Bucket, census: DocumentAudit) -> None:
        self._run, self._bucket, self._census = run, bucket, census

    def mend_head(self) -> str | None:
        """Put HEAD.json where it is missing, which no finding says; or first what it names. Errors as ``mend``."""
        return self._first([self._same_head])

    def mend(self, finding: Finding) -> str | None:
        """Put what a finding is about; its key, or None if the mirror has nothing that is proven right.

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
            attempts = [partial(self._beside, key) for key in self._ways(version)]
        elif version is not None:
            attempts = [partial(self._manifest, version), *([partial(self._manifest, version - 1)] if version else [])]
        elif finding.key == HEAD_KEY:
            # With it the only proof of the newest manifest may be gone, and that damaged where nobody sees it.
            attempts = [partial(self._manifest, self._census.top), self._same_head]
        else:
            attempts = [partial(self._beside, finding.key)]
        return self._first(attempts)

    @staticmethod
    def _first(attempts: "list[Callable[[], str | None]]") -> str | None:
        for attempt in attempts:
            try:
                key = attempt()
            except StoreError:
                raise
            except DeltaSyncError:
                continue
            if key is not None:
                return key
        return None

    def _object(self, ref: ObjectRef) -> str:
        with tempfile.TemporaryDirectory(prefix="delta-sync-", ignore_cleanup_errors=True) as folder:
            path = fetch_file(self._bucket, ref, Path(folder), object_limit(self._run.table))
            self._run.bucket.put(ref.key, path)
        return ref.key

    def _stored_file(self, item: Sidecar | RunFile) -> str:
        self._run.bucket.put(item.key, fetch_object(self._bucket, item))
        return item.key

    def _retention(self, finding: Finding) -> str | None:
        """An object that is in neither bucket may be one that retention removed, if only what says so is lost."""
        if self._stored(RETENTION_KEY) is not None or finding.document is None:
            return None
        data = self._bucket.get(RETENTION_KEY, max_bytes=limits.MAX_JSON_BYTES)
        version = version_of_key(finding.document)
        if version is None or not Retention.from_bytes(data, RETENTION_KEY).is_gone(version):
            return None
        return self._beside(RETENTION_KEY)

    def _ways(self, version: int) -> list[str]:
        """Documents that lead to a version, and are only in the mirror."""
        listed = [item.key for item in self._bucket.list(FOLDS_PREFIX)]
        folds = [key for key in listed if (pair := merged_delta_of_key(key)) is not None and pair[1] == version]
        return [key for key in (anchor_key(version), *folds) if self._stored(key) is None]

    def _manifest(self, version: int) -> str | None:
        key = version_key(version)
        if version in self._census.confirmed:
            return None
        data = self._bucket.get(key, max_bytes=limits.MAX_JSON_BYTES)
        manifest = Manifest.from_bytes(data, key)
        if (manifest.run, manifest.version) != (self._run.info.run, version):
            return None
        self._run.authentic.manifest(manifest, key)
        if data == self._stored(key):
            return self._head(manifest)
        if manifest.digest not in self._census.wanted(version) and not self._continues(manifest):
            return None
        self._run.bucket.put(key, data)
        return key

    def _continues(self, manifest: Manifest) -> bool:
        """Whether nothing here but HEAD.json names a version, it follows from the one before, and the mirror's own
        HEAD.json names it: then it is the newest, and only the proof of it was damaged too."""
        version = manifest.version
        if not self._census.only_head_names(version) or version - 1 not in self._census.digests:
            return False
        before = self._run.manifest(version - 1)
        check_follows(before, manifest)
        head = Head.from_bytes(self._bucket.get(HEAD_KEY, max_bytes=limits.MAX_HEAD_BYTES), HEAD_KEY)
        self._run.authentic.head(head, HEAD_KEY)
        return (head.run, head.version, head.manifest) == (manifest.run, version, manifest.digest)

    def _head(self, manifest: Manifest) -> str | None:
        """Both buckets have this manifest, so if only HEAD.json says otherwise, HEAD.json is wrong."""
        if manifest.version in self._census.digests or not self._census.only_head_names(manifest.version):
            return None
        try:
            data = self._bucket.get(HEAD_KEY, max_bytes=limits.MAX_HEAD_BYTES)
            if self._names(data) == (manifest.version, manifest.digest):
                self._run.bucket.put(HEAD_KEY, data)
                return HEAD_KEY
        except StoreError:
            raise
        except DeltaSyncError:
            pass  # the mirror's own is damaged, or may not be believed
        check_signer(self._run)
        self._run.bucket.put(HEAD_KEY, head_of(manifest, self._run.keyring).to_bytes())
        return HEAD_KEY

    def _same_head(self) -> str | None:
        """The mirror's HEAD.json, if it names the newest good version; what is missing up to it first."""
        data = self._bucket.get(HEAD_KEY, max_bytes=limits.MAX_HEAD_BYTES)
        newest = max(self._census.digests, default=-1)
        named = self._names(data)
        if newest >= 0 and named is not None and named[0] > newest:
            return self._following(newest)
        if newest < 0 or named != (newest, self._census.digests[newest]):
            return None
        if data == self._stored(HEAD_KEY):
            return None
        self._run.bucket.put(HEAD_KEY, data)
        return HEAD_KEY

    def _following(self, newest: int) -> str | None:
        """The version after the newest good one, which the mirror's HEAD.json proves to have been: ours was damaged."""
        key = version_key(newest + 1)
        if self._stored(key) is not None:
            return None
        data = self._bucket.get(key, max_bytes=limits.MAX_JSON_BYTES)
        manifest = Manifest.from_bytes(data, key)
        self._run.authentic.manifest(manifest, key)
        if (manifest.run, manifest.version) != (self._run.info.run, newest + 1):
            return None
        check_follows(self._run.manifest(newest), manifest)
        self._run.bucket.put(key, data, if_absent=True)
        return key

    def _names(self, data: bytes) -> tuple[int, str] | None:
        """What a HEAD.json of this run that may be believed points at."""
        head = Head.from_bytes(data, HEAD_KEY)
        self._run.authentic.head(head, HEAD_KEY)
        return (head.version, head.manifest) if head.run == self._run.info.run else None

    def _stored(self, key: str) -> bytes | None:
        try:
            return self._run.bucket.get(key, max_bytes=limits.MAX_JSON_BYTES)
        except NotFoundError:
            return None

    def _beside(self, key: str) -> str | None:
        data = self._bucket.get(key, max_bytes=limits.MAX_JSON_BYTES)
        if data == self._stored(key) or not self._fits(key, data):
            return None
        self._run.bucket.put(key, data)
        return key

    def _fits(self, key: str, data: bytes) -> bool:
        """Whether a document beside the chain is one of this run, and names the manifests that are here."""
        digests, fingerprints = self._census.digests, self._census.fingerprints
        document: Anchor | MergedDelta | Tag | Claim | Retention
        ends: list[tuple[int, str, str | None]]
        if (version := anchor_of_key(key)) is not None:
            document = anchor = Anchor.from_bytes(data, key)
            check_tensor_fingerprints(anchor, self._run.table)
            self._run.authentic.side(anchor, version, key)
            ends = [(version, anchor.manifest, anchor.fingerprint)]
        elif (pair := merged_delta_of_key(key)) is not None:
            document = fold = MergedDelta.from_bytes(data, key)
            self._run.authentic.side(fold, pair[1], key)
            ends = [
                (pair[0], fold.first_manifest, fold.first_fingerprint),
                (pair[1], fold.last_manifest, fold.last_fingerprint),
            ]
        elif tag_of_key(key) is not None:
            document = tag = Tag.from_bytes(data, key)
            if tag.name != tag_of_key(key):
                raise ChainError(f"{key} is tag {tag.name!r}")
            self._run.authentic.side(tag, tag.version, key)
            ends = [(tag.version, tag.manifest, None)]
        elif (epoch := claim_of_key(key)) is not None:
            document = claim = Claim.from_bytes(data, key)
            ends = [(claim.version, claim.manifest, None)]
            if claim.epoch != epoch or claim.version >= self._census.epochs.get(epoch, limits.MAX_VERSION):
                return False
        elif key == RETENTION_KEY:
            document, ends = Retention.from_bytes(data, key), []
        else:
            return False
        return document.run == self._run.info.run and all(
            digests.get(version) == digest and fingerprint in (None, fingerprints[version])
            for version, digest, fingerprint in ends
        )


def mend_keys(bucket: Bucket, mirror: Bucket | None, keyring: Keyring) -> list[str]:
    """Put the newest keys.json that a trusted key has signed, from changes that are here or from the mirror.

    Does nothing without trusted keys: nobody could tell which is good.

    Returns:
        what was put, for people.

    Raises:
        StoreError: one of the stores failed.
    """
    info = _parsed(bucket, RUN_KEY)
    info = info or (None if mirror is None else _parsed(mirror, RUN_KEY))
    if info is None or not keyring.checks:
        return []
    here = newest_file(bucket, keyring, info.run)
    there = None if mirror is None else newest_file(mirror, keyring, info.run)
    newest, whence = here, "the newest change of the list that is here"
    if there is not None and (here is None or there.sequence > here.sequence):
        newest, whence = there, "from the mirror"
    try:
        stored = bucket.get(KEYS_KEY, max_bytes=limits.MAX_SIDE_BYTES)
    except StoreError:
        raise
    except DeltaSyncError:
        stored = b""
    if newest is None or newest.to_bytes() == stored:
        return []
    bucket.put(KEYS_KEY, newest.to_bytes())
    return [f"{KEYS_KEY}: {whence}, with sequence {newest.sequence}"]


def mend_identity(bucket: Bucket, mirror: Bucket, keyring: Keyring) -> list[str]:
    """Bring run.json and tensors.json back, without which a run cannot be opened; the keys that were put.

    run.json has to be of the run whose HEAD.json or version 0 is here, and signed where trusted keys are set;
    tensors.json is proven by its digest.

    Raises:
        StoreError: one of the stores failed.
    """
    mended = []
    info = _parsed(bucket, RUN_KEY)
    if info is None or not _is_believed(bucket, keyring, info):
        info = _parsed(mirror, RUN_KEY)
        if info is None or not _is_run(bucket, info) or not _is_believed(bucket, keyring, info):
            return []
        bucket.put(RUN_KEY, info.to_bytes())
        mended.append(RUN_KEY)
    if _table(bucket, info) is None:
        table = _table(mirror, info)
        if table is not None:
            bucket.put(TABLE_KEY, table)
            mended.append(TABLE_KEY)
    return mended


def _is_believed(bucket: Bucket, keyring: Keyring, info: RunInfo) -> bool:
    try:
        RunVerifier(bucket, keyring, info)
    except StoreError:
        raise
    except DeltaSyncError:
        return False
    return True


def _parsed(bucket: Bucket, key: str) -> RunInfo | None:
    try:
        return RunInfo.from_bytes(bucket.get(key, max_bytes=limits.MAX_JSON_BYTES), key)
    except StoreError:
        raise
    except DeltaSyncError:
        return None


def _is_run(bucket: Bucket, info: RunInfo) -> bool:
    """Whether the manifests of a bucket are of this run, and its tensor table, if there is one, too."""
    for item in bucket.list(VERSIONS_PREFIX):
        try:
            manifest = Manifest.from_bytes(bucket.get(item.key, max_bytes=limits.MAX_JSON_BYTES), item.key)
        except StoreError:
            raise
        except DeltaSyncError:
            continue
        return (manifest.run, manifest.total, manifest.full_bytes) == (info.run, info.total, info.full_bytes)
    return False


def _table(bucket: Bucket, info: RunInfo) -> bytes | None:
    try:
        data = bucket.get(TABLE_KEY, max_bytes=limits.MAX_JSON_BYTES)
        return data if TensorTable.from_bytes(data).digest == info.tensors else None
    except StoreError:
        raise
    except DeltaSyncError:
        return None

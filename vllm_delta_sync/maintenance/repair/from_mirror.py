"""``Mirror`` restores what a run lacks from a copy, but only what digests or intact documents prove to be correct.

With trusted keys, documents without a valid signature are not restored.
"""

from collections.abc import Callable, Collection
from contextlib import suppress

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.verified import fetch_object
from vllm_delta_sync.errors import ConflictError, DataError, NotFoundError, UsageError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import RETENTION_KEY, Claim, anchor_key, merged_delta_key
from vllm_delta_sync.format.manifest import (
    HEAD_KEY,
    RUN_KEY,
    TABLE_KEY,
    VERSIONS_PREFIX,
    Manifest,
    ObjectRef,
    RunInfo,
    Stored,
    version_key,
    version_of_key,
)
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.process_folders import ProcessFolder
from vllm_delta_sync.run.checks import object_limit
from vllm_delta_sync.run.graph import check_follows
from vllm_delta_sync.run.objects import fetch_object_file
from vllm_delta_sync.run.run_reader import RunReader, read_info, read_table
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.report import Finding


class Mirror:
    """A copy of a run in another bucket, which may be damaged itself.

    Args:
        run: the run to repair. bucket: the copy. audit: the documents of ``run``.
    """

    def __init__(self, run: RunReader, bucket: Bucket, audit: DocumentAudit) -> None:
        self._run, self._bucket, self._audit = run, bucket, audit
        self._copy = run.in_bucket(bucket)

    def restore_head(self) -> str | None:
        """Restore a missing HEAD.json, which the audit does not report. See ``restore``.

        If the mirror's HEAD.json names a newer version, that version is restored first.
        """
        return self._tried(self._head)

    def restore(self, finding: Finding) -> str | None:
        """Restore the subject of a finding.

        Returns:
            the key that was put; None if the mirror has nothing that is proven correct.
        """
        version = version_of_key(finding.key)
        if isinstance(finding.stored, ObjectRef):
            return self._tried(self._object, finding.stored) or self._tried(self._retention, finding)
        if finding.stored is not None:
            return self._tried(self._stored_file, finding.stored)
        if version is not None:
            return self._tried(self._manifest, version)
        return self._tried(self._head) if finding.key == HEAD_KEY else self._tried(self._standalone, finding.key)

    @staticmethod
    def _tried(restore: Callable[..., str | None], *args: object) -> str | None:
        """Return what an attempt returns; None if it fails."""
        try:
            return restore(*args)
        except (DataError, UsageError, ConflictError):
            # The copy is damaged or cannot be listed, there is no key to sign with, or a publisher was first.
            return None

    def _object(self, ref: ObjectRef) -> str:
        with ProcessFolder() as folder:
            path = fetch_object_file(self._bucket, ref, folder.path, object_limit(self._run.table))
            self._run.bucket.put(ref.key, path)
        return ref.key

    def _stored_file(self, item: Stored) -> str:
        self._run.bucket.put(item.key, fetch_object(self._bucket, item))
        return item.key

    def _retention(self, finding: Finding) -> str | None:
        """Restore retention.json if the mirror's shows that the object was removed on purpose.

        Unless a collection wrote the one that is here, which may be newer: that of a repair without a mirror has no
        ``head``.
        """
        version = None if finding.document is None else version_of_key(finding.document)
        stored = self._run.retention()
        if version is None or (stored is not None and stored.head is not None):
            return None
        record = self._copy.retention()
        return self._standalone(RETENTION_KEY) if record is not None and record.is_gone(version) else None

    def restore_leading_to(self, versions: Collection[int]) -> list[str]:
        """Restore anchors and merged deltas that lead to some versions and are only in the mirror; return their keys.

        Lists the mirror once: if version 0 is damaged, nothing leads to any version.
        """
        if not versions:
            return []
        wanted = set(versions)
        keys = [anchor_key(version) for version in self._copy.anchors() if version in wanted]
        keys += [merged_delta_key(*pair) for pair in self._copy.merged_deltas() if pair[1] in wanted]
        restored = [self._tried(self._standalone, key) for key in keys if self._stored(key) is None]
        return [key for key in restored if key is not None]

    def _manifest(self, version: int) -> str | None:
        """Restore a manifest that the one after it or HEAD.json names here, or else one that follows the one before it.

        If the mirror has the same manifest, what contradicts it here is restored instead.
        """
        manifest, known = self._copy.manifest(version), self._audit.known
        if manifest.to_bytes() == self._stored(version_key(version)):
            return self._tried(self._after, version) or self._tried(self._head)
        if known.get(version) == manifest.digest:
            return self._put_manifest(manifest)
        # At most HEAD.json names it, which may be damaged too.
        is_newest = version + 1 not in self._audit.manifests and version - 1 in self._audit.manifests
        return self._after(version - 1) if is_newest else None

    def _after(self, version: int) -> str | None:
        """Restore the manifest that follows one that is here, if the mirror has another than this bucket."""
        manifest = self._run.manifest(version)
        following = self._copy.manifest(manifest.version + 1)
        check_follows(manifest, following)
        return (
            None
            if self._stored(version_key(following.version)) == following.to_bytes()
            else self._put_manifest(following)
        )

    def _put_manifest(self, manifest: Manifest) -> str:
        key = version_key(manifest.version)
        self._run.bucket.put(key, manifest.to_bytes())
        return key

    def _head(self) -> str | None:
        """Restore HEAD.json, unless the mirror's is older than what is here; if it is newer, first what it names."""
        newest, head = max(self._audit.manifests, default=-1), self._copy.read_head()
        if newest >= 0 and head.version > newest and (key := self._after(newest)) is not None:
            return key
        if head.version < newest or head.to_bytes() == self._stored(HEAD_KEY):
            return None
        self._run.bucket.put(HEAD_KEY, head.to_bytes())
        return HEAD_KEY

    def _stored(self, key: str) -> bytes | None:
        try:
            return self._run.bucket.get(key, max_bytes=limits.MAX_JSON_BYTES)
        except NotFoundError:
            return None

    def _standalone(self, key: str) -> str | None:
        """Restore a document beside the chain, unless the manifests that are here contradict it."""
        document = self._copy.standalone(key)
        if document is None or document.to_bytes() == self._stored(key) or self._audit.contradiction(document):
            return None
        if isinstance(document, Claim) and document.version >= self._audit.epochs.get(
            document.epoch, limits.MAX_VERSION
        ):
            return None
        self._run.bucket.put(key, document.to_bytes())
        return key


def restore_identity(bucket: Bucket, mirror: Bucket, keyring: Keyring) -> list[str]:
    """Restore run.json and tensors.json, without which a run cannot be opened; return the keys that were put.

    run.json must belong to the run whose manifests are here and, with trusted keys, have a valid signature. The digest
    in run.json proves tensors.json.
    """
    restored = []
    info = _trusted_info(bucket, keyring)
    if info is None:
        info = _trusted_info(mirror, keyring)
        if info is None or not _is_run(bucket, info):
            return []
        bucket.put(RUN_KEY, info.to_bytes())
        restored.append(RUN_KEY)
    if _table(bucket, info) is None and (table := _table(mirror, info)) is not None:
        bucket.put(TABLE_KEY, table.to_bytes())
        restored.append(TABLE_KEY)
    return restored


def restore_lost_head(run: RunReader, mirror: Bucket) -> list[str]:
    """Restore HEAD.json if it and all manifests are lost, so that the manifests are missed; return the keys put."""
    if run.versions():
        return []
    with suppress(DataError):
        run.read_head()
        return []
    with suppress(DataError):
        run.bucket.put(HEAD_KEY, run.in_bucket(mirror).read_head().to_bytes())
        return [HEAD_KEY]
    return []


def check_copy(mirror: Bucket, info: RunInfo) -> None:
    """Check that a mirror holds this run, as far as it can be read: its URL may be wrong.

    Raises:
        NotFoundError: it holds nothing. UsageError: it holds another run. StoreError: the store failed.
    """
    try:
        found = read_info(mirror).run
    except NotFoundError:
        with suppress(UsageError):  # it cannot be listed
            if next(iter(mirror.list("")), None) is None:
                raise NotFoundError(
                    f"the mirror {mirror.url} holds nothing; give the URL of a copy of the run"
                ) from None
        return
    except DataError:
        return
    if found != info.run:
        raise UsageError(f"the mirror {mirror.url} holds run {found}, not run {info.run}; give the URL of its copy")


def _trusted_info(bucket: Bucket, keyring: Keyring) -> RunInfo | None:
    """Return run.json; None if it is missing or damaged, or has no valid signature of a trusted key."""
    try:
        info = read_info(bucket, keyring)
        keyring.check(info, RUN_KEY)
    except DataError:
        return None
    return info


def _table(bucket: Bucket, info: RunInfo) -> TensorTable | None:
    try:
        return read_table(bucket, info)
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

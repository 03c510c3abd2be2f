"""``RunVerifier`` checks the signatures of one run's documents, and whether one version descends from another."""

import threading
from collections.abc import Callable
from hashlib import sha256

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.errors import ChainError, DeltaSyncError, ForkError, NotFoundError, SignatureError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import KEYS_KEY, KeyFile
from vllm_delta_sync.format.manifest import Document, Head, Manifest, RunInfo, version_key
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keyring import RunKeys, check_signature

_BATCH = 256
_CACHED_LINEAGES = 8
"""Lineages that are cached: the head's, and those of the last valid versions of retired and revoked keys."""


class RunVerifier:
    """Checks the signatures of one run. Checks nothing if the keyring has no trusted keys.

    Args:
        stored: returns the bytes of a version's manifest; if None, read from the bucket.
        read_keys: returns the bytes of ``keys.json``; if None, read from the bucket.

    Attributes:
        keys: the keys that are valid in this run.
    """

    def __init__(
        self,
        bucket: Bucket,
        keyring: Keyring,
        info: RunInfo,
        stored: Callable[[int], bytes] | None = None,
        read_keys: Callable[[], bytes] | None = None,
    ) -> None:
        self._bucket = bucket
        self._read_keys = read_keys or (lambda: bucket.get(KEYS_KEY, max_bytes=limits.MAX_SIDE_BYTES))
        self._stored = stored or self._fetched
        self._checks = keyring.checks_signatures
        self._lock = threading.Lock()
        self._lineages: list[_Lineage] = []
        self.keys = RunKeys(keyring, info.run)
        if self._checks:
            self.refresh()
            self.keys.check_info(info)

    def refresh(self, at_least: int = 0) -> None:
        """Read ``keys.json`` again: one small request, or none if there are no trusted keys.

        Args:
            at_least: the sequence number seen before.

        Raises:
            SignatureError, ChainError, ReplayError, FormatError: it is refused. StoreError: the store failed.
        """
        if not self._checks:
            return
        try:
            data = self._read_keys()
        except NotFoundError:
            self.keys.accept(None, at_least)
            return
        self.keys.accept(KeyFile.from_bytes(data, KEYS_KEY), at_least)

    def check_head(self, head: Head, what: str) -> None:
        """Raise SignatureError unless the signature of HEAD.json is valid."""
        self.check_standalone(head, head.version, what)

    def check_standalone(self, document: Document, version: int, what: str) -> None:
        """Raise SignatureError unless a document about a version, other than its manifest, is validly signed."""
        if self._checks:
            self.keys.check_standalone(document, version, what)

    def check_manifest(self, manifest: Manifest, what: str) -> None:
        """Raise SignatureError unless the signature of a manifest is valid.

        If its key is no longer in use, the manifest is valid only as an ancestor of the last version that keys.json
        accepts from that key; to check this, the manifests between are read.
        """
        if not self._checks:
            return
        entry = self.keys.check_manifest(manifest, manifest.version, what)
        if entry is None or entry.last is None:
            return
        try:
            expected = self.ancestor_digest(entry.last.version, entry.last.manifest, manifest.version)
        except NotFoundError as error:
            raise SignatureError(
                f"{what} is signed by a key that is no longer in use, and it cannot be shown that the key wrote it "
                f"while it was valid: {error}"
            ) from error
        if expected != manifest.digest:
            raise SignatureError(
                f"{what} is signed by a key that is no longer in use, and is not among the versions that keys.json "
                "accepts from that key"
            )

    def signed_by_ended_key(self, data: bytes, what: str) -> Manifest | None:
        """Parse a stored manifest; None unless it is signed by a key that ``keys.json`` lists as retired or revoked."""
        file = self.keys.file
        if not self._checks or file is None:
            return None
        try:
            manifest = Manifest.from_bytes(data, what)
            check_signature(manifest.signature, manifest.signed_bytes(), what)
        except DeltaSyncError:
            return None
        entry = None if manifest.signature is None else file.entry(manifest.signature.key)
        return manifest if entry is not None and (entry.revoked or entry.last is not None) else None

    def check_descends(self, younger: Manifest, older: Manifest) -> None:
        """Raise ForkError unless ``younger`` descends from ``older``; errors as ``ancestor_digest``.

        Checks nothing if there are no trusted keys.
        """
        if not self._checks:
            return
        ancestor = self.ancestor_digest(younger.version, younger.digest, older.version)
        if ancestor != older.digest:
            raise ForkError(
                f"version {younger.version} descends from {ancestor} as version {older.version}, but {older.digest} is "
                f"another version {older.version} with a valid signature: the history was forked"
            )

    def ancestor_digest(self, version: int, digest: str, wanted: int) -> str:
        """Return the digest of the ancestor at version ``wanted`` of the manifest of ``version`` that has ``digest``.

        Reads all manifests between them, once and in parallel, and no objects.

        Raises:
            NotFoundError: a manifest is missing. ForkError: one is not the manifest that the next one names.
            ChainError: one names no parent, or ``wanted`` is above ``version``.
        """
        if wanted > version:
            raise ChainError(f"version {wanted} cannot precede version {version}")
        if wanted == version:
            return digest
        with self._lock:
            lineage = self._lineage(version, digest)
            while lineage.low > wanted:
                top = lineage.low
                first = max(wanted + 1, top - _BATCH + 1)
                for data in in_parallel(self._stored, range(top, first - 1, -1)):
                    lineage.extend(data)
            return lineage.digests[wanted]

    def _lineage(self, version: int, digest: str) -> "_Lineage":
        """Return the cached lineage of a manifest, or a new one."""
        lineage = next((known for known in self._lineages if known.digests.get(version) == digest), None)
        if lineage is None:
            lineage = _Lineage(version, digest)
            self._lineages = [*self._lineages[1 - _CACHED_LINEAGES :], lineage]
        return lineage

    def _fetched(self, version: int) -> bytes:
        return self._bucket.get(version_key(version), max_bytes=limits.MAX_JSON_BYTES)


class _Lineage:
    """Digests of consecutive manifests, each named as parent by the next.

    Attributes:
        low: the oldest version in ``digests``, whose manifest was not read yet.
    """

    def __init__(self, version: int, digest: str) -> None:
        self.low = version
        self.digests = {version: digest}

    def extend(self, data: bytes) -> None:
        """Add the parent of version ``low``, given the stored bytes of its manifest."""
        key, found, expected = version_key(self.low), sha256(data).hexdigest(), self.digests[self.low]
        if found != expected:
            raise ForkError(
                f"{key} has digest {found}, but the next version names {expected} as its parent: the manifest was "
                "replaced"
            )
        parent = Manifest.from_bytes(data, key).parent
        if parent is None:
            raise ChainError(f"{key} names no parent")
        self.low -= 1
        self.digests[self.low] = parent

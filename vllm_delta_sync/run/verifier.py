"""Whether what a bucket says was said by somebody whose word counts, and whether one version descends from another."""

import threading
from collections.abc import Callable
from hashlib import sha256

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.parallel import in_parallel
from vllm_delta_sync.errors import ChainError, DeltaSyncError, ForkError, NotFoundError, SignatureError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import KEYS_KEY, KeyFile
from vllm_delta_sync.format.manifest import Document, Head, Manifest, RunInfo, version_key
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keyring import RunKeys, check_signature

_BATCH = 256
_LINES = 8
"""Chains that are remembered: that of the head, and those of the last words of keys."""


class RunVerifier:
    """The signatures of one run. Does nothing for a keyring without trusted keys.

    Args:
        stored: gives a version's manifest as it is stored; None: the bucket does.

    Attributes:
        keys: whose word counts.
    """

    def __init__(
        self, bucket: Bucket, keyring: Keyring, info: RunInfo, stored: Callable[[int], bytes] | None = None
    ) -> None:
        self._bucket = bucket
        self._stored = stored or self._fetched
        self._checks = keyring.checks_signatures
        self._lock = threading.Lock()
        self._lines: list[_Line] = []
        self.keys = RunKeys(keyring, info.run)
        if self._checks:
            self.refresh()
            self.keys.check_info(info)

    def refresh(self, at_least: int = 0) -> None:
        """Read ``keys.json`` anew: one small get, none without trusted keys.

        Args:
            at_least: sequence that was seen before.

        Raises:
            SignatureError, ChainError, ReplayError, FormatError: it may not be believed. StoreError: the store failed.
        """
        if not self._checks:
            return
        try:
            data = self._bucket.get(KEYS_KEY, max_bytes=limits.MAX_SIDE_BYTES)
        except NotFoundError:
            self.keys.accept(None, at_least)
            return
        self.keys.accept(KeyFile.from_bytes(data, KEYS_KEY), at_least)

    def check_head(self, head: Head, what: str) -> None:
        """Raise SignatureError unless HEAD.json may be believed."""
        self.check_standalone(head, head.version, what)

    def check_standalone(self, document: Document, version: int, what: str) -> None:
        """Raise SignatureError unless a document about a version, outside the chain, may be believed."""
        if self._checks:
            self.keys.check_standalone(document, version, what)

    def check_manifest(self, manifest: Manifest, what: str) -> None:
        """Raise SignatureError unless a manifest may be believed.

        One whose key is no longer in use holds because the chain leads from it to that key's last word, for which the
        manifests between are read.
        """
        if not self._checks:
            return
        entry = self.keys.check_manifest(manifest, manifest.version, what)
        if entry is None or entry.last is None:
            return
        try:
            there = self.ancestor_digest(entry.last.version, entry.last.manifest, manifest.version)
        except NotFoundError as error:
            raise SignatureError(
                f"{what} is signed by a key that is no longer in use, and that it belongs to what the key wrote before "
                f"cannot be shown: {error}"
            ) from error
        if there != manifest.digest:
            raise SignatureError(
                f"{what} is signed by a key that is no longer in use, and is not what keys.json says it had written"
            )

    def signed_by_ended_key(self, data: bytes, what: str) -> Manifest | None:
        """A manifest, as it is stored, if its signature is that of a key which ``keys.json`` has retired or revoked."""
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
        """Raise unless one manifest comes from another of this run; see ``ancestor``. Nothing without trusted keys."""
        if not self._checks:
            return
        there = self.ancestor_digest(younger.version, younger.digest, older.version)
        if there != older.digest:
            raise ForkError(
                f"version {younger.version} goes on from {there} as version {older.version}, and {older.digest} is "
                f"another version {older.version} with a valid signature: the history was forked"
            )

    def ancestor_digest(self, version: int, digest: str, wanted: int) -> str:
        """Digest of the manifest of version ``wanted`` from which the one with ``digest``, of ``version``, descends.

        Reads the manifests between once, all of them, several at a time; never objects.

        Raises:
            NotFoundError: one is gone. ForkError: one is not the one that the next names. ChainError: one that is
                damaged does not say what it follows.
        """
        if wanted > version:
            raise ChainError(f"version {wanted} cannot precede version {version}")
        if wanted == version:
            return digest
        with self._lock:
            line = self._line(version, digest)
            while line.low > wanted:
                top = line.low
                first = max(wanted + 1, top - _BATCH + 1)
                for data in in_parallel(self._stored, range(top, first - 1, -1)):
                    line.extend(data)
            return line.digests[wanted]

    def _line(self, version: int, digest: str) -> "_Line":
        """What is known of the ancestors of a manifest."""
        line = next((known for known in self._lines if known.digests.get(version) == digest), None)
        if line is None:
            line = _Line(version, digest)
            self._lines = [*self._lines[1 - _LINES :], line]
        return line

    def _fetched(self, version: int) -> bytes:
        return self._bucket.get(version_key(version), max_bytes=limits.MAX_JSON_BYTES)


class _Line:
    """Digests of consecutive manifests, each named by the one after it.

    Attributes:
        low: the oldest version in ``digests``, whose manifest was not read yet.
    """

    def __init__(self, version: int, digest: str) -> None:
        self.low = version
        self.digests = {version: digest}

    def extend(self, data: bytes) -> None:
        """Take the manifest of version ``low`` as it is stored."""
        key, found, expected = version_key(self.low), sha256(data).hexdigest(), self.digests[self.low]
        if found != expected:
            raise ForkError(
                f"{key} has digest {found}, and {expected} is the one that the chain goes on from: somebody has put "
                "another in its place"
            )
        parent = Manifest.from_bytes(data, key).parent
        if parent is None:
            raise ChainError(f"{key} names no parent")
        self.low -= 1
        self.digests[self.low] = parent

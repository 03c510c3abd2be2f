"""``Ancestors`` finds which manifest precedes another, by the digests that manifests name as their parents."""

import threading
from collections.abc import Callable
from hashlib import sha256

from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.errors import ChainError, ForkError
from vllm_delta_sync.format.manifest import Manifest, version_key

_BATCH = 256
_CACHED_LINEAGES = 2


class Ancestors:
    """Reads the parents of a run's manifests, each once. Thread-safe.

    Args:
        stored: returns the bytes of a version's manifest.
    """

    def __init__(self, stored: Callable[[int], bytes]) -> None:
        self._stored = stored
        self._lock = threading.Lock()
        self._lineages: list[_Lineage] = []

    def digest(self, version: int, digest: str, wanted: int) -> str:
        """Return the digest of the ancestor at version ``wanted`` of the manifest of ``version`` that has ``digest``.

        Reads all manifests between them, in parallel, and no objects.

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

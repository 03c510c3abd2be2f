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
        # Version → digest of consecutive manifests, the newest first. The last one's manifest was not read yet.
        self._lineages: list[dict[int, str]] = []

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
            lineage = next((known for known in self._lineages if known.get(version) == digest), None)
            if lineage is None:
                lineage = {version: digest}
                self._lineages = [*self._lineages[1 - _CACHED_LINEAGES :], lineage]
            while (low := next(reversed(lineage))) > wanted:
                numbers = range(low, max(wanted, low - _BATCH), -1)
                for number, data in zip(numbers, in_parallel(self._stored, numbers), strict=True):
                    lineage[number - 1] = _parent(number, lineage[number], data)
            return lineage[wanted]


def _parent(version: int, digest: str, data: bytes) -> str:
    """Return the digest of the manifest before a version, given the version's digest and the bytes that are stored."""
    key, found = version_key(version), sha256(data).hexdigest()
    if found != digest:
        raise ForkError(
            f"{key} has digest {found}, but the next version names {digest} as its parent: the manifest was replaced"
        )
    parent = Manifest.from_bytes(data, key).parent
    if parent is None:
        raise ChainError(f"{key} names no parent")
    return parent

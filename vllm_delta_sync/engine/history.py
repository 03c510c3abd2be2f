"""What a receiver knows of the run: its manifests, which versions to take next, and which not to try again."""

from vllm_delta_sync.chain import Run, check_follows, open_run
from vllm_delta_sync.errors import DeltaSyncError, FingerprintError, NotFoundError
from vllm_delta_sync.wire.fingerprint import Fingerprint
from vllm_delta_sync.wire.manifest import Manifest

STAGED_BYTES = 32
"""Memory that staging takes at most per changed element of a 16-bit dtype: decoded 10, folded 10 more, routed 14, and
never all of it at once."""
FOLDED_VERSIONS = 1024


class History:
    """The run at a URL, as far as it is known.

    Attributes:
        head: newest good version.
        behind: manifests of the versions in the undo log, so that going back needs no network.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._run: Run | None = None
        self.head: Manifest | None = None
        self.behind: dict[int, Manifest] = {}
        self._fold = FOLDED_VERSIONS
        self._fold_until = -1
        # Digest and message of a version that was committed and taken back: trying again would only pause again.
        self._rejected = ("", "")

    @property
    def run(self) -> Run:
        """The run; NotFoundError before it was opened."""
        if self._run is None:
            raise NotFoundError(f"no run at {self._url!r} yet")
        return self._run

    @property
    def is_open(self) -> bool:
        """Whether a run was found."""
        return self._run is not None

    def is_replaced(self) -> bool:
        """Whether another run lies at the URL than the one known. Raises DeltaSyncError if that cannot be read."""
        return self._run is None or not self._run.is_current()

    def open(self) -> Run:
        """Open the run at the URL, whichever it is now. Errors as ``open_run``."""
        self._run = open_run(self._url)
        self.head = None
        self.behind.clear()
        return self._run

    def look(self) -> DeltaSyncError | None:
        """Find the newest good manifest; returns what is wrong beyond it."""
        self.head, stopped_by = self.run.reachable_head()
        return stopped_by

    def manifest(self, version: int) -> Manifest:
        """A version's manifest. Errors as ``Run.manifest``."""
        head = self.head
        return head if head is not None and head.version == version else self.run.manifest(version)

    def base(self) -> tuple[Manifest, list[Fingerprint]]:
        """Version 0, and its fingerprint per tensor id. Errors as ``Run.manifest``; NotFoundError if it has none."""
        first = self.manifest(0)
        declared = first.tensor_fingerprints or {}
        missing = next((spec.name for spec in self.run.table if spec.name not in declared), None)
        if missing is not None:
            raise NotFoundError(f"version 0 has no fingerprint for tensor {missing!r}")
        return first, [Fingerprint.from_hex(declared[spec.name]) for spec in self.run.table]

    def window(self, served: Manifest, target: int, room: int) -> list[Manifest]:
        """The next versions to take in one commit: up to an anchor, a bad one, or ``room`` bytes of memory.

        Raises:
            DeltaSyncError: the very next one cannot be taken.
        """
        found: list[Manifest] = []
        parent = served
        for version in range(served.version + 1, target + 1):
            try:
                manifest = self.manifest(version)
                check_follows(parent, manifest)
                if manifest.digest == self._rejected[0]:
                    raise FingerprintError(self._rejected[1])
            except DeltaSyncError:
                if not found:
                    raise
                break
            room -= STAGED_BYTES * manifest.changed
            if found and (room < 0 or manifest.kind != "delta" or len(found) >= self._fold):
                break
            found.append(manifest)
            if manifest.kind != "delta":
                break
            parent = manifest
        return found

    def halve(self, manifests: list[Manifest]) -> None:
        """Take fewer versions at once until those given are behind: together they did not fit the weights."""
        self._fold, self._fold_until = max(1, len(manifests) // 2), max(self._fold_until, manifests[-1].version)

    def committed(self, version: int) -> None:
        """A version was committed."""
        if version >= self._fold_until:
            self._fold = FOLDED_VERSIONS

    def reject(self, manifest: Manifest, reason: str) -> None:
        """Do not try this version again."""
        self._rejected = (manifest.digest, reason)

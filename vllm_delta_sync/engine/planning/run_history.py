"""What a receiver knows of the run that it follows: its manifests, and those of the runs it branches from."""

from contextlib import AbstractContextManager, nullcontext

from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.engine.planning.commit_plan import WeightPosition
from vllm_delta_sync.engine.planning.lineage import RunVersion, line
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.errors import DeltaSyncError, ExpiredError, NotFoundError, SignatureError, StoreError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.trust import Keyring


class History:
    """The run at a URL, as far as it is known.

    Args:
        keyring: whose signatures to ask for. witness: refuses what contradicts what was seen before.
        store: how to talk to the store; None: as the settings say.

    Attributes:
        head: newest good version.
        expired: what was wrong with the age of HEAD.json at the last look.
        behind: manifests of the versions in the undo log, so that going back needs no network.
    """

    def __init__(self, url: str, keyring: Keyring, witness: TrustedHead, store: StoreOptions | None = None) -> None:
        self._url = url
        self.store = store
        self.keyring = keyring
        self.witness = witness
        self._run: Run | None = None
        self._origins: list[RunVersion] = []
        self.head: Manifest | None = None
        self.expired: ExpiredError | None = None
        self._stopped_by: DeltaSyncError | None = None
        self.behind: dict[int, Manifest] = {}

    @property
    def run(self) -> Run:
        """The run; NotFoundError before it was opened."""
        if self._run is None:
            raise NotFoundError(f"no run at {self._url!r} yet")
        return self._run

    def is_replaced(self) -> bool:
        """Whether another run lies at the URL than the one known. Raises DeltaSyncError if that cannot be read."""
        return self._run is None or not self._run.is_current()

    def open(self) -> Run:
        """Open the run that is at the URL now. Errors as ``open_run``, ``TrustedHead.recall`` and ``admit``."""
        self.witness.recall()
        run = open_run(self._url, self.keyring, self.store)
        self.witness.admit(run)
        self._run = run
        self._origins = []
        self.head = None
        self.behind.clear()
        return self._run

    def looking(self, expected: int | None) -> AbstractContextManager[object]:
        """Within the block a look is begun ahead, where the run is known; see ``Run.prefetching``."""
        if self._run is None:
            return nullcontext()
        return self._run.prefetching(None if self.head is None else self.head.version, expected)

    def look(self, served: Manifest | None = None) -> DeltaSyncError | None:
        """Find the newest good manifest; returns what is wrong beyond it.

        Args:
            served: the version served, from which it must descend.

        Raises:
            ReplayError, ForkError: see ``TrustedHead.accept``; ``head`` is as before. Else as ``TrustedHead.recall``
                and ``Run.reachable_head``.
        """
        self.witness.recall()
        try:
            head, stopped_by = self.run.reachable_head()
        except NotFoundError as error:
            self.witness.admit(self.run)
            raise self.witness.missed(error) from error
        except DeltaSyncError:
            # What was learnt of keys counts all the same.
            self.witness.admit(self.run)
            raise
        self.expired = self.witness.expiry(self.run, stopped_by)
        self.witness.accept(self.run, head, stopped_by, served)
        self.head, self._stopped_by = head, stopped_by
        return stopped_by

    def check_fresh(self) -> None:
        """Raise if no new version is to be taken, because HEAD.json has run out; see ``TrustedHead.check_fresh``."""
        self.witness.check_fresh(self.run, self._stopped_by, self.expired)

    def fallen(self, held: Manifest) -> SignatureError | None:
        """What is wrong with a version that was believed when it was taken; see ``TrustedHead.fallen``."""
        return self.witness.fallen(self.run, held)

    def check_ours(self, manifest: Manifest) -> None:
        """Raise ForkError unless the head descends from a version; reads manifests between, with trusted keys only."""
        if self.head is not None:
            self.run.verifier.check_descends(self.head, manifest)

    @property
    def keys(self) -> int:
        """Sequence of keys.json; 0 if the run has none."""
        file = self.run.verifier.keys.file
        return 0 if file is None else file.sequence

    def manifest(self, version: int) -> Manifest:
        """A version's manifest. Errors as ``Run.manifest``."""
        head = self.head
        return head if head is not None and head.version == version else self.run.manifest(version)

    def base(self) -> tuple[Manifest, list[Fingerprint]]:
        """Version 0, and its fingerprint per tensor id. Errors as ``Run.manifest``; NotFoundError if it has none."""
        return first_of(self.run)

    def confirms(self, served: Manifest) -> tuple[bool | None, str | None]:
        """Whether the bucket, read anew, holds a version as it was served; None if it cannot be read. And why not."""
        try:
            if self.is_replaced():
                return False, f"another run lies at {self._url!r} now"
            there = self.run.manifest(served.version)
        except StoreError as error:
            return None, error.message
        except NotFoundError as error:
            return (None if self._is_gone() else False), error.message
        except DeltaSyncError as error:
            return False, error.message
        if there.digest != served.digest:
            return False, f"version {served.version} is {there.digest} in the bucket, {served.digest} was served"
        return True, None

    def _is_gone(self) -> bool:
        try:
            return self.is_replaced()
        except DeltaSyncError:
            return True

    def origins(self) -> list[RunVersion]:
        """The versions of other runs that this one begins with, youngest first; empty if it is no branch.

        Raises:
            StoreError: the store failed. DeltaSyncError: version 0 cannot be read.
        """
        if not self._origins:
            # Looked for again if there was none: the source may come back.
            self._origins = line(self.run, 0)[1:]
        return self._origins

    def is_own(self, place: WeightPosition) -> bool:
        """Whether a place is a version of the run followed."""
        return place.run.info.run == self.run.info.run


def first_of(run: Run) -> tuple[Manifest, list[Fingerprint]]:
    """Version 0 of a run, and its fingerprint per tensor id.

    Raises:
        NotFoundError: it has none for a tensor. Else as ``Run.manifest``.
    """
    first = run.manifest(0)
    declared = first.tensor_fingerprints or {}
    missing = next((spec.name for spec in run.table if spec.name not in declared), None)
    if missing is not None:
        raise NotFoundError(f"version 0 has no fingerprint for tensor {missing!r}")
    return first, [Fingerprint.from_hex(declared[spec.name]) for spec in run.table]

"""``History`` reads the run that a receiver follows: its head, its manifests, and the runs it branches from.

Paths lead across branches: version 0 of a branch is a version of its source run, so deltas lead from one to the other.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.planning.trusted_head import TrustedHead
from vllm_delta_sync.errors import DataError, DeltaSyncError, ExpiredError, NotFoundError, StoreError, UsageError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.run.run_reader import parse_target
from vllm_delta_sync.run.service_policy import ServicePolicy, newest_to_serve
from vllm_delta_sync.settings import HEAD
from vllm_delta_sync.trust import Keyring

MAX_DEPTH = 64
"""Maximum depth of branches of branches that are followed to their source."""


class RunVersion(NamedTuple):
    """A version of a run."""

    run: Run
    version: int


class RunSegment(NamedTuple):
    """From one version of a run to another."""

    run: Run
    first: int
    last: int


@dataclass(frozen=True)
class WeightPosition:
    """A version of a run: what the ranks hold."""

    run: Run
    manifest: Manifest

    @property
    def version(self) -> int:
        return self.manifest.version


class History:
    """The run at a URL.

    Args:
        keyring: keys that must have signed the run. trusted_head: refuses heads older than one seen before.
        policy: which versions are served.

    Attributes:
        head: manifest of the newest good version; None before the first poll.
        goal: the newest version that a receiver of the head serves; None if there is none.
        expired: set if HEAD.json had expired at the last poll.
        undo_manifests: manifests of the versions in the undo log, so that a rollback needs no network.
    """

    def __init__(
        self, url: str, keyring: Keyring, trusted_head: TrustedHead, store: StoreOptions, policy: ServicePolicy
    ) -> None:
        self._url = url
        self._policy = policy
        self.store = store
        self.keyring = keyring
        self.trusted_head = trusted_head
        self._run: Run | None = None
        self._origins: list[RunVersion] = []
        self.head: Manifest | None = None
        self.goal: int | None = None
        self.expired: ExpiredError | None = None
        self._stopped_by: DeltaSyncError | None = None
        self.undo_manifests: dict[int, Manifest] = {}

    @property
    def run(self) -> Run:
        """The run. Raises NotFoundError before it was opened."""
        if self._run is None:
            raise NotFoundError(f"no run at {self._url!r} yet")
        return self._run

    def is_replaced(self) -> bool:
        """Return whether the run at the URL is not the one known. Raises DeltaSyncError if it cannot be read."""
        return self._run is None or not self._run.is_there()

    def open(self) -> Run:
        """Open the run that is at the URL now. Errors as ``open_run``, ``TrustedHead.reload_last_seen`` and
        ``check_run``."""
        self.trusted_head.reload_last_seen()
        run = open_run(self._url, self.keyring, self.store)
        self.trusted_head.check_run(run)
        self._run = run
        self._origins = []
        self.head = self.goal = None
        self.undo_manifests.clear()
        return self._run

    def prefetching(self, expected: int | None) -> AbstractContextManager[object]:
        """Prefetch for a poll in the block, once the run is known; see ``Run.prefetching``.

        Errors as ``TrustedHead.reload_last_seen``, which must come before any read: what others see later is no reason
        to refuse what this poll finds.
        """
        self.trusted_head.reload_last_seen()
        if self._run is None:
            return nullcontext()
        return self._run.prefetching(None if self.head is None else self.head.version, expected)

    def poll(self, served: Manifest | None = None) -> DeltaSyncError | None:
        """Find the newest good manifest; returns what is wrong with the one after it.

        Call it right after ``open``, or within ``prefetching``.

        Args:
            served: the version served, from which the head must descend.

        Raises:
            ReplayError, ForkError: see ``TrustedHead.accept_head``; ``head`` is unchanged. Other errors as
                ``Run.reachable_head``.
        """
        try:
            head, stopped_by = self.run.reachable_head(self.head)
        except NotFoundError as error:
            self.trusted_head.check_run(self.run)
            raise self.trusted_head.empty_run_error(error) from error
        self.expired = self.trusted_head.check_expiry(self.run, stopped_by)
        self.trusted_head.accept_head(self.run, head, stopped_by, served)
        if self.head is None or self.head.digest != head.digest:
            self.goal = newest_to_serve(self.run, head, self._policy)
        self.head, self._stopped_by = head, stopped_by
        return stopped_by

    def check_fresh(self) -> None:
        """Raise if no new version may be taken because HEAD.json has expired; see ``TrustedHead.check_fresh``."""
        self.trusted_head.check_fresh(self.run, self._stopped_by, self.expired)

    def check_in_history(self, manifest: Manifest) -> None:
        """Raise ForkError unless the head descends from a version. Reads manifests between, with trusted keys only."""
        if self.head is not None:
            self.run.check_descends(self.head, manifest)

    def unpublished(self, version: int) -> NotFoundError | None:
        """Return the error for a version that was not published when last polled; None if it was."""
        if self.head is not None and version <= self.head.version:
            return None
        newest = "nothing is published yet" if self.head is None else f"the head is {self.head.version}"
        return NotFoundError(f"version {version} is not published; {newest}")

    def resolve_target(self, target: str, served: int | None = None) -> int:
        """Return the version that a target names as of the last poll: ``head``, a number, or ``tag:NAME``.

        Args:
            served: the version of this run that is served, if it may stay. It may be newer than the newest readable
                manifest, or quarantined. A number or a tag may be older.

        Raises:
            NotFoundError: there is no such version. Otherwise as ``Run.resolve``, or what is wrong with the manifest
                after the head.
        """
        if self.head is None:
            raise NotFoundError(f"no version is published at {self._url!r} yet")
        named = parse_target(target)
        if isinstance(named, int):
            missing = self.unpublished(named)
            if missing is not None and (served is None or named > served):
                raise self._stopped_by or missing
            return named
        if named != HEAD:
            return self.run.resolve(named).version
        found = [version for version in (self.goal, served) if version is not None]
        if not found:
            raise NotFoundError(
                f"every version of the run at {self._url!r} is quarantined; publish a sound one, or ask for one by its "
                "number"
            )
        return max(found)

    def manifest(self, version: int) -> Manifest:
        """Return a version's manifest. Errors as ``Run.manifest``."""
        head = self.head
        return head if head is not None and head.version == version else self.run.manifest(version)

    def compare_with_bucket(self, served: Manifest) -> tuple[bool | None, str | None]:
        """Read the bucket: does it hold a version as served (None: unreadable); and if not, why."""
        # Of run.json, absence too: then nothing is known of the manifest.
        unreadable: tuple[type[DeltaSyncError], ...] = (StoreError, NotFoundError)
        try:
            if not self.run.is_current():
                return False, f"another run lies at {self._url!r} now"
            unreadable = (StoreError,)
            there = self.run.manifest(served.version)
        except DeltaSyncError as error:
            return (None if isinstance(error, unreadable) else False), error.message
        if there.digest != served.digest:
            return False, f"version {served.version} is {there.digest} in the bucket, {served.digest} was served"
        return True, None

    def origins(self) -> list[RunVersion]:
        """Return the versions of source runs that this run descends from, youngest first; empty if it is no branch.

        Raises:
            StoreError: the store failed. DeltaSyncError: version 0 cannot be read.
        """
        if not self._origins:
            # Read again if empty: the source may become readable.
            self._origins = ancestry(self.run, 0)[1:]
        return self._origins

    def is_followed_run(self, position: WeightPosition) -> bool:
        """Return whether a position is a version of the run followed."""
        return position.run.info.run == self.run.info.run


def version_0_of(run: Run) -> tuple[Manifest, list[Fingerprint]]:
    """Return version 0 of a run, and its fingerprint per tensor id.

    Raises:
        NotFoundError: a tensor has no fingerprint. Other errors as ``Run.manifest``.
    """
    first = run.manifest(0)
    declared = first.tensor_fingerprints or {}
    missing = next((spec.name for spec in run.table if spec.name not in declared), None)
    if missing is not None:
        raise NotFoundError(f"version 0 has no fingerprint for tensor {missing!r}")
    return first, [Fingerprint.from_hex(declared[spec.name]) for spec in run.table]


def ancestry(run: Run, version: int) -> list[RunVersion]:
    """Return a version, and the versions of source runs that its run descends from, youngest first.

    Ends where a source is missing, has other tensors, or lies in another kind of store. The source's URL is untrusted
    data of the bucket and must not choose the protocol that this server speaks. It may name any local directory: what
    is read there is a run, or is refused.

    Raises:
        StoreError: the store failed. NotFoundError, FormatError, ChainError: a run has no good version 0.
    """
    found = [RunVersion(run, version)]
    while len(found) < MAX_DEPTH:
        first = run.manifest(0)
        if first.base is None or first.base.run is None or first.base.version is None:
            break
        try:
            source = run.open_source(first)
        except (DataError, UsageError) as error:
            logger.warning("cannot use the run that run %s branches from: %s", run.info.run, error.message)
            break
        if source.table.digest != run.table.digest or any(source.info.run == known.run.info.run for known in found):
            source.close()
            break
        found.append(RunVersion(source, first.base.version))
        run = source
    return found


def connect_runs(held: list[RunVersion], wanted: list[RunVersion]) -> list[RunSegment] | None:
    """Return the segments that lead from the first version of one ancestry to the first of another; None if none do.

    Raises:
        StoreError: the store failed.
    """
    for up, point in enumerate(held):
        for down, other in enumerate(wanted):
            if point.run.info.run == other.run.info.run:
                return [
                    *(RunSegment(run, version, 0) for run, version in held[:up]),
                    RunSegment(other.run, point.version, other.version),
                    *(RunSegment(run, 0, version) for run, version in reversed(wanted[:down])),
                ]
    if not held or not wanted or not _have_same_start(held[-1].run, wanted[-1].run):
        return None
    return [
        *(RunSegment(run, version, 0) for run, version in held),
        *(RunSegment(run, 0, version) for run, version in reversed(wanted)),
    ]


def _have_same_start(one: Run, other: Run) -> bool:
    """Return whether two runs begin with the same weights, for example of one public model."""
    if one.table.digest != other.table.digest:
        return False
    try:
        return one.manifest(0).fingerprint == other.manifest(0).fingerprint
    except DataError:
        return False


def open_expected_run(url: str, run_id: str, keyring: Keyring, store: StoreOptions | None = None) -> Run | None:
    """Return the run at a URL, if it has the id, is readable, and is signed as the keyring requires; else None."""
    try:
        run = open_run(url, keyring, store)
    except DeltaSyncError:
        return None
    if run.info.run != run_id:
        run.close()
        return None
    return run

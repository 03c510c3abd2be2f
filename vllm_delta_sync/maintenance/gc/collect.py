"""Retention: remove what no version that is kept needs.

Only objects, anchors, folded ranges and sidecars are ever removed of a run; manifests, tags and claims stay. The order
makes it safe to stop anywhere: first retention.json says what will go, then tags, leases and the head are looked at
again, then go the documents beside the chain, then objects. What is left after a crash is garbage that the next
collection finds.

One collection removes things at a time (``retention_lock``), because what it announces has to stand until it is done:
a tag that is set meanwhile counts on it. While it removes things it checks that ``retention.json`` is still its own:
every few seconds, or before each removal where create-if-absent does not hold. One race is left: an object that no
document lists, put again by a writer between the last look at it and its removal, a moment later. Writers that find a
crashed one's object therefore put it again, which makes it young, rather than rely on it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.bucket.conditional_put import reads
from vllm_delta_sync.errors import ConflictError, NotFoundError
from vllm_delta_sync.format.documents import (
    LEASES_PREFIX,
    RETENTION_KEY,
    TURNS_PREFIX,
    Retention,
    anchor_of_key,
    merged_delta_of_key,
)
from vllm_delta_sync.format.manifest import OBJECTS_PREFIX, SIDECARS_PREFIX, timestamp, version_key
from vllm_delta_sync.maintenance.gc.expired import left_behind
from vllm_delta_sync.maintenance.gc.graph import RunGraph, check_current, survey
from vllm_delta_sync.maintenance.gc.lock import CollectionLock
from vllm_delta_sync.maintenance.gc.policy import CollectionPlan, RetentionPolicy, plan_collection, reachable
from vllm_delta_sync.maintenance.gc.record import ranges
from vllm_delta_sync.run.documents import RunDocuments

__all__ = ["CollectionReport", "RetentionPolicy", "collect"]

Progress = Callable[[int, int, int], None]
"""Called with keys looked at for removal, keys in all, and bytes removed so far."""


CHECK_SECONDS = 5.0
"""How often it is checked, while things are removed, that no collection of an older release is under way."""


@dataclass
class CollectionReport:
    """What a collection did, or would do.

    Attributes:
        head: newest version. kept: version → why. lost: wanted, but cannot be rebuilt: see `delta-sync repair`;
            nothing that may belong to them is removed.
        objects, anchors, folds: what was removed; sidecars, leases, turns: keys of those that were.
        bytes: their size in all.
        gone: closed ranges of versions whose own deltas are not there any more.
        nothing_because: why nothing was removed, if nothing was: how many objects stay for which reason.
        notes: what people should know. dry_run: nothing was removed.
    """

    head: int
    kept: dict[int, list[str]] = field(default_factory=dict)
    lost: dict[int, list[str]] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)
    folds: list[tuple[int, int]] = field(default_factory=list)
    sidecars: list[str] = field(default_factory=list)
    leases: list[str] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    bytes: int = 0
    gone: list[list[int]] = field(default_factory=list)
    nothing_because: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False


def collect(
    run: RunDocuments,
    policy: RetentionPolicy | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    now: float | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> CollectionReport:
    """Remove what is not needed for the versions that the policy keeps, each of which can be rebuilt bit for bit.

    Args:
        policy: None for the defaults. dry_run: only say what would be removed; ages are then by this machine's clock.
        now: seconds since the epoch that ages count to; None asks the store's clock.
        monotonic: seconds that this machine's clock counts; a claim of the run is renewed by it.

    Raises:
        NotFoundError: nothing is published.
        ConflictError: another run took the URL, or another collection is under way, or has taken over from this one.
        DeltaSyncError: a manifest or a tag cannot be read, so that nobody knows what is needed; nothing was removed.
        StoreError: the store failed; what was removed until then was not needed.
    """
    collector = _Collector(run, policy or RetentionPolicy(), progress, monotonic)
    return collector.preview(now) if dry_run else collector.collect(now)


class _Collector:
    def __init__(
        self, run: RunDocuments, policy: RetentionPolicy, progress: Progress | None, monotonic: Callable[[], float]
    ) -> None:
        self._run, self._policy, self._progress, self._monotonic = run, policy, progress, monotonic
        self._lock = CollectionLock(run, monotonic)
        self._checked = -math.inf

    def preview(self, now: float | None) -> CollectionReport:
        """What would be removed."""
        record = self._run.retention()
        found = survey(self._run, record=record)
        at = time.time() if now is None else now
        planned = plan_collection(found, self._policy, at, record)
        doomed = [*_planned_removals(planned), *self._left_behind(found, at)]
        return self._report(found, planned, doomed, True)

    def collect(self, now: float | None) -> CollectionReport:
        """Remove it."""
        # Nothing is written into another run, or where nothing is published.
        check_current(self._run)
        self._run.head()
        try:
            claimed_at = self._lock.acquire()
            return self._collect(claimed_at if now is None else now)
        finally:
            self._lock.release()

    def _collect(self, at: float) -> CollectionReport:
        record = self._run.retention()
        found = survey(self._run, record=record)
        planned = plan_collection(found, self._policy, at, record)
        written = self._record(found, planned)
        self._announce(written)
        # Whoever sets a tag from here on reads what has just been written.
        found = survey(self._run, found, record)
        again = plan_collection(found, self._policy, at, record)
        again.documents = _both(planned.documents, again.documents)
        again.objects = _both(planned.objects, again.objects)
        again.sidecars = _both(planned.sidecars, again.sidecars)
        declared = self._record(found, again)
        if (declared.gone, declared.going, declared.kept) != (written.gone, written.going, written.kept):
            self._check_announced(written)
            self._announce(declared)
            written = declared
        doomed = [*_planned_removals(again), *self._left_behind(found, at)]
        removed = self._remove(doomed, found, written)
        self._finish(written)
        return self._report(found, again, removed, False)

    def _left_behind(self, found: RunGraph, at: float) -> list[ObjectInfo]:
        return left_behind(self._run, found.leases, at, self._policy.min_age)

    def _announce(self, record: Retention) -> None:
        self._lock.renew()
        self._run.bucket.put(RETENTION_KEY, record.to_bytes())

    def _check_announced(self, written: Retention) -> None:
        """Make sure that what this collection announced still stands.

        Raises:
            ConflictError: another collection has taken over. StoreError: the store failed.
        """
        self._lock.renew()
        # Where create-if-absent holds, the claim keeps other collections out, but for those of older releases.
        if self._run.bucket.exclusive and self._monotonic() < self._checked + CHECK_SECONDS:
            return
        self._checked = self._monotonic()
        if not reads(self._run.bucket, RETENTION_KEY, written.to_bytes()):
            raise ConflictError(
                f"{RETENTION_KEY} of {self._run.bucket.url} is not the one that this collection wrote: another one is "
                "under way. Nothing more is removed; start this one again when that is done"
            )

    def _record(self, found: RunGraph, planned: CollectionPlan) -> Retention:
        return Retention(
            run=self._run.info.run,
            gone=ranges(_gone(found, planned)),
            going=sorted(planned.documents),
            head=found.head,
            kept=ranges(reachable(found, planned) | planned.lost.keys()),
            created_at=timestamp(),
        )

    def _remove(self, doomed: list[ObjectInfo], found: RunGraph, written: Retention) -> list[ObjectInfo]:
        listed = {key for owner in (*found.chain, *found.sides) for key, _ in owner.refs}
        listed |= {key for owner in found.chain for key in owner.sidecars}
        removed: list[ObjectInfo] = []
        size = 0
        for number, info in enumerate(doomed, 1):
            # What no document lists may be of a version that was committed since.
            beside = not info.key.startswith((OBJECTS_PREFIX, SIDECARS_PREFIX))
            free = beside or info.key in listed or self._is_head(found.head)
            if free and self._unchanged(info):
                self._check_announced(written)
                self._run.bucket.delete(info.key)
                removed.append(info)
                size += info.bytes
            if self._progress is not None:
                self._progress(number, len(doomed), size)
        return removed

    def _is_head(self, version: int) -> bool:
        try:
            self._run.bucket.stat(version_key(version + 1))
        except NotFoundError:
            return True
        return False

    def _unchanged(self, info: ObjectInfo) -> bool:
        """Whether nobody has removed it, or put it again, since the bucket was looked at."""
        try:
            return self._run.bucket.stat(info.key) == info
        except NotFoundError:
            return False

    def _finish(self, written: Retention) -> None:
        """Take back the announcement of documents that are gone, so that they may be made again."""
        if written.going:
            self._check_announced(written)
            self._announce(written.model_copy(update={"going": []}))

    def _report(
        self, found: RunGraph, planned: CollectionPlan, removed: list[ObjectInfo], dry_run: bool
    ) -> CollectionReport:
        report = CollectionReport(found.head, planned.kept, planned.lost, dry_run=dry_run, notes=planned.notes)
        report.gone = ranges(_gone(found, planned))
        for info in removed:
            report.bytes += info.bytes
            version, fold = anchor_of_key(info.key), merged_delta_of_key(info.key)
            if version is not None:
                report.anchors.append(version)
            elif fold is not None:
                report.folds.append(fold)
            elif info.key.startswith(SIDECARS_PREFIX):
                report.sidecars.append(info.key)
            elif info.key.startswith(LEASES_PREFIX):
                report.leases.append(info.key)
            elif info.key.startswith(TURNS_PREFIX):
                report.turns.append(info.key)
            else:
                report.objects.append(info.key)
        if not (removed or _planned_removals(planned)):
            report.nothing_because = planned.staying
        return report


def _planned_removals(planned: CollectionPlan) -> list[ObjectInfo]:
    return [*planned.documents.values(), *planned.objects.values(), *planned.sidecars.values()]


def _gone(found: RunGraph, planned: CollectionPlan) -> set[int]:
    """Versions whose own deltas are not there, or will not be."""
    going = {owner.end for owner in found.chain if any(key in planned.objects for key, _ in owner.refs)}
    return going | planned.missing


def _both(one: dict[str, ObjectInfo], other: dict[str, ObjectInfo]) -> dict[str, ObjectInfo]:
    return {key: info for key, info in other.items() if one.get(key) == info}

"""``collect`` removes what no retained version needs.

A collection removes only objects, anchors, merged deltas, sidecars and the stale heartbeats of servers;
manifests, tags and claims stay. It can stop at any point, because of its order: it announces in retention.json what it
will remove, reads tags, heartbeats and the head again, removes anchors and merged deltas, then objects. A crash leaves
only garbage that the next collection finds.

Only one collection removes things at a time (``gc.lock``), because its announcement must stay valid until it ends: a
tag set in the meantime relies on it. Where the store lacks create-if-absent, a collection checks before each removal
that ``retention.json`` is still its own. Two races remain. A writer may
put an unlisted object again between the collection's last check of that object and its removal. Writers therefore put
an object left by a crashed writer again, which makes it young, instead of relying on it. And a collection that stands
still for longer than its claim (``CLAIM_SECONDS``), right between checks and removals, still makes these removals, at
most as many as it makes at once (``AT_ONCE``): objects that a collection with another policy has meanwhile decided to
keep. It stops before the next ones.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.bucket.base import exists, has_content
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.errors import ConflictError, LimitError, NotFoundError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.documents import (
    HEARTBEATS_PREFIX,
    RETENTION_KEY,
    Retention,
    anchor_of_key,
    merged_delta_of_key,
)
from vllm_delta_sync.format.manifest import SIDECARS_PREFIX, version_key
from vllm_delta_sync.maintenance.gc.contents import RunContents, check_current, survey
from vllm_delta_sync.maintenance.gc.lock import CollectionLock, uptime
from vllm_delta_sync.maintenance.gc.policy import CollectionPlan, RetentionPolicy, plan_collection, reachable
from vllm_delta_sync.maintenance.gc.record import ranges
from vllm_delta_sync.run.run_reader import RunReader

__all__ = ["CollectionReport", "RetentionPolicy", "collect"]

Progress = Callable[[int, int, int], None]
"""Called with keys processed, keys in total, and bytes removed so far."""

AT_ONCE = 16
"""Removals in flight. Each takes two requests or three, and a collection may remove 100,000 objects."""
BATCH = 4096
"""Removals prepared at a time: each takes 2 kB of memory."""
SHOWN_SECONDS = 24 * 3600.0
"""Seconds that a heartbeat stays after it expired, so that operators see which servers ended."""


@dataclass
class CollectionReport:
    """What a collection did, or would do.

    Attributes:
        head: newest version. kept: version → reasons. lost: versions to keep that cannot be rebuilt, → reasons; see
            `delta-sync repair`. Nothing that may belong to them is removed.
        objects, sidecars, heartbeats: removed keys. anchors: removed versions.
        merged_deltas: (first, last) of those removed.
        bytes: total size of what was removed.
        gone: closed ranges of versions whose own deltas are no longer stored.
        nothing_because: if nothing was removed, how many objects stay for which reason.
        notes: for the operator. dry_run: True if nothing was removed.
    """

    head: int
    kept: dict[int, list[str]] = field(default_factory=dict)
    lost: dict[int, list[str]] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    anchors: list[int] = field(default_factory=list)
    merged_deltas: list[tuple[int, int]] = field(default_factory=list)
    sidecars: list[str] = field(default_factory=list)
    heartbeats: list[str] = field(default_factory=list)
    bytes: int = 0
    gone: list[list[int]] = field(default_factory=list)
    nothing_because: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False


def collect(
    run: RunReader,
    policy: RetentionPolicy | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    now: float | None = None,
    monotonic: Callable[[], float] = uptime,
) -> CollectionReport:
    """Remove what the versions that the policy keeps do not need. Each kept version can be rebuilt bit for bit.

    Args:
        policy: None for the defaults.
        dry_run: only report what would be removed; ages are then measured by this machine's clock.
        now: the time for ages, in seconds since the epoch; None means by the store's clock.
        monotonic: this machine's clock in seconds; decides when to renew the claim on the run.

    Raises:
        NotFoundError: nothing is published.
        ConflictError: another run took the URL, or another collection is running or has taken over from this one.
        DeltaSyncError: a manifest or a tag cannot be read, so what it needs is unknown; nothing was removed.
        StoreError: the store failed; what was removed until then was not needed.
    """
    collector = _Collector(run, policy or RetentionPolicy(), progress, monotonic)
    return collector.preview(now) if dry_run else collector.collect(now)


class _Collector:
    def __init__(
        self, run: RunReader, policy: RetentionPolicy, progress: Progress | None, monotonic: Callable[[], float]
    ) -> None:
        self._run, self._policy, self._progress = run, policy, progress
        self._lock = CollectionLock(run, monotonic)

    def preview(self, now: float | None) -> CollectionReport:
        """Report what ``collect`` would remove."""
        record = self._run.retention()
        found = survey(self._run, record=record)
        at = time.time() if now is None else now
        planned = self._plan(found, at, record)
        self._record(found, planned)
        removals = [info for step in self._removals(found, planned, at) for info in step]
        return self._report(found, planned, removals, True)

    def collect(self, now: float | None) -> CollectionReport:
        """Claim the run, remove, and release the claim."""
        # Before the first write: is this still the same run, and is anything published?
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
        planned = self._plan(found, at, record)
        written = self._record(found, planned)
        self._announce(written)
        # Every tag set from here on is checked against what was just written.
        found = survey(self._run, found, record)
        again = self._plan(found, at, record)
        again.documents = _in_both(planned.documents, again.documents)
        again.objects = _in_both(planned.objects, again.objects)
        again.sidecars = _in_both(planned.sidecars, again.sidecars)
        declared = self._record(found, again)
        if (declared.gone, declared.going, declared.kept) != (written.gone, written.going, written.kept):
            self._check_announced(written)
            self._announce(declared)
            written = declared
        removed = self._remove(self._removals(found, again, at), found, written)
        self._finish(written)
        return self._report(found, again, removed, False)

    def _plan(self, found: RunContents, at: float, record: Retention | None) -> CollectionPlan:
        """Return what to remove, of which retention.json can announce all documents."""
        planned = plan_collection(found, self._policy, at, record)
        planned.left = set(sorted(planned.documents)[limits.MAX_RANGES :])
        if planned.left:
            for document in found.documents():
                if document.key in planned.left:
                    del planned.documents[document.key]
                    for key, _ in document.refs:
                        planned.objects.pop(key, None)
            planned.notes.append(f"{len(planned.left):,} anchors and merged deltas are left for the next collection")
        return planned

    def _removals(self, found: RunContents, planned: CollectionPlan, now: float) -> tuple[list[ObjectInfo], ...]:
        """Return what to remove, in three steps: documents; what documents list, and heartbeats; other objects.

        Of the heartbeats these are those that expired a day ago or more, and at least ``min_age`` ago.
        """
        stays = max(self._policy.min_age, SHOWN_SECONDS)
        stale = [held.info for held in found.heartbeats.stored if now - held.expires >= stays]
        listed = {key for edge in (*found.history, *found.standalone) for key, _ in edge.refs}
        listed |= {key for edge in found.history for key in edge.sidecars}
        data = [*planned.objects.values(), *planned.sidecars.values()]
        return (
            [*planned.documents.values()],
            [*(info for info in data if info.key in listed), *stale],
            [info for info in data if info.key not in listed],
        )

    def _announce(self, record: Retention) -> None:
        self._lock.renew()
        self._run.bucket.put(RETENTION_KEY, record.to_bytes())

    def _check_announced(self, written: Retention) -> None:
        """Check that this collection's announcement is still in place.

        Raises:
            ConflictError: another collection has taken over. StoreError: the store failed.
        """
        self._lock.renew()
        # With create-if-absent, the claim keeps out all other collections.
        bucket = self._run.bucket
        if not bucket.supports_conditional_put and not has_content(bucket, RETENTION_KEY, written.to_bytes()):
            raise ConflictError(
                f"{RETENTION_KEY} of {bucket.url} was replaced, so another collection is running; this one "
                "stopped removing: start it again when the other is done"
            )

    def _record(self, found: RunContents, planned: CollectionPlan) -> Retention:
        gone, kept = ranges(_gone(found, planned)), ranges(reachable(found, planned) | planned.lost.keys())
        most = max(len(gone), len(kept))
        if most > limits.MAX_RANGES:
            raise LimitError(
                f"{most:,} separate ranges of versions would be left, and {RETENTION_KEY} lists at most "
                f"{limits.MAX_RANGES:,}; keep fewer (a larger --keep-every, or none)"
            )
        return Retention(
            run=self._run.info.run,
            gone=gone,
            going=sorted(planned.documents),
            head=found.head,
            kept=kept,
            created_at=timestamp(),
        )

    def _remove(self, steps: tuple[list[ObjectInfo], ...], found: RunContents, written: Retention) -> list[ObjectInfo]:
        removed: list[ObjectInfo] = []
        size = 0

        def remove(info: ObjectInfo) -> bool:
            if not self._is_unchanged(info):
                return False
            self._check_announced(written)
            self._run.bucket.delete(info.key)
            return True

        def remove_unlisted(info: ObjectInfo) -> bool:
            return not exists(self._run.bucket, version_key(found.head + 1)) and remove(info)

        done, total = 0, sum(map(len, steps))
        # An unlisted object may belong to a version that is committed meanwhile: one at a time, so that none is looked
        # at before the removal of another has ended.
        for step, call, at_once in zip(steps, (remove, remove, remove_unlisted), (AT_ONCE, AT_ONCE, 1), strict=True):
            for start in range(0, len(step), BATCH):
                batch = step[start : start + BATCH]
                for info, gone in zip(batch, in_parallel(call, batch, workers=at_once), strict=True):
                    done += 1
                    if gone:
                        removed.append(info)
                        size += info.bytes
                    if self._progress is not None:
                        self._progress(done, total, size)
        return removed

    def _is_unchanged(self, info: ObjectInfo) -> bool:
        """Return whether the object was neither removed nor put again since the bucket was listed."""
        try:
            return self._run.bucket.stat(info.key) == info
        except NotFoundError:
            return False

    def _finish(self, written: Retention) -> None:
        """Withdraw the announcement of the removed documents, so that they may be made again."""
        if written.going:
            self._check_announced(written)
            self._announce(written.model_copy(update={"going": []}))

    def _report(
        self, found: RunContents, planned: CollectionPlan, removed: list[ObjectInfo], dry_run: bool
    ) -> CollectionReport:
        report = CollectionReport(found.head, planned.kept, planned.lost, dry_run=dry_run, notes=planned.notes)
        report.gone = ranges(_gone(found, planned))
        for info in removed:
            report.bytes += info.bytes
            version, merged = anchor_of_key(info.key), merged_delta_of_key(info.key)
            if version is not None:
                report.anchors.append(version)
            elif merged is not None:
                report.merged_deltas.append(merged)
            elif info.key.startswith(SIDECARS_PREFIX):
                report.sidecars.append(info.key)
            elif info.key.startswith(HEARTBEATS_PREFIX):
                report.heartbeats.append(info.key)
            else:
                report.objects.append(info.key)
        if not (removed or planned.documents or planned.objects or planned.sidecars):
            report.nothing_because = planned.staying
        return report


def _gone(found: RunContents, planned: CollectionPlan) -> set[int]:
    """Return the versions whose own deltas are missing or about to be removed."""
    going = {edge.end for edge in found.history if any(key in planned.objects for key, _ in edge.refs)}
    return going | planned.missing


def _in_both(one: dict[str, ObjectInfo], other: dict[str, ObjectInfo]) -> dict[str, ObjectInfo]:
    return {key: info for key, info in other.items() if one.get(key) == info}

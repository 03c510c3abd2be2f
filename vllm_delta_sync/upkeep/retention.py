"""Retention: remove what no version that is kept needs.

Only objects, anchors, folded ranges and sidecars are ever removed of a run; manifests, tags and claims stay. The order
makes it safe to stop anywhere: first retention.json says what will go, then tags, leases and the head are looked at
again, then go the documents beside the chain, then objects. What is left after a crash is garbage that the next
collection finds.

Two collectors do no harm to each other: ways are chosen so that both choose the same (``retention_survey``), and
neither removes anything because of what the other cannot know yet (``min_age``). One race is left: an object that
nobody lists, put again by a writer between the last look at it and its removal, a moment later. Writers that find a
crashed one's object therefore put it again, which makes it young, rather than rely on it.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.chain.documents import RunDocuments
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.upkeep.retention_fleet import left_behind
from vllm_delta_sync.upkeep.retention_plan import Planned, Policy, plan_collection, reachable
from vllm_delta_sync.upkeep.retention_record import empty_record, ranges
from vllm_delta_sync.upkeep.retention_survey import Survey, survey
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire.documents import RETENTION_KEY, Retention
from vllm_delta_sync.wire.manifest import OBJECTS_PREFIX, SIDECARS_PREFIX, timestamp, version_key

__all__ = ["Policy", "Report", "collect"]

Progress = Callable[[int, int, int], None]
"""Called with keys looked at for removal, keys in all, and bytes removed so far."""


@dataclass
class Report:
    """What a collection did, or would do.

    Attributes:
        head: newest version. kept: version → why. lost: wanted, but cannot be rebuilt: see `delta-sync repair`;
            nothing that may belong to them is removed.
        objects, anchors, folds: what was removed; sidecars, leases, turns: keys of those that were.
        bytes: their size in all.
        gone: closed ranges of versions whose own deltas are not there any more.
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
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False


def collect(
    run: RunDocuments,
    policy: Policy | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    now: float | None = None,
) -> Report:
    """Remove what is not needed for the versions that the policy keeps, each of which can be rebuilt bit for bit.

    Args:
        policy: None for the defaults. dry_run: only say what would be removed; ages are then by this machine's clock.
        now: seconds since the epoch that ages count to; None asks the store's clock.

    Raises:
        NotFoundError: nothing is published. ConflictError: another run took the URL.
        DeltaSyncError: a manifest or a tag cannot be read, so that nobody knows what is needed; nothing was removed.
        StoreError: the store failed; what was removed until then was not needed.
    """
    return _Collector(run, policy or Policy(), progress).collect(dry_run, now)


class _Collector:
    def __init__(self, run: RunDocuments, policy: Policy, progress: Progress | None) -> None:
        self._run, self._policy, self._progress = run, policy, progress

    def collect(self, dry_run: bool, now: float | None) -> Report:
        record = self._run.retention()
        found = survey(self._run, record=record)
        if dry_run:
            at = time.time() if now is None else now
            planned = plan_collection(found, self._policy, at, record)
            doomed = [*_planned_removals(planned), *self._left_behind(found, at)]
            return self._report(found, planned, doomed, True)
        at = self._store_time() if now is None else now
        planned = plan_collection(found, self._policy, at, record)
        written = self._record(found, planned)
        self._run.bucket.put(RETENTION_KEY, written.to_bytes())
        # Whoever sets a tag from here on reads what has just been written.
        found = survey(self._run, found, record)
        again = plan_collection(found, self._policy, at, record)
        again.documents = _both(planned.documents, again.documents)
        again.objects = _both(planned.objects, again.objects)
        again.sidecars = _both(planned.sidecars, again.sidecars)
        declared = self._record(found, again)
        if (declared.gone, declared.going, declared.kept) != (written.gone, written.going, written.kept):
            self._run.bucket.put(RETENTION_KEY, declared.to_bytes())
            written = declared
        doomed = [*_planned_removals(again), *self._left_behind(found, at)]
        removed = self._remove(doomed, found)
        self._finish(written)
        return self._report(found, again, removed, False)

    def _left_behind(self, found: Survey, at: float) -> list[ObjectInfo]:
        return left_behind(self._run, found.leases, at, self._policy.min_age)

    def _store_time(self) -> float:
        """Now, by the clock that the ages of objects are by."""
        record = self._run.retention() or empty_record(self._run)
        self._run.bucket.put(RETENTION_KEY, record.to_bytes())
        return self._run.bucket.stat(RETENTION_KEY).modified

    def _record(self, found: Survey, planned: Planned) -> Retention:
        return Retention(
            run=self._run.info.run,
            gone=ranges(_gone(found, planned)),
            going=sorted(planned.documents),
            head=found.head,
            kept=ranges(reachable(found, planned) | planned.lost.keys()),
            created_at=timestamp(),
        )

    def _remove(self, doomed: list[ObjectInfo], found: Survey) -> list[ObjectInfo]:
        listed = {key for owner in (*found.chain, *found.sides) for key, _ in owner.refs}
        listed |= {key for owner in found.chain for key in owner.sidecars}
        removed: list[ObjectInfo] = []
        size = 0
        for number, info in enumerate(doomed, 1):
            # What no document lists may be of a version that was committed since.
            beside = not info.key.startswith((OBJECTS_PREFIX, SIDECARS_PREFIX))
            free = beside or info.key in listed or self._is_head(found.head)
            if free and self._unchanged(info):
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
        if not written.going:
            return
        found = self._run.retention()
        if found is not None and found.to_bytes() == written.to_bytes():
            done = written.model_copy(update={"going": []})
            self._run.bucket.put(RETENTION_KEY, done.to_bytes())

    def _report(self, found: Survey, planned: Planned, removed: Iterable[ObjectInfo], dry_run: bool) -> Report:
        report = Report(found.head, planned.kept, planned.lost, dry_run=dry_run, notes=planned.notes)
        report.gone = ranges(_gone(found, planned))
        for info in removed:
            report.bytes += info.bytes
            version, fold = side.anchor_of_key(info.key), side.fold_of_key(info.key)
            if version is not None:
                report.anchors.append(version)
            elif fold is not None:
                report.folds.append(fold)
            elif info.key.startswith(SIDECARS_PREFIX):
                report.sidecars.append(info.key)
            elif info.key.startswith(side.LEASES_PREFIX):
                report.leases.append(info.key)
            elif info.key.startswith(side.TURNS_PREFIX):
                report.turns.append(info.key)
            else:
                report.objects.append(info.key)
        return report


def _planned_removals(planned: Planned) -> list[ObjectInfo]:
    return [*planned.documents.values(), *planned.objects.values(), *planned.sidecars.values()]


def _gone(found: Survey, planned: Planned) -> set[int]:
    """Versions whose own deltas are not there, or will not be."""
    going = {owner.end for owner in found.chain if any(key in planned.objects for key, _ in owner.refs)}
    return going | planned.missing


def _both(one: dict[str, ObjectInfo], other: dict[str, ObjectInfo]) -> dict[str, ObjectInfo]:
    return {key: info for key, info in other.items() if one.get(key) == info}

"""``plan_collection`` decides which versions a collection keeps and what they need. Pure: reads no bucket."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.documents import Heartbeat, Retention
from vllm_delta_sync.maintenance.gc.contents import Listed, RunContents, graph_of
from vllm_delta_sync.maintenance.gc.record import spelled
from vllm_delta_sync.maintenance.tags import rebase_epoch
from vllm_delta_sync.run.graph import ROOT, Ways

DAY = 24 * 3600.0


@dataclass(frozen=True)
class RetentionPolicy:
    """What to keep. Always kept are the head, the newest version that is not quarantined, the newest that is exact as
    well, and everything put less than ``min_age`` ago.

    Attributes:
        keep_last: number of newest versions to keep, with all their deltas.
        keep_every: keep versions, other than 0, whose number this divides; None for none.
        keep_tagged: keep tagged versions. Versions that other runs branch from, or that the publisher rebased to, are
            always kept.
        keep_seconds: keep versions published less than this many seconds ago; None for none.
        min_age: seconds. Must be longer than an upload, a compaction, a read without a heartbeat, and the lag of the
            store's listings.
        longest_pin: seconds. A heartbeat keeps no version published longer ago: anyone may write heartbeats, and a
            forged one must not keep a version forever. A tag does.

    Raises:
        UsageError: a number is out of range.
    """

    keep_last: int = 100
    keep_every: int | None = None
    keep_tagged: bool = True
    keep_seconds: float | None = None
    min_age: float = 3600.0
    longest_pin: float = 7 * DAY

    def __post_init__(self) -> None:
        for name, lowest in (("keep_last", 1), ("keep_every", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < lowest):
                raise UsageError(f"{name} is {value!r}; give a whole number of at least {lowest}")
        for name in ("keep_seconds", "min_age", "longest_pin"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise UsageError(f"{name} is {value!r}; give a number of seconds, 0 or more")


@dataclass
class CollectionPlan:
    """What a collection would do.

    Attributes:
        kept: version → reasons; each can be rebuilt now and afterwards.
        lost: version → reasons; wanted, but cannot be rebuilt now.
        documents, objects, sidecars: to remove, by key. left: documents for the next collection to remove.
        missing: versions that lack objects and that no wanted version needs.
        notes: for the operator. staying: one line for each reason why stored objects stay.
    """

    kept: dict[int, list[str]] = field(default_factory=dict)
    lost: dict[int, list[str]] = field(default_factory=dict)
    staying: list[str] = field(default_factory=list)
    documents: dict[str, ObjectInfo] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    sidecars: dict[str, ObjectInfo] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def plan_collection(
    contents: RunContents, policy: RetentionPolicy, now: float, record: Retention | None
) -> CollectionPlan:
    """Decide what to keep.

    Args:
        now: seconds since the epoch, by the store's clock. record: retention.json of the last collection.
    """
    return _Planner(contents, policy, now, record).run()


def reachable(found: RunContents, planned: CollectionPlan) -> set[int]:
    """Return the versions that can be rebuilt after the planned removals."""
    removed = planned.documents.keys() | planned.left
    stays = [
        document
        for document in found.documents()
        if document.key not in removed and not any(key in planned.objects for key, _ in document.refs)
    ]
    return set(graph_of(stays).ways().last)


class _Planner:
    def __init__(self, contents: RunContents, policy: RetentionPolicy, now: float, record: Retention | None) -> None:
        self._contents, self._policy, self._now, self._record = contents, policy, now, record
        self._documents = {item.key: item for item in contents.documents()}
        self._graph = graph_of(self._documents.values(), self._is_unsettled)
        self._keep: dict[str, Listed] = {}
        self._heartbeats = contents.heartbeats.live(now)
        self._planned = CollectionPlan(notes=list(contents.notes))

    def run(self) -> CollectionPlan:
        planned = self._planned
        self._keep_window()
        ways = self._graph.ways()
        abandoned: list[int] = []
        newest = (self._contents.head, self._contents.sound, self._contents.exact)
        for version, reasons in self._wanted().items():
            if version in ways:
                planned.kept[version] = reasons
            elif version not in newest and self._record is not None and self._record.gave_up(version):
                abandoned.append(version)
            else:
                planned.lost[version] = reasons
        self._keep_ways(ways, planned.kept)
        if abandoned:
            planned.notes.append(f"not kept, as an earlier collection gave them up: versions {spelled(abandoned)}")
        self._keep_paths_onward()
        self._keep_anchors()
        self._keep_around_lost()
        self._sweep()
        return planned

    # Which versions to keep

    def _wanted(self) -> dict[int, list[str]]:
        contents, policy = self._contents, self._policy
        found: dict[int, dict[str, None]] = {contents.head: {"head": None}}
        if contents.sound is not None and contents.sound != contents.head:
            found[contents.sound] = {"sound": None}
        if contents.exact is not None and contents.exact not in found:
            found[contents.exact] = {"exact": None}

        def want(version: int, reason: str) -> None:
            if version <= contents.head:
                found.setdefault(version, {})[reason] = None

        for version in range(max(0, contents.head - policy.keep_last + 1), contents.head):
            want(version, "last")
        if policy.keep_every is not None:
            for version in range(policy.keep_every, contents.head + 1, policy.keep_every):
                want(version, "every")
        if policy.keep_seconds is not None:
            for item in contents.history:
                if self._age(item.info) < policy.keep_seconds:
                    want(item.end, "recent")
        for name, tag in contents.tags.items():
            # A version that the publisher rebased to is always kept: the next version builds on it.
            if tag.branch is not None or policy.keep_tagged or rebase_epoch(name) is not None:
                want(tag.version, f"branch {tag.branch}" if tag.branch is not None else f"tag {name}")
        for heartbeat in self._heartbeats:
            for version in self._versions_held_by(heartbeat):
                want(version, f"heartbeat {heartbeat.receiver}")
        return {version: list(found[version]) for version in sorted(found) if contents.history[version].lost is None}

    def _versions_held_by(self, heartbeat: Heartbeat) -> list[int]:
        named = [version for version in (heartbeat.served, heartbeat.target, *heartbeat.pins) if version is not None]
        history = self._contents.history
        return [
            version
            for version in named
            if version < len(history) and self._age(history[version].info) < self._policy.longest_pin
        ]

    # What these versions need

    def _age(self, info: ObjectInfo) -> float:
        return self._now - info.modified

    def _is_young(self, info: ObjectInfo) -> bool:
        return self._age(info) < self._policy.min_age

    def _is_unsettled(self, item: Listed) -> bool:
        """Return whether another collection may not know this document, so that nothing may be removed on its account.

        Every collection that sees the head knows the versions of the history, unless their objects were put again.
        """
        newest = self._contents.newest(item)
        in_history = item.end <= self._contents.head and item is self._contents.history[item.end]
        return self._now - newest < self._policy.min_age and not (in_history and self._is_young(item.info))

    def _keep_all(self, documents: Iterable[Listed]) -> None:
        self._keep |= {item.key: item for item in documents}

    def _keep_ways(self, ways: Ways, versions: Iterable[int | None]) -> None:
        """Keep the documents on the ways to or from those of the versions that are connected."""
        connected = (version for version in versions if version is not None and version in ways)
        self._keep_all(self._documents[move.edge.key] for move in ways.moves_to(connected))

    def _keep_window(self) -> None:
        """Keep all deltas of the last versions, and merged deltas among them, for servers that are a little behind."""
        begin = self._contents.head - self._policy.keep_last
        self._keep_all(self._contents.history[max(0, begin + 1) :])
        self._keep_all(item for item in self._contents.standalone if item.start >= max(0, begin))

    def _keep_paths_onward(self) -> None:
        """Keep the paths to the head from live receivers, and from the newest sound and exact ones if they differ."""
        head, sound, exact = self._contents.head, self._contents.sound, self._contents.exact
        served: set[int | None] = {
            heartbeat.served for heartbeat in self._heartbeats if heartbeat.served in self._versions_held_by(heartbeat)
        }
        served |= {sound, exact} - {head}
        for target in {head, sound, exact}:
            if target is not None and served - {None}:
                self._keep_ways(self._graph.ways_to(target), served)

    def _keep_anchors(self) -> None:
        """Keep milestones' anchors, and the newest anchors leading to the head, sound and exact version, for servers
        without the base."""
        anchors = [item for item in self._documents.values() if item.start == ROOT and item.refs]
        milestones = {tag.version for tag in self._contents.tags.values() if tag.milestone}
        self._keep_all(item for item in anchors if item.end in milestones & self._planned.kept.keys())
        for target in {self._contents.head, self._contents.sound, self._contents.exact}:
            if target is not None:
                self._keep_anchor_of(target, anchors)

    def _keep_anchor_of(self, target: int, anchors: list[Listed]) -> None:
        onward = self._graph.ways_to(target, revert=False)
        leading = [item for item in anchors if item.end in onward]
        settled = [item for item in leading if not self._is_unsettled(item)]
        if leading:
            newest = max(settled or leading, key=lambda item: (item.end, -item.bytes, item.key))
            self._keep_all([newest])
            self._keep_ways(onward, [newest.end])

    def _keep_around_lost(self) -> None:
        """Keep everything that a wanted but lost version may need once it is repaired."""
        if self._planned.lost:
            last = max(self._planned.lost)
            self._keep_all(self._contents.history[: last + 1])
            standalone = self._contents.standalone
            self._keep_all(item for item in standalone if (item.end if item.start == ROOT else item.start) <= last)

    # What to remove

    def _sweep(self) -> None:
        contents, planned = self._contents, self._planned
        wanted = _keys(self._keep.values())
        young = [item for item in contents.history if self._is_young(item.info)]
        young += [item for item in contents.standalone if self._now - contents.newest(item) < self._policy.min_age]
        self._keep_all(young)
        planned.documents = {item.key: item.info for item in contents.standalone if item.key not in self._keep}
        needed = _keys((*self._keep.values(), *contents.unrelated))
        listed = _keys((*contents.history, *contents.standalone))
        planned.objects = {
            key: info
            for key, info in contents.objects.items()
            # An unreadable document may list an object that seems unlisted.
            if key not in needed and not self._is_young(info) and (key in listed or not contents.unreadable)
        }
        # Sidecars go with their version, when nothing leads to it any more.
        readable = reachable(contents, planned) | planned.lost.keys()
        staying = [item for item in contents.history if item.end in readable or item.key in self._keep]
        named = {key for item in staying for key in item.sidecars}
        planned.sidecars = {
            key: info for key, info in contents.sidecars.items() if key not in named and not self._is_young(info)
        }
        last = max(planned.lost, default=-1)
        planned.missing = {
            item.end
            for item in contents.history
            if not contents.is_complete(item)
            and (item.end > last or (self._record is not None and self._record.is_gone(item.end)))
        }
        planned.staying = self._staying(wanted, _keys(young))

    def _staying(self, wanted: set[str], young: set[str]) -> list[str]:
        """Return how many objects stay for which reason, one line each.

        Args:
            wanted: keys that kept versions need, or servers on their way to them. young: keys of young documents.
        """
        left = [info for key, info in self._contents.objects.items() if key not in self._planned.objects]
        others = [info for info in left if info.key not in wanted]
        fresh = [info for info in others if info.key in young or self._is_young(info)]
        lines = []
        if len(left) > len(others):
            lines.append(
                f"{len(left) - len(others)} objects are needed by versions to keep, or by servers on their way"
            )
        if fresh:
            age = self._policy.min_age
            wait = math.ceil(max(0, age - max(map(self._age, fresh))))
            lines.append(
                f"{len(fresh)} objects were put less than {age:g} s ago (--min-age); the first can be removed in "
                f"{wait} s"
            )
        if len(others) > len(fresh):
            lines.append(f"{len(others) - len(fresh)} objects may belong to documents that are damaged or do not fit")
        removed = sorted(version for version in self._planned.missing if self._record and self._record.is_gone(version))
        if removed:
            lines.append(f"earlier collections removed the deltas of versions {spelled(removed)}")
        return lines or ["the run has no objects"]


def _keys(documents: Iterable[Listed]) -> set[str]:
    return {key for item in documents for key, _ in item.refs}

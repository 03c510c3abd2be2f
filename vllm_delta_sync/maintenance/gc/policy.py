"""``plan_collection`` decides which versions a collection keeps and what they need. Pure: reads a graph, no bucket."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.documents import Heartbeat, Retention
from vllm_delta_sync.maintenance.gc.graph import NOTHING, Edge, RunGraph, paths_from, paths_to
from vllm_delta_sync.maintenance.gc.record import spelled
from vllm_delta_sync.maintenance.tags import rebase_epoch

DAY = 24 * 3600.0


@dataclass(frozen=True)
class RetentionPolicy:
    """What to keep. The head, the newest version that is not quarantined, and everything put less than ``min_age`` ago
    are always kept.

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
        documents, objects, sidecars: to remove, by key.
        missing: versions that lack objects and that no wanted version needs.
        notes: for the operator. staying: one line for each reason why stored objects stay.
    """

    kept: dict[int, list[str]] = field(default_factory=dict)
    lost: dict[int, list[str]] = field(default_factory=dict)
    staying: list[str] = field(default_factory=list)
    documents: dict[str, ObjectInfo] = field(default_factory=dict)
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    sidecars: dict[str, ObjectInfo] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def plan_collection(graph: RunGraph, policy: RetentionPolicy, now: float, record: Retention | None) -> CollectionPlan:
    """Decide what to keep.

    Args:
        now: seconds since the epoch, by the store's clock. record: retention.json of the last collection.
    """
    return _Planner(graph, policy, now, record).run()


def reachable(graph: RunGraph, planned: CollectionPlan) -> set[int]:
    """Return the versions that can be rebuilt after the planned removals."""
    left = [
        edge
        for edge in graph.edges()
        if edge.key not in planned.documents and not any(key in planned.objects for key, _ in edge.refs)
    ]
    return set(paths_from(left, NOTHING, lambda edge: False).last)


class _Planner:
    def __init__(self, graph: RunGraph, policy: RetentionPolicy, now: float, record: Retention | None) -> None:
        self._graph, self._policy, self._now, self._record = graph, policy, now, record
        self._edges = graph.edges()
        self._keep: dict[str, Edge] = {}
        self._why: dict[str, str] = {}
        self._heartbeats = graph.heartbeats.live(now)
        self._planned = CollectionPlan(notes=list(graph.notes))

    def run(self) -> CollectionPlan:
        planned = self._planned
        self._keep_window()
        paths = paths_from(self._edges, NOTHING, self._is_unsettled)
        abandoned: list[int] = []
        for version, reasons in self._wanted().items():
            if version in paths:
                planned.kept[version] = reasons
                self._keep_all(paths.path_to(version), reasons[-1])
            elif self._is_abandoned(version):
                abandoned.append(version)
            else:
                planned.lost[version] = reasons
        if abandoned:
            planned.notes.append(f"not kept, as an earlier collection gave them up: versions {spelled(abandoned)}")
        self._keep_paths_onward()
        self._keep_anchors()
        self._keep_around_lost()
        self._sweep()
        planned.staying = self._staying()
        return planned

    # Which versions to keep

    def _wanted(self) -> dict[int, list[str]]:
        graph, policy = self._graph, self._policy
        found: dict[int, dict[str, None]] = {graph.head: {"head": None}}
        if graph.sound is not None and graph.sound != graph.head:
            found[graph.sound] = {"sound": None}
        if graph.exact is not None and graph.exact not in found:
            found[graph.exact] = {"exact": None}

        def want(version: int, reason: str) -> None:
            if version <= graph.head:
                found.setdefault(version, {})[reason] = None

        for version in range(max(0, graph.head - policy.keep_last + 1), graph.head):
            want(version, "last")
        if policy.keep_every is not None:
            for version in range(policy.keep_every, graph.head + 1, policy.keep_every):
                want(version, "every")
        if policy.keep_seconds is not None:
            for edge in graph.history:
                if self._age(edge.info) < policy.keep_seconds:
                    want(edge.end, "recent")
        for name, tag in graph.tags.items():
            # A version that the publisher rebased to is always kept: the next version builds on it.
            if tag.branch is not None or policy.keep_tagged or rebase_epoch(name) is not None:
                want(tag.version, f"branch {tag.branch}" if tag.branch is not None else f"tag {name}")
        for heartbeat in self._heartbeats:
            for version in self._versions_held_by(heartbeat):
                want(version, f"heartbeat {heartbeat.receiver}")
        return {version: list(found[version]) for version in sorted(found)}

    def _versions_held_by(self, heartbeat: Heartbeat) -> list[int]:
        named = [version for version in (heartbeat.served, heartbeat.target, *heartbeat.pins) if version is not None]
        history = self._graph.history
        return [
            version
            for version in named
            if version < len(history) and self._age(history[version].info) < self._policy.longest_pin
        ]

    def _is_abandoned(self, version: int) -> bool:
        record = self._record
        if record is None or version in (self._graph.head, self._graph.sound, self._graph.exact):
            return False
        if record.head is not None:
            return record.gave_up(version)
        # Written by an older release, without the kept versions: assume a gap on the path to the version is intended.
        while version != NOTHING:
            if record.is_gone(version):
                return True
            version = self._graph.history[version].start
        return False

    # What these versions need

    def _age(self, info: ObjectInfo) -> float:
        return self._now - info.modified

    def _is_young(self, info: ObjectInfo) -> bool:
        return self._age(info) < self._policy.min_age

    def _is_unsettled(self, edge: Edge) -> bool:
        """Return whether another collection may not know this document, so that nothing may be removed on its account.

        Every collection that sees the head knows the versions of the history, unless their objects were put again.
        """
        newest = self._graph.newest(edge)
        in_history = edge.end <= self._graph.head and edge is self._graph.history[edge.end]
        return self._now - newest < self._policy.min_age and not (in_history and self._is_young(edge.info))

    def _keep_all(self, edges: Iterable[Edge], why: str) -> None:
        for edge in edges:
            self._keep[edge.key] = edge
            self._why.setdefault(edge.key, why)

    def _keep_window(self) -> None:
        """Keep all deltas of the last versions, and merged deltas among them, for servers that are a little behind."""
        begin = self._graph.head - self._policy.keep_last
        self._keep_all(self._graph.history[max(0, begin + 1) :], "last")
        self._keep_all((edge for edge in self._graph.standalone if edge.used and edge.start >= max(0, begin)), "last")

    def _keep_paths_onward(self) -> None:
        """Keep the paths to the head from live receivers, and from the newest sound and exact ones if they differ."""
        head, sound, exact = self._graph.head, self._graph.sound, self._graph.exact
        served: set[int | None] = {
            heartbeat.served for heartbeat in self._heartbeats if heartbeat.served in self._versions_held_by(heartbeat)
        }
        served |= {sound, exact} - {head}
        for target in {head, sound, exact}:
            if target is not None and served - {None}:
                paths = paths_to(self._edges, target, self._is_unsettled)
                for version in served:
                    if version is not None:
                        self._keep_all(paths.path_to(version), "onward")

    def _keep_anchors(self) -> None:
        """Keep milestones' anchors, and the newest anchors leading to the head, sound and exact version, for servers
        without the base."""
        anchors = [edge for edge in self._edges if edge.start == NOTHING and edge.refs]
        milestones = {tag.version for tag in self._graph.tags.values() if tag.milestone}
        self._keep_all((edge for edge in anchors if edge.end in milestones & self._planned.kept.keys()), "milestone")
        for target in {self._graph.head, self._graph.sound, self._graph.exact}:
            if target is not None:
                self._keep_anchor_of(target, anchors)

    def _keep_anchor_of(self, target: int, anchors: list[Edge]) -> None:
        onward = paths_to(self._edges, target, self._is_unsettled, back=False)
        leading = [edge for edge in anchors if edge.end in onward or edge.end == target]
        settled = [edge for edge in leading if not self._is_unsettled(edge)]
        if leading:
            newest = max(settled or leading, key=lambda edge: (edge.end, -edge.bytes, edge.key))
            self._keep_all([newest, *onward.path_to(newest.end)], "anchor")

    def _keep_around_lost(self) -> None:
        """Keep everything that a wanted but lost version may need once it is repaired."""
        if self._planned.lost:
            last = max(self._planned.lost)
            self._keep_all(self._graph.history[: last + 1], "lost")
            standalone = self._graph.standalone
            self._keep_all(
                (edge for edge in standalone if (edge.end if edge.start == NOTHING else edge.start) <= last), "lost"
            )

    # What to remove

    def _sweep(self) -> None:
        graph, planned = self._graph, self._planned
        for edge in graph.history:
            if self._is_young(edge.info):
                self._keep[edge.key] = edge
        for edge in graph.standalone:
            if self._now - graph.newest(edge) < self._policy.min_age:
                self._keep[edge.key] = edge
        planned.documents = {edge.key: edge.info for edge in graph.standalone if edge.key not in self._keep}
        needed = {key for edge in (*self._keep.values(), *graph.unrelated) for key, _ in edge.refs}
        listed = {key for edge in (*graph.history, *graph.standalone) for key, _ in edge.refs}
        planned.objects = {
            key: info
            for key, info in graph.objects.items()
            # An unreadable document may list an object that seems unlisted.
            if key not in needed and not self._is_young(info) and (key in listed or not graph.unreadable)
        }
        # Sidecars go with their version, when nothing leads to it any more.
        readable = reachable(graph, planned) | planned.lost.keys()
        staying = [edge for edge in graph.history if edge.end in readable or edge.key in self._keep]
        named = {key for edge in staying for key in edge.sidecars}
        planned.sidecars = {
            key: info for key, info in graph.sidecars.items() if key not in named and not self._is_young(info)
        }
        last = max(planned.lost, default=-1)
        planned.missing = {
            edge.end
            for edge in graph.history
            if not graph.is_complete(edge)
            and (edge.end > last or (self._record is not None and self._record.is_gone(edge.end)))
        }

    # Why objects stay

    def _staying(self) -> list[str]:
        """Return how many objects stay for which reason, one line each."""
        graph, planned = self._graph, self._planned
        why: dict[str, str] = {}
        for edge in (*graph.history, *graph.standalone):
            if edge.key in self._keep:
                # A document without another reason stays for its age.
                reason = self._why.get(edge.key, "young")
                for key, _ in edge.refs:
                    why.setdefault(key, reason)
        unrelated = {key for edge in graph.unrelated for key, _ in edge.refs}
        counts = dict.fromkeys(why.values(), 0)  # in the order of the versions
        young: list[ObjectInfo] = []
        for key, info in graph.objects.items():
            if key in planned.objects:
                continue
            reason = why.get(key) or (
                "unrelated" if key in unrelated else "young" if self._is_young(info) else "unreadable"
            )
            counts[reason] = counts.get(reason, 0) + 1
            if reason == "young":
                young.append(info)
        return self._explained(counts, young)

    def _explained(self, counts: dict[str, int], young: list[ObjectInfo]) -> list[str]:
        policy, head, last = self._policy, self._graph.head, self._policy.keep_last
        reasons = {
            "head": f"needed by the head, version {head}",
            "sound": f"needed by version {self._graph.sound}, the newest not quarantined",
            "exact": f"needed by version {self._graph.exact}, the newest that is the trainer's exact state",
            "last": ("needed by the newest version" if last == 1 else f"needed by the newest {last} versions")
            + (f" (--keep-last), and the run has {head + 1}" if head < last else " (--keep-last)"),
            "every": f"needed by versions divisible by {policy.keep_every} (--keep-every)",
            "recent": f"needed by versions published in the last {_span(policy.keep_seconds or 0)} (--keep-for)",
            "onward": "needed by servers to get from the version they serve to the head",
            "milestone": "anchors of milestones",
            "anchor": "the newest anchor and what leads on from it, for servers without the base",
            "lost": "may be needed by lost versions; see delta-sync repair",
            "unrelated": "listed by documents that do not fit the run",
            "unreadable": "listed by no readable document",
        }
        lines = []
        for kind, word in (("tag", "tags"), ("branch", "branches"), ("heartbeat", "receivers")):
            names = [reason.partition(" ")[2] for reason in counts if reason.startswith(f"{kind} ")]
            count = sum(counts.pop(f"{kind} {name}") for name in names)
            if count:
                shown = ", ".join(names[:_SHOWN]) + (f", … {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
                lines.append(f"{_objects(count)} needed by {word} {shown}")
        if young:
            wait = policy.min_age - max(self._age(info) for info in young)
            put = _objects(counts.pop("young"), "was", "were")
            lines.append(
                f"{put} put less than {_span(policy.min_age)} ago (--min-age); the first can be removed in "
                + _span(max(0.0, wait))
            )
        lines = [f"{_objects(count)} {reasons[reason]}" for reason, count in counts.items() if count] + lines
        removed = sorted(version for version in self._planned.missing if self._record and self._record.is_gone(version))
        if removed:
            lines.append(f"earlier collections removed the deltas of versions {spelled(removed)}")
        return lines or ["the run has no objects"]


_SHOWN = 5


def _objects(count: int, one: str = "is", more: str = "are") -> str:
    return f"1 object {one}" if count == 1 else f"{count} objects {more}"


def _span(seconds: float) -> str:
    """Format seconds in their two largest units, such as ``2h 5m``, rounded up to the second."""
    left, parts = int(-(-seconds // 1)), []
    for size, unit in ((24 * 3600, "d"), (3600, "h"), (60, "m"), (1, "s")):
        if left >= size:
            parts.append(f"{left // size}{unit}")
            left %= size
    return " ".join(parts[:2]) or "0s"

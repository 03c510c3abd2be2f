"""Which versions a collection keeps, and what of the bucket they need. Pure: it looks at a survey, and at no bucket."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.documents import Lease, Retention
from vllm_delta_sync.maintenance.gc.graph import NOTHING, Edge, RunGraph, ways_from, ways_to
from vllm_delta_sync.maintenance.gc.record import spelled
from vllm_delta_sync.maintenance.tags import rebase_epoch

DAY = 24 * 3600.0


@dataclass(frozen=True)
class RetentionPolicy:
    """What to keep. The head, the newest version that is not quarantined, and whatever was put less than ``min_age``
    ago are always kept.

    Attributes:
        keep_last: so many of the newest versions, and every delta of them.
        keep_every: versions whose number it divides, other than 0; None for none.
        keep_tagged: versions that have a tag. Those that other runs branch from, or that the publisher has rebased
            to, are kept in any case.
        keep_seconds: versions published less than so many seconds ago; None for none.
        min_age: seconds. Must be longer than an upload, a compaction, and any reader that has no lease takes, and than
            the store's listings lag.
        longest_pin: seconds. A lease holds no version that was published longer ago than this: anybody may write
            leases, and a forged one must not hold a version for ever. A tag does.

    Raises:
        UsageError: a number makes no sense.
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
                raise UsageError(f"{name} is {value!r}; give a number from {lowest} on")
        for name in ("keep_seconds", "min_age", "longest_pin"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise UsageError(f"{name} is {value!r}; give seconds from 0 on")


@dataclass
class CollectionPlan:
    """What a collection would do.

    Attributes:
        kept: version → why; each of them can be rebuilt now and afterwards. lost: wanted, but cannot be rebuilt now.
        documents, objects, sidecars: to be removed, by key.
        missing: versions of which objects were not there, and are not missed by a version that is wanted.
        notes: what people should know.
        staying: why each of the objects that are there and not removed stays: one line for each reason.
    """

    kept: dict[int, list[str]] = field(default_factory=dict)
    lost: dict[int, list[str]] = field(default_factory=dict)
    staying: list[str] = field(default_factory=list)
    documents: dict[str, ObjectInfo] = field(default_factory=dict)
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    sidecars: dict[str, ObjectInfo] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def plan_collection(survey: RunGraph, policy: RetentionPolicy, now: float, record: Retention | None) -> CollectionPlan:
    """Decide what to keep.

    Args:
        now: seconds since the epoch, by the store's clock. record: what the last collection wrote.
    """
    return _Planning(survey, policy, now, record).run()


def reachable(survey: RunGraph, planned: CollectionPlan) -> set[int]:
    """Versions that can be rebuilt once what is planned is removed."""
    left = [
        edge
        for edge in survey.edges()
        if edge.key not in planned.documents and not any(key in planned.objects for key, _ in edge.refs)
    ]
    return set(ways_from(left, NOTHING, lambda edge: False).last)


class _Planning:
    def __init__(self, survey: RunGraph, policy: RetentionPolicy, now: float, record: Retention | None) -> None:
        self._survey, self._policy, self._now, self._record = survey, policy, now, record
        self._edges = survey.edges()
        self._keep: dict[str, Edge] = {}
        self._why: dict[str, str] = {}
        self._leases = survey.leases.live(now)
        self._planned = CollectionPlan(notes=list(survey.notes))

    def run(self) -> CollectionPlan:
        planned = self._planned
        self._keep_window()
        ways = ways_from(self._edges, NOTHING, self._unripe)
        given_up: list[int] = []
        for version, reasons in self._wanted().items():
            if version in ways:
                planned.kept[version] = reasons
                self._keep_all(ways.way(version), reasons[-1])
            elif self._given_up(version):
                given_up.append(version)
            else:
                planned.lost[version] = reasons
        if given_up:
            planned.notes.append(f"given up by an earlier collection, and not kept: versions {spelled(given_up)}")
        self._keep_ways_on()
        self._keep_anchors()
        self._keep_around_lost()
        self._sweep()
        planned.staying = self._staying()
        return planned

    # What is wanted

    def _wanted(self) -> dict[int, list[str]]:
        survey, policy = self._survey, self._policy
        found: dict[int, dict[str, None]] = {survey.head: {"head": None}}
        if survey.sound is not None and survey.sound != survey.head:
            found[survey.sound] = {"sound": None}

        def want(version: int, reason: str) -> None:
            if version <= survey.head and not survey.chain[version].refused:
                found.setdefault(version, {})[reason] = None

        for version in range(max(0, survey.head - policy.keep_last + 1), survey.head):
            want(version, "last")
        if policy.keep_every is not None:
            for version in range(policy.keep_every, survey.head + 1, policy.keep_every):
                want(version, "every")
        if policy.keep_seconds is not None:
            for owner in survey.chain:
                if self._age(owner.info) < policy.keep_seconds:
                    want(owner.end, "recent")
        for name, tag in survey.tags.items():
            # What the publisher has rebased to is not its owner's to choose: the next version builds on it.
            if tag.branch is not None or policy.keep_tagged or rebase_epoch(name) is not None:
                want(tag.version, f"branch {tag.branch}" if tag.branch is not None else f"tag {name}")
        for lease in self._leases:
            for version in self._held(lease):
                want(version, f"lease {lease.receiver}")
        return {version: list(found[version]) for version in sorted(found)}

    def _held(self, lease: Lease) -> list[int]:
        named = [version for version in (lease.served, lease.target, *lease.pins) if version is not None]
        chain = self._survey.chain
        return [
            version
            for version in named
            if version < len(chain) and self._age(chain[version].info) < self._policy.longest_pin
        ]

    def _given_up(self, version: int) -> bool:
        record = self._record
        if record is None or version in (self._survey.head, self._survey.sound):
            return False
        if record.head is not None:
            return record.gave_up(version)
        # Not written by a collection of ours: a hole on the way down to it was made on purpose.
        while version != NOTHING:
            if record.is_gone(version):
                return True
            version = self._survey.chain[version].start
        return False

    # What that needs

    def _age(self, info: ObjectInfo) -> float:
        return self._now - info.modified

    def _young(self, info: ObjectInfo) -> bool:
        return self._age(info) < self._policy.min_age

    def _unripe(self, owner: Edge) -> bool:
        """Whether another collector may not know of it, so that nothing is to be removed because of it.

        A version of the chain is known to all who see the head; unless its objects were put again.
        """
        newest = self._survey.newest(owner)
        in_chain = owner.end <= self._survey.head and owner is self._survey.chain[owner.end]
        return self._now - newest < self._policy.min_age and not (in_chain and self._young(owner.info))

    def _keep_all(self, owners: Iterable[Edge], why: str) -> None:
        for owner in owners:
            self._keep[owner.key] = owner
            self._why.setdefault(owner.key, why)

    def _keep_window(self) -> None:
        """All deltas of the last versions, and the folded ranges among them, for whoever is only a little behind."""
        begin = self._survey.head - self._policy.keep_last
        self._keep_all((owner for owner in self._survey.chain[max(0, begin + 1) :] if not owner.refused), "last")
        self._keep_all((owner for owner in self._survey.sides if owner.used and owner.start >= max(0, begin)), "last")

    def _keep_ways_on(self) -> None:
        """What receivers with a lease need to get to the head; and all others, where that is quarantined."""
        head, sound = self._survey.head, self._survey.sound
        served: set[int | None] = {lease.served for lease in self._leases if lease.served in self._held(lease)}
        if sound != head:
            served.add(sound)
        for target in {head, sound}:
            if target is not None and served - {None}:
                ways = ways_to(self._edges, target, self._unripe)
                for version in served:
                    if version is not None:
                        self._keep_all(ways.way(version), "onward")

    def _keep_anchors(self) -> None:
        """Anchors of milestones; and the newest that lead to the head and to what is served, for who has no base."""
        whole = [edge for edge in self._edges if edge.start == NOTHING and edge.refs]
        milestones = {tag.version for tag in self._survey.tags.values() if tag.milestone}
        self._keep_all((edge for edge in whole if edge.end in milestones & self._planned.kept.keys()), "milestone")
        for target in {self._survey.head, self._survey.sound}:
            if target is not None:
                self._keep_anchor_of(target, whole)

    def _keep_anchor_of(self, target: int, whole: list[Edge]) -> None:
        onward = ways_to(self._edges, target, self._unripe, back=False)
        reach = [edge for edge in whole if edge.end in onward or edge.end == target]
        ripe = [edge for edge in reach if not self._unripe(edge)]
        if reach:
            newest = max(ripe or reach, key=lambda edge: (edge.end, -edge.bytes, edge.key))
            self._keep_all([newest, *onward.way(newest.end)], "anchor")

    def _keep_around_lost(self) -> None:
        """Whatever a version that is wanted and cannot be rebuilt may need once its loss is mended."""
        if self._planned.lost:
            last = max(self._planned.lost)
            self._keep_all(self._survey.chain[: last + 1], "lost")
            sides = self._survey.sides
            self._keep_all(
                (owner for owner in sides if (owner.end if owner.start == NOTHING else owner.start) <= last), "lost"
            )

    # What is left

    def _sweep(self) -> None:
        survey, planned = self._survey, self._planned
        for owner in survey.chain:
            if self._young(owner.info):
                self._keep[owner.key] = owner
        for owner in survey.sides:
            if self._now - survey.newest(owner) < self._policy.min_age:
                self._keep[owner.key] = owner
        planned.documents = {owner.key: owner.info for owner in survey.sides if owner.key not in self._keep}
        needed = {key for owner in (*self._keep.values(), *survey.strange) for key, _ in owner.refs}
        listed = {key for owner in (*survey.chain, *survey.sides) for key, _ in owner.refs}
        planned.objects = {
            key: info
            for key, info in survey.objects.items()
            # An object that no document lists may be one that a document lists which cannot be read.
            if key not in needed and not self._young(info) and (key in listed or not survey.unread)
        }
        # They go with their version: when nothing leads to that any more.
        readable = reachable(survey, planned) | planned.lost.keys()
        staying = [owner for owner in survey.chain if owner.end in readable or owner.key in self._keep]
        named = {key for owner in staying for key in owner.sidecars}
        planned.sidecars = {
            key: info for key, info in survey.sidecars.items() if key not in named and not self._young(info)
        }
        last = max(planned.lost, default=-1)
        planned.missing = {
            owner.end
            for owner in survey.chain
            if not survey.whole(owner)
            and (owner.end > last or (self._record is not None and self._record.is_gone(owner.end)))
        }

    # Why that is so

    def _staying(self) -> list[str]:
        """Of the objects that stay, how many stay for which reason."""
        survey, planned = self._survey, self._planned
        why: dict[str, str] = {}
        for owner in (*survey.chain, *survey.sides):
            if owner.key in self._keep:
                # Those of a document that stays for its age alone have no other reason.
                reason = self._why.get(owner.key, "young")
                for key, _ in owner.refs:
                    why.setdefault(key, reason)
        strange = {key for owner in survey.strange for key, _ in owner.refs}
        counts = dict.fromkeys(why.values(), 0)  # in the order of the versions
        young: list[ObjectInfo] = []
        for key, info in survey.objects.items():
            if key in planned.objects:
                continue
            reason = why.get(key) or ("strange" if key in strange else "young" if self._young(info) else "unread")
            counts[reason] = counts.get(reason, 0) + 1
            if reason == "young":
                young.append(info)
        return self._explained(counts, young)

    def _explained(self, counts: dict[str, int], young: list[ObjectInfo]) -> list[str]:
        policy, head, last = self._policy, self._survey.head, self._policy.keep_last
        reasons = {
            "head": f"needed by the head, version {head}",
            "sound": f"needed by version {self._survey.sound}, the newest that is not quarantined",
            "last": ("needed by the newest version" if last == 1 else f"needed by the newest {last} versions")
            + (f" (--keep-last), and the run has {head + 1}" if head < last else " (--keep-last)"),
            "every": f"needed by versions that {policy.keep_every} divides (--keep-every)",
            "recent": f"needed by versions published in the last {_span(policy.keep_seconds or 0)} (--keep-for)",
            "onward": "needed by servers to get from the version they serve to the head",
            "milestone": "anchors of milestones",
            "anchor": "the newest anchor and what leads on from it, for servers without the base",
            "lost": "perhaps needed by versions that are lost; see delta-sync repair",
            "strange": "listed by documents that do not fit the run",
            "unread": "listed by no document that can be read",
        }
        lines = []
        for kind, word in (("tag", "tags"), ("branch", "branches"), ("lease", "receivers")):
            names = [reason.partition(" ")[2] for reason in counts if reason.startswith(f"{kind} ")]
            count = sum(counts.pop(f"{kind} {name}") for name in names)
            if count:
                shown = ", ".join(names[:_SHOWN]) + (f", … {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
                lines.append(f"{_objects(count)} needed by {word} {shown}")
        if young:
            wait = policy.min_age - max(self._age(info) for info in young)
            put = _objects(counts.pop("young"), "was", "were")
            lines.append(
                f"{put} put less than {_span(policy.min_age)} ago (--min-age); the first may go in "
                + _span(max(0.0, wait))
            )
        lines = [f"{_objects(count)} {reasons[reason]}" for reason, count in counts.items() if count] + lines
        removed = sorted(version for version in self._planned.missing if self._record and self._record.is_gone(version))
        if removed:
            lines.append(f"earlier collections removed the deltas of versions {spelled(removed)}")
        return lines or ["the run has no objects of its own"]


_SHOWN = 5


def _objects(count: int, one: str = "is", more: str = "are") -> str:
    return f"1 object {one}" if count == 1 else f"{count} objects {more}"


def _span(seconds: float) -> str:
    """Seconds in the two largest units that they fill, rounded up to the second."""
    left, parts = int(-(-seconds // 1)), []
    for size, unit in ((24 * 3600, "d"), (3600, "h"), (60, "m"), (1, "s")):
        if left >= size:
            parts.append(f"{left // size}{unit}")
            left %= size
    return " ".join(parts[:2]) or "0s"

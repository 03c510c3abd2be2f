"""What happens to a bucket: tags, branches, merging, collections, rot, repair; also in the middle of each other."""

import json
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.run.machine.events import ANY, FAULTS, SEEDS, Events, pick
from tests.run.machine.store import Fault, Process
from tests.run.machine.tensors import copy_bits, tensors_of, train
from tests.run.machine.world import NO_FAULT, Line
from vllm_delta_sync.errors import ConflictError
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.maintenance.branch import branch
from vllm_delta_sync.maintenance.compact import compact
from vllm_delta_sync.maintenance.gc.collect import CollectionReport, RetentionPolicy, collect
from vllm_delta_sync.maintenance.gc.lock import CLAIM_SECONDS
from vllm_delta_sync.maintenance.repair.repair import repair
from vllm_delta_sync.maintenance.tags import delete_tag, set_tag

MAX_DAMAGED = 2
MAX_RUNS = 3
MAX_FOLLOWERS = 4
POLICIES = st.builds(
    RetentionPolicy,
    keep_last=st.integers(1, 12),
    keep_every=st.one_of(st.none(), st.integers(2, 6)),
    keep_seconds=st.sampled_from([None, None, 60.0, 1e6]),
    min_age=st.sampled_from([0.0, 60.0, 3600.0]),
)
OLD = st.builds(RetentionPolicy, keep_last=st.integers(1, 4), min_age=st.just(60.0))
MOMENTS = st.sampled_from([0, 0, 0, 1, 2, 5])
MEANWHILE = ["publish", "take over", "tag", "tag", "branch", "compact", "collect"]


class StoreEvents(Events):
    """The bucket: tags, branches, merging, collections, rot and repair; and time."""

    @rule(which=ANY, version=ANY, name=st.sampled_from(["a", "b", "c"]), milestone=st.booleans(), fault=FAULTS)
    def tag(self, which: int, version: int, name: str, milestone: bool, fault: Fault) -> None:
        line = self.line(which)
        self.set_tag(line, version % len(line.versions), name, milestone, fault)

    def set_tag(self, line: Line, number: int, name: str, milestone: bool, fault: Fault) -> None:
        error = self.world.attempt(Process(), fault, lambda: set_tag(self.opened(line), name, number, milestone))
        if error is None:
            line.tags[name] = number
        elif line.healthy and fault is NO_FAULT:
            assert not line.owes_tag(number), error
        self.enter_tags(line)

    @rule(which=ANY, name=st.sampled_from(["a", "b", "c"]))
    def untag(self, which: int, name: str) -> None:
        line = self.line(which)
        error = self.world.attempt(Process(), NO_FAULT, lambda: delete_tag(self.opened(line), name))
        if line.healthy:
            assert (error is None) == (name in line.tags), error
        self.enter_tags(line)

    def enter_tags(self, line: Line) -> None:
        """After a failure only the bucket tells whether a tag was set."""
        for name in ("a", "b", "c"):
            key = side.tag_key(name)
            data = line.place.read(key)
            if data is None and key not in line.place.damaged:
                line.tags.pop(name, None)
            elif data is not None and key not in line.place.damaged:
                line.tags[name] = side.Tag.from_bytes(data).version

    @precondition(lambda self: len(self.world.places) < MAX_RUNS)
    @rule(which=ANY, version=ANY, fault=FAULTS, seed=SEEDS)
    def branch(self, which: int, version: int, fault: Fault, seed: int) -> None:
        """A run that begins at a version of another, and a server that follows it."""
        line = self.line(which)
        self.branch_at(line, version % len(line.versions), fault, seed)

    def branch_at(self, line: Line, number: int, fault: Fault, seed: int) -> None:
        place = self.world.place(f"branch-{len(self.world.places)}")
        error = self.world.attempt(Process(), fault, lambda: branch(self.opened(line), number, place.inner.url))
        line_there = self.world.enter_branch(place, line, number)
        if line_there is None:
            assert error is not None
            assert fault is not NO_FAULT or not line.healthy or not line.owes_tag(number), error
            place.recreate()
            return
        if len(self.world.followers) < MAX_FOLLOWERS:
            bits = [line_there.versions[0].bits, line.versions[0].bits][seed % 2]
            self.world.follow(place, 1, bits)

    @rule(which=ANY, anchor=st.sampled_from([None, None, "head", "tag:a"]), fault=FAULTS)
    def compact(self, which: int, anchor: str | None, fault: Fault) -> None:
        line = self.line(which)
        error = self.world.attempt(Process(), fault, lambda: compact(self.opened(line), anchor=anchor))
        if line.healthy and fault is NO_FAULT and not (anchor == "tag:a" and "a" not in line.tags):
            assert error is None, error

    @rule(which=ANY, policy=POLICIES, fault=FAULTS, dry=st.booleans())
    def collect(self, which: int, policy: RetentionPolicy, fault: Fault, dry: bool) -> None:
        line = self.line(which)
        if fault.lag:
            # Neither may what was put be taken for forgotten before it is listed.
            policy = replace(policy, min_age=3600.0)
        self.outlast_claim(line)
        self.collect_with(line, policy, fault, dry and fault is NO_FAULT)

    def outlast_claim(self, line: Line) -> None:
        """Let the claim of a collection that ended in the middle run out."""
        claims = [found for key in line.place.keys("") if (found := side.collection_of_key(key)) is not None]
        if claims and not max(claims)[1]:
            self.world.clock.now += CLAIM_SECONDS + 2

    def collect_with(
        self,
        line: Line,
        policy: RetentionPolicy,
        fault: Fault,
        dry: bool,
        process: Process | None = None,
        contended: bool = False,
    ) -> None:
        """Remove what no version needs that is kept; whatever comes in between, those that are kept can be read.

        Args:
            contended: whether another collection may be under way.
        """
        reports: list[CollectionReport] = []
        clean, before, now = line.healthy, set(line.gone), self.world.clock.now
        tags = dict(line.tags)
        wanted = {other.source[1] for other in self.world.lines.values() if other.source and other.source[0] is line}
        error = self.world.attempt(
            process or Process(), fault, lambda: reports.append(collect(self.opened(line), policy, dry, now=now))
        )
        self.enter_gone(line)
        self.drop_unread(line, dry)
        if dry:
            assert line.gone == before
        if contended and isinstance(error, ConflictError):
            assert "another collection" in error.message
        elif clean and fault is NO_FAULT and not any(version + 1 in line.lost for version in line.lost):
            assert error is None, error
            head = reports[0].head
            wanted |= set(range(max(0, head + 1 - policy.keep_last), head + 1))
            # A tag that moved meanwhile holds what it was on no more.
            wanted |= {version for name, version in tags.items() if line.tags.get(name) == version}
            assert wanted <= reports[0].kept.keys() | before | line.lost, "versions that the policy keeps were given up"
        if clean and fault.lag == 0:
            self.read_some(line)

    def drop_unread(self, line: Line, dry: bool) -> None:
        """A damaged document of which objects were removed, because no other lists them, cannot be brought back."""
        place = line.place
        for key in sorted(place.damaged):
            if dry or not key.startswith((side.ANCHORS_PREFIX, side.MERGED_PREFIX)):
                continue
            listed = [item["key"] for item in json.loads(place.intended(key) or b"{}").get("objects", [])]
            if any(place.read(item) is None and item not in place.damaged for item in listed):
                place.delete(key)

    @rule(which=ANY, policy=OLD, moment=MOMENTS, what=st.sampled_from(MEANWHILE), number=ANY)
    def collect_meanwhile(self, which: int, policy: RetentionPolicy, moment: int, what: str, number: int) -> None:
        """Between two writes of a collection, another process publishes, tags, merges, collects …"""
        line = self.line(which)
        if not line.healthy:
            return
        self.outlast_claim(line)
        self.world.clock.now += 2 * policy.min_age
        process, left = Process(), [moment]

        def meanwhile(key: str) -> None:
            # Between the last look at an object and its removal nobody may put it again: no store can do both in one.
            left[0] -= not key.startswith("objects/")
            if left[0] == -1:
                left[0] -= 1
                self.happen(line, what, number)

        process.before_write = meanwhile
        self.collect_with(line, policy, NO_FAULT, False, process, contended=what == "collect")

    @precondition(lambda self: self.world.writers)
    @rule(
        which=ANY, policy=OLD, moment=st.integers(0, 3), what=st.sampled_from(["collect", "compact", "tag", "branch"])
    )
    def publish_meanwhile(self, which: int, policy: RetentionPolicy, moment: int, what: str) -> None:
        """Between two writes of a publisher, another process collects, merges, tags or branches."""
        writer = pick(self.world.writers, which)
        left = [moment]

        def meanwhile(key: str) -> None:
            left[0] -= 1
            if left[0] == -1:
                writer.line.reconcile(copy_bits(writer.tensors))
                self.happen(writer.line, what, which, policy)

        train(writer.tensors, "sparse", which)
        writer.process.before_write = meanwhile
        self.publish_with(writer, which)
        writer.process.before_write = lambda key: None

    def happen(self, line: Line, what: str, number: int, policy: RetentionPolicy | None = None) -> None:
        """One thing that somebody else does, without a fault."""
        if not line.current:
            return
        self.enter_gone(line)
        if what == "publish":
            for writer in [writer for writer in self.world.writers if writer.line is line]:
                train(writer.tensors, "sparse", number)
                self.publish_with(writer, number)
        elif what == "take over":
            self.start(line.place, tensors_of(line.newest))
        elif what == "tag":
            self.set_tag(line, number % len(line.versions), "abc"[number % 3], number % 2 == 0, NO_FAULT)
        elif what == "branch" and len(self.world.places) < MAX_RUNS:
            self.branch_at(line, number % len(line.versions), NO_FAULT, number)
        elif what == "compact":
            self.world.attempt(Process(), NO_FAULT, lambda: compact(self.opened(line)))
        elif what == "collect" and line.healthy:
            chosen = policy or RetentionPolicy(keep_last=1, min_age=60.0)
            self.collect_with(line, chosen, NO_FAULT, False, contended=True)

    def enter_gone(self, line: Line) -> None:
        """What the record of collections gives up need not be readable any more."""
        data = line.place.read(side.RETENTION_KEY)
        if data is not None and side.RETENTION_KEY not in line.place.damaged:
            record = side.Retention.from_bytes(data)
            line.gone |= {version for version in range(len(line.versions)) if record.gave_up(version)}

    @rule(which=ANY, what=ANY, how=st.sampled_from(["flip", "truncate", "empty", "delete"]), at=SEEDS)
    def damage(self, which: int, what: int, how: str, at: int) -> None:
        """An object or a document rots. A manifest rots where it is: without a trace nobody can tell that it was."""
        place = self.line(which).place
        line = self.world.line_at(place)
        if line is not None and line.head > 0 and len(place.damaged) < MAX_DAMAGED:
            key = pick(place.keys(""), what)
            if key.startswith(keys.VERSIONS_PREFIX) and how == "delete":
                how = "empty"
            place.damage(key, how, at)

    @rule(which=ANY, mirror=st.booleans(), fault=FAULTS)
    def repair(self, which: int, mirror: bool, fault: Fault) -> None:
        line = self.line(which)
        place = line.place
        mirrored = str(place.mirror) if mirror else None
        self.world.attempt(Process(), fault, lambda: repair(self.world.open(place.inner.url), mirrored))
        if mirror and fault is NO_FAULT and (line.source is None or line.source[0].healthy):
            self.verify(line)
        self.world.settle_damage(place)

    @rule(which=ANY)
    def heal(self, which: int) -> None:
        self.mend(self.line(which).place)

    @rule(seconds=st.sampled_from([1.0, 60.0, 3600.0, 100_000.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds

"""The state machine: everything that may happen to runs, one event at a time."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.run.machine.events import ANY, FAULTS, LAGS, NONE, READS, SEEDS, Events, pick
from tests.run.machine.store import Fault
from tests.run.machine.store_events import StoreEvents
from tests.run.machine.tensors import TRAININGS, copy_bits, first_tensors, tensors_of, train
from tests.run.machine.world import NO_FAULT, Writer
from vllm_delta_sync.errors import ConflictError
from vllm_delta_sync.format import manifest as keys

HOWS = st.sampled_from(TRAININGS)
PUBLISH_FAULTS = st.one_of(
    st.builds(Fault, write=st.integers(0, 3), after=st.booleans(), dies=st.booleans(), blind=st.booleans()),
    st.builds(Fault, read=st.integers(0, 5), blind=st.booleans()),
    FAULTS,
)


class WriterEvents(Events):
    """Publishers: publish, fail, die, take over, go back, look after the chain."""

    @precondition(lambda self: self.world.writers)
    @rule(which=ANY, how=HOWS, seed=SEEDS, step=st.integers(0, 50))
    def publish(self, which: int, how: str, seed: int, step: int) -> None:
        writer = pick(self.world.writers, which)
        train(writer.tensors, how, seed)
        self.publish_with(writer, step)

    @precondition(lambda self: self.world.writers)
    @rule(seed=SEEDS, count=st.integers(2, 9))
    def publish_many(self, seed: int, count: int) -> None:
        writer = self.world.writers[-1]
        for number in range(count):
            if writer in self.world.writers:
                train(writer.tensors, "sparse", seed + number)
                self.publish_with(writer, number)

    @precondition(lambda self: self.world.writers)
    @rule(which=ANY, how=HOWS, seed=SEEDS, faults=st.lists(PUBLISH_FAULTS, min_size=1, max_size=4))
    def publish_badly(self, which: int, how: str, seed: int, faults: list[Fault]) -> None:
        writer = pick(self.world.writers, which)
        for number, fault in enumerate(faults):
            if writer in self.world.writers:
                train(writer.tensors, how, seed + number)
                self.publish_with(writer, seed % 7, fault)

    @rule(which=ANY, same=st.booleans(), seed=SEEDS, fault=FAULTS)
    def take_over(self, which: int, same: bool, seed: int, fault: Fault) -> None:
        """A publisher starts on a run that is there, on another machine: its weights are the head's, or others."""
        line = self.line(which)
        tensors = tensors_of(line.newest) if same else first_tensors(seed)
        clean, head = line.healthy and line.current, line.head
        writer = self.start(line.place, tensors, fault, kind=seed)
        if clean and fault is NO_FAULT:
            assert writer is not None
            assert line.head == head

    @precondition(lambda self: self.world.writers)
    @rule(which=ANY, same=st.booleans(), seed=SEEDS)
    def take_over_in_between(self, which: int, same: bool, seed: int) -> None:
        """Another publisher claims the run right between a writer's look for claims and its commit."""
        writer = pick(self.world.writers, which)
        line = writer.line
        clean, current, before = line.healthy and not writer.behind, writer.current, line.head
        train(writer.tensors, "sparse", seed)
        bits = copy_bits(writer.tensors)
        successors: list[Writer | None] = []

        def claim(key: str) -> None:
            if key.startswith(keys.VERSIONS_PREFIX):
                writer.process.before_write = lambda key: None
                tensors = tensors_of(line.newest) if same else first_tensors(seed)
                successors.append(self.start(line.place, tensors))

        writer.process.before_write = claim
        error = self.world.attempt(writer.process, NO_FAULT, lambda: _publish(writer))
        writer.process.before_write = lambda key: None
        line.reconcile(bits)
        if clean and current:
            assert error is None, error
            assert line.head == before + 1
        self.tidy(writer, error)
        successor = successors[0] if successors else None
        if successor is not None and clean and current:
            self.adopt_former(successor)

    def adopt_former(self, writer: Writer) -> None:
        """Its first publish finds the number taken by the former writer's last version; the second goes through."""
        head = writer.line.head
        error = self.world.attempt(writer.process, NO_FAULT, lambda: _publish(writer))
        assert error is not None
        assert not isinstance(error, ConflictError), error
        assert writer.line.reconcile() == 0
        self.world.check_writer(writer)
        assert self.publish_with(writer, 2) is None
        assert writer.line.head == head + 1

    @precondition(lambda self: self.world.writers)
    @rule(which=ANY)
    def end_writer(self, which: int) -> None:
        """A trainer closes its publisher, or it just goes."""
        writer = pick(self.world.writers, which)
        if which % 2:
            bits = copy_bits(writer.tensors)
            self.world.attempt(writer.process, NO_FAULT, writer.publisher.close)
            # It makes up for a publish that has failed.
            writer.line.reconcile(bits)
        self.world.bury(writer)

    @precondition(lambda self: self.world.writers)
    @rule(which=ANY, version=ANY, fault=st.one_of(NONE, NONE, READS))
    def rebase(self, which: int, version: int, fault: Fault) -> None:
        """From here on another reference; see ``Writer.held``."""
        writer = pick(self.world.writers, which)
        line = writer.line
        number = version % len(line.versions)
        clean = line.healthy and writer.current and line.owes_tag(number)
        error = self.world.attempt(writer.process, fault, lambda: writer.publisher.rebase(number))
        if clean and fault is NO_FAULT:
            assert error is None, error
            assert writer.held == number
        self.tidy(writer, error)

    @precondition(lambda self: self.world.writers)
    @rule(which=ANY, fault=FAULTS)
    def look_after(self, which: int, fault: Fault) -> None:
        """What a publisher's second thread does after a version, anchors and merged deltas, at any time."""
        writer = pick(self.world.writers, which)
        committer, upkeep = writer.publisher._committer, writer.publisher._maintenance
        assert upkeep is not None
        self.world.attempt(writer.process, fault, lambda: upkeep._look_after(committer.newest))
        if writer.process.dead:
            self.world.bury(writer)

    @precondition(lambda self: self.world.writers)
    @rule(which=ANY, fault=FAULTS)
    def write_anchor(self, which: int, fault: Fault) -> None:
        writer = pick(self.world.writers, which)
        error = self.world.attempt(writer.process, fault, writer.publisher.anchor)
        if fault is NO_FAULT and writer.line.healthy and writer.current:
            assert error is None, error
        self.tidy(writer, error)

    @rule(which=ANY, seed=SEEDS)
    def recreate(self, which: int, seed: int) -> None:
        """The bucket is deleted, and another run begins under the same name."""
        line = self.line(which // 4)
        branched = any(other.source is not None and other.source[0] is line for other in self.world.lines.values())
        if which % 4 == 0 and not branched:
            line.place.recreate()
            assert self.start(line.place, first_tensors(self.seed if seed % 2 else seed)) is not None


class FollowerEvents(Events):
    """Servers: notices in any order, old ones and none at all; rollback, hold, restarts. Readers without an engine."""

    @rule(which=ANY)
    def advance(self, which: int) -> None:
        """A notice came, or the clock."""
        self.advance_with(pick(self.world.followers, which))

    @rule(which=ANY, fault=st.one_of(READS, LAGS))
    def advance_badly(self, which: int, fault: Fault) -> None:
        self.advance_with(pick(self.world.followers, which), fault)

    @rule(which=ANY, version=st.integers(0, 60))
    def advance_to(self, which: int, version: int) -> None:
        """Somebody asks for a version: an old one, one that is not there yet, or any."""
        self.advance_with(pick(self.world.followers, which), hint=version)

    @rule(which=ANY, back=ANY)
    def roll_back(self, which: int, back: int) -> None:
        follower = pick(self.world.followers, which)
        undo = follower.receiver.board.undo
        if undo:
            version = pick(undo, back)
            error = self.world.attempt(follower.process, NO_FAULT, lambda: follower.receiver.rollback(version))
            assert error is None, error
            assert follower.receiver.served_version == version
            follower.floor = (str(follower.receiver.served_run), version)

    @rule(which=ANY, hold=st.booleans())
    def hold(self, which: int, hold: bool) -> None:
        receiver = pick(self.world.followers, which).receiver
        receiver.hold() if hold else receiver.release()

    @rule(which=ANY, engine=st.booleans(), seed=SEEDS)
    def restart_follower(self, which: int, engine: bool, seed: int) -> None:
        """The controller starts again beside the same ranks, or the whole engine does."""
        follower = pick(self.world.followers, which)
        if not engine:
            follower.restart_controller(follower.place.inner.url)
            return
        self.world.followers.remove(follower)
        line = self.world.line_at(follower.place)
        others = copy_bits(first_tensors(seed))
        bits = line.versions[0].bits if line is not None and (line.based or seed % 2) else others
        self.world.follow(follower.place, 1 + seed % 2, bits)

    @rule(which=ANY, version=ANY, fault=st.one_of(NONE, NONE, READS, LAGS))
    def read(self, which: int, version: int, fault: Fault) -> None:
        line = self.line(which)
        self.read_version(line, version % len(line.versions), fault)


class ChainMachine(WriterEvents, FollowerEvents, StoreEvents):
    """All of it."""


def _publish(writer: Writer) -> None:
    writer.publisher.publish(1, wait=True)
    writer.publisher.flush()

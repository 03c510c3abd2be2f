"""What all events of the state machine share: the world, how something is chosen, and what must come of it."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from tests.run.machine.store import Fault, Place
from tests.run.machine.tensors import copy_bits, equal, first_tensors, save_checkpoint, tensors_of, train
from tests.run.machine.world import NO_FAULT, Follower, Line, World, Writer
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.errors import ChainError, ConflictError, NotFoundError, StoreError
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.maintenance.repair.repair import repair
from vllm_delta_sync.verify.verify import verify_run

ANY = st.integers(0, 1023)
"""Picks one of however many there are."""
SEEDS = st.integers(0, 2**16 - 1)
NONE = st.just(NO_FAULT)
WRITES = st.builds(Fault, write=st.integers(0, 7), after=st.booleans(), dies=st.booleans(), blind=st.booleans())
READS = st.builds(Fault, read=st.integers(0, 11))
LAGS = st.builds(Fault, lag=st.sampled_from([0.01, 5.0, 60.0]))
FAULTS = st.one_of(NONE, NONE, NONE, WRITES, READS, LAGS)


class Tally:
    """What happened, over all examples."""

    events = 0


TALLY = Tally()

T = TypeVar("T")


def pick(of: Sequence[T], which: int) -> T:
    """One of several, however many there are."""
    return of[which % len(of)]


class Events(RuleBasedStateMachine):
    """One run to begin with, a writer and two followers of it; rules do the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="delta-sync-chain-"))
        self.world = World(self.root)
        self.seed = 0
        self.based = False
        self.base = self.root / "base"

    def teardown(self) -> None:
        try:
            if self.world.places:
                self.finish()
        finally:
            self.world.close()
            shutil.rmtree(self.root, ignore_errors=True)

    @initialize(based=st.booleans(), upkeep=st.booleans(), seed=SEEDS)
    def begin(self, based: bool, upkeep: bool, seed: int) -> None:
        """Version 0 is a checkpoint that everybody has, or an anchor."""
        self.seed, self.based, self.world.upkeep = seed, based, upkeep
        bits = copy_bits(first_tensors(seed))
        save_checkpoint(self.base, bits)
        place = self.world.place("run")
        self.start(place, first_tensors(seed))
        self.world.follow(place, 1, bits)
        self.world.follow(place, 2, bits)

    @invariant()
    def everybody_holds_a_version(self) -> None:
        TALLY.events += 1
        for follower in self.world.followers:
            self.world.check_follower(follower)

    # Writers

    def start(self, place: Place, tensors: dict[str, Any], fault: Fault = NO_FAULT, kind: int = 0) -> Writer | None:
        """A publisher, of one of several kinds."""
        codec = {3: "plain", 4: "raw"}.get(kind % 5, "tiled")
        options: dict[str, Any] = {"codec": codec}
        options |= {"compression": "none" if kind % 7 == 6 else "zstd", "anchor_every": 3 if kind % 2 else None}
        if self.based and place.read("run.json") is None:
            options["base"] = self.base
        return self.world.write(place, tensors, fault, **options)

    def line(self, which: int) -> Line:
        """A run that is still at its place."""
        lines = [line for line in self.world.lines.values() if line.current]
        return pick(lines or list(self.world.lines.values()), which)

    def publish_with(self, writer: Writer, step: int, fault: Fault = NO_FAULT) -> BaseException | None:
        """Publish; what is durable afterwards is entered, and a writer that can go on no more is buried."""
        line = writer.line
        clean, current, before = line.healthy and not writer.behind, writer.current, line.head
        bits = copy_bits(writer.tensors)

        def publish() -> None:
            writer.publisher.publish(step, wait=True)
            writer.publisher.flush()

        error = self.world.attempt(writer.process, fault, publish)
        line.reconcile(bits)
        if not current:
            assert error is not None
            assert isinstance(error, (ConflictError, StoreError)) or fault is not NO_FAULT
            assert line.head == before
        elif clean and fault is NO_FAULT:
            assert error is None, error
            assert line.head == before + 1
        self.tidy(writer, error)
        return error

    def tidy(self, writer: Writer, error: BaseException | None) -> None:
        """After a failure: the process is dead, or stopped for good, or as good as before."""
        again = None
        if error is not None and not writer.process.dead:
            again = self.world.attempt(writer.process, NO_FAULT, writer.publisher.flush)
        if writer.process.dead or isinstance(error, ConflictError) or isinstance(again, ConflictError):
            self.world.bury(writer)
        elif again is None:
            self.world.check_writer(writer)

    # Followers

    def advance_with(self, follower: Follower, fault: Fault = NO_FAULT, hint: int | None = None) -> None:
        """Let a follower look; if nothing is in the way, it comes to what it was asked for."""
        line = self.world.line_at(follower.place)
        receiver = follower.receiver
        error = self.world.attempt(follower.process, fault, lambda: receiver.advance(hint))
        self.world.check_follower(follower)
        if fault is not NO_FAULT or line is None or not line.healthy:
            return
        served = receiver.served_version
        if error is None:
            assert served == (line.head if hint is None else hint) or receiver.board.holding
        elif hint is not None and (hint > line.head or hint < (served or 0) or not line.owes(hint)):
            assert isinstance(error, (NotFoundError, ChainError)), error
        elif not receiver.board.holding and not self.is_foreign(follower, line):
            raise AssertionError(f"version {hint} of {line.head} was not reached, {served} is served") from error

    def is_foreign(self, follower: Follower, line: Line) -> bool:
        """Whether its weights are of another run, and this one begins with a checkpoint that it does not hold."""
        return line.based and not line.holds(follower.bits)

    # Reading

    def read_version(self, line: Line, version: int, fault: Fault = NO_FAULT) -> None:
        """A version reads as it was published; or, if something is in the way, not at all."""
        if not line.current:
            return
        held: dict[str, Any] = {}

        def read() -> None:
            held.update(open_run(line.place.inner.url).tensors(version))

        error = self.world.attempt(self.world.process, fault, read)
        if error is None:
            assert equal(copy_bits(held), line.versions[version].bits), f"version {version} has other bits"
        elif line.healthy and fault is NO_FAULT and line.owes(version):
            raise AssertionError(f"version {version} cannot be read: {error}") from error

    def read_some(self, line: Line) -> None:
        """All versions if they are few; the newest, the tagged and some others."""
        newest = range(max(0, len(line.versions) - 3), len(line.versions))
        others = range(0, len(line.versions), 1 + len(line.versions) // 6)
        for version in sorted({*newest, *others, *line.tags.values()}):
            self.read_version(line, version)

    def opened(self, line: Line) -> Run:
        """The run as the process of now sees it."""
        return Run(self.world.open(line.place.inner.url))

    def verify(self, line: Line) -> None:
        """All of the run holds, but for manifests that rotted for good."""
        report = verify_run(self.opened(line), findings=bool(line.lost))
        assert report.head == line.head
        written_off = {keys.version_key(version) for version in line.lost}
        assert {finding.key for finding in report.findings} <= written_off

    # The end

    def mend(self, place: Place) -> None:
        for key in sorted(place.damaged):
            place.heal(key)

    def finish(self) -> None:
        """Faults are over and damage is mended: everybody comes to the head, and every run verifies."""
        world = self.world
        for place in world.places.values():
            self.mend(place)
            if place.altered:
                # If the manifest after it was lost, nothing showed that it was altered, so an anchor or a merged delta
                # written meanwhile may have its digest. Repair replaces them; a wrong tag would stay.
                repair(world.open(place.inner.url))
        for line in [line for line in world.lines.values() if line.current]:
            writer = self.start(line.place, tensors_of(line.newest))
            assert writer is not None
            train(writer.tensors, "sparse", 1)
            assert self.publish_with(writer, 100) is None
            self.verify(line)
            self.read_some(line)
        for follower in list(world.followers):
            follower.receiver.release()
            line_there = world.line_at(follower.place)
            assert line_there is not None
            if self.is_foreign(follower, line_there):
                world.followers.remove(follower)
                follower = world.follow(follower.place, 1, line_there.versions[0].bits)
            self.advance_with(follower)
            assert follower.receiver.served_version == line_there.head
            assert follower.receiver.verify()["verdict"]

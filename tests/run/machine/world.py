"""Trainers, servers and tools around the buckets of one test, all real, and an account of what was published.

Everybody is a process of its own (``store.Process``) and lives in this one. The world keeps the bits of every version
that it finds durable, and holds everything that anybody shows against that.
"""

import random
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from tests.run.machine.store import Clock, Death, Fault, Place, Process, Session
from tests.run.machine.tensors import ServedModel, copy_bits, equal, fingerprint, gather, tensors_of
from tests.support.modules import ModulePort
from trainer_side import Publisher
from trainer_side.maintenance import BackgroundMaintenance
from vllm_delta_sync import bucket as buckets
from vllm_delta_sync.bucket import Bucket, StoreOptions
from vllm_delta_sync.bucket import threads as bucket_calls
from vllm_delta_sync.engine.follow import rank_group
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.manifest import Manifest, RunInfo
from vllm_delta_sync.settings import Settings
from vllm_delta_sync.tensors.changes import Bits

NO_FAULT = Fault()


@dataclass(eq=False, repr=False)
class Version:
    """A durable version: digest of its manifest, and the bits that the trainer had."""

    digest: str
    bits: list[Bits]


@dataclass(eq=False, repr=False)
class Line:
    """One run by the test's own account.

    Attributes:
        versions: by number. gone: numbers that retention gave up. lost: those whose manifests rotted for good.
        rotted: keys that ever were damaged while the place had this run.
        source: the run and version that it branches from.
    """

    run: str
    place: Place
    versions: list[Version] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    tags: dict[str, int] = field(default_factory=dict)
    source: "tuple[Line, int] | None" = None
    base: bool = False

    def __post_init__(self) -> None:
        # A server may still name what it read of this run after another one has begun at the place.
        self.rotted = self.place.rotted

    @property
    def head(self) -> int:
        return len(self.versions) - 1

    @property
    def based(self) -> bool:
        """Whether everything begins with a checkpoint, be it that of the run branched from."""
        return self.base if self.source is None else self.source[0].based

    def holds(self, bits: list[Bits]) -> bool:
        """Whether these are a version of it, or of what it branches from."""
        own = any(equal(bits, version.bits) for version in self.versions)
        return own or (self.source is not None and self.source[0].holds(bits))

    def owes(self, version: int) -> bool:
        """Whether a version must be readable once nothing is in the way."""
        return version not in self.gone and version not in self.lost

    def owes_tag(self, version: int) -> bool:
        """Whether it can be tagged: only the manifest after it shows whether its own was altered."""
        return self.owes(version) and version + 1 not in self.lost

    @property
    def newest(self) -> list[Bits]:
        return self.versions[-1].bits

    def reconcile(self, *intended: list[Bits]) -> int:
        """Enter what is durable now and was not; each must be what a trainer had, in that order. Returns how many."""
        left, found = list(intended), 0
        while (data := self.place.read(keys.version_key(len(self.versions)))) is not None:
            manifest = Manifest.from_bytes(data)
            if manifest.run != self.run:
                assert not self.current
                break
            while left and fingerprint(left[0]).hex() != manifest.fingerprint:
                left.pop(0)
            assert left, f"version {manifest.version} is durable and has bits that no trainer had"
            self._write_off(manifest)
            self.versions.append(Version(manifest.digest, left.pop(0)))
            found += 1
        return found

    def _write_off(self, manifest: Manifest) -> None:
        """Somebody went on behind a damaged manifest and named it as it is stored: now it must stay so."""
        key = keys.version_key(manifest.version - 1)
        data = self.place.read(key)
        if key in self.place.damaged and data is not None and sha256(data).hexdigest() == manifest.parent:
            self.lost.add(manifest.version - 1)
            self.place.accept(key)

    @property
    def healthy(self) -> bool:
        """Whether nothing that reading needs has rotted."""
        return not self.place.damaged and (self.source is None or self.source[0].healthy)

    @property
    def current(self) -> bool:
        """Whether this is the run at its place."""
        data = self.place.intended(keys.RUN_KEY)
        return data is not None and RunInfo.from_bytes(data).run == self.run


@dataclass(eq=False, repr=False)
class Writer:
    """A trainer with its publisher."""

    process: Process
    line: Line
    tensors: dict[str, torch.Tensor]
    publisher: Publisher

    @property
    def epoch(self) -> int:
        return self.publisher._committer.writer.epoch

    @property
    def current(self) -> bool:
        """Whether nobody has claimed the run since, and it is still there."""
        return self.line.current and self.line.place.read(side.claim_key(self.epoch + 1)) is None

    @property
    def behind(self) -> bool:
        """Whether the writer before has committed once more since this one took over, and this one has not met that."""
        if self.publisher.version != self.line.head - 1:
            return False
        newest = self.line.place.intended(keys.version_key(self.line.head))
        return newest is not None and Manifest.from_bytes(newest).epoch < self.epoch

    @property
    def held(self) -> int:
        """The version that the next one builds on: the newest, unless it was rebased."""
        return self.publisher._committer.current.version

    @property
    def baseline(self) -> list[Bits]:
        return [self.publisher._committer.baseline.read(i) for i in range(len(self.tensors))]


@dataclass(eq=False, repr=False)
class Follower:
    """A server: its models, one per rank, and what it is known to hold.

    Attributes:
        bits: of its weights when last looked at. floor: (run, version) below which it must not go by itself.
    """

    process: Process
    place: Place
    models: list[ServedModel]
    port: ModulePort
    receiver: Receiver
    bits: list[Bits]
    floor: tuple[str, int] | None = None

    def restart_controller(self, url: str) -> None:
        self.receiver = Receiver(self.port, Settings(bucket=url))


class World:
    """Places with runs, the writers and followers of them, and the clock.

    Attributes:
        process: whose turn it is. upkeep: whether publishers look after the chain after each version.
    """

    _present: "World | None" = None

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.random = random.Random(0)
        self.upkeep = False
        self.process = Process()
        self.places: dict[str, Place] = {}
        self.lines: dict[str, Line] = {}
        self.writers: list[Writer] = []
        self.followers: list[Follower] = []
        World._present = self

    def place(self, name: str) -> Place:
        place = Place(self.root / name, self.clock)
        self.places[place.inner.url] = place
        return place

    def open(self, url: str) -> Bucket:
        """A bucket as the process of now sees it."""
        bucket = _open_bucket(url)
        place = self.places.get(bucket.url)
        return bucket if place is None else Session(place, self.process)

    def attempt(self, process: Process, fault: Fault, act: Callable[[], Any]) -> BaseException | None:
        """Let a process do something while a fault waits for it; what became of it, bugs excepted."""
        before, self.process = self.process, process
        process.suffer(fault)
        try:
            act()
        except (DeltaSyncError, Death) as error:
            return error
        finally:
            process.suffer(NO_FAULT)
            self.process = before
        return None

    def line_at(self, place: Place) -> Line | None:
        """The run that is at a place, whether or not its run.json can be read."""
        data = place.intended(keys.RUN_KEY)
        return None if data is None else self.lines.get(RunInfo.from_bytes(data).run)

    # Writers

    def write(self, place: Place, tensors: dict[str, torch.Tensor], fault: Fault, **options: Any) -> Writer | None:
        """A publisher at a place: it begins a run there, or takes over the one that is there. None: it could not."""
        process = Process()
        made: list[Publisher] = []
        bits = copy_bits(tensors)
        line = self.line_at(place)

        def begin() -> None:
            made.append(Publisher(list(tensors.items()), bucket=Session(place, process), **options))

        error = self.attempt(process, fault, begin)
        if line is None:
            line = self._register(place)
            if line is not None:
                line.base = "base" in options
        if line is not None:
            line.reconcile(bits)
        if not made:
            assert error is not None
            return None
        assert line is not None
        writer = Writer(process, line, tensors, made[0])
        assert made[0].run == line.run
        assert made[0].version == line.head
        assert equal(writer.baseline, line.newest)
        self.writers.append(writer)
        return writer

    def enter_branch(self, place: Place, source: Line, version: int) -> Line | None:
        """The run that was begun at a version of another, if it has a version 0."""
        line = self._register(place)
        if line is not None:
            line.source = (source, version)
            line.reconcile(source.versions[version].bits)
        return line

    def settle_damage(self, place: Place) -> None:
        """After a repair: what is as it was put is whole; the rest stays damaged."""
        for key in sorted(place.damaged):
            if place.read(key) == (place.mirror / key).read_bytes():
                place.damaged.discard(key)

    def _register(self, place: Place) -> Line | None:
        """The run that has just begun at a place, if it has a version 0."""
        data = place.intended(keys.RUN_KEY)
        if data is None or place.read(keys.version_key(0)) is None:
            return None
        line = Line(RunInfo.from_bytes(data).run, place)
        self.lines[line.run] = line
        return line

    def bury(self, writer: Writer) -> None:
        """The writer's process is gone: nothing of what closing it does reaches the bucket."""
        writer.process.dead = True
        self.writers.remove(writer)
        try:
            writer.publisher.close()
        except (DeltaSyncError, Death):
            pass

    def check_writer(self, writer: Writer) -> None:
        """What its next version is compared with is the newest durable version."""
        if writer.current and not writer.process.dead:
            held = writer.line.versions[writer.held]
            assert writer.behind or writer.publisher.version == writer.line.head
            assert equal(writer.baseline, held.bits), "the baseline is not the version that it builds on"

    # Followers

    def follow(self, place: Place, count: int, bits: list[Bits]) -> Follower:
        """A server of so many ranks, loaded with these bits."""
        models = [ServedModel(rank, count) for rank in range(count)]
        tensors = tensors_of(bits)
        for model in models:
            model.load_weights(tensors.items())
        port = ModulePort(*models)
        receiver = Receiver(port, Settings(bucket=place.inner.url))
        follower = Follower(Process(), place, models, port, receiver, gather(models))
        self.followers.append(follower)
        return follower

    def check_follower(self, follower: Follower) -> None:
        """Its weights are the version that it names, or unchanged if it names none; and it went back by no version."""
        bits = gather(follower.models)
        board = follower.receiver.board
        if board.served is None:
            assert equal(bits, follower.bits), "weights changed while no version is served"
            return
        line = self.lines[board.served.run]
        version = board.served.version
        # One that rotted may still be a manifest, of the same weights.
        rotted = keys.version_key(version) in line.rotted
        assert rotted or line.versions[version].digest == board.served.digest
        assert equal(bits, line.versions[version].bits), f"weights are not those of version {version}"
        if follower.floor is not None and follower.floor[0] == line.run:
            assert version >= follower.floor[1], f"went back from {follower.floor[1]} to {version}"
        follower.floor, follower.bits = (line.run, version), bits

    def close(self) -> None:
        for writer in list(self.writers):
            self.bury(writer)


_open_bucket = buckets.open_bucket


def _open(url: str, options: StoreOptions | None = None) -> Bucket:
    world = World._present
    return _open_bucket(url, options) if world is None else world.open(url)


def _token_hex(size: int = 32) -> str:
    world = World._present
    return _real_token_hex(size) if world is None else world.random.randbytes(size).hex()


_real_token_hex = secrets.token_hex


class _Datetime(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        world = World._present
        return super().now(tz) if world is None else cls.fromtimestamp(world.clock.now, tz)


def _in_order(call: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """One request after another: which of them a fault hits must not depend on threads."""
    return map(call, items)


def _offer(upkeep: BackgroundMaintenance, manifest: Manifest) -> None:
    """Upkeep right away, not in a thread of its own; or never, as an event of its own."""
    world = World._present
    if world is not None and world.upkeep:
        upkeep._look_after(manifest)


@contextmanager
def patched() -> Iterator[None]:
    """Let all of the project open its buckets through the world, and take time and random ids from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_hex", _token_hex)
        patch.setattr(BackgroundMaintenance, "offer", _offer)
        patch.setattr(rank_group, "POLL_SHORTEST_S", 0.0002)
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] not in ("vllm_delta_sync", "trainer_side"):
                continue
            if getattr(module, "open_bucket", None) is _open_bucket:
                patch.setattr(module, "open_bucket", _open)
            if getattr(module, "datetime", None) is datetime:
                patch.setattr(module, "datetime", _Datetime)
            if getattr(module, "in_parallel", None) is bucket_calls.in_parallel:
                patch.setattr(module, "in_parallel", _in_order)
        try:
            yield
        finally:
            World._present = None

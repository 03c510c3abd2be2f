"""Runs for tests of retention: in a bucket in memory whose clock a test turns, grown at random."""

from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from tests.support.samples import RunWriter, nudge, random_bits, whole_object
from vllm_delta_sync.bucket import Bucket, ObjectInfo
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import ConflictError, NotFoundError
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy

TABLE = TensorTable([TensorSpec("a", "F32", (31,)), TensorSpec("b", "I64", (3, 5))])
LARGE = TensorTable([TensorSpec("a", "F32", (4000,)), TensorSpec("b", "I64", (3, 5))])
"""Large enough that a delta is smaller than an anchor."""
HOUR = 3600.0

Hook = Callable[[str, str], None]


class Crash(BaseException):
    """The process is gone."""


class MemoryBucket(Bucket):
    """Objects in a dictionary.

    Attributes:
        clock: the store's, in seconds; every put takes one. before, after: called with ``put`` or ``delete`` and the
            key, around each.
    """

    def __init__(self) -> None:
        self.url = "memory"
        self.held: dict[str, tuple[bytes, float]] = {}
        self.clock = 1e9
        self.before: Hook = lambda action, key: None
        self.after: Hook = lambda action, key: None

    def copy(self) -> "MemoryBucket":
        other = MemoryBucket()
        other.held, other.clock = dict(self.held), self.clock
        return other

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        self.before("put", key)
        if if_absent and key in self.held:
            raise ConflictError(f"key {key!r} exists already")
        self.clock += 1.0
        self.held[key] = (data if isinstance(data, bytes) else data.read_bytes(), self.clock)
        self.after("put", key)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        if key not in self.held:
            raise NotFoundError(f"no object {key!r}")
        return self.held[key][0]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def stat(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self.get(key)), self.held[key][1])

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter([self.stat(key) for key in sorted(self.held) if key.startswith(prefix)])

    def delete(self, key: str) -> None:
        self.before("delete", key)
        self.held.pop(key, None)
        self.after("delete", key)


class Grown(RunWriter):
    """A run that grows at random.

    Attributes:
        memory: where it is. folder: for files.
    """

    def __init__(
        self, bucket: MemoryBucket, folder: Path, seed: int, whole: bool = True, table: TensorTable = TABLE
    ) -> None:
        super().__init__(bucket, table)
        self.memory, self.folder = bucket, folder
        self.random = np.random.default_rng(seed)
        bits = random_bits(table, self.random)
        if whole:
            self.anchor(bits)
        else:
            base = folder / "base"
            base.mkdir(exist_ok=True)
            (base / "model.safetensors").write_bytes(whole_object(table, bits))
            self.reference(bits, str(base))

    @property
    def run_(self) -> Run:
        return Run(self.memory)

    def copy(self, folder: Path) -> "Grown":
        """A copy of the run as it is now, in a bucket of its own, for a test to continue."""
        other = copy(self)
        other.bucket = other.memory = self.memory.copy()
        other.folder, other.random = folder, deepcopy(self.random)
        other.manifests, other.bits, other.breaks = [*self.manifests], [*self.bits], [*self.breaks]
        return other

    def seconds(self) -> float:
        """A machine's own clock, which counts the seconds that pass at the store."""
        return self.memory.clock - 1e6

    @property
    def newest(self) -> int:
        return len(self.manifests) - 1

    def put_at(self, version: int) -> float:
        """When a version's manifest was put."""
        return self.memory.held[keys.version_key(version)][1]

    def grow(self, base: int | None = None, full: bool = False) -> int:
        """Publish a change, against an older version if one is given; returns the new version."""
        bits = nudge(self.bits[self.newest if base is None else base], self.random, 0.2)
        self.delta(bits, full=[1] if full else [], base=base)
        return self.newest

    def grow_whole(self) -> int:
        """Publish an anchor inside the chain."""
        bits = nudge(self.bits[-1], self.random, 0.2)
        self.anchor(bits)
        return self.newest

    def equals(self, version: int) -> bool:
        """Whether a reader who has nothing gets a version's very bits."""
        state = Run(self.memory).snapshot(version)
        return all(np.array_equal(found, bits) for found, bits in zip(state.bits, self.bits[version], strict=True))


def objects(bucket: MemoryBucket) -> set[str]:
    return {key for key in bucket.held if key.startswith(keys.OBJECTS_PREFIX)}


@cache
def _written_once(versions: int, large: bool) -> Grown:
    grown = Grown(MemoryBucket(), Path(), 7, table=LARGE if large else TABLE)
    for _ in range(versions):
        grown.grow()
    grown.merge_all()
    grown.memory.clock += 10 * HOUR
    return grown


def long_run(folder: Path, versions: int = 40, table: TensorTable = TABLE) -> Grown:
    """Many versions with all their merged deltas, all of it old; tests need one for each moment of a collection."""
    return _written_once(versions, table is LARGE).copy(folder)


STEPS = st.one_of(
    st.tuples(st.just("grow"), st.integers(1, 6)),
    st.tuples(st.just("full"), st.just(0)),
    st.tuples(st.just("rebase"), st.integers(0, 30)),
    st.tuples(st.just("whole"), st.just(0)),
    st.tuples(st.just("beside"), st.integers(0, 30)),
    st.tuples(st.just("merge"), st.integers(0, 30)),
    st.tuples(st.just("repair"), st.integers(0, 30)),
    st.tuples(st.just("tag"), st.integers(0, 30)),
    st.tuples(st.just("milestone"), st.integers(0, 30)),
    st.tuples(st.just("branch"), st.integers(0, 30)),
    st.tuples(st.just("orphan"), st.integers(0, 30)),
    st.tuples(st.just("age"), st.integers(1, 5000)),
)
"""What may happen to a run; a number that names a version is taken modulo how many there are."""

POLICIES = st.builds(
    RetentionPolicy,
    keep_last=st.integers(1, 8),
    keep_every=st.none() | st.integers(1, 9),
    keep_tagged=st.booleans(),
    keep_seconds=st.none() | st.integers(0, 9000),
    min_age=st.sampled_from([0.0, 30.0, HOUR]),
    longest_pin=st.sampled_from([100.0, 1e6]),
)


def play(grown: Grown, steps: list[tuple[str, int]]) -> None:
    for action, number in steps:
        version = number % (grown.newest + 1)
        breaks = {item.version for item in grown.breaks}
        if action == "grow":
            for _ in range(number):
                grown.grow()
        elif action == "full":
            grown.grow(full=True)
        elif action == "rebase" and version < grown.newest:
            grown.grow(base=version)
        elif action == "whole":
            grown.grow_whole()
        elif action == "beside":
            grown.beside(version, grown.folder)
        elif action == "merge":
            grown.merge_all()
        elif action == "repair" and version and version not in breaks:
            grown.merge(version - 1, version)
        elif action in ("tag", "milestone", "branch"):
            url = "file:///elsewhere" if action == "branch" else None
            grown.tag(f"{action}-{version}", version, action == "milestone", url)
        elif action == "orphan":
            grown._put(number.to_bytes(8, "little"))
        elif action == "age":
            grown.memory.clock += number

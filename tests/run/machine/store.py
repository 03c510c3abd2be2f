"""A real bucket with faults around it: writes that fail or end the process, listings that lag, bytes that rot.

A ``Place`` is one directory with a real ``LocalBucket``. Everybody who opens its URL gets a ``Session``, which belongs
to a ``Process`` and dies with it. Time is a ``Clock`` that only tests move.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from vllm_delta_sync.bucket import Bucket, ObjectInfo
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.errors import DataError, NotFoundError, StoreError
from vllm_delta_sync.format.manifest import VERSIONS_PREFIX, Manifest

EPOCH = 1_800_000_000.0
TICK = 0.001


class Death(BaseException):
    """The process ended here: nothing of it happens any more."""


@dataclass
class Clock:
    """Seconds since 1970, moved by the test, and a little by each write so that no two are at the same time."""

    now: float = EPOCH


@dataclass
class Fault:
    """One thing that goes wrong.

    Attributes:
        write: which write of the process, counted from 0, goes wrong; None: none.
        after: whether it takes effect all the same. dies: whether the process ends there, else StoreError.
        blind: whether all reads fail from then on. read: which read fails; None: none.
        lag: seconds for which a listing shows neither what was put nor what was deleted.
    """

    write: int | None = None
    after: bool = False
    dies: bool = False
    blind: bool = False
    read: int | None = None
    lag: float = 0.0


@dataclass
class Process:
    """Whoever uses a bucket: a trainer, a server, a tool.

    Attributes:
        fault: what is to go wrong. fired: whether it has. before_write: called with each key that is about to be put.
    """

    fault: Fault = field(default_factory=Fault)
    fired: bool = False
    dead: bool = False
    before_write: Callable[[str], None] = lambda key: None
    writes: int = 0
    reads: int = 0

    def suffer(self, fault: Fault) -> None:
        """Let a fault happen from now on, instead of the one before."""
        self.fault, self.fired, self.writes, self.reads = fault, False, 0, 0

    def check(self) -> None:
        if self.dead:
            raise Death

    def reading(self, key: str) -> None:
        self.check()
        self.reads += 1
        if (self.fired and self.fault.blind) or self.reads - 1 == self.fault.read:
            self.fired = True
            raise StoreError(f"injected: reading {key}")

    def writing(self, key: str, act: Callable[[], None]) -> None:
        self.check()
        self.before_write(key)
        self.writes += 1
        strikes = self.writes - 1 == self.fault.write
        if strikes and not self.fault.after:
            self._strike(key)
        act()
        if strikes:
            self._strike(key)

    def _strike(self, key: str) -> None:
        self.fired = True
        if self.fault.dies:
            self.dead = True
            raise Death
        raise StoreError(f"injected: writing {key}")


class Place:
    """One directory that may hold a run, and everything that was ever put there: its mirror.

    Attributes:
        times: key → when it was put last, in the order of first puts. damaged: keys whose bytes are not those put.
        rotted: those that ever were damaged.
        altered: whether a manifest ever rotted into another valid one; only the manifest after it can show that.
    """

    def __init__(self, root: Path, clock: Clock) -> None:
        self.root = root
        self.clock = clock
        self.inner = LocalBucket(root)
        self.mirror = root.with_name(root.name + "-mirror")
        self.times: dict[str, float] = {}
        self.removed: dict[str, ObjectInfo] = {}
        self.removed_at: dict[str, float] = {}
        self.damaged: set[str] = set()
        self.rotted: set[str] = set()
        self.altered = False

    def put(self, key: str, data: bytes | Path, if_absent: bool) -> None:
        self.inner.put(key, data, if_absent=if_absent)
        self.clock.now += TICK
        self.times[key] = self.clock.now
        self.damaged.discard(key)
        self.removed_at.pop(key, None)
        copy = self.mirror / key
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.root / key, copy)

    def delete(self, key: str) -> None:
        try:
            self.removed[key] = self.stat(key)
            self.removed_at[key] = self.clock.now
        except NotFoundError:
            pass
        self.inner.delete(key)
        self.times.pop(key, None)
        self.damaged.discard(key)

    def stat(self, key: str) -> ObjectInfo:
        info = self.inner.stat(key)
        return ObjectInfo(info.key, info.bytes, self.times.get(key, EPOCH))

    def listing(self, prefix: str, lag: float) -> Iterator[ObjectInfo]:
        since = self.clock.now - lag
        found = [ObjectInfo(i.key, i.bytes, self.times.get(i.key, EPOCH)) for i in self.inner.list(prefix)]
        if lag:
            found = [info for info in found if info.modified <= since]
            there = {info.key for info in found}
            late = [key for key, at in self.removed_at.items() if at > since and key not in there]
            found += [self.removed[key] for key in late if key.startswith(prefix) and key not in self.times]
        yield from sorted(found, key=lambda info: info.key)

    def keys(self, *prefixes: str) -> list[str]:
        """Keys there are, whole or damaged but not deleted, in the order of their first put."""
        return [key for key in self.times if key.startswith(prefixes) and (self.root / key).is_file()]

    def read(self, key: str) -> bytes | None:
        """What is there, past all faults; None if nothing is."""
        try:
            return (self.root / key).read_bytes()
        except FileNotFoundError:
            return None

    def intended(self, key: str) -> bytes | None:
        """What was put last and not deleted, whatever rot made of it."""
        return (self.mirror / key).read_bytes() if key in self.times else None

    def damage(self, key: str, how: str, at: int) -> None:
        """Let an object or a document rot: ``flip`` a byte, ``truncate``, ``empty`` or ``delete`` it."""
        path = self.root / key
        data = bytearray(path.read_bytes())
        if how == "delete":
            path.unlink()
        elif how == "flip" and data:
            data[at % len(data)] ^= 1 << (at % 8)
            path.write_bytes(data)
        else:
            path.write_bytes(b"" if how == "empty" else data[: at % max(1, len(data))])
        self.damaged.add(key)
        self.rotted.add(key)
        if key.startswith(VERSIONS_PREFIX):
            with suppress(DataError):
                Manifest.from_bytes(path.read_bytes(), key)
                self.altered = True

    def heal(self, key: str) -> None:
        """Bring one key back as it was put last."""
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.mirror / key, target)
        self.damaged.discard(key)

    def accept(self, key: str) -> None:
        """Let what is there be right from now on."""
        shutil.copyfile(self.root / key, self.mirror / key)
        self.damaged.discard(key)

    def recreate(self) -> None:
        """Delete the bucket with all that is in it."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.mirror, ignore_errors=True)
        self.__init__(self.root, self.clock)  # type: ignore[misc]


class Session(Bucket):
    """A place as one process sees it."""

    def __init__(self, place: Place, process: Process) -> None:
        self.place, self.process = place, process
        self.url = place.inner.url

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        self.process.writing(key, lambda: self.place.put(key, data, if_absent))

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        self.process.reading(key)
        return self.place.inner.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.process.reading(key)
        return self.place.inner.get_range(key, start, length)

    def stat(self, key: str) -> ObjectInfo:
        self.process.reading(key)
        return self.place.stat(key)

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.process.reading(prefix)
        return self.place.listing(prefix, self.process.fault.lag)

    def delete(self, key: str) -> None:
        self.process.writing(key, lambda: self.place.delete(key))

"""Receivers that take turns, in an order that a seed chooses: between any two calls to the store others run."""

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.collecting import Crash, Grown, MemoryBucket
from vllm_delta_sync.bucket import Bucket, ObjectInfo
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import StoreError
from vllm_delta_sync.fleet.fleet import Fleet
from vllm_delta_sync.fleet.heartbeats import write_heartbeat
from vllm_delta_sync.fleet.pause_slots import PauseSlots

WAIT = 120.0


class Clocked(MemoryBucket):
    """A store whose clock stands still until it is turned; what it says is cut to whole seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1e9

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        self.clock = float(int(self.now)) - 1.0
        super().put(key, data, if_absent=if_absent)


class FleetRun:
    """A run of some versions in a store whose clock is the true time.

    Attributes:
        slept: seconds that a fleet has waited, one by one.
    """

    def __init__(self, folder: Path, versions: int = 0) -> None:
        self.bucket = Clocked()
        self.grown = Grown(self.bucket, folder, 1)
        self.run = Run(self.bucket)
        self.slept: list[float] = []
        for _ in range(versions):
            self.grow()

    def grow(self) -> None:
        self.bucket.now += 10
        self.grown.grow()

    def passes(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.bucket.now += seconds

    def fleet(self, skew: float = 0.0) -> Fleet:
        """As seen by somebody whose clock is wrong by ``skew``."""
        return Fleet(self.run, lambda: self.bucket.now + skew, lambda: self.bucket.now, self.passes)

    def turns(self, name: str, slots: int = 1, skew: float = 0.0, seed: int = 0, pause: float = 4.0) -> PauseSlots:
        return PauseSlots(
            self.run, name, slots, pause, lambda: self.bucket.now + skew, self.passes, random.Random(seed)
        )

    def heartbeat(self, name: str, served: int | None, **more: Any) -> None:
        write_heartbeat(self.run, name, served, **{"seconds": 60, **more})


class Yielding(BucketMiddleware):
    """Lets others run before and after each call; may lose what is asked, the answer, or the one who asks."""

    def __init__(self, inner: Bucket, actor: "Actor") -> None:
        super().__init__(inner)
        self._actor = actor

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        self._actor.lets_others()
        self._actor.may_fail()
        self._inner.put(key, data, if_absent=if_absent)
        self._actor.lets_others()
        self._actor.may_fail()

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        self._actor.lets_others()
        return self._inner.get(key, max_bytes=max_bytes)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._actor.lets_others()
        found = [*self._inner.list(prefix)]
        self._actor.lets_others()
        return iter(found)

    def delete(self, key: str) -> None:
        self._actor.lets_others()
        self._inner.delete(key)


@dataclass
class Play:
    """What happened: ``pauses`` as (begin, end) by the true time, who died, and what should not have happened."""

    pauses: list[tuple[float, float]] = field(default_factory=list)
    died: int = 0
    errors: list[Exception] = field(default_factory=list)

    @property
    def most(self) -> int:
        """How many were paused at once."""
        edges = sorted([(begin, 1) for begin, _ in self.pauses] + [(end, -1) for _, end in self.pauses])
        now = most = 0
        for _, step in edges:
            now += step
            most = max(most, now)
        return most


class Actor(threading.Thread):
    """A receiver: takes turns, pauses in them, and may die anywhere."""

    def __init__(self, number: int, stage: "Stage") -> None:
        super().__init__(daemon=True)
        self.go = threading.Semaphore(0)
        self.alive = True
        self._number, self._stage = number, stage
        self._skew = stage.chance.uniform(-1e6, 1e6)

    def lets_others(self) -> None:
        """Stand still until chosen again."""
        self._stage.back.release()
        self.go.acquire()
        if self._stage.over or self._stage.chance.random() < 0.01:
            raise Crash

    def may_fail(self) -> None:
        if self._stage.chance.random() < 0.08:
            raise StoreError("injected")

    def run(self) -> None:
        self.go.acquire()
        try:
            for version in range(4):
                self._take(version)
        except Crash:
            self._stage.outcome.died += not self._stage.over
        except Exception as error:  # noqa: BLE001  shown by the test
            self._stage.outcome.errors.append(error)
        finally:
            self.alive = False
            self._stage.back.release()

    def _take(self, version: int) -> None:
        stage = self._stage
        run = Run(stage.bucket)
        run.bucket = Yielding(stage.bucket, self)
        turns = PauseSlots(
            run,
            f"r{self._number}",
            stage.slots,
            stage.pause,
            lambda: stage.bucket.now + self._skew,
            lambda seconds: self.lets_others(),
            stage.chance,
        )
        try:
            held = turns.acquire(version)
            assert held is not None
            begin = stage.bucket.now
            stage.outcome.pauses.append((begin, begin + stage.pause))
            for _ in range(stage.chance.randrange(4)):
                self.lets_others()
            # A pause ends by itself when its time is over.
            stage.outcome.pauses.remove((begin, begin + stage.pause))
            stage.outcome.pauses.append((begin, min(begin + stage.pause, stage.bucket.now)))
            turns.release(held)
        except StoreError:
            return


class Stage:
    """Runs one receiver at a time, in an order by chance, and turns the clock between them."""

    def __init__(self, folder: Path, seed: int, slots: int, receivers: int, longest: float, pause: float) -> None:
        self.chance = random.Random(seed)
        self.slots, self.longest, self.pause = slots, longest, pause
        self.bucket = Clocked()
        Grown(self.bucket, folder, 1)
        self.outcome = Play()
        self.back = threading.Semaphore(0)
        self.over = False
        self.actors = [Actor(number, self) for number in range(receivers)]

    def play(self, steps: int = 3000) -> Play:
        """Until all are done, or so many steps were made."""
        for actor in self.actors:
            actor.start()
        for step in range(steps):
            self.over = step >= steps - 100 * len(self.actors)
            alive = [actor for actor in self.actors if actor.alive]
            if not alive:
                break
            self.bucket.now += self.chance.uniform(0, self.longest)
            self.chance.choice(alive).go.release()
            assert self.back.acquire(timeout=WAIT), "a receiver hangs"
        return self.outcome

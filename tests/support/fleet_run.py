"""``FleetRun``: a run in a store whose clock a test sets, with heartbeats of receivers that do not exist."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.collecting import Grown, MemoryBucket
from vllm_delta_sync.client import Run
from vllm_delta_sync.fleet.fleet import Fleet
from vllm_delta_sync.fleet.heartbeats import write_heartbeat


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
        """As seen on a machine whose clock is wrong by ``skew``."""
        clocks = SimpleNamespace(
            time=lambda: self.bucket.now + skew, monotonic=lambda: self.bucket.now, sleep=self.passes
        )
        return Fleet(self.run, clocks)

    def heartbeat(self, name: str, served: int | None, **more: Any) -> None:
        write_heartbeat(self.run, name, served, **{"seconds": 60, **more})

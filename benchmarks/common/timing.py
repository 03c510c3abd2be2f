"""Time and peak memory of one method among others, on a machine that may do other work too."""

import ctypes
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PAUSED_SHARE = 1.05
"""A run that took more wall time than this many times its processor time shared its core with somebody."""
EVICTING_BYTES = 1 << 26
"""More than the last-level cache that one core has for itself."""


@dataclass
class Method:
    """One way to bring the model to the new version.

    Attributes:
        run: does it; what is timed.
        inputs: bytes of what it is given.
        prepare: before each run, untimed, with the model at the old version.
        whole: what to measure memory over, if more than ``run``.
        arrives: whether the model is at the new version afterwards, else at the old one.
    """

    name: str
    run: Callable[[], object]
    inputs: int
    prepare: Callable[[], object] = lambda: None
    whole: Callable[[], object] | None = None
    arrives: bool = True
    walls: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Shortest wall time."""
        return min(self.walls)

    @property
    def disturbance(self) -> float:
        """Wall time of the fastest run over its processor time: 1 if nothing else ran."""
        best = self.walls.index(self.seconds)
        return self.seconds / self.processor[best]

    @property
    def is_settled(self) -> bool:
        """Whether the fastest run had its core to itself."""
        return bool(self.walls) and self.disturbance < PAUSED_SHARE


def time_all(methods: list[Method], restore: Callable[[], object], least: int, most: int) -> None:
    """Run methods in turns, ``least`` times each, and on to ``most`` times while one was always disturbed."""
    # Written between runs, so that each finds the processor's caches without what the last one left in them.
    scratch = np.zeros(EVICTING_BYTES, np.uint8)
    for turn in range(most):
        for method in methods:
            if turn >= least and method.is_settled:
                continue
            restore()
            method.prepare()
            scratch += 1
            used, began = time.thread_time(), time.perf_counter()
            method.run()
            method.walls.append(time.perf_counter() - began)
            method.processor.append(time.thread_time() - used)


def peak_extra_bytes(action: Callable[[], object]) -> int:
    """Peak resident memory of this process while ``action`` runs, above what it had before. Linux only.

    Pages of mapped files count, as the kernel counts them.
    """
    gc.collect()
    # Memory that the allocator kept back would be used again without being seen.
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR.write_text("5")
    before = _status_bytes("VmRSS")
    action()
    return max(0, _status_bytes("VmHWM") - before)


def load_average() -> float:
    """Processes that wanted a core, over the last minute."""
    return os.getloadavg()[0]


def _status_bytes(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])

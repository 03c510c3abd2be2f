"""Resident memory of a server's processes, commit by commit, and whether it grows."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.tools.soak.lives import Lives

LOOK_SECONDS = 0.25
FEWEST = 40
"""Fewer samples than that say nothing of what grows."""
BOUND = 6.0
"""Megabytes per 100 versions, over the last half of a life."""


@dataclass(frozen=True)
class Sample:
    """Of one process, after one commit."""

    life: int
    process: str
    commits: int
    megabytes: float


def processes_of(group: int) -> dict[str, int]:
    """Name → process id of a server's processes that hold more than an interpreter; names as vLLM calls them."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # gone meanwhile
        if int(fields[2]) != group or "resource_tracker" in words:
            continue
        name = words.partition("\0")[0] if words.startswith("VLLM::") else "API server"
        found[name.strip()] = int(folder.name)
    return found


def resident(process: int) -> float:
    """Megabytes; 0 for one that is gone."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    kilobytes = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(kilobytes[0]) / 1000 if kilobytes else 0.0


class Watch(threading.Thread):
    """Looks at the status, and takes a sample of every process whenever there was a commit.

    Attributes:
        samples: all of them. served: versions that were ever seen to be served.
    """

    def __init__(self, lives: Lives) -> None:
        super().__init__(daemon=True)
        self._lives = lives
        self._ending = threading.Event()
        self.samples: list[Sample] = []
        self.served: set[int] = set()

    def run(self) -> None:
        seen = (0, -1)
        while not self._ending.wait(LOOK_SECONDS):
            life = self._lives.now()
            if life is None:
                continue
            try:
                status = life.server.status()
            except (httpx.HTTPError, ValueError):
                continue  # killed meanwhile; a server that answers nothing else fails the load
            if status["served"] is not None:
                self.served.add(status["served"]["version"])
            if (life.number, status["commits"]) != seen:
                seen = (life.number, status["commits"])
                for name, process in processes_of(life.group).items():
                    self.samples.append(Sample(life.number, name, status["commits"], resident(process)))

    def stop(self) -> None:
        self._ending.set()
        self.join()


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Megabytes per 100 commits of each process of the longest life, over its last half; none if that was short."""
    lives: dict[int, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        lives[sample.life][sample.process].append(sample)
    if not lives:
        return {}
    longest = max(lives.values(), key=lambda life: max(map(len, life.values())))
    return {name: 100 * slope(part[len(part) // 2 :]) for name, part in longest.items() if len(part) >= FEWEST}


def slope(samples: Sequence[Sample]) -> float:
    """Megabytes per commit, by least squares."""
    mean_x = sum(sample.commits for sample in samples) / len(samples)
    mean_y = sum(sample.megabytes for sample in samples) / len(samples)
    over = sum((sample.commits - mean_x) * (sample.megabytes - mean_y) for sample in samples)
    under = sum((sample.commits - mean_x) ** 2 for sample in samples)
    return over / under if under else 0.0

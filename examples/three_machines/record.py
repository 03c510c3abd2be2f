"""What is measured during a run, and the summary made of it."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from examples.fleet.links import Passed
from examples.fleet.probe import Measured
from examples.fleet.record import Full
from examples.three_machines.reach import Attempt
from examples.three_machines.settings import ROLLOUT, TRAINER, Options

ENDS = 20
"""Versions at the beginning and at the end whose mean rewards are compared."""


@dataclass
class Kill:
    """One part, killed with SIGKILL and started again.

    Attributes:
        at, back, going: monotonic times of the kill, of the new start, and of the first step of training after that,
            on games played after that unless the trainer itself was killed; None: not yet.
        version: the newest when it was killed. step: the one that was the first. batches: played since, by key.
    """

    part: str
    version: int
    at: float
    back: float | None = None
    going: float | None = None
    step: int | None = None
    batches: set[str] = field(default_factory=set)

    @property
    def seconds(self) -> float | None:
        """From the kill until it went on."""
        return None if self.going is None else self.going - self.at

    def document(self) -> dict[str, Any]:
        """For summary.json."""
        went_on = None if self.seconds is None else round(self.seconds, 2)
        return {"part": self.part, "version": self.version, "seconds": went_on, "step": self.step}


@dataclass(frozen=True)
class Version:
    """One version, as its manifest in the bucket says.

    ``batches``: trajectories it was trained on; ``staleness``: versions between the oldest token's and the weights that
    were trained, at most; ``reward`` and ``solved``: means over those games, None if there are none.
    """

    version: int
    changed: int
    total: int
    payload_bytes: int
    full_bytes: int
    batches: int
    staleness: int
    reward: float | None
    solved: float | None


@dataclass
class Record:
    """One run.

    Attributes:
        shared: why the machines share one network; empty: they do not. called: when each version was published, by the
            monotonic clock. served: when the server was first seen to serve it. pauses_ms: of its commit.
        looks, seen, found: see ``sockets.Watch``. read: processes whose arguments and variables were read, and told:
            what of those they should not know. scan: the server's rescan of its weights at the end.
        passed: bytes over each link during training. stale: trajectories that were too old to be trained on.
        claims: the verdict. figures: what it rests on.
    """

    options: Options
    shared: str = ""
    links: dict[str, Measured] = field(default_factory=dict)
    versions: list[Version] = field(default_factory=list)
    called: dict[int, float] = field(default_factory=dict)
    served: dict[int, float] = field(default_factory=dict)
    pauses_ms: dict[int, float] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    looks: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    read: int = 0
    told: list[str] = field(default_factory=list)
    scan: dict[str, Any] = field(default_factory=dict)
    passed: dict[str, Passed] = field(default_factory=dict)
    training_seconds: float = 0.0
    full: Full | None = None
    stale: int = 0
    claims: dict[str, bool] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> int:
        """The newest version that was heard of."""
        return max(self.called, default=0)

    def serve(self, version: int, at: float) -> None:
        """The server was seen to serve it: so it has served all before too."""
        for earlier in range(max(self.served, default=-1) + 1, version + 1):
            self.served[earlier] = at

    def fresh(self) -> dict[int, float]:
        """Version → seconds from ``publish()`` until it was served, of those on whose way nobody was down."""
        down = [(kill.at, kill.going or float("inf")) for kill in self.kills if kill.part in (ROLLOUT, TRAINER)]
        return {
            version: self.served[version] - called
            for version, called in self.called.items()
            if version in self.served and not any(at < self.served[version] and called < end for at, end in down)
        }

    def rewards(self) -> tuple[float, float]:
        """Mean reward of the games that the first versions, and the last ones, were trained on."""
        return _ends([version.reward for version in self.versions])

    def solved(self) -> tuple[float, float]:
        """The same of the share of games that were solved."""
        return _ends([version.solved for version in self.versions])

    def summary(self, seconds: float) -> dict[str, Any]:
        """The content of summary.json."""
        fresh = list(self.fresh().values())
        pauses = list(self.pauses_ms.values())
        first, last = self.rewards()
        solved_first, solved_last = self.solved()
        deltas = self.versions
        return {
            "verdict": self.claims,
            "wrong": self.wrong,
            "reward": {"first": round(first, 4), "last": round(last, 4)},
            "solved": {"first": round(solved_first, 4), "last": round(solved_last, 4)},
            "versions": self.head,
            "network": "namespaces" if not self.shared else f"loopback: {self.shared}",
            "link": {"mbit_s": self.options.mbit, "round_trip_ms": self.options.round_trip_ms},
            "links_measured": {name: measured.document() for name, measured in self.links.items()},
            "payload_bytes": sum(version.payload_bytes for version in deltas),
            "full_bytes": sum(version.full_bytes for version in deltas),
            "changed_share": round(sum(v.changed for v in deltas) / max(1, sum(v.total for v in deltas)), 6),
            "fresh_seconds": _spread(fresh),
            "pause_ms": _spread(pauses),
            "full": None if self.full is None else asdict(self.full),
            "link_bytes": self.passed,
            "training_seconds": round(self.training_seconds, 1),
            "kills": [kill.document() for kill in self.kills],
            "looks": {"number": self.looks, "connections_seen": dict(self.seen), "wrong": dict(self.found)},
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "told": self.told,
            "stale_batches": self.stale,
            "figures": self.figures,
            "curve": [asdict(version) for version in self.versions],
            "seconds": round(seconds, 1),
        }


def _ends(values: Sequence[float | None]) -> tuple[float, float]:
    known = [value for value in values if value is not None]
    count = max(1, min(ENDS, len(known) // 3))
    return (statistics.fmean(known[:count]), statistics.fmean(known[-count:])) if known else (0.0, 0.0)


def _spread(values: list[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "longest": None}
    return {"median": round(statistics.median(values), 4), "longest": round(max(values), 4)}

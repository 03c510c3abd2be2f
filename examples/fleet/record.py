"""What is measured, the claims about it, and the tables made of it."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from examples.fleet.links import Passed
from examples.fleet.probe import Measured
from examples.fleet.settings import Options

MB = 1e6
PERCENT = 100.0
TRAINER_PHASES = ("diff", "encode")
REPLICA_PHASES = ("fetch", "verify", "decode", "route", "turn", "pause")
"""Those that come one after the other; the rescan goes beside them, ``wait`` and ``commit`` are parts of ``pause``."""


@dataclass(frozen=True)
class Change:
    """One version as it went out.

    Attributes:
        scene: during which. seconds: of the publisher, as in ``PublishResult.seconds``.
        fresh: seconds from the call of ``publish`` until each replica served it.
        passed: bytes over each link from that call until all served it, whatever they were for.
        timings: of each replica, milliseconds per phase of its commit, as its status gives them.
    """

    scene: str
    version: int
    changed: int
    total: int
    payload_bytes: int
    seconds: dict[str, float]
    fresh: dict[str, float]
    passed: dict[str, Passed]
    timings: dict[str, dict[str, float]]

    def document(self) -> dict[str, Any]:
        """For summary.json."""
        return {
            "scene": self.scene,
            "version": self.version,
            "changed_share": round(self.changed / self.total, 6),
            "payload_bytes": self.payload_bytes,
            "publish_seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "fresh_seconds": {name: round(value, 4) for name, value in self.fresh.items()},
            "link_bytes": self.passed,
            "commit_ms": self.timings,
        }


@dataclass(frozen=True)
class Full:
    """The full checkpoint, by the same store and links: ``up`` seconds to write and store it, ``down`` to fetch it.

    ``save`` is the part of ``up`` that writing the file took.
    """

    bytes: int
    save: float
    up: float
    down: float
    passed: dict[str, Passed]

    @property
    def seconds(self) -> float:
        """From the trainer's weights in memory to a file on the replica's disk; loading it is not counted."""
        return self.up + self.down


@dataclass(frozen=True)
class Arrival:
    """A server that came, or came back: ``version`` served ``seconds`` after its start, with so many bytes down."""

    name: str
    how: str
    version: int
    seconds: float
    down: int


@dataclass
class Record:
    """One run of the example. ``listing``: what ``delta-sync fleet`` says at the end."""

    options: Options
    parameters: int = 0
    links: dict[str, Measured] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    full: Full | None = None
    full_replica: str = ""
    fingerprints: dict[str, str] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    answers: dict[str, list[Any]] = field(default_factory=dict)
    listing: str = ""

    def undisturbed(self) -> list[Change]:
        """The versions that were published while no server was starting: those that the ratio is made of."""
        return [change for change in self.changes if change.scene != "restart"]

    def fresh(self) -> list[float]:
        """Seconds to fresh, of every such version on every replica."""
        return [seconds for change in self.undisturbed() for seconds in change.fresh.values()]

    def phases(self) -> dict[str, float]:
        """Median seconds of each part of the way to fresh. ``between``: storing, the notice, and the look after it."""
        parts: dict[str, list[float]] = {phase: [] for phase in (*TRAINER_PHASES, *REPLICA_PHASES)}
        parts["between"] = []
        for change in self.undisturbed():
            for name, seconds in change.fresh.items():
                spent = {phase: change.seconds[phase] for phase in TRAINER_PHASES}
                spent |= {phase: change.timings[name].get(phase, 0.0) / 1e3 for phase in REPLICA_PHASES}
                spent["between"] = seconds - sum(spent.values())
                for phase, value in spent.items():
                    parts[phase].append(value)
        return {phase: statistics.median(values) for phase, values in parts.items() if values}

    def down(self) -> list[int]:
        """Bytes down a replica's link, of every such version on every replica."""
        return [change.passed[name]["down"] for change in self.undisturbed() for name in change.fresh]

    def time_ratio(self) -> float:
        """How many times longer full weights take than the median version. 0: not measured."""
        return 0.0 if self.full is None else self.full.seconds / statistics.median(self.fresh())

    def overlapped_ratio(self) -> float:
        """The same if nothing of the full weights had to be stored before it is fetched: a bound, not measured."""
        return 0.0 if self.full is None else max(self.full.up, self.full.down) / statistics.median(self.fresh())

    def byte_ratio(self) -> float:
        """How many times more bytes full weights send down a replica's link than the median version does."""
        if self.full is None:
            return 0.0
        return self.full.passed[self.full_replica]["down"] / statistics.median(self.down())

    def claims(self, ratio: float | None) -> dict[str, bool]:
        """What has to hold.

        Args:
            ratio: how many times faster than full weights a version has to be; None: no matter.
        """
        head = self.changes[-1].version if self.changes else 0
        equal = len(set(self.fingerprints.values())) == 1 and len(self.fingerprints) > len(self.served) > 0
        claims = {
            "weights_exact": equal,
            "all_fresh": bool(self.served) and set(self.served.values()) == {head},
            "answers_equal": bool(self.answers) and all(self.answers.values())
            and all(answer == next(iter(self.answers.values())) for answer in self.answers.values()),
        }  # fmt: skip
        if ratio is not None:
            claims["ratio_reached"] = self.time_ratio() >= ratio
        return claims

    def summary(self, ratio: float | None, seconds: float) -> dict[str, Any]:
        """The content of summary.json."""
        fresh, full = self.fresh(), self.full
        share = sum(change.changed for change in self.changes) / max(1, sum(change.total for change in self.changes))
        return {
            "verdict": self.claims(ratio),
            "size": self.options.size,
            "parameters": self.parameters,
            "versions": len(self.changes),
            "changed_share": round(share, 6),
            "link": {
                "mbit_s": self.options.mbit,
                "round_trip_ms": self.options.round_trip_ms,
                "slow_start": self.options.slow_start,
            },
            "links_measured": {name: measured.document() for name, measured in self.links.items()},
            "fresh_seconds": {"median": round(statistics.median(fresh), 4), "longest": round(max(fresh), 4)},
            "phases_seconds": {phase: round(value, 4) for phase, value in self.phases().items()},
            "full_seconds": None
            if full is None
            else {"save": round(full.save, 4), "up": round(full.up, 4), "down": round(full.down, 4)},
            "full_bytes": None if full is None else full.bytes,
            "ratio": {
                "time": round(self.time_ratio(), 2),
                "bytes": round(self.byte_ratio(), 2),
                "overlapped": round(self.overlapped_ratio(), 2),
            },
            "arrivals": [vars(arrival) for arrival in self.arrivals],
            "fingerprints": self.fingerprints,
            "served": self.served,
            "changes": [change.document() for change in self.changes],
            "seconds": round(seconds, 1),
        }

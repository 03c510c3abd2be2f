"""What is measured, the claims about it, and rows made of it."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.rows import Row, row
from benchmarks.fleet.probe import Measured
from tests.support.links import Passed

BENCH = "fleet"
MB = 1e6
FULL, VERSION = "full weights, stored and fetched", "a version"
RATIO = 20.0
"""How many times sooner than full weights a version has to be, in full size."""
TRAINER_PHASES = ("diff", "encode")
REPLICA_PHASES = ("fetch", "verify", "decode", "route", "pause")
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


@dataclass(frozen=True)
class Full:
    """The full checkpoint, by the same store and links: ``up`` seconds to write and store it, ``down`` to fetch it.

    ``down_bytes``: over the replica's link.
    """

    up: float
    down: float
    down_bytes: int

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
    """One run of the benchmark."""

    links: dict[str, Measured] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    full: Full | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)
    answers: dict[str, list[Any]] = field(default_factory=dict)

    def undisturbed(self) -> list[Change]:
        """The versions that were published while no server was starting: those that the ratio is made of."""
        return [change for change in self.changes if change.scene != "restart"]

    def fresh(self) -> list[float]:
        """Seconds to fresh, of every such version on every replica."""
        return [seconds for change in self.undisturbed() for seconds in change.fresh.values()]

    def down(self) -> list[int]:
        """Bytes down a replica's link, of every such version on every replica."""
        return [change.passed[name]["down"] for change in self.undisturbed() for name in change.fresh]

    def phases(self) -> dict[str, float]:
        """Median seconds of each part of the way to fresh. ``between``: storing, the notice, and the poll after it."""
        parts: dict[str, list[float]] = {phase: [] for phase in (*TRAINER_PHASES, *REPLICA_PHASES, "between")}
        for change in self.undisturbed():
            for name, seconds in change.fresh.items():
                spent = {phase: change.seconds[phase] for phase in TRAINER_PHASES}
                spent |= {phase: change.timings[name].get(phase, 0.0) / 1e3 for phase in REPLICA_PHASES}
                spent["between"] = seconds - sum(spent.values())
                for phase, value in spent.items():
                    parts[phase].append(value)
        return {phase: statistics.median(values) for phase, values in parts.items() if values}

    def time_ratio(self) -> float:
        """How many times longer full weights take than the median version. 0: not measured."""
        return 0.0 if self.full is None else self.full.seconds / statistics.median(self.fresh())

    def claims(self, ratio: float | None) -> dict[str, bool]:
        """What has to hold.

        Args:
            ratio: how many times faster than full weights a version has to be; None: no matter.
        """
        head = self.changes[-1].version if self.changes else 0
        equal = len(set(self.fingerprints.values())) == 1 and len(self.fingerprints) > len(self.served) > 0
        answers = list(self.answers.values())
        claims = {
            "weights exact": equal,
            "all fresh": bool(self.served) and set(self.served.values()) == {head},
            "answers equal": bool(answers) and all(answer and answer == answers[0] for answer in answers),
        }
        return claims if ratio is None else claims | {"ratio reached": self.time_ratio() >= ratio}

    def rows(self, ratio: float | None) -> list[Row]:
        """All measurements."""
        found = [row(BENCH, "verdict", name, float(holds), "holds") for name, holds in self.claims(ratio).items()]
        for name, link in self.links.items():
            found.append(row(BENCH, f"link of {name}", "round trip", link.round_trip_ms, "ms"))
            found.append(row(BENCH, f"link of {name}", "up", link.up_mbit_s, "Mbit/s"))
            found.append(row(BENCH, f"link of {name}", "down", link.down_mbit_s, "Mbit/s"))
        for change in self.changes:
            case = f"{change.version}, {change.scene}"
            found.append(row(BENCH, case, "changed", 100 * change.changed / change.total, "%"))
            found.append(row(BENCH, case, "payload", change.payload_bytes / MB, "MB"))
            found.append(row(BENCH, case, "trainer up", change.passed["trainer"]["up"] / MB, "MB"))
            for name, seconds in change.fresh.items():
                found.append(row(BENCH, case, f"{name} fresh", seconds, "s"))
                found.append(row(BENCH, case, f"{name} down", change.passed[name]["down"] / MB, "MB"))
        for arrival in self.arrivals:
            case = f"{arrival.name}: {arrival.how}"
            found.append(row(BENCH, case, "version", arrival.version, "number"))
            found.append(row(BENCH, case, "from start", arrival.seconds, "s"))
            found.append(row(BENCH, case, "came down", arrival.down / MB, "MB"))
        found += [row(BENCH, "way of a version", phase, 1e3 * value, "ms") for phase, value in self.phases().items()]
        return found + self._comparison()

    def _comparison(self) -> list[Row]:
        """A version beside the full weights, over the same links; a ratio is peer / ours."""
        fresh, down, full = self.fresh(), self.down(), self.full
        if not fresh:
            return []
        found = [
            row(BENCH, f"{VERSION}, median", "seconds to fresh", statistics.median(fresh), "s"),
            row(BENCH, f"{VERSION}, median", "bytes down", statistics.median(down) / MB, "MB"),
            row(BENCH, f"{VERSION}, slowest", "seconds to fresh", max(fresh), "s"),
            row(BENCH, f"{VERSION}, slowest", "bytes down", max(down) / MB, "MB"),
        ]
        if full is None:
            return found
        # Computed: if nothing of the full weights had to be stored before it is fetched, the slower way alone counts.
        overlapped = max(full.up, full.down)
        return [
            *found,
            row(BENCH, FULL, "seconds to fresh", full.seconds, "s"),
            row(BENCH, FULL, "bytes down", full.down_bytes / MB, "MB"),
            row(BENCH, "the same, if both ways overlapped (computed)", "seconds to fresh", overlapped, "s"),
            row(BENCH, "seconds to fresh", "ratio", self.time_ratio(), "×", FULL),
            row(BENCH, "bytes down", "ratio", full.down_bytes / statistics.median(down), "×", FULL),
            row(BENCH, "seconds, both ways overlapped", "ratio", overlapped / statistics.median(fresh), "×", FULL),
        ]

"""What the times of arrival and the syncs of ``benchmarks.serving`` say: speed lost, gaps, and where it went."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common.estimate import Estimate, estimate

Floats = npt.NDArray[np.float64]

BEFORE_SECONDS, AFTER_SECONDS = 0.25, 0.75
"""A sync's window, from when it was asked for: what it costs shows in there, and outside there is none."""


@dataclass(frozen=True)
class Phase:
    """A stretch of time, by the monotonic clock, with syncs or without."""

    syncs: bool
    start: float
    end: float


@dataclass(frozen=True)
class Sync:
    """One version taken: when it was asked for, when that was answered, and the status' entry of it."""

    asked: float
    answered: float
    entry: dict[str, Any]

    def milliseconds(self, *names: str) -> float:
        """Sum of some of its timings; one that is not there counts nothing."""
        return float(sum(self.entry["timings_ms"].get(name, 0.0) for name in names))


class Arrivals:
    """Tokens as they arrived at all clients."""

    def __init__(self, pieces: Floats) -> None:
        """``pieces``: (n, 3) seconds, request, tokens; in any order."""
        ordered = pieces[np.argsort(pieces[:, 0], kind="stable")]
        self._times, self._requests = ordered[:, 0], ordered[:, 1]
        self._counted = np.concatenate([[0.0], np.cumsum(ordered[:, 2])])

    def tokens(self, start: float, end: float) -> float:
        """How many arrived in between."""
        first, last = np.searchsorted(self._times, [start, end])
        return float(self._counted[last] - self._counted[first])

    def speed(self, start: float, end: float) -> float:
        """Tokens per second in between."""
        return self.tokens(start, end) / (end - start)

    def gaps(self, spans: Sequence[tuple[float, float]]) -> Floats:
        """Seconds between neighbouring pieces of one answer, of those that ended within one of the spans."""
        order = np.lexsort((self._times, self._requests))
        times, requests = self._times[order], self._requests[order]
        same = requests[1:] == requests[:-1]
        ends, lengths = times[1:][same], np.diff(times)[same]
        inside = np.zeros(len(ends), bool)
        for start, end in spans:
            inside |= (ends >= start) & (ends < end)
        found: Floats = lengths[inside]
        return found


def lost_by_blocks(arrivals: Arrivals, plan: Sequence[Phase]) -> Estimate:
    """Share of the tokens that are lost with syncs, one value for each block of four phases."""
    found = []
    for first in range(0, len(plan), 4):
        block = plan[first : first + 4]
        speeds = {kind: [arrivals.speed(p.start, p.end) for p in block if p.syncs is kind] for kind in (True, False)}
        found.append(1 - sum(speeds[True]) / sum(speeds[False]))
    return estimate(found)


def lost_by_syncs(arrivals: Arrivals, plan: Sequence[Phase], syncs: Sequence[Sync]) -> Estimate:
    """Seconds of generation that one sync costs: what is missing around it, at the speed of the rest of its phase."""
    found = []
    for sync in syncs:
        phase = next(phase for phase in plan if phase.start <= sync.asked < phase.end)
        start, end = sync.asked - BEFORE_SECONDS, sync.answered + AFTER_SECONDS
        mine = [other for other in syncs if phase.start <= other.asked < phase.end]
        windows = [(other.asked - BEFORE_SECONDS, other.answered + AFTER_SECONDS) for other in mine]
        quiet = phase.end - phase.start - sum(b - a for a, b in windows)
        rest = arrivals.tokens(phase.start, phase.end) - sum(arrivals.tokens(a, b) for a, b in windows)
        found.append((end - start) - arrivals.tokens(start, end) / (rest / quiet))
    return estimate(found)


def speed_while_staging(arrivals: Arrivals, plan: Sequence[Phase], syncs: Sequence[Sync]) -> float:
    """Speed from a sync's start to its pause, against the speed without syncs; all syncs together."""
    tokens = seconds = 0.0
    for sync in syncs:
        end = sync.answered - sync.milliseconds("pause") / 1e3
        tokens, seconds = tokens + arrivals.tokens(sync.asked, end), seconds + max(0.0, end - sync.asked)
    quiet = [arrivals.speed(phase.start, phase.end) for phase in plan if not phase.syncs]
    return tokens / seconds / statistics.fmean(quiet)

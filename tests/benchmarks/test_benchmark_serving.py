"""Figures of the serving benchmark, from arrivals that are known."""

import itertools

import numpy as np
import pytest

from benchmarks.serving import Plan, figures, tables
from benchmarks.serving_figures import (
    Arrivals,
    Phase,
    Sync,
    estimate,
    lost_by_blocks,
    lost_by_syncs,
    phases,
    speed_while_staging,
)
from benchmarks.tables import value_of

EVERY, BLOCKS, STOP = 10.0, 3, 0.2
START = 100.0


def arrivals_of(plan: list[Phase], stop: float, drift: float = 0.0) -> Arrivals:
    """Two streams of about 100 tokens a second, which stand still so long in the middle of each phase with syncs."""
    times = []
    now = START
    stops = [(phase.start + phase.end) / 2 for phase in plan if phase.syncs]
    while now < plan[-1].end:
        times.append(now)
        now += 0.01 * (1 + drift * (now - START))
        if stops and now >= stops[0]:
            now += stop
            stops.pop(0)
    return Arrivals(np.array([[at + offset, request, 1] for at in times for request, offset in ((1, 0), (2, 0.001))]))


def syncs_of(plan: list[Phase], stop: float) -> list[Sync]:
    entry = {"timings_ms": {"fetch": 1.0, "route": 2.0, "pause": 1e3 * stop}, "changed": 7, "payload_bytes": 3000}
    middles = [(phase.start + phase.end) / 2 for phase in plan if phase.syncs]
    return [Sync(middle - 0.1, middle + stop, entry) for middle in middles]


def test_each_block_has_syncs_in_its_middle() -> None:
    plan = phases(START, BLOCKS, EVERY)
    assert [phase.syncs for phase in plan] == [False, True, True, False] * BLOCKS
    assert plan[0].start == START
    assert all(left.end == right.start for left, right in itertools.pairwise(plan))


@pytest.mark.parametrize("drift", [0.0, 0.001])
def test_lost_is_the_time_that_generation_stood_still(drift: float) -> None:
    plan = phases(START, BLOCKS, EVERY)
    arrivals = arrivals_of(plan, STOP, drift)
    assert lost_by_blocks(arrivals, plan).mean == pytest.approx(STOP / EVERY, rel=0.1)
    assert lost_by_syncs(arrivals, plan, syncs_of(plan, STOP)).mean == pytest.approx(STOP, rel=0.1)


def test_nothing_is_lost_where_nothing_stood_still() -> None:
    plan = phases(START, BLOCKS, EVERY)
    arrivals = arrivals_of(plan, 0.0)
    assert lost_by_blocks(arrivals, plan).mean == pytest.approx(0, abs=1e-3)
    assert speed_while_staging(arrivals, plan, syncs_of(plan, 0.0)) == pytest.approx(1, abs=0.1)


def test_gaps_are_within_one_answer() -> None:
    arrivals = Arrivals(np.array([[0.0, 1, 1], [0.5, 2, 1], [1.0, 1, 3], [1.25, 2, 1], [9.0, 3, 1]]))
    assert sorted(arrivals.gaps([(0, 10)])) == [0.75, 1.0]
    assert list(arrivals.gaps([(1.1, 2.0)])) == [0.75]
    assert arrivals.tokens(0.5, 1.1) == 4


def test_interval_of_an_estimate() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.30 / 3**0.5)
    assert estimate([4.0] * 30).half == 0


def test_rows_and_tables() -> None:
    plan = phases(START, BLOCKS, EVERY)
    case = "demo, every 10 s"
    rows = figures(case, arrivals_of(plan, STOP), plan, syncs_of(plan, STOP), Plan(EVERY, BLOCKS))
    assert value_of(rows, case, "lost") == pytest.approx(100 * STOP / EVERY, rel=0.1)
    assert value_of(rows, case, "pause p50") == pytest.approx(1e3 * STOP)
    assert value_of(rows, case, "staging p50") == 3
    assert value_of(rows, case, "ratio", "no_sync") == pytest.approx(1 - STOP / EVERY, abs=0.003)
    assert value_of(rows, case, "gap longest") == pytest.approx(1e3 * (STOP + 0.01), rel=0.05)
    assert all((row["metric"] == "ratio") == ("peer" in row) for row in rows)
    assert sum(line.startswith("| " + case) for line in tables(rows)) == 3

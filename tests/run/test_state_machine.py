"""No sequence of events breaks a chain: at least 800 of them, in `make test-full` 10,000 more, drawn by Hypothesis.

A failure prints the events that lead to it, the fewest that Hypothesis finds. `make fuzz` draws others, and prints the
command that repeats a failure. Everything follows from the seed: time, random ids and the order of requests come from
the test (``world.patched``), nothing is kept from one run for the next, and what runs in the background is waited for
after each event. CHAIN_EVENTS asks for another number of events.
"""

import os
import time

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.run.machine.events import TALLY
from tests.run.machine.machine import ChainMachine
from tests.run.machine.world import patched

EVENTS = {102: 800, 103: 10_000}
"""By seed: fixed, so that a change is red only for what it has changed."""
EVENTS_PER_EXAMPLE = 50
SURELY_PER_EXAMPLE = 40
"""Some examples end early."""


def draw(chosen: int, wanted: int) -> None:
    """Let at least so many events happen, all of them determined by a seed."""
    with patched():
        seed(chosen)(ChainMachine)
        run_state_machine_as_test(
            ChainMachine,
            settings=settings(
                max_examples=wanted // SURELY_PER_EXAMPLE + wanted // 1000 + 1,
                stateful_step_count=EVENTS_PER_EXAMPLE,
                deadline=None,
                database=None,
                derandomize=False,
                print_blob=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate, Phase.shrink],
            ),
        )


@pytest.mark.parametrize(
    "seed_", [pytest.param(102, marks=pytest.mark.hypothesis), pytest.param(103, marks=pytest.mark.slow)], ids=str
)
def test_no_sequence_of_events_breaks_a_chain(seed_: int, campaign_seed: int | None) -> None:
    wanted = int(os.environ.get("CHAIN_EVENTS", EVENTS[seed_]))
    before, began = TALLY.events, time.monotonic()
    draw(seed_ if campaign_seed is None else campaign_seed, wanted)
    happened = TALLY.events - before
    print(f"{happened:,} events in {time.monotonic() - began:.0f} s")
    assert happened >= wanted or campaign_seed is not None

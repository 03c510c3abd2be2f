"""The line that the log has for each change of weights: one, of one form, that says what took how long."""

import logging
import re
from pathlib import Path

import pytest

from tests.support.world import World
from vllm_delta_sync.bucket.hashing import hashed_seconds, hashing
from vllm_delta_sync.engine import telling
from vllm_delta_sync.engine.reading import Clock

ENDING = r"paused [\d.]+( ms)? \(committed [\d.]+, resumed [\d.]+\)"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of moves since the last call."""
    found = [record.getMessage() for record in caplog.records if re.match(r"version \d+ \(step", record.getMessage())]
    caplog.clear()
    return found


def test_every_move_has_one_line_of_the_same_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm.delta_sync")
    world = World(tmp_path)
    world.receiver.advance()
    world.train(480)
    world.receiver.advance()
    (line,) = lines(caplog)
    assert re.fullmatch(rf"version 1 \(step 480\) served: [\d.]+ % changed, [\d.]+ kB; .*{ENDING}", line)
    for step in (481, 482):
        world.tensors["model.norm.weight"].mul_(1.5)
        world.train(step)
    world.receiver.advance()
    (line,) = lines(caplog)
    form = r"version 3 \(step 482\) served: 2 versions in one commit, ([\d,]+) elements written, [\d.]+ kB; "
    found = re.match(form, line)
    assert found is not None
    # What both versions changed is written once.
    assert 0 < int(found[1].replace(",", "")) < world.receiver.status()["recent"][-1]["changed"]
    world.receiver.rollback(1)
    (line,) = lines(caplog)
    assert re.fullmatch(rf"version 1 \(step 480\) served: gone back from version 3; .*{ENDING}", line)
    world.model.norm.data.mul_(2)
    world.receiver.verify()
    world.receiver.mend()
    (line,) = lines(caplog)
    assert line.startswith("version 1 (step 480) served: weights that were changed from outside are replaced; fetched ")


def test_anchor_is_told_as_such_and_its_reading_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm.delta_sync")
    world = World(tmp_path, with_base=False)
    world.model.norm.data[:] = 0
    world.receiver.advance()
    (line,) = lines(caplog)
    assert re.match(r"version 0 \(step \d+\) served: taken whole, [\d.]+ kB; ", line)
    timings = world.receiver.status()["timings_ms"]
    assert list(timings) == [phase for phase in telling.ORDER if phase in timings]
    assert {"fetch", "verify", "decode", "route", "turn"} <= timings.keys()
    assert min(timings["verify"], timings["fetch"], timings["decode"]) > 0


@pytest.mark.parametrize(
    ("ms", "line"),
    [
        (
            {"fetch": 210.4, "verify": 4.0, "decode": 12, "route": 9, "turn": 0.0, "wait": 1, "pause": 14, "commit": 9,
             "resume": 1},
            "fetched 210 ms, verified 4.0, decoded 12, routed 9.0, waited 1.0, paused 14 (committed 9.0, resumed 1.0)",
        ),
        ({"turn": 1500.0, "pause": 9.97}, "queued 1500 ms, paused 10"),
        ({"wait": 0.01, "pause": 3.0, "commit": 2, "resume": 1}, "paused 3.0 ms (committed 2.0, resumed 1.0)"),
        ({}, ""),
    ],
)  # fmt: skip
def test_durations_in_words(ms: dict[str, float], line: str) -> None:
    assert telling.durations(ms) == line


def test_digests_count_as_verified_wherever_they_are_computed() -> None:
    clock = Clock()
    before = hashed_seconds()
    with hashing():
        sum(range(100_000))
    spent = 1e3 * (hashed_seconds() - before)
    clock.tick("fetch")
    clock.tick("decode")
    clock.tick("fetch")
    assert list(clock.ms) == ["fetch", "verify", "decode"]
    assert clock.ms["verify"] == pytest.approx(spent)
    assert clock.ms["fetch"] >= 0

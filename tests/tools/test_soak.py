"""The soak's own judgement, in short: it notices memory that grows and spans that leave a token out."""

import random

import pytest

from tests.tools.soak import proof
from tests.tools.soak.load import covers, spans_of
from tests.tools.soak.memory import FEWEST, Sample, growth


def test_memory_that_grows_is_noticed() -> None:
    """Over the last half of the longest life, by so many megabytes a commit, with noise."""
    chance = random.Random(1)
    samples = [
        Sample(life, name, commit, 500 + 3.0 * min(commit, count // 3) + rate * commit + chance.uniform(-0.2, 0.2))
        for life, count, slopes in ((1, FEWEST, {"API server": 9.0}), (2, 3 * FEWEST, {"API server": 0, "worker": 0.2}))
        for commit in range(count)
        for name, rate in slopes.items()
    ]
    found = growth(samples)
    assert found["API server"] == pytest.approx(0, abs=1)
    assert found["worker"] == pytest.approx(20, abs=1)
    assert growth(samples[: FEWEST - 1]) == growth([]) == {}


def test_spans_that_leave_a_token_out_are_noticed() -> None:
    def covered(*spans: tuple[int, int]) -> bool:
        told = [{"index": 0, "version": 3, "start": start, "end": end} for start, end in spans]
        return covers(spans_of({"delta_sync": {"spans": told}}), 9)

    assert covered((0, 4), (4, 9))
    assert not any((covered((0, 4), (5, 9)), covered((0, 4)), covered((1, 9)), covered()))
    assert proof.findings([])[1] == ["no span was proven"]

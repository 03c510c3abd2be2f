"""The soak in short: twenty versions and no kill. ``make soak`` is the long one."""

from pathlib import Path

import pytest

from tests.tools.soak.course import Options, Progress, run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_short_soak_holds(tmp_path: Path) -> None:
    report = run(Options(versions=20, every=0.6, seed=1, kills=0), tmp_path, Progress())
    assert report.wrong == []
    assert report.answers
    assert report.crossing
    assert report.proof["neighbours_would_be_noticed"] > 0.9
    # The chaos did get to something.
    assert {"release", "target"} & set(report.acts)

"""A plugin of pytest for campaigns: shuffles the tests, starts none when the time is over, and writes what they say.

Takes ``FUZZ_OUTCOMES``, the file that gets one line of JSON for each test, and ``FUZZ_UNTIL``, a Unix time.
"""

import json
import os
import random
import time
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # With pytest-xdist, all workers need the same order.
    random.Random(config.getoption("--hypothesis-seed")).shuffle(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    return True if time.time() > float(os.environ["FUZZ_UNTIL"]) else None


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist have a ``workerinput``; their parent hears of all their tests.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(Path(os.environ["FUZZ_OUTCOMES"])))


class _Outcomes:
    """Writes a line for each test."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # An id is relative to some folder above the test, a location to that in which pytest runs.
        test = f"{report.location[0]}::{report.nodeid.partition('::')[2]}"
        self._write({"test": test, "when": report.when, "outcome": report.outcome, "text": report.longreprtext})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = report.longreprtext
            self._write({"test": report.nodeid, "when": "collect", "outcome": report.outcome, "text": text})

    def _write(self, line: dict[str, str | None]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

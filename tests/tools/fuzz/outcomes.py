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


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # An id is relative to some folder above the test, a location to that in which pytest runs.
    test = f"{report.location[0]}::{report.nodeid.partition('::')[2]}"
    _write({"test": test, "when": report.when, "outcome": report.outcome, "text": report.longreprtext})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write({"test": report.nodeid, "when": "collect", "outcome": report.outcome, "text": report.longreprtext})


def _write(line: dict[str, str | None]) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ["FUZZ_OUTCOMES"]).open("a") as file:
            file.write(json.dumps(line) + "\n")

"""``campaign`` runs the tests that draw with Hypothesis, round after round, each round with another seed.

The module is also a plugin of pytest for its rounds: it shuffles the tests, starts none after the Unix time
``FUZZ_UNTIL``, and writes those that failed into the file ``FUZZ_FAILED``.
"""

import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SELECTED = "hypothesis and not e2e"


def campaign(
    tests: list[str], seed: int, seconds: float, rounds: int, workers: int, scratch: Path, found: list[str]
) -> None:
    """Run rounds until the time is over, and print what failed after each; adds a line for each failure to ``found``.

    Tests that run when the time is over may end.
    """
    until, number = time.time() + seconds, 0
    while number < rounds and time.time() < until:
        with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as folder:
            _round(tests, (seed + number) % 2**32, workers, until, Path(folder), found)
        number += 1


def _round(tests: list[str], seed: int, workers: int, until: float, folder: Path, found: list[str]) -> None:
    print(f"properties: seed {seed}", flush=True)
    options = ["--hypothesis-profile=random", f"--hypothesis-seed={seed}"]
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", *tests, *options, "-m", SELECTED]
    command += ["-c", "pyproject.toml", "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    command += ["-p", "tests.tools.fuzz.properties", "-n", str(workers if workers > 1 else 0)]
    log, failures = folder / "log", folder / "failed"
    failures.touch()
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "TMPDIR": str(folder)}
    environment |= {"FUZZ_UNTIL": str(until), "FUZZ_FAILED": str(failures)}
    with log.open("w") as output:
        # A session of its own, so that Ctrl-C reaches this process only, and what the tests started ends with it.
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            child.wait()
        finally:
            # Also what its tests started.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    text, failed = log.read_text(), dict.fromkeys(failures.read_text().splitlines())
    python = sys.executable.removeprefix(f"{ROOT}/")
    again = [["-m", "pytest", test, *options] for test in failed]
    if child.returncode not in (0, 1) or (child.returncode and not failed):
        again.append(["-m", "tests.tools.fuzz", "--only", "properties", "--seed", str(seed), "--rounds", "1"])
    if again:
        print(text, flush=True)
    for arguments in again:
        line = shlex.join(["env", f"PYTHONHASHSEED={seed}", python, *arguments])
        found.append(f"{arguments[2]}, seed {seed}; again: {line}")
        print(f"again: {line}", flush=True)
    print(f"properties: seed {seed}: {text.rstrip().rpartition(chr(10))[2]}", flush=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # With pytest-xdist, all workers need the same order.
    random.Random(config.getoption("--hypothesis-seed")).shuffle(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    return True if time.time() > float(os.environ["FUZZ_UNTIL"]) else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        # An id is relative to some folder above the test, a location to that in which pytest runs.
        with open(os.environ["FUZZ_FAILED"], "a") as file:
            file.write(f"{report.location[0]}::{report.nodeid.partition('::')[2]}\n")

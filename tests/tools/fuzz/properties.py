"""``campaign`` runs the tests that draw with Hypothesis, round after round, each round with another seed."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SELECTED = "hypothesis and not e2e"
ENDING_SECONDS = 20.0
LINE_SECONDS = 60.0
"""How often progress is printed where no line can be overwritten."""
SHOWN = 4000
"""Characters of what pytest printed, where it does not say which test failed."""


def campaign(
    tests: list[str], seed: int, seconds: float, rounds: int, workers: int, scratch: Path, found: list[str]
) -> None:
    """Run rounds until the time is over, and print each failure at once; adds a line for each to ``found``.

    Tests that run when the time is over may end.
    """
    until, number = time.time() + seconds, 0
    while number < rounds and time.time() < until:
        with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as folder:
            _Round(tests, (seed + number) % 2**32, workers, until, found).run(Path(folder))
        number += 1


class _Round:
    """One run of pytest over the properties."""

    def __init__(self, tests: list[str], seed: int, workers: int, until: float, found: list[str]) -> None:
        self.tests, self.seed, self.workers, self.until, self.found = tests, seed, workers, until, found
        self.options = ["--hypothesis-profile=random", f"--hypothesis-seed={seed}"]
        self.began = self.printed = time.time()
        self.ended = self.failed = 0
        self.written = ""

    def run(self, folder: Path) -> None:
        print(f"properties: seed {self.seed}", flush=True)
        command = [sys.executable, "-m", "pytest", *self.tests, *self.options, "-m", SELECTED]
        command += ["-c", "pyproject.toml", "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
        command += ["-p", "tests.tools.fuzz.outcomes", "-n", str(self.workers if self.workers > 1 else 0)]
        outcomes, log = folder / "outcomes", folder / "log"
        outcomes.touch()
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(self.seed),
            "FUZZ_OUTCOMES": str(outcomes),
            "FUZZ_UNTIL": str(self.until),
            "TMPDIR": str(folder),
        }
        with log.open("w") as output, outcomes.open() as lines:
            # A session of its own, so that Ctrl-C reaches this process only, and what the tests started ends with it.
            child = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                while child.poll() is None:
                    time.sleep(0.5)
                    self.take(lines.read())
                self.take(lines.read())
            finally:
                _end(child)
        if child.returncode not in (0, 1) or (child.returncode and not self.failed):
            again = ["-m", "tests.tools.fuzz", "--only", "properties", "--seed", str(self.seed), "--rounds", "1"]
            self.report("pytest", f"ended with {child.returncode}:\n{log.read_text()[-SHOWN:]}", again)
        self.show(f"properties: seed {self.seed}: {self.counts}\n")

    def take(self, text: str) -> None:
        """Take what the plugin has written, and print failures and progress."""
        *lines, self.written = (self.written + text).split("\n")
        for line in lines:
            outcome = json.loads(line)
            self.ended += outcome["when"] == "call"
            if outcome["outcome"] == "failed":
                self.failed += 1
                self.report(outcome["test"], outcome["text"], ["-m", "pytest", outcome["test"], *self.options])
        left = f"{max(0.0, self.until - time.time()) / 60:.1f} min left"
        if sys.stdout.isatty():
            self.show(f"{self.counts}, {left}")
        elif time.time() - self.printed > LINE_SECONDS:
            self.printed = time.time()
            self.show(f"{self.counts}, {left}\n")

    def report(self, test: str, text: str, again: list[str]) -> None:
        """Print a failure, and the command that repeats it from the root of the repository."""
        python = sys.executable.removeprefix(f"{ROOT}/")
        command = shlex.join(["env", f"PYTHONHASHSEED={self.seed}", python, *again])
        self.found.append(f"{test}, seed {self.seed}; again: {command}")
        self.show(f"FAILED {test}, seed {self.seed}\n{text}\nagain: {command}\n\n")

    @property
    def counts(self) -> str:
        return f"{self.ended} tests, {self.failed} failed, {(time.time() - self.began) / 60:.1f} min"

    def show(self, text: str) -> None:
        """Print over the line of progress."""
        print(f"\r\x1b[K{text}" if sys.stdout.isatty() else text, end="", flush=True)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a round, and what its tests started."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGINT)
        try:
            child.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()

"""The whole of it: publish, load, chaos, kills; then the proof, and the verdict."""

import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.servers import Server
from tests.support.fits import fits_of
from tests.support.tiny import make_model, save_checkpoint
from tests.tools.soak import memory, proof
from tests.tools.soak.chaos import Chaos
from tests.tools.soak.lives import Lives, until
from tests.tools.soak.load import Load
from tests.tools.soak.trainer import FAMILY, SEED

LAST_KILL = 0.35
"""All kills lie before this share of the versions, so that the last life is long enough to show what memory does."""
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Options:
    """How long, and how wild. ``every``: seconds from one version to the next. streams: requests at a time."""

    versions: int
    every: float
    seed: int
    kills: int = 2
    streams: int = 6


@dataclass
class Report:
    """What came of it.

    Attributes:
        wrong: everything that should not have been; empty if all holds. growth: megabytes per 100 versions.
    """

    options: Options
    seconds: float = 0.0
    answers: int = 0
    crossing: int = 0
    unproven_spans: int = 0
    cut: int = 0
    served: int = 0
    acts: dict[str, int] = field(default_factory=dict)
    growth: dict[str, float] = field(default_factory=dict)
    samples: list[memory.Sample] = field(default_factory=list)
    proof: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Trainer:
    """The trainer's process."""

    def __init__(self, base: Path, url: str, log: Path) -> None:
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.tools.soak.trainer", str(base), url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Ctrl-C is for the soak, which ends its trainer in order.
                process_group=0,
            )
        self._log = log
        self._read("ready")

    def publish(self, version: int) -> None:
        """Train and publish the next one, which has to be this."""
        if self._process.stdin is not None:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        self._read(str(version))

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()

    def _read(self, expected: str) -> None:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if line.strip() != expected:
            raise RuntimeError(f"the trainer said {line!r} for {expected!r}:\n{self._log.read_text()[-2000:]}")


def run(options: Options, folder: Path, progress: "Progress") -> Report:
    """Everything; ``folder`` keeps the run and the logs."""
    began = time.monotonic()
    report = Report(options)
    base = save_checkpoint(make_model(FAMILY, seed=SEED), folder / "base")
    url = str(folder / "run")
    with ExitStack() as stack:
        trainer = Trainer(base, url, folder / "trainer.log")
        stack.callback(trainer.close)
        lives = Lives(base, url, folder)
        stack.callback(lives.close)
        progress.say("starting the server")
        lives.start()
        load = Load(lives, options.streams, options.seed)
        watch, chaos = memory.Watch(lives), Chaos(lives, options.seed)
        for thread in (load, watch, chaos):
            thread.start()
            # Whatever happens: before the server ends, which waits for those who are connected.
            stack.callback(thread.stop)
        publish(options, trainer, lives, progress)
        chaos.stop()
        progress.say("waiting for the last version")
        life = lives.now()
        if life is None:
            raise RuntimeError("no server is left")
        report.wrong += settle(life.server, options.versions)
        # A little of the last version under load, then what is in flight is finished.
        time.sleep(1)
        load.stop()
        report.wrong += verified(life.server, options.versions)
        watch.stop()
    report.wrong += load.wrong + chaos.wrong
    report.acts = dict(sorted(chaos.done.items()))
    report.answers, report.cut, report.served = len(load.answers), load.cut, len(watch.served)
    judge(report, load, watch, url, base, progress)
    report.seconds = round(time.monotonic() - began, 1)
    return report


def publish(options: Options, trainer: Trainer, lives: Lives, progress: "Progress") -> None:
    """All versions, at an even pace, the server killed in between."""
    spacing = max(1, round(LAST_KILL * options.versions / max(1, options.kills)))
    kills = {spacing * (number + 1) for number in range(options.kills)}
    for version in range(1, options.versions + 1):
        due = time.monotonic() + options.every
        trainer.publish(version)
        if version in kills:
            progress.say(f"version {version}: killing the server")
            lives.kill()
            lives.start()
        life = lives.now()
        served = life.server.status()["served"] if life is not None else None
        progress.step(version, options.versions, f"served {served['version'] if served else '-'}")
        time.sleep(max(0.0, due - time.monotonic()))


def settle(server: Server, head: int) -> list[str]:
    """The newest version has to be served in the end, whatever was done before."""

    def is_there() -> bool:
        status = server.status()
        return bool(status["served"] and status["served"]["version"] == head and status["state"] == "idle")

    try:
        until(is_there, PATIENCE_SECONDS, f"version {head} served")
    except TimeoutError as error:
        return [f"{error}; {server.status()}"]
    return []


def verified(server: Server, head: int) -> list[str]:
    """Weights and history, rescanned."""
    outcome: dict[str, Any] = server.post("/delta_sync/verify").json()
    holds = outcome.get("verdict") is True and outcome.get("chain") is True and outcome.get("version") == head
    return [] if holds else [f"verify: {outcome}"]


def judge(report: Report, load: Load, watch: memory.Watch, url: str, base: Path, progress: "Progress") -> None:
    """Proof of every span, and the memory."""
    answers = load.answers
    report.crossing = sum(len({span.version for span in answer.spans}) > 1 for answer in answers)
    report.unproven_spans = sum(span.version is None for answer in answers for span in answer.spans)
    if not report.crossing:
        report.wrong.append("no answer was in flight across a commit")
    progress.say(f"computing {len(answers)} answers anew")
    last = report.options.versions
    fits = fits_of(answers, url, base, lambda version: progress.step(version, last, "proven"))
    report.proof, wrong = proof.findings(fits)
    report.wrong += wrong
    report.samples = watch.samples
    report.growth = {name: round(value, 2) for name, value in memory.growth(watch.samples).items()}
    for name, value in report.growth.items():
        if value > memory.BOUND:
            report.wrong.append(f"{name} grows by {value:.1f} MB in 100 versions; {memory.BOUND} are allowed")


class Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    EVERY_SECONDS = 10.0

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = 0.0

    def say(self, text: str) -> None:
        """Something new begins."""
        print(f"{chr(10) if self._terminal else ''}soak: {text}", file=sys.stderr, flush=True)

    def step(self, number: int, of: int, text: str) -> None:
        """So far."""
        if self._terminal:
            filled = "#" * round(30 * number / of)
            print(f"\r[{filled:30}] {number}/{of} {text}  ", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last > self.EVERY_SECONDS:
            self._last = time.monotonic()
            print(f"soak: {number} of {of}, {text}", file=sys.stderr, flush=True)

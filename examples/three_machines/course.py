"""The training itself, seen from outside: who says what, who is killed when, and whether it goes on."""

import time
from collections.abc import Callable
from typing import Any

from examples.demo.processes import DemoError
from examples.fleet.screen import Screen
from examples.three_machines.programs import Program
from examples.three_machines.record import Kill, Record
from examples.three_machines.settings import (
    DOWN_SECONDS,
    ENVIRONMENT,
    ROLLOUT,
    SERVER,
    TRAINER,
    WITNESS,
    WORKER,
)

LOOK_SECONDS = 0.1
STILL_SECONDS = 180.0
"""Without a new version for so long, something is wrong."""
END_SECONDS = 60.0
SAID_EVERY = 10
SHOWN = ("what", "error", "seconds", "version", "key", "why")
PROGRAMS = {ENVIRONMENT: (ENVIRONMENT,), WORKER: (WORKER,), ROLLOUT: (WORKER, SERVER), TRAINER: (TRAINER,)}
"""Part → its programs."""


class Course:
    """From the first version to the last; ``record`` is filled while it goes on."""

    def __init__(self, programs: dict[str, Program], record: Record, screen: Screen) -> None:
        self._programs = programs
        self._record = record
        self._screen = screen
        self._due = dict(record.options.kills_at)
        self._moved = time.monotonic()
        self._done = self._ready = False
        self._scan: dict[str, Any] = {}
        self._stepped: dict[int, float] = {}
        """Step → when its weights were handed to the publisher."""
        self._halfway: Callable[[], None] | None = None

    def run(self, halfway: Callable[[], None]) -> None:
        """Until the trainer has published its last version and the server serves it.

        Args:
            halfway: called once, in the middle, while all programs run.

        Raises:
            DemoError: a program ended by itself, or nothing moves any more.
        """
        self._halfway = halfway
        self._moved = time.monotonic()
        while not self._done:
            self._look()
            self._kill_and_start()
            self._call_halfway()
        self.await_served(self._record.head, END_SECONDS)

    def await_ready(self, seconds: float) -> None:
        """Wait for the trainer to have version 0 in the bucket. Raises DemoError: it does not come to that."""
        self._await(lambda: self._ready, "the trainer is ready", seconds)

    def await_served(self, version: int, seconds: float) -> None:
        """Wait for the server to serve a version, or any newer. Raises DemoError: it does not."""
        self._await(
            lambda: max(self._record.served, default=-1) >= version, f"the server serves version {version}", seconds
        )

    def verified(self) -> dict[str, Any]:
        """What a rescan of the server's weights says. Raises DemoError: it does not come."""
        self._programs[WITNESS].say("verify")
        self._await(lambda: bool(self._scan), "the server has rescanned its weights", END_SECONDS)
        return self._scan

    def _await(self, reached: Callable[[], bool], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            self._look()
            if time.monotonic() > deadline:
                raise DemoError(f"not within {seconds:g} s: {what}; see the logs")

    def _look(self) -> None:
        """Take in what was said since, and see that all who should run do."""
        time.sleep(LOOK_SECONDS)
        for program in self._programs.values():
            for event in program.new_events():
                self._take(program.name, event)
            if not (program.name == TRAINER and self._done):
                program.check()
        if not self._done and time.monotonic() - self._moved > STILL_SECONDS:
            raise DemoError(f"no new version for {STILL_SECONDS:.0f} s after version {self._record.head}; see the logs")

    def _take(self, name: str, event: dict[str, Any]) -> None:
        kind = event["event"]
        if name == WITNESS and kind == "served":
            self._record.serve(event["version"], event["at"])
            self._record.pauses_ms.update(dict(event["pauses_ms"]))
        elif name == WITNESS and kind == "verified":
            self._scan = event
        elif name == WORKER and kind == "batch":
            for kill in self._record.kills:
                if kill.back is not None and event["at"] > kill.back:
                    kill.batches.add(event["key"])
        elif name == TRAINER and kind == "step":
            self._step(event)
        elif name == TRAINER and kind == "published":
            self._record.called[event["version"]] = self._stepped.get(event["step"], event["at"])
        elif name == TRAINER and kind in ("ready", "done"):
            self._ready, self._done = True, kind == "done"
        elif kind in ("away", "back", "impatient", "set_aside"):
            self._screen.say(f"{name}: {kind} " + ", ".join(f"{k} {v}" for k, v in event.items() if k in SHOWN))

    def _step(self, event: dict[str, Any]) -> None:
        """A step of training; what it made is published at once."""
        self._moved = time.monotonic()
        self._stepped[event["step"]] = event["at"]
        for kill in self._record.kills:
            of_it = kill.part == TRAINER or kill.batches.intersection(event["trained"])
            if kill.back is not None and kill.going is None and event["at"] > kill.back and of_it:
                kill.going, kill.step = event["at"], event["step"]
                self._screen.say(f"it goes on: step {kill.step}, {kill.seconds:.1f} s after {kill.part} was killed")
        if event["step"] % SAID_EVERY == 0:
            self._screen.say(
                f"step {event['step']}: reward {event['reward']:.3f}, solved {event['solved']:.0%}, "
                f"{event['staleness']} versions behind; served {max(self._record.served, default='none')}"
            )

    def _kill_and_start(self) -> None:
        """Kill what is due once all others have recovered; start again what has been down long enough."""
        kills, now = self._record.kills, time.monotonic()
        for kill in kills:
            if kill.back is None and now - kill.at >= DOWN_SECONDS:
                for name in PROGRAMS[kill.part]:
                    self._programs[name].start()
                kill.back = time.monotonic()
                self._screen.say(f"{kill.part} starts again")
        if all(kill.going is not None for kill in kills):
            part = next((part for part, version in self._due.items() if version <= self._record.head), None)
            if part is not None:
                del self._due[part]
                self._kill(part)

    def _kill(self, part: str) -> None:
        began = time.monotonic()
        for name in PROGRAMS[part]:
            self._programs[name].kill()
        self._record.kills.append(Kill(part, self._record.head, began))
        self._screen.say(f"version {self._record.head}: {part} was killed ({' and '.join(PROGRAMS[part])})")

    def _call_halfway(self) -> None:
        running = all(kill.going is not None for kill in self._record.kills)
        if self._halfway is not None and running and self._record.head >= self._record.options.versions // 2:
            self._halfway()
            self._halfway = None

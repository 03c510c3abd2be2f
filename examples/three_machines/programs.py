"""A program of a machine through its lives: started, killed, started again under the same name."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.demo.orchestrate import Events
from examples.demo.processes import Child, DemoError
from examples.three_machines.machines import Machine
from examples.three_machines.sockets import Watch


@dataclass
class Program:
    """What runs, where, and what it says.

    Attributes:
        words: its command. talks: whether it speaks JSON lines on standard output.
        started: by the monotonic clock. lives: how often it was started.
    """

    name: str
    machine: Machine
    words: list[str]
    environment: Mapping[str, str]
    log: Path
    watch: Watch
    talks: bool = True
    child: Child | None = field(default=None, init=False)
    started: float = field(default=0.0, init=False)
    lives: int = field(default=0, init=False)
    _events: Events | None = field(default=None, init=False)
    _kept: list[dict[str, Any]] = field(default_factory=list, init=False)

    def start(self) -> None:
        """Start it; returns at once."""
        self.started = time.monotonic()
        self.lives += 1
        self._kept = list(self.new_events())
        command = self.machine.command(*self.words)
        self.child = Child(f"the {self.name}", command, self.log, environment=self.environment, talk=self.talks)
        self._events = Events(self.child) if self.talks else None
        self.watch.runs(self.machine.name, self.child)

    def kill(self) -> None:
        """End all its processes with SIGKILL."""
        if self.child is not None:
            self.child.kill()
            self.child = None

    def close(self) -> None:
        """End it in order, if it runs."""
        if self.child is not None:
            self.child.stop()
            self.child = None

    def ask_to_end(self) -> None:
        """Have it end; returns at once."""
        if self.child is not None:
            self.child.ask_to_end()

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        if self.child is not None:
            self.child.say(line)

    def new_events(self) -> Iterator[dict[str, Any]]:
        """What it has said since, without waiting; the last words of a life that was killed come first."""
        while self._kept:
            yield self._kept.pop(0)
        while self._events is not None and (event := self._events.next(0)) is not None:
            yield event

    def check(self) -> None:
        """Raises DemoError: it has ended by itself."""
        child = self.child
        if child is not None and child.exit_code is not None:
            raise DemoError(
                f"{child.name} ended with status {child.exit_code}; the end of {child.log.name}:\n{child.tail()}"
            )

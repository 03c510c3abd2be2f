"""The example from start to end: a store, links, three machines, their programs, and what becomes of them."""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples.demo import serving
from examples.demo.orchestrate import Events
from examples.demo.processes import Child, DemoError
from examples.fleet import fetch, store
from examples.fleet.links import Links
from examples.fleet.orchestrate import difference
from examples.fleet.probe import Measured, far_end
from examples.fleet.record import MB, Full
from examples.fleet.screen import Screen
from examples.fleet.shaping import HOST
from examples.three_machines import verdict
from examples.three_machines.course import Course
from examples.three_machines.machines import Machine, machines
from examples.three_machines.reach import attempt
from examples.three_machines.record import Record
from examples.three_machines.settings import (
    CHECKPOINT,
    ENVIRONMENT,
    LINKS,
    MACHINES,
    ROLLOUT,
    SERVER,
    TRAINER,
    WEIGHTS,
    WITNESS,
    WORKER,
    Options,
)
from examples.three_machines.sockets import Watch, descendants, given
from examples.three_machines.wiring import MODULE, Wiring, without_proxy

START_SECONDS = 300.0
LOOK_SECONDS = 0.5
SPARE_PORT = 9000
"""Where a listener waits on the trainer's machine for the rollout machine's attempt."""
LISTENER = "import socket, sys; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); print(flush=True); input()"


class Example:
    """One run. ``record`` is filled while it goes on."""

    def __init__(self, options: Options, out: Path, screen: Screen) -> None:
        self.record = Record(options)
        self._options = options
        self._out = out
        self._screen = screen

    def run(self) -> None:
        """Everything up to the verdict.

        Raises:
            DemoError: a program did not start, or ended by itself. DeltaSyncError, OSError: what else failed.
        """
        with ExitStack() as stack:
            self._site = stack.enter_context(machines(MACHINES, self._options.network))
            self.record.shared = self._site.shared
            self._say_networks()
            self._store = stack.enter_context(store.serving(self._out / "store", self._out / "store.log"))
            rate, round_trip = self._options.bits_per_second, self._options.round_trip
            self._links = stack.enter_context(Links(rate, round_trip, self._out / "links.log"))
            far = stack.enter_context(far_end())
            self._wiring = Wiring.lay(self._site, self._links, self._store, far)
            self._measure_links()
            self._make_policy()
            self._watch = Watch({**self._site.machines, LINKS: Machine(LINKS, HOST, HOST)}, self._wiring.rules())
            self._watch.runs(LINKS, self._links.child)
            self._programs = self._wiring.programs(self._options, self._out, self._watch)
            stack.callback(self._close)
            self._watch.start()
            stack.callback(self._watch.stop)
            self._train()
            self._compare_with_full()
            self._watch.stop()
            self._judge()

    # Before

    def _say_networks(self) -> None:
        if not self._site.isolated:
            self._screen.say(f"all machines share this one's loopback: {self._site.shared}")
            return
        for machine in self._site.machines.values():
            self._screen.say(f"{machine.name}: network namespace {machine.prefix[-1]}, address {machine.address}")

    def _measure_links(self) -> None:
        for name, end in self._wiring.probes.items():
            words = ["examples.fleet.probe", end.host, str(end.port), str(self._options.bits_per_second)]
            found = Measured(**json.loads(self._output(self._site[name], words)))
            self.record.links[name] = found
            self._screen.say(
                f"the link of {name}: {found.round_trip_ms:.1f} ms, {found.up_mbit_s:.1f} Mbit/s up, "
                f"{found.down_mbit_s:.1f} down"
            )

    def _make_policy(self) -> None:
        """A checkpoint on the trainer's disk; its configuration and tokenizer, without weights, on the other's."""
        for name in MACHINES:
            (self._out / name).mkdir()
        self._screen.begin("making a policy of 3 M parameters that knows how a game looks like (supervised)")
        made = self._out / TRAINER / "policy"
        words = [f"{MODULE}policy", "--out", str(made), "--seed", str(self._options.seed), "--threads", "2"]
        words += [] if self._options.warm_up is None else ["--steps", str(self._options.warm_up)]
        self._output(self._site[TRAINER], words)
        shutil.copytree(made, self._out / ROLLOUT / "policy", ignore=shutil.ignore_patterns(WEIGHTS))

    def _output(self, machine: Machine, words: list[str]) -> str:
        """What a short program says. Raises DemoError: it failed."""
        command = machine.command(sys.executable, "-m", *words)
        environment = serving.trainer_environment()
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
        if done.returncode:
            raise DemoError(f"{' '.join(words)} ended with status {done.returncode}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    # Training

    def _train(self) -> None:
        """All programs from start to end; the server comes up from the bucket, where version 0 has to be first."""
        self._course = Course(self._programs, self.record, self._screen)
        self._screen.begin("starting trainer and environment; then the server, from the bucket")
        for name in (TRAINER, ENVIRONMENT):
            self._programs[name].start()
        self._course.await_ready(START_SECONDS)
        for name in (SERVER, WITNESS):
            self._programs[name].start()
        self._course.await_served(0, START_SECONDS)
        self._screen.say("the server serves version 0, which it has from the bucket")
        before, began = self._links.passed(), time.monotonic()
        self._programs[WORKER].start()
        self._screen.begin("training")
        self._course.run(self._halfway)
        self.record.training_seconds = time.monotonic() - began
        self.record.passed = difference(self._links.passed(), before)
        self._programs[WORKER].close()
        self._screen.begin("rescanning the weights that are served")
        self.record.scan = self._course.verified()
        for name in (WITNESS, SERVER, ENVIRONMENT):
            self._programs[name].ask_to_end()

    def _halfway(self) -> None:
        """Look at what the processes were given, and try to connect where no way should be."""
        for name in MACHINES:
            roots = self._watch.roots(name)
            texts = given(pid for pid in descendants(roots) if pid not in roots)
            self.record.read += len(texts)
            self.record.told += self._wiring.told(name, texts.values())
        if not self._site.isolated:
            return
        trainer, rollout, environment = (self._site[name] for name in MACHINES)
        command = trainer.command(sys.executable, "-c", LISTENER, trainer.address, str(SPARE_PORT))
        with Child("a listener", command, self._out / TRAINER / "listener.log", talk=True) as listener:
            listener.lines.readline()
            serving = {rollout: self._wiring.server.port, trainer: SPARE_PORT}
            for source, target in ((trainer, rollout), (rollout, trainer), (environment, rollout)):
                # The first shows that somebody answers there.
                for one in (target, source):
                    self.record.attempts.append(attempt(one, target, serving[target]))
        for found in self.record.attempts:
            if found.source != found.target:
                self._screen.say(f"from {found.source} to {found.target}: {found.reason}")

    # After

    def _compare_with_full(self) -> None:
        """What it takes without deltas: all weights into the store, and from there to the rollout machine's disk."""
        self._screen.begin("full weights through the same links: into the store, and out of it")
        weights = self.checkpoint / WEIGHTS
        file = self._out / ROLLOUT / "fetched.safetensors"
        before = self._links.passed()
        up = self._carry(TRAINER, weights, fetch.PUT)
        down = self._carry(ROLLOUT, file)
        if file.read_bytes() != weights.read_bytes():
            raise DemoError(f"{file} is not {weights}")
        file.unlink()
        passed = difference(self._links.passed(), before)
        self.record.full = Full(weights.stat().st_size, 0.0, up, down, passed)
        self._screen.say(f"full weights, {weights.stat().st_size / MB:.2f} MB: {up:.2f} s up, {down:.2f} s down")

    def _carry(self, name: str, file: Path, *words: str) -> float:
        """Seconds that a file takes between a machine's disk and the store."""
        machine = self._site[name]
        command = machine.command(
            sys.executable, "-m", "examples.fleet.fetch", self._wiring.full, WEIGHTS, str(file), *words
        )
        environment = without_proxy(serving.clean_environment() | self._wiring.reaching_store(name))
        with Child("full weights", command, self._out / name / "full.log", environment, talk=True) as child:
            events = Events(child)
            self._next(events, child)
            child.say("now")
            found = self._next(events, child)
        return float(found["at"] - found["began"])

    def _next(self, events: Events, child: Child) -> dict[str, Any]:
        deadline = time.monotonic() + START_SECONDS
        while (event := events.next(LOOK_SECONDS)) is None:
            if events.ended or time.monotonic() > deadline:
                raise DemoError(f"{child.name} did not come; the end of {child.log.name}:\n{child.tail()}")
        return event

    @property
    def checkpoint(self) -> Path:
        """What the trainer saved at its end, as any trainer would."""
        return self._out / TRAINER / CHECKPOINT

    def _judge(self) -> None:
        self._screen.begin("reading the bucket: what became of each trajectory, and whether its versions explain it")
        record = self.record
        record.looks, record.seen, record.found = self._watch.looks, self._watch.seen, self._watch.found
        os.environ.update(self._store.environment)
        found = verdict.read_store(self._wiring.run, self._wiring.trajectories)
        verdict.judge(record, found, self.checkpoint)

    def _close(self) -> None:
        """All at once, for each takes its time to end."""
        for program in self._programs.values():
            program.ask_to_end()
        for program in self._programs.values():
            program.close()

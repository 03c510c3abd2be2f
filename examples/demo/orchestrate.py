"""The demo from start to end: trainer, server, training, verdict."""

import json
import queue
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo import serving, task
from examples.demo.characters import encode
from examples.demo.output import Output
from examples.demo.processes import Child, DemoError, free_port
from examples.demo.record import Record
from examples.demo.rollouts import Completion, ServerClient, ServerError
from examples.demo.screen import Screen
from examples.demo.settings import MODEL_NAME, Cores, TrainerSettings
from examples.demo.store import KINDS, running_store
from examples.demo.verdict import (
    Verdict,
    comparison_words,
    greedy_answers,
    prove_answers,
    prove_weights,
)

SERVER_START_SECONDS = 240.0
VERDICT_SECONDS = 90.0
"""Kept free at the end for the second server's start and the comparison."""
SHORTEST_TRAINING_SECONDS = 30.0
TRAINER_END_SECONDS = 20.0
BLAME_SECONDS = 2.0
"""A server that dies takes the trainer with it, sometimes before its own process is gone."""
LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Options:
    """Command line of the demo; ``port`` None: any free one, ``bucket``: one of ``store.KINDS``, or a URL."""

    steps: int
    out: Path
    seed: int
    max_seconds: float
    port: int | None
    bucket: str


class Demo:
    """One run. ``record`` and ``verdict`` are filled while it goes on."""

    def __init__(self, options: Options, output: Output, screen: Screen) -> None:
        self.record = Record()
        self.verdict = Verdict()
        self._options = options
        self._output = output
        self._screen = screen
        self._cores = Cores.share_out()
        self._bucket = options.bucket
        self._children: list[Child] = []
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def run(self) -> None:
        """Everything up to the verdict.

        Raises:
            DemoError: a process did not start, died or went silent; the message shows the end of its log.
            ServerError: a server refused or vanished at the end.
        """
        with ExitStack() as children:
            if self._bucket in KINDS:
                self._bucket = children.enter_context(running_store(self._bucket, self._output.bucket))
            settings = TrainerSettings(
                out=str(self._output.path),
                bucket=self._bucket,
                steps=self._options.steps,
                seed=self._options.seed,
                cores=self._cores.trainer,
            )
            try:
                self._run(children, settings)
            finally:
                # All at once, for a server waits for the connections of a trainer that still lives.
                for child in self._children:
                    child.ask_to_end()

    def _run(self, children: ExitStack, settings: TrainerSettings) -> None:
        trainer = self._add(children, self._start_trainer(settings))
        events = Events(trainer)
        self._screen.phase("warming up a 3 M parameter policy (supervised)")
        ready = self._until(events, "ready", [trainer])
        self.record.parameters = ready["parameters"]
        server, client = self._start_following(children, settings, ready["notice"])
        self._train(events, trainer, server, client)
        trainer.wait(TRAINER_END_SECONDS)
        trainer.stop()
        self._screen.phase("rescanning the weights that are served")
        prove_weights(self.verdict, client, self._bucket, settings.checkpoint)
        prompts = [encode(task.prompt_of(word)) for word in comparison_words(self._options.seed)]
        running = greedy_answers(client, prompts)
        client.close()
        server.stop()
        self._compare(children, settings.checkpoint, prompts, running)

    def _add(self, children: ExitStack, child: Child) -> Child:
        self._children.append(child)
        return children.enter_context(child)

    def _start_trainer(self, settings: TrainerSettings) -> Child:
        command = [sys.executable, "-m", "examples.demo.trainer", json.dumps(settings.to_dict())]
        log = self._output.path / "trainer.log"
        return Child("the trainer", command, log, environment=serving.trainer_environment(), talk=True)

    def _start_following(
        self, children: ExitStack, settings: TrainerSettings, notice: str
    ) -> tuple[Child, ServerClient]:
        self._screen.phase("starting vllm serve on the base checkpoint")
        with free_port(self._options.port) as port:
            pass
        log = self._output.path / "server.log"
        server = self._add(
            children, serving.following_server(settings.base, self._bucket, notice, port, self._cores.server, log)
        )
        client = children.enter_context(ServerClient(f"http://127.0.0.1:{port}", MODEL_NAME))
        self._await_health(server, client)
        self._await_version_zero(server, client)
        return server, client

    def _train(self, events: "Events", trainer: Child, server: Child, client: ServerClient) -> None:
        left = self._options.max_seconds - self.seconds - VERDICT_SECONDS
        seconds = max(SHORTEST_TRAINING_SECONDS, left)
        trainer.say(json.dumps({"server": client.url, "seconds": seconds}))
        self._screen.phase("training: the server answers, the trainer learns and publishes")
        done = self._until(events, "done", [trainer, server])
        self.record.versions = done["versions"]

    def _compare(
        self, children: ExitStack, checkpoint: Path, prompts: list[list[int]], running: list[Completion]
    ) -> None:
        self._screen.phase("starting a fresh vLLM on the trainer's checkpoint, to compare answers")
        with free_port() as port:
            pass
        log = self._output.path / "fresh-server.log"
        fresh = self._add(children, serving.fresh_server(checkpoint, port, self._cores.server, log))
        with ServerClient(f"http://127.0.0.1:{port}", MODEL_NAME) as client:
            self._await_health(fresh, client)
            prove_answers(self.verdict, running, greedy_answers(client, prompts))
        fresh.stop()

    def _until(self, events: "Events", wanted: str, children: list[Child]) -> dict[str, Any]:
        """Take in events until the wanted one; every child, the trainer first, must live that long."""
        while True:
            event = events.next(LOOK_SECONDS)
            if event is None:
                if events.ended:
                    children[-1].wait(BLAME_SECONDS)
                    children[0].wait(TRAINER_END_SECONDS)
                for child in reversed(children):
                    _check_alive(child)
                continue
            if event["event"] == "warm_up":
                self._screen.warm_up(event["step"], event["chance"], event["target"])
            elif event["event"] == "step":
                self.record.add(event)
                self._screen.step(event, self.record)
            elif event["event"] == "shown":
                self.record.show(event["shown"])
            if event["event"] == wanted:
                return event

    def _await_health(self, server: Child, client: ServerClient) -> None:
        deadline = time.monotonic() + SERVER_START_SECONDS
        while True:
            _check_alive(server)
            try:
                client.request("GET", "/health", seconds=5.0)
                return
            except ServerError as error:
                if time.monotonic() > deadline:
                    raise DemoError(
                        f"{server.name} did not answer within {SERVER_START_SECONDS:.0f} s ({error}); "
                        f"the end of {server.log.name}:\n{server.tail()}"
                    ) from error
            time.sleep(LOOK_SECONDS)

    def _await_version_zero(self, server: Child, client: ServerClient) -> None:
        """Wait until the server has proven that it serves the run's base."""
        deadline = time.monotonic() + SERVER_START_SECONDS
        while True:
            _check_alive(server)
            status = client.request("GET", "/delta_sync/status")
            if status["served"] is not None:
                return
            if status["state"] == "refused" or time.monotonic() > deadline:
                reason = status["last_error"]["message"] if status["last_error"] else f"state {status['state']}"
                raise DemoError(f"the server does not follow the run: {reason}; see {server.log}")
            time.sleep(LOOK_SECONDS)


class Events:
    """JSON lines of the trainer, read by a thread so that waiting for them can be bounded."""

    def __init__(self, child: Child) -> None:
        self.ended = False
        self._child = child
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next event, or None if none came; ``ended`` then says whether none will."""
        try:
            line = self._queue.get(timeout=seconds)
        except queue.Empty:
            return None
        if line is None:
            self.ended = True
            return None
        event: dict[str, Any] = json.loads(line)
        return event

    def _read(self) -> None:
        for line in self._child.lines:
            self._queue.put(line)
        self._queue.put(None)


def _check_alive(child: Child) -> None:
    if child.exit_code is not None:
        raise DemoError(_death(child))


def _death(child: Child) -> str:
    return f"{child.name} ended with status {child.exit_code}; the end of {child.log.name}:\n{child.tail()}"

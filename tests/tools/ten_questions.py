"""The ten questions of a new user, each answered by one command, on a long run in a store with latency.

    python -m tests.tools.ten_questions [--versions 1000] [--latency 0.05] [--json FILE]

A real publisher publishes a small model, one version every two minutes by a clock of its own, to an S3 store on
loopback (the gateway of the loopback Hub). Then each request to the store waits ``--latency`` seconds, and a real vLLM
server follows the run. The commands run as a user runs them, in processes of their own. Exit status 1: a command did
not succeed, or took longer than ``LIMIT_SECONDS``.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from tests.e2e.servers import Server, delta_sync_serve, serving
from tests.support import hub_store
from tests.support.tiny import make_model, save_checkpoint, train_steps
from trainer_side import Gate, Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.format.manifest import timestamp

LIMIT_SECONDS = 10.0
SPACING = timedelta(minutes=2)
SPACE, BUCKET = "team", "runs"
URL = f"s3://{BUCKET}/run"
SHOWN_LINES = 14
RECEIVER = "rollout-1"

QUESTIONS = (
    ("what is served", "status --server {server}"),
    ("how far behind", "fleet list --bucket {url}"),
    ("what did the last hour cost", "stats --bucket {url} --last 1h"),
    ("why was this version refused, by the trainer's gate", "status --server {server}"),
    ("which tensors moved since yesterday", "diff ago:1d head --bucket {url}"),
    # In this store all objects are minutes old, whatever the manifests say.
    ("what may I delete", "gc --bucket {url} --keep-last 100 --min-age 1s --dry-run"),
    ("pin this one", "tag set good --bucket {url} --version head~1"),
    ("is the bucket healthy", "doctor --bucket {url}"),
    ("give me the weights of step 400", "export --bucket {url} --version step:400 --to {folder}/step-400"),
    ("go back two versions", "rollback --server {server} --version served~2"),
)
"""Question, and the command that answers it. The head is quarantined."""
REFUSED = ("why was this version refused, by the server", "status --server {server}")
"""Asked at last, of a server that follows a run whose newest object was damaged."""


@dataclass(frozen=True)
class Answer:
    """A command that has ended.

    Attributes:
        requests: to the store meanwhile, with those of the server, which polls.
    """

    question: str
    command: str
    seconds: float
    status: int
    requests: int
    output: list[str]


class World:
    """A store, a run in it, and its trainer.

    Attributes:
        folder: for what lies outside the store. hub: serves the store.
    """

    def __init__(self, folder: Path, hub: hub_store.Hub) -> None:
        self.folder, self.hub = folder, hub
        # The gateway would answer with redirects, as the Hub's does; an S3 store answers with the bytes.
        hub.change(s3_redirect=False)
        hub.create_bucket(f"{SPACE}/{BUCKET}")
        os.environ.update(
            AWS_ENDPOINT_URL=f"{hub.endpoint}/s3/{SPACE}",
            AWS_ALLOW_HTTP="true",
            AWS_ACCESS_KEY_ID=hub.options()["s3_key"],
            AWS_SECRET_ACCESS_KEY="any",
            AWS_REGION=hub_store.hub.REGION,
            AWS_VIRTUAL_HOSTED_STYLE_REQUEST="false",
        )
        self._model = make_model("qwen3", seed=5)
        self._steps = train_steps(self._model, lr=3e-5)
        save_checkpoint(self._model, folder / "base")

    @contextmanager
    def publishing(self, versions: int) -> Iterator[Publisher]:
        """Publish so many versions, the newest of which is quarantined; yields their publisher."""
        began = datetime.now(UTC) - SPACING * (versions - 1)
        moments = [timestamp(began + SPACING * number) for number in range(versions)]
        gate = Gate(action="quarantine")
        with ExitStack() as stack:
            with mock.patch("trainer_side.manifests.timestamp", side_effect=moments):
                publisher = stack.enter_context(
                    Publisher(self._model, bucket=URL, base=self.folder / "base", gate=gate)
                )
                for step in range(1, versions - 1):
                    self.publish(publisher, step)
                weight = next(self._model.parameters())
                kept = weight[0, 0].item()
                _set(weight, float("nan"))
                publisher.publish(step=versions - 1, wait=True)
                _set(weight, kept)
                publisher.flush()
            yield publisher

    def publish(self, publisher: Publisher, step: int) -> None:
        """Train a step and publish it."""
        next(self._steps)
        publisher.publish(step=step, wait=True)

    def delay(self, seconds: float) -> None:
        """From now on each request to the store waits so long."""
        self.hub.clear_faults()
        self.hub.fault("stall", "^/s3/", times=None, seconds=seconds)

    def serve(self) -> AbstractContextManager[Server]:
        """A server of the run."""
        command = delta_sync_serve(self.folder / "base", "--bucket", URL, "--receiver-id", RECEIVER)
        state = {"DELTA_SYNC_STATE_DIR": str(self.folder / "state")}
        return serving(self.folder / "base", self.folder / "server.log", command, state)

    def damage(self, version: int) -> None:
        """Change a byte of a version's object."""
        with open_run(URL) as run:
            key = run.manifest(version).objects[0].key
            data = bytearray(run.bucket.get(key))
            data[-1] ^= 1
            run.bucket.put(key, bytes(data))

    def ask(self, question: str, command: str, server: Server) -> Answer:
        """Run a command as a user does."""
        words = shlex.split(command.format(url=URL, server=server.url, folder=self.folder))
        program = str(Path(sys.executable).with_name("delta-sync"))
        self.hub.forget_requests()
        began = time.perf_counter()
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=600, check=False)
        seconds = time.perf_counter() - began
        requests = len(self.hub.requests("^/s3/"))
        lines = (done.stdout + done.stderr).splitlines()
        return Answer(question, shlex.join(["delta-sync", *words]), seconds, done.returncode, requests, lines)


def _set(weight: Tensor, value: float) -> None:
    with torch.no_grad():
        weight[0, 0] = value


def report(answer: Answer) -> None:
    """Print a question, its command, and the first lines of the output."""
    print(f"\n{answer.question}?\n$ {answer.command}")
    for line in answer.output[:SHOWN_LINES]:
        print(f"    {line}")
    if len(answer.output) > SHOWN_LINES:
        print(f"    … {len(answer.output) - SHOWN_LINES} more lines")
    print(
        f"    exit status {answer.status}, {answer.seconds:.2f} s, {answer.requests} requests to the store", flush=True
    )


def main(arguments: list[str]) -> int:
    """Ask, and print the answers; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.ten_questions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--versions", type=int, default=1000, help="of the run, at least 801 for every question")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds that each request to the store waits")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the answers there")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="questions-")))
        world = World(folder, stack.enter_context(hub_store.serving(folder / "hub")))
        publisher = stack.enter_context(world.publishing(options.versions))
        answers = ask_all(world, publisher, options.versions, options.latency)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(answer) for answer in answers], indent=2) + "\n")
    print(f"\n{'question':<52} {'seconds':>8} {'requests':>8} {'status':>6}")
    for answer in answers:
        print(f"{answer.question:<52} {answer.seconds:8.2f} {answer.requests:8} {answer.status:6}")
    return int(any(answer.status or answer.seconds > LIMIT_SECONDS for answer in answers))


def ask_all(world: World, publisher: Publisher, versions: int, latency: float) -> list[Answer]:
    """Ask each question once; the answers are printed as they come."""
    answers: list[Answer] = []

    def ask(question: str, command: str) -> None:
        answers.append(world.ask(question, command, server))
        report(answers[-1])

    world.delay(latency)
    with world.serve() as server:
        server.wait_served(versions - 2)
        for question, command in QUESTIONS:
            ask(question, command)
        # The server holds what it went back to, so it reads the next version once that is damaged.
        world.publish(publisher, versions)
        publisher.flush()
        world.damage(versions)
        server.post("/delta_sync/release")
        server.wait_error("digest")
        ask(*REFUSED)
    return answers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A trainer in a process of its own: run as ``python -m tests.e2e.trainer FAMILY OPTIONS [die]``.

OPTIONS is JSON: the arguments of ``Publisher``. It answers with a line of JSON when it has begun. For each line of
standard input it trains a step, publishes it, and answers with its version, its fingerprint, and the seconds for which
the training loop stood still. With ``die`` it publishes a step, and is killed by SIGKILL after the objects and before
the manifest.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.tiny import make_model, train_steps


def main(family: str, options: str, end: str = "") -> None:
    from trainer_side import Publisher
    from vllm_delta_sync import open_run

    model = make_model(family, seed=5)
    steps = train_steps(model, lr=3e-5)
    arguments = json.loads(options)
    with Publisher(model, **arguments) as publisher:
        print(json.dumps({"run": publisher.run}), flush=True)
        if end == "die":
            die_before_the_manifest()
        for number, _ in enumerate([end] if end else sys.stdin, start=1):
            next(steps)
            started = time.perf_counter()
            result = publisher.publish(step=number)
            stood_still = time.perf_counter() - started
            publisher.flush()
            fingerprint = open_run(arguments["bucket"]).manifest(int(result.version or 0)).fingerprint
            answer = {"version": result.version, "fingerprint": fingerprint, "seconds": stood_still}
            print(json.dumps(answer), flush=True)


def die_before_the_manifest() -> None:
    """Be killed as soon as the next manifest is about to be written."""
    from vllm_delta_sync.bucket.local import LocalBucket

    original = LocalBucket.put

    def put(self: LocalBucket, key: str, data: Any, *, if_absent: bool = False) -> None:
        if key.startswith("versions/"):
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, key, data, if_absent=if_absent)

    LocalBucket.put = put  # type: ignore[method-assign]


class Child:
    """A process of ours that answers lines of JSON."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, **(environment or {})},
            )

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        assert text, f"{self.process.args!r} ended with {self.process.wait(120)}"
        document: dict[str, Any] = json.loads(text)
        return document

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.line()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(120)

    def close(self) -> None:
        if self.process.poll() is None:
            if self.process.stdin is not None:
                self.process.stdin.close()
            self.process.terminate()
            self.process.wait(120)


class Trainer(Child):
    """Drives the program.

    Attributes:
        run: id of the run.
    """

    def __init__(self, family: str, log: Path, environment: Mapping[str, str] | None = None, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.e2e.trainer", family, json.dumps(options)]
        super().__init__(command, log, environment)
        self.run = str(self.line()["run"])

    def step(self) -> dict[str, Any]:
        """Train and publish; what the program says of it."""
        return self.ask("publish")


if __name__ == "__main__":
    main(*sys.argv[1:4])

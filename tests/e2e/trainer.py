"""A trainer in a process of its own: run as ``python -m tests.e2e.trainer FAMILY CHECKPOINT RUN``.

Reads commands from standard input, one a line, and answers each with a line: ``step`` trains a step and publishes it
(the version's number), ``die`` does the same and is killed by SIGKILL after the objects and before the manifest.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tiny import make_model, train_steps


def main(family: str, base: str, url: str) -> None:
    from trainer_side import Publisher

    model = make_model(family, seed=5)
    steps = train_steps(model, lr=3e-5)
    with Publisher(model, bucket=url, base=base) as publisher:
        print("ready", flush=True)
        for number, line in enumerate(sys.stdin, start=1):
            if line.strip() == "die":
                die_before_the_manifest()
            next(steps)
            result = publisher.publish(step=number, wait=True)
            publisher.flush()
            print(result.version, flush=True)


def die_before_the_manifest() -> None:
    """Be killed as soon as the next manifest is about to be written."""
    from vllm_delta_sync.bucket.local import LocalBucket

    original = LocalBucket.put

    def put(self: LocalBucket, key: str, data: Any, *, if_absent: bool = False) -> None:
        if key.startswith("versions/"):
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, key, data, if_absent=if_absent)

    LocalBucket.put = put  # type: ignore[method-assign]


class Trainer:
    """Drives the process."""

    def __init__(self, family: str, base: Path, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.trainer", family, str(base), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def step(self) -> int:
        """Train and publish; the version."""
        return int(self._ask("step"))

    def die(self) -> None:
        """Let it be killed in the middle of a publish."""
        stdin = self.process.stdin
        if stdin is not None:
            stdin.write("die\n")
            stdin.flush()
        assert self.process.wait(60) == -signal.SIGKILL

    def close(self) -> None:
        """End the process."""
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(60)

    def _ask(self, command: str) -> str:
        if self.process.stdin is None:
            raise AssertionError("the trainer has no input")
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        assert line, f"the trainer ended with {self.process.wait(10)}"
        return line.strip()


if __name__ == "__main__":
    main(*sys.argv[1:4])

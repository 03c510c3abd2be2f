"""Tries to connect, as anybody on this machine could: is there a way from here to there?

    python -m examples.three_machines.reach HOST PORT

Prints ``{"reached": BOOL, "reason": TEXT}``.
"""

import json
import socket
import subprocess
import sys
from dataclasses import dataclass

from examples.demo.processes import DemoError
from examples.three_machines.machines import Machine

CONNECT_SECONDS = 3.0
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Attempt:
    """``source`` tried to connect to a port that answers on ``target``."""

    source: str
    target: str
    reached: bool
    reason: str


def attempt(source: Machine, target: Machine, port: int) -> Attempt:
    """Try from one machine to another. Raises DemoError: the attempt itself could not be made."""
    command = source.command(sys.executable, "-m", "examples.three_machines.reach", target.address, str(port))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    if done.returncode:
        raise DemoError(f"the attempt to reach {target.name} from {source.name} failed: {done.stderr.strip()}")
    return Attempt(source.name, target.name, **json.loads(done.stdout))


def main(arguments: list[str]) -> None:
    """Connect once, as the module's docstring says."""
    try:
        with socket.create_connection((arguments[0], int(arguments[1])), CONNECT_SECONDS):
            print(json.dumps({"reached": True, "reason": "it answers"}))
    except OSError as error:
        print(json.dumps({"reached": False, "reason": error.strerror or str(error)}))


if __name__ == "__main__":
    main(sys.argv[1:])

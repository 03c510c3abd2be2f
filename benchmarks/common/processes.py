"""Processes that a benchmark starts, and the environment of servers: ``Child``, ``SERVE_ARGUMENTS``."""

import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

MODEL_NAME = "policy"
SERVE_ARGUMENTS = (
    *("--host", "127.0.0.1"),
    *("--served-model-name", MODEL_NAME),
    *("--dtype", "bfloat16"),
    *("--max-num-seqs", "128"),
    *("--generation-config", "vllm"),
    *("--uvicorn-log-level", "warning"),
    "--enforce-eager",
)
END_SECONDS = 15.0
TAIL_LINES = 25


class Child:
    """One command in a session of its own, which ends with the block, and all that it started too.

    Attributes:
        name: for messages. log: file that gets all its output.
    """

    def __init__(self, name: str, command: list[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        """Start it. ``environment``: all of it; None for this process's."""
        self.name, self.log = name, log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                text=True,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        if self._process.stdin is not None:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def wait(self, seconds: float) -> None:
        """Give it time to end by itself."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ask_to_end()
        self.wait(END_SECONDS)
        self.kill()

    def ask_to_end(self) -> None:
        """Send SIGTERM; returns at once."""
        self._process.terminate()

    def kill(self) -> None:
        """End all of its processes with SIGKILL, as a machine that fails does."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def free_port() -> int:
    """A TCP port on the loopback address that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_environment(core: int) -> dict[str, str]:
    """One pinned computing thread, a small cache, and nothing of this process's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DELTA_SYNC_", "VLLM_"))}
    return (
        {"HF_HUB_OFFLINE": "1"}
        | kept
        | {
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
            "VLLM_NO_USAGE_STATS": "1",
        }
    )


def cores() -> tuple[int, list[int]]:
    """(the server's core, the cores for the rest); with a single one, both use it."""
    available = sorted(os.sched_getaffinity(0))
    return available[0], available[1:5] or available

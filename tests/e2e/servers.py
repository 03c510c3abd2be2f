"""Start and end real ``vllm serve`` processes for tests."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e import warm
from tests.e2e.warm import ENVIRONMENT, WarmProcess

START_SECONDS = 600.0
PATIENCE_SECONDS = 600.0
PLAIN = False
"""Loading certificates would take httpx longer than any of our requests, which need none."""
VLLM_FLAGS = [
    "--enforce-eager",
    "--max-model-len",
    "256",
    "--max-num-seqs",
    "16",
    "--served-model-name",
    "tiny",
]


def free_port() -> int:
    """A TCP port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """A running server: its URL, its process, and its log file."""

    url: str
    process: "subprocess.Popen[bytes] | WarmProcess"
    log: Path

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_SECONDS, verify=PLAIN, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE_SECONDS, verify=PLAIN, **kwargs)

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = self.get("/delta_sync/status").json()
        return document

    def wait_served(self, version: int, timeout: float = 300) -> dict[str, Any]:
        """Block until a version is served; fails with the status if it is not in time."""
        response = self.get("/delta_sync/wait", params={"version": version, "timeout": timeout})
        assert response.status_code == 200, response.text
        document: dict[str, Any] = response.json()
        return document

    def wait_error(self, kind: str, timeout: float = 300) -> dict[str, Any]:
        """Block until status shows an error of that kind."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            status = self.status()
            if status["last_error"] and status["last_error"]["kind"] == kind:
                return status
            time.sleep(0.1)
        raise AssertionError(f"no error of kind {kind!r} within {timeout} s: {self.status()}")

    def wait_idle(self, timeout: float = 60) -> dict[str, Any]:
        """Block until nothing is under way: a version is served before it is counted and logged."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            status = self.status()
            if status["state"] == "idle":
                return status
            time.sleep(0.05)
        raise AssertionError(f"not idle within {timeout} s: {self.status()}")


@contextmanager
def serving(
    model: Path, log: Path, command: list[str], environment: dict[str, str], *, cold: bool = False
) -> Iterator[Server]:
    """Run a server command until the block ends; its whole process group is ended with it.

    ``cold``: as a user starts it, with an environment and command line of its own in ``/proc``.
    """
    port = free_port()
    command = [*command, "--port", str(port), "--host", "127.0.0.1"]
    process = _cold(command, log, environment) if cold else warm.start(command, log, environment)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_ready(server)
        yield server
    finally:
        end_group(process)


def refused(log: Path, command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit status of a server command that ends by itself, and what it said."""
    process = warm.start([*command, "--port", str(free_port()), "--host", "127.0.0.1"], log, environment)
    try:
        status = process.wait(START_SECONDS)
    finally:
        end_group(process)
    return status, log.read_text()


def _cold(command: list[str], log: Path, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **environment},
            # Not a session: Linux gives each an equal share of the processor, and two busy processes of a server would
            # then take as much as all else that the tests run, stores and trainers included.
            process_group=0,
        )


def _wait_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(f"server ended with {server.process.returncode}:\n{server.log.read_text()[-4000:]}")
        try:
            if httpx.get(server.url + "/health", timeout=30, verify=PLAIN).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.25)
    raise AssertionError(f"server did not start within {START_SECONDS} s:\n{server.log.read_text()[-4000:]}")


def end_group(process: "subprocess.Popen[bytes] | WarmProcess") -> None:
    """Terminate a process group that this test started, and wait for it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            continue
    process.wait(60)


def delta_sync_serve(model: Path, *flags: str) -> list[str]:
    """The ``delta-sync serve`` command line."""
    program = str(Path(sys.executable).with_name("delta-sync"))
    return [program, "serve", str(model), *flags, *VLLM_FLAGS]


def plain_vllm_serve(model: Path, *flags: str) -> list[str]:
    """The ``vllm serve`` command line."""
    program = str(Path(sys.executable).with_name("vllm"))
    return [program, "serve", str(model), *flags, *VLLM_FLAGS]

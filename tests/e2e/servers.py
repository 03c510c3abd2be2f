"""Start and end real ``vllm serve`` processes for tests."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from tests.e2e import warm
from tests.e2e.fresh import MAX_TOKENS, PROMPTS
from tests.e2e.warm import ENVIRONMENT, WarmProcess
from tests.support.answers import closed_port
from vllm_delta_sync import engine

START_SECONDS = 600.0
PATIENCE_SECONDS = 600.0
PLAIN = False
"""Loading certificates would take httpx longer than any of our requests, which need none."""
VLLM_FLAGS = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16", "--served-model-name", "tiny"]


@dataclass
class Server:
    """A running server: its URL, its process, and its log file."""

    url: str
    process: "subprocess.Popen[bytes] | WarmProcess"
    log: Path
    log_start: int = 0
    """Where in the log ``logged`` begins."""

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

    def wait_commits(self, count: int) -> None:
        """Block until status shows so many commits: a commit is counted a moment after its version is served."""
        eventually(lambda: self.status()["commits"] >= count, f"{count} commits")
        assert self.status()["commits"] == count

    def wait_error(self, kind: str, timeout: float = 300) -> dict[str, Any]:
        """Block until status shows an error of that kind."""
        return self.wait_status(lambda status: (status["last_error"] or {}).get("kind") == kind, timeout)

    def wait_idle(self) -> dict[str, Any]:
        """Block until nothing is under way: a version is served before it is counted and logged."""
        return self.wait_status(lambda status: status["state"] == "idle", 60)

    def wait_status(self, reached: Callable[[dict[str, Any]], bool], timeout: float) -> dict[str, Any]:
        """Block until status is so."""
        deadline = time.monotonic() + timeout
        while not reached(status := self.status()):
            assert time.monotonic() < deadline, f"within {timeout} s it did not come to this: {status}"
            time.sleep(0.05)
        return status

    def traced(self, model: str = "tiny") -> dict[str, Any]:
        """What a short request says of the run and the weights that answered it."""
        body = {"model": model, "prompt": "fox", "max_tokens": 5, "ignore_eos": True}
        traced: dict[str, Any] = self.post("/v1/completions", body).json()["delta_sync"]
        return traced

    def versions(self, model: str = "tiny") -> list[int]:
        return [span["version"] for span in self.traced(model)["spans"]]

    def outputs(self, model: str = "tiny") -> list[dict[str, Any]]:
        """Greedy tokens and log probabilities, in the form of tests/e2e/fresh.py."""
        body = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        outputs = []
        for prompt in PROMPTS:
            answer = self.post("/v1/completions", {**body, "prompt": prompt, "return_token_ids": True})
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            outputs.append({"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]})
        return outputs

    def digests(self) -> dict[str, str]:
        """SHA-256 of every runtime parameter, from vLLM's own weight checker."""
        found: dict[str, str] = self.post("/weight_checker", {"action": "checksum"}).json()["checksums"]
        return {name.removeprefix("dp0:pp0:pcp0:tp0:"): digest for name, digest in found.items()}

    def pids(self) -> list[int]:
        """Of all processes of the server's group."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):
                if os.getpgid(int(folder.name)) == self.process.pid:
                    found.append(int(folder.name))
        return found

    def metrics(self) -> dict[str, float]:
        """Ours, by name and labels."""
        text = self.get("/metrics").text
        return {name: float(value) for name, value in re.findall(r"^(delta_sync_\S+) (\S+)$", text, re.MULTILINE)}

    def skip_log(self) -> None:
        """Let ``logged`` begin here: what was logged before is of no interest any more."""
        self.log_start = self.log.stat().st_size

    def logged(self) -> str:
        """The log, since ``skip_log``."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            return file.read().decode(errors="replace")

    def log_lines(self, words: str) -> list[str]:
        """Lines of ``logged`` with these words."""
        return [line for line in self.logged().splitlines() if words in line]

    def wait_logged(self, words: str) -> str:
        """Block until there is such a line, and return it."""
        deadline = time.monotonic() + 300
        while not (lines := self.log_lines(words)):
            assert time.monotonic() < deadline, f"no {words!r}:\n{self.logged()[-4000:]}"
            time.sleep(0.05)
        return lines[0]


@contextmanager
def beside(*works: Callable[[threading.Event], object]) -> Iterator[list[threading.Thread]]:
    """Threads that work beside the block; each gets the event that tells of its end."""
    ended = threading.Event()
    threads = [threading.Thread(target=work, args=(ended,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        ended.set()
        for thread in threads:
            thread.join(300)


class Load:
    """Threads that ask one long request after the other, from the start of the block, once they are at it, to its end.

    Attributes:
        answers: the responses.
    """

    TOKENS = 230

    def __init__(self, server: Server, threads: int = 2) -> None:
        self.answers: list[httpx.Response] = []
        self._server = server
        self._answered = threading.Event()
        self._asking = beside(*[self._ask] * threads)

    def __enter__(self) -> Self:
        self._asking.__enter__()
        # The next request follows at once, so that one is in flight from now on.
        assert self._answered.wait(120)
        return self

    def __exit__(self, *error: Any) -> None:
        self._asking.__exit__(*error)

    def _ask(self, ended: threading.Event) -> None:
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": self.TOKENS, "temperature": 0, "ignore_eos": True}
        # One client: making one takes as long as half of such a request, and nothing is in flight meanwhile.
        with httpx.Client(base_url=self._server.url, timeout=PATIENCE_SECONDS) as client:
            while not ended.is_set():
                self.answers.append(client.post("/v1/completions", json=body))
                self._answered.set()

    def check(self) -> None:
        """All finished, some met commits, and they say which weights sampled which of their tokens."""
        crossed = 0
        for response in self.answers:
            body = response.json()
            assert body["usage"]["completion_tokens"] == self.TOKENS
            spans = body["delta_sync"]["spans"]
            assert [spans[0]["start"], spans[-1]["end"]] == [0, self.TOKENS]
            assert all(left["end"] == right["start"] for left, right in itertools.pairwise(spans))
            versions = [span["version"] for span in spans]
            assert versions == sorted(set(versions))
            assert int(response.headers["x-delta-sync-version"]) <= versions[0]
            crossed += len(spans) > 1
        assert crossed, f"no request of {len(self.answers)} was in flight across a commit"


def complaints(log: str) -> list[str]:
    """Lines of a log with a warning, an error or a traceback of ours. vLLM warns of processes that it ends itself."""
    ours = {path.name for path in Path(engine.__file__).parent.rglob("*.py")}
    of_levels = re.compile(r"(?:WARNING|ERROR|CRITICAL) .*?\[(\w+\.py):\d+\]")
    words = ("vllm_delta_sync/", "Event loop is closed", "never awaited")
    return [
        line
        for line in log.splitlines()
        if any(word in line for word in words) or ((found := of_levels.search(line)) and found[1] in ours)
    ]


def eventually(reached: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Block until something is so."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"within {seconds:.0f} s it did not come to this: {what}"
        time.sleep(0.02)


@contextmanager
def serving(
    log: Path, command: list[str], environment: dict[str, str], *, cold: bool = False, port: int | None = None
) -> Iterator[Server]:
    """Run a server command until the block ends; its whole process group is ended with it.

    ``cold``: as a user starts it, with an environment and command line of its own in ``/proc``. ``port``: any if None.
    """
    port = port or closed_port()
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
    process = warm.start([*command, "--port", str(closed_port()), "--host", "127.0.0.1"], log, environment)
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
    return [str(Path(sys.executable).with_name("delta-sync")), "serve", str(model), *flags, *VLLM_FLAGS]


def plain_vllm_serve(model: Path, *flags: str) -> list[str]:
    """The ``vllm serve`` command line."""
    return [str(Path(sys.executable).with_name("vllm")), "serve", str(model), *flags, *VLLM_FLAGS]

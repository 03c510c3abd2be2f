"""One inference machine: a real ``delta-sync serve`` behind its own link, with a cache directory of its own."""

import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.processes import MODEL_NAME, SERVE_ARGUMENTS, Child, free_port, server_environment

CONTEXT = 256
"""Tokens."""
START_SECONDS, FRESH_SECONDS = 600.0, 120.0
ANSWER_TOKENS = 24


class ReplicaError(Exception):
    """A server ended, refused the run, or fell behind; the message has the end of its log."""


@dataclass
class Replica:
    """A machine that serves, or did.

    Attributes:
        name: of the machine and of its link. bucket: the run's URL. endpoint: of the store, through its link.
        flags: of ``delta-sync serve``, such as where notices come from. folder: its disk: cache, state and log.
    """

    name: str
    bucket: str
    endpoint: str
    flags: list[str]
    core: int
    folder: Path
    process: Child | None = field(default=None, init=False)
    started: float = field(default=0.0, init=False)
    http: httpx.Client = field(init=False)

    def start(self, model: Path | None) -> None:
        """Start the server from a checkpoint, or from the bucket alone; returns at once."""
        self.folder.mkdir(exist_ok=True)
        port = free_port()
        command = [str(Path(sysconfig.get_path("scripts")) / "delta-sync"), "serve"]
        command += ["--load-format", "delta_sync"] if model is None else [str(model)]
        command += ["--bucket", self.bucket, "--receiver-id", self.name, "--cache-dir", str(self.folder / "cache")]
        command += ["--state-dir", str(self.folder / "state"), *self.flags, "--port", str(port), *SERVE_ARGUMENTS]
        command += ["--max-model-len", str(CONTEXT)]
        environment = server_environment(self.core) | {"AWS_ENDPOINT_URL": self.endpoint}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=FRESH_SECONDS + 10)
        self.started = time.monotonic()
        self.process = Child(self.name, command, self.folder / "server.log", environment)

    def kill(self) -> None:
        """End every process of the server at once."""
        if self.process is not None:
            self.process.kill()
            self.http.close()
            self.process = None

    def ask_to_end(self) -> None:
        """Returns at once."""
        if self.process is not None:
            self.process.ask_to_end()

    def close(self) -> None:
        """End the server in order, if it runs."""
        if self.process is not None:
            with self.process:
                pass
            self.http.close()
            self.process = None

    def check(self) -> None:
        """Raises ReplicaError: it has ended by itself."""
        if self.process is not None and self.process.exit_code is not None:
            raise self._error(f"ended with status {self.process.exit_code}")

    def _error(self, what: str) -> ReplicaError:
        tail = "" if self.process is None else self.process.tail()
        return ReplicaError(f"{self.name} {what}; the end of its log:\n{tail}")

    def await_served(self, version: int) -> float:
        """Wait for a server that is starting to serve a version; seconds since its start. Raises ReplicaError."""
        state = "does not answer"
        while time.monotonic() - self.started < START_SECONDS:
            self.check()
            try:
                status = self.status()
            except httpx.TransportError:
                time.sleep(0.2)
                continue
            if status["served"] is not None and status["served"]["version"] >= version:
                return time.monotonic() - self.started
            state = f"is {status['state']}"
            if status["state"] == "refused":
                break
            time.sleep(0.2)
        raise self._error(f"does not serve version {version}, it {state}")

    def fresh(self, version: int) -> float:
        """When the version was served, by the monotonic clock; waits for it. Raises ReplicaError."""
        answer = self.http.get("/delta_sync/wait", params={"version": version, "timeout": FRESH_SECONDS})
        if not answer.is_success:
            raise self._error(f"did not come to serve version {version}: {answer.text[:300]}")
        return time.monotonic()

    def status(self) -> dict[str, Any]:
        """``GET /delta_sync/status``."""
        answer: dict[str, Any] = self.http.get("/delta_sync/status").raise_for_status().json()
        return answer

    def commit_timings(self, version: int) -> dict[str, float]:
        """Milliseconds per phase of the commit that ended at a version, if it is the one served."""
        status = self.status()
        timings: dict[str, float] = status["timings_ms"]
        return timings if status["served"]["version"] == version else {}

    def verify(self) -> dict[str, Any]:
        """A rescan of all its weights: ``POST /delta_sync/verify``."""
        answer: dict[str, Any] = self.http.post("/delta_sync/verify").raise_for_status().json()
        return answer

    def answers(self, prompts: list[list[int]]) -> list[Any]:
        """Tokens and log-probs of greedy answers to prompts of token ids, one request at a time: kernels round by the
        shape of a batch."""
        body = {"model": MODEL_NAME, "max_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        found = []
        for prompt in prompts:
            asked = body | {"return_token_ids": True, "prompt": prompt}
            choice = self.http.post("/v1/completions", json=asked).raise_for_status().json()["choices"][0]
            found.append([choice["token_ids"], choice["logprobs"]["token_logprobs"]])
        return found

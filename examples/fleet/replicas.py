"""One inference machine: a real ``delta-sync serve`` behind its own link, with a cache directory of its own."""

import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.demo import serving
from examples.demo.characters import encode
from examples.demo.processes import Child, DemoError, free_port
from examples.demo.rollouts import Completion, ServerClient, ServerError, parse_completions
from examples.demo.settings import MODEL_NAME
from examples.fleet.settings import CONTEXT

SERVE_ARGUMENTS = (
    *("--host", "127.0.0.1"),
    *("--served-model-name", MODEL_NAME),
    *("--dtype", "bfloat16"),
    *("--max-model-len", str(CONTEXT)),
    *("--max-num-seqs", "16"),
    *("--generation-config", "vllm"),
    *("--uvicorn-log-level", "warning"),
    "--enforce-eager",
)
START_SECONDS = 300.0
FRESH_SECONDS = 120.0
LOOK_SECONDS = 0.2
PROMPTS = ("delta>", "a fleet of four", "0123", "TRAINER")
ANSWER_TOKENS = 24


@dataclass
class Replica:
    """A machine that serves, or did.

    Attributes:
        name: of the machine and of its link. environment: how it reaches the store. notice: how it hears the trainer.
        folder: its disk: cache and log, which outlive its process.
    """

    name: str
    bucket: str
    environment: Mapping[str, str]
    notice: str
    core: int
    folder: Path
    child: Child | None = field(default=None, init=False)
    started: float = field(default=0.0, init=False)
    client: ServerClient = field(init=False)

    def start(self, model: Path, cold: bool = False) -> None:
        """Start the server; returns at once.

        Args:
            model: a checkpoint directory. cold: it has no weights, they come from the bucket.
        """
        self.folder.mkdir(exist_ok=True)
        with free_port() as port:
            pass
        command = [
            *(script("delta-sync"), "serve", str(model)),
            *("--bucket", self.bucket, "--notice", self.notice, "--receiver-id", self.name),
            *("--cache-dir", str(self.folder / "cache"), "--port", str(port), *SERVE_ARGUMENTS),
            *(("--load-format", "delta_sync") if cold else ()),
        ]
        environment = {**serving.server_environment(self.core), **self.environment}
        self.client = ServerClient(f"http://127.0.0.1:{port}", MODEL_NAME)
        self.started = time.monotonic()
        self.child = Child(self.name, command, self.folder / "server.log", environment=environment)

    def kill(self) -> None:
        """End every process of the server with SIGKILL, as a machine that fails does."""
        self._running().kill()
        self.close()

    def close(self) -> None:
        """End the server in order, if it runs."""
        if self.child is not None:
            self.child.stop()
            self.client.close()
            self.child = None

    def await_served(self, version: int) -> float:
        """Wait for a server that is starting to serve a version; seconds since its start.

        Raises:
            DemoError: it ended, refused the run, or took too long.
        """
        while True:
            child = self._running()
            if child.exit_code is not None:
                raise DemoError(f"{self.name} ended with status {child.exit_code}; the end of its log:\n{child.tail()}")
            status = self._status_or_none()
            if status is not None and status["served"] is not None and status["served"]["version"] >= version:
                return time.monotonic() - self.started
            if (status or {}).get("state") == "refused" or time.monotonic() - self.started > START_SECONDS:
                raise DemoError(f"{self.name} does not serve version {version}: {_reason(status)}; see {child.log}")
            time.sleep(LOOK_SECONDS)

    def fresh(self, version: int) -> float:
        """When the version was served, by the monotonic clock; waits for it.

        Raises:
            DemoError: not within ``FRESH_SECONDS``.
        """
        try:
            self.client.request(
                "GET", f"/delta_sync/wait?version={version}&timeout={FRESH_SECONDS}", None, FRESH_SECONDS + 10
            )
        except ServerError as error:
            raise DemoError(f"{self.name} did not come to serve version {version}: {str(error)[:300]}") from error
        return time.monotonic()

    def status(self) -> dict[str, Any]:
        """``GET /delta_sync/status``. Raises ServerError."""
        answer: dict[str, Any] = self.client.request("GET", "/delta_sync/status")
        return answer

    def commit_timings(self, version: int) -> dict[str, float]:
        """Milliseconds per phase of the commit that ended at a version, if it is the one served. Raises ServerError."""
        status = self.status()
        timings: dict[str, float] = status["timings_ms"]
        return timings if status["served"]["version"] == version else {}

    def verify(self) -> dict[str, Any]:
        """A rescan of all its weights: ``POST /delta_sync/verify``. Raises ServerError."""
        answer: dict[str, Any] = self.client.request("POST", "/delta_sync/verify")
        return answer

    def answers(self) -> list[Completion]:
        """Greedy answers, one request after the other: kernels round by the shape of a batch. Raises ServerError."""
        body = {
            "model": MODEL_NAME,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        found = [self.client.request("POST", "/v1/completions", {**body, "prompt": encode(text)}) for text in PROMPTS]
        return [parse_completions(answer, 1)[0][0] for answer in found]

    def _running(self) -> Child:
        if self.child is None:
            raise DemoError(f"{self.name} is not running")
        return self.child

    def _status_or_none(self) -> dict[str, Any] | None:
        try:
            return self.status()
        except ServerError:
            return None


def script(name: str) -> str:
    """Path of a command that is installed beside this interpreter."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def _reason(status: dict[str, Any] | None) -> str:
    if status is None:
        return "it does not answer"
    error = status["last_error"]
    return f"state {status['state']}" if error is None else str(error["message"])

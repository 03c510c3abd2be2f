"""The rollout machine: serves the newest weights with vLLM, plays games with them, and writes the games to the bucket.

    python rollouts.py --bucket RUN --games URL --environment http://HOST:7000 --folder DIR --versions 120

It starts ``delta-sync serve`` beside itself, which gets the model's files and all weights from the run. A batch of
finished games is one immutable object, ``trajectories/WORKER/0000000017.json.gz``: tokens, the log-prob of each when it
was sampled, and the weight version that sampled it. The machine has no connection to a trainer: it plays ``--ahead``
batches per version that its server serves, and ends once that is version ``--versions``. It waits while store, server
or environment are unreachable. It writes JSON lines of events to standard output.
"""

import argparse
import gzip
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.errors import ConflictError, DeltaSyncError, NotFoundError, StoreError

MODEL = "policy"
CHARACTERS = ["<pad>", "<eos>", "<unk>", ">", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"01234567"]
IDS = {character: number for number, character in enumerate(CHARACTERS)}
LETTERS, GUESSES = 3, 4
CONNECTIONS = 4
START_SECONDS = 600.0
RETRY_SECONDS = 0.5
SERVE = (
    *("--load-format", "delta_sync", "--poll-seconds", "0.2", "--served-model-name", MODEL, "--dtype", "bfloat16"),
    *("--max-model-len", "64", "--max-num-seqs", "128", "--generation-config", "vllm", "--enforce-eager"),
    *("--uvicorn-log-level", "warning"),
)
SERVER_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    "VLLM_NO_USAGE_STATS": "1",
}
_Result = TypeVar("_Result")


class NotReadyError(Exception):
    """The server has not yet proven which version it serves."""


def emit(event: str, **fields: Any) -> None:
    """Write one event; in whole lines, since two threads write."""
    os.write(1, (json.dumps({"event": event, "at": time.time(), **fields}) + "\n").encode())


def until_done(what: str, call: Callable[[], _Result], seconds: float) -> _Result:
    """Repeat a call while ``what`` is unreachable, up to ``seconds``. An HTTP status below 500 is raised at once."""
    began: float | None = None
    while True:
        try:
            result = call()
        except (httpx.HTTPError, StoreError, NotReadyError) as error:
            refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
            if began is None:
                began = time.monotonic()
                emit("away", what=what, error=f"{type(error).__name__}: {error}"[:300])
            if refused or time.monotonic() - began > seconds:
                raise
            time.sleep(RETRY_SECONDS)
            continue
        if began is not None:
            emit("back", what=what, seconds=time.monotonic() - began)
        return result


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character."""
    return [IDS.get(character, IDS["<unk>"]) for character in text]


def reply(guess: str, feedback: str) -> str:
    """Feedback as the policy reads it: upper case in place, lower case elsewhere, 0 absent; then the call for more."""
    marked = {"g": str.upper, "y": str.lower, "-": lambda letter: "0"}
    padded = guess.ljust(len(feedback), "0")
    return "".join(marked[sign](letter) for letter, sign in zip(padded, feedback, strict=False)) + ">"


class Server:
    """``delta-sync serve`` on this machine; a server started by an earlier process of this script is reused."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(base_url=options.server or f"http://127.0.0.1:{options.port}", timeout=120.0)

    def start(self) -> None:
        """Start it unless it runs, once the run exists, and wait for its answer. Raises SystemExit: it ended."""
        if self._options.server is None and not self._answers():
            while not until_done("store", lambda: exists(self._options.bucket), self._options.give_up):
                time.sleep(RETRY_SECONDS)
            folder: Path = self._options.folder
            folder.mkdir(parents=True, exist_ok=True)
            command = [str(Path(sysconfig.get_path("scripts")) / "delta-sync"), "serve", *SERVE]
            command += ["--bucket", self._options.bucket, "--cache-dir", str(folder / "cache")]
            command += ["--host", self._options.host, "--port", str(self._options.port)]
            with (folder / "server.log").open("ab") as log:
                environment = SERVER_ENVIRONMENT | os.environ
                self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process is not None and self._process.poll() is not None:
                raise SystemExit(f"rollouts: the server ended with status {self._process.returncode}; see its log")
            if time.monotonic() > deadline:
                raise SystemExit(f"rollouts: the server does not answer after {START_SECONDS:.0f} s; see its log")
            time.sleep(RETRY_SECONDS)

    def _answers(self) -> bool:
        try:
            return self.http.get("/delta_sync/status").is_success
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """End the server if this process started it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON. Raises httpx.HTTPError."""
        answer = self.http.request(method, path, json=body)
        answer.raise_for_status()
        return answer.json()

    def complete(self, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
        """One guess for each prompt: output, log-probs and spans. Raises NotReadyError, httpx.HTTPError."""
        share = -(-len(prompts) // CONNECTIONS)
        pieces = [list(prompts[at : at + share]) for at in range(0, len(prompts), share)]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return [turn for turns in pool.map(self._complete, pieces) for turn in turns]

    def _complete(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        body = {"model": MODEL, "prompt": prompts, "max_tokens": LETTERS, "temperature": 1.0}
        answer = self.request("POST", "/v1/completions", body | {"logprobs": 0, "return_token_ids": True})
        spans = answer["delta_sync"]["spans"]
        if any(span["version"] is None for span in spans):
            raise NotReadyError("the server has not proven yet which version it serves")
        return [
            {
                "prompt": prompts[choice["index"]],
                "output": choice["token_ids"],
                "logprobs": [min(0.0, value) for value in choice["logprobs"]["token_logprobs"]],
                "spans": [
                    {name: span[name] for name in ("version", "start", "end")}
                    for span in spans
                    if span["index"] == choice["index"]
                ],
            }
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]

    def follow(self) -> None:
        """Report each version once the server serves it, endlessly; on a separate connection."""
        last = -1
        with httpx.Client(base_url=self.http.base_url, timeout=30.0) as http:
            while True:
                try:
                    status = http.get("/delta_sync/status").raise_for_status().json()
                    if status["served"] is not None and status["served"]["version"] != last:
                        last = status["served"]["version"]
                        pauses = {one["version"]: one["timings_ms"].get("pause") for one in status["recent"]}
                        emit("served", version=last, pauses_ms=pauses)
                    http.get("/delta_sync/wait", params={"version": last + 1, "timeout": 5})
                except httpx.HTTPError:
                    time.sleep(RETRY_SECONDS)


@dataclass
class Play:
    """A game that is being played. ``prompt``: token ids before the next guess."""

    game: int
    prompt: list[int] = field(default_factory=lambda: encode(">"))
    guesses: list[str] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)

    def take(self, turn: dict[str, Any]) -> None:
        """Add a guess of the policy."""
        self.turns.append(turn)
        self.guesses.append("".join(CHARACTERS[token] for token in turn["output"]))

    def hear(self, answer: dict[str, Any]) -> None:
        """Add the environment's feedback."""
        self.answer = answer
        self.prompt = self.prompt + self.turns[-1]["output"] + encode(reply(self.guesses[-1], answer["feedback"]))


class Worker:
    """Plays batch after batch and writes them under ascending numbers."""

    def __init__(self, options: argparse.Namespace, server: Server, bucket: Bucket) -> None:
        self._options, self._server, self._bucket = options, server, bucket
        self._environment = httpx.Client(base_url=options.environment, timeout=15.0)
        self._version: int | None = None
        self._played = 0  # batches since the server began to serve that version
        listed = self._retry("store", lambda: [item.key for item in bucket.list(f"trajectories/{options.worker}/")])
        self._number = 1 + max((int(Path(key).name.split(".")[0]) for key in listed), default=-1)
        emit("ready", number=self._number)

    def _retry(self, what: str, call: Callable[[], _Result]) -> _Result:
        return until_done(what, call, self._options.give_up)

    def run(self) -> None:
        """Play until the server serves the last version. Raises httpx.HTTPError, StoreError: unreachable too long."""
        while (run := self._next_run()) is not None:
            began = time.monotonic()
            plays = self._play()
            key = self._put(run, plays)
            self._played += 1
            emit("batch", key=key, version=self._version, seconds=time.monotonic() - began)
        emit("verified", **self._retry("server", lambda: self._server.request("POST", "/delta_sync/verify")))

    def _next_run(self) -> str | None:
        """Wait until another batch is due; return the id of the served run, or None after the last version."""
        began = time.monotonic()
        while True:
            status = self._retry("server", lambda: self._server.request("GET", "/delta_sync/status"))
            served = status["served"] and status["served"]["version"]
            if served is not None and served >= self._options.versions:
                return None
            if served is not None and served != self._version:
                self._version, self._played = served, 0
            if served is not None and self._played < self._options.ahead:
                return str(status["run"])
            if time.monotonic() - began > self._options.patience:
                # The trainer may lack just the batch that was lost or too old: both would wait endlessly.
                emit("impatient", version=served)
                began, self._played = time.monotonic(), 0
            time.sleep(0.1)

    def _play(self) -> list[Play]:
        """Play a batch of games, each ``plays`` times, one turn of all of them at once."""
        chosen = random.Random(f"{self._options.worker} {self._number}").sample(range(2**31), self._options.groups)
        plays = [Play(game) for game in chosen for _ in range(self._options.plays)]
        for _ in range(GUESSES):
            left = [play for play in plays if not play.answer.get("done")]
            if not left:
                break
            prompts = [play.prompt for play in left]
            turns = self._retry("server", partial(self._server.complete, prompts))
            for play, turn in zip(left, turns, strict=True):
                play.take(turn)
            for play, answer in zip(left, self._rate(left), strict=True):
                play.hear(answer)
        return plays

    def _rate(self, plays: list[Play]) -> list[dict[str, Any]]:
        body = [{"game": play.game, "guesses": play.guesses} for play in plays]
        answer = self._retry("environment", lambda: self._environment.post("/guess", json=body).raise_for_status())
        return list(answer.json())

    def _put(self, run: str, plays: list[Play]) -> str:
        """Write the batch under the next free number; return its key."""
        games = [
            {"game": play.game, "turns": play.turns, "solved": play.answer["solved"], "reward": play.answer["reward"]}
            for play in plays
        ]
        batch = {"format_version": 1, "run": run, "worker": self._options.worker, "games": games}
        while True:
            key = f"trajectories/{self._options.worker}/{self._number:010d}.json.gz"
            data = gzip.compress(json.dumps(batch | {"number": self._number}).encode(), mtime=0)
            written = self._retry("store", partial(create, self._bucket, key, data))
            self._number += 1
            if written:
                return key


def exists(run: str) -> bool:
    """Whether a trainer has begun the run."""
    try:
        open_run(run).head()
    except NotFoundError:
        return False
    return True


def create(bucket: Bucket, key: str, data: bytes) -> bool:
    """Put an object unless its key is taken by another; the same bytes may have arrived in an earlier attempt."""
    try:
        bucket.put(key, data, if_absent=True)
    except ConflictError:
        return bucket.get(key) == data
    return True


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with status 2 on a wrong one."""
    parser = argparse.ArgumentParser(description="Serve a run's weights with vLLM, play games, write trajectories.")
    parser.add_argument("--bucket", required=True, metavar="RUN", help="URL of the run to serve")
    parser.add_argument("--games", required=True, metavar="URL", help="bucket to write trajectories to")
    parser.add_argument("--environment", required=True, metavar="URL", help="of environment.py")
    parser.add_argument("--folder", required=True, type=Path, metavar="DIR", help="for the server's cache and log")
    parser.add_argument("--versions", required=True, type=int, metavar="N", help="end when this version is served")
    parser.add_argument("--worker", default="rollout", metavar="NAME", help="part of the keys (default %(default)s)")
    parser.add_argument("--server", metavar="URL", help="of a server that runs already; default: start one")
    parser.add_argument("--host", default="127.0.0.1", help="for the server to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="the same (default %(default)s)")
    parser.add_argument("--groups", type=int, default=16, help="different games in a batch (default %(default)s)")
    parser.add_argument("--plays", type=int, default=8, help="times that each is played (default %(default)s)")
    parser.add_argument("--ahead", type=int, default=1, help="batches per weight version (default %(default)s)")
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds without a new version until it plays on all the same"
    )
    parser.add_argument("--give-up", type=float, default=300.0, help="seconds to wait for unreachable services")
    options = parser.parse_args(arguments)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", options.worker):
        parser.error(f"--worker {options.worker[:80]!r}: give up to 63 of A-Z a-z 0-9 _ -")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run as the module's docstring says."""
    options = parse_options(arguments)
    server = Server(options)
    try:
        server.start()
        threading.Thread(target=server.follow, daemon=True).start()
        with open_bucket(options.games) as bucket:
            Worker(options, server, bucket).run()
    except (httpx.HTTPError, DeltaSyncError, NotReadyError) as error:
        print(f"rollouts: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

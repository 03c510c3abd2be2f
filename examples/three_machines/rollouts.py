"""The rollout machine: serves the newest weights with vLLM, plays games with them, and writes the games to the bucket.

    python rollouts.py --bucket RUN --games URL --environment http://HOST:7000 --folder DIR --versions 120

It starts ``delta-sync serve`` beside itself, which gets the model's files and all weights from the run. A batch of
finished games is one immutable object, ``trajectories/WORKER/0000000017.json.gz``: tokens, the log-prob of each when it
was sampled, and the weight version that sampled it. The machine has no connection to a trainer: it plays ``--ahead``
batches per version that its server serves, and ends once that is version ``--versions``. It waits while the server or
the environment is unreachable; the bucket retries requests to the store. Events go to standard output as JSON lines.
"""

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from vllm_delta_sync import DeltaSyncError, open_run
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.errors import ConflictError, NotFoundError

MODEL = "policy"
CHARACTERS = ["<pad>", "<eos>", "<unk>", ">", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *"01234567"]
IDS = {character: number for number, character in enumerate(CHARACTERS)}
LETTERS = 3
START_SECONDS, RETRY_SECONDS = 600.0, 0.5
SERVE = (
    f"--load-format delta_sync --poll-seconds 0.2 --served-model-name {MODEL} --dtype bfloat16 --max-model-len 64 "
    "--max-num-seqs 128 --generation-config vllm --enforce-eager --uvicorn-log-level warning"
)


def emit(event: str, **fields: Any) -> None:
    """Write one event; in whole lines, since two threads write."""
    os.write(1, (json.dumps({"event": event, "at": time.time(), **fields}) + "\n").encode())


def encode(text: str) -> list[int]:
    """Token ids of a text, one per character."""
    return [IDS.get(character, IDS["<unk>"]) for character in text]


def reply(guess: str, feedback: str) -> str:
    """Feedback as the policy reads it: upper case in place, lower case elsewhere, 0 absent; then the call for more."""
    marked = {"g": str.upper, "y": str.lower, "-": lambda letter: "0"}
    padded = guess.ljust(len(feedback), "0")
    return "".join(marked[sign](letter) for letter, sign in zip(padded, feedback, strict=False)) + ">"


@contextmanager
def serving(options: argparse.Namespace, url: str) -> Iterator[None]:
    """``delta-sync serve`` on this machine, once the run exists; one that an earlier process has left is reused."""
    if options.server or answers(url):
        yield
        return
    while True:
        try:
            with open_run(options.bucket) as run:
                run.head()
            break
        except NotFoundError:
            time.sleep(RETRY_SECONDS)
    options.folder.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sysconfig.get_path("scripts")) / "delta-sync"), "serve", *SERVE.split()]
    command += ["--bucket", options.bucket, "--cache-dir", str(options.folder / "cache")]
    command += ["--host", options.host, "--port", str(options.port)]
    # By default vLLM closes connections that are idle for 5 s, and the wait for a version may be longer.
    environment = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"} | os.environ
    with (options.folder / "server.log").open("ab") as log:
        with subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process:
            try:
                deadline = time.monotonic() + START_SECONDS
                while not answers(url):
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit(f"rollouts: the server has ended or does not answer; see {log.name}")
                    time.sleep(RETRY_SECONDS)
                yield
            finally:
                process.terminate()


def answers(url: str) -> bool:
    """Whether a server answers there."""
    try:
        return httpx.get(f"{url}/delta_sync/status", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def follow(url: str) -> None:
    """Report each version once the server serves it, endlessly; on a connection of its own."""
    last = -1
    with httpx.Client(base_url=url, timeout=30.0, trust_env=False) as server:
        while True:
            try:
                status = server.get("/delta_sync/status").raise_for_status().json()
                if status["served"] is not None and status["served"]["version"] != last:
                    last = status["served"]["version"]
                    pauses = {one["version"]: one["timings_ms"].get("pause") for one in status["recent"]}
                    emit("served", version=last, pauses_ms=pauses)
                server.get("/delta_sync/wait", params={"version": last + 1, "timeout": 5})
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


class Worker:
    """Plays batch after batch and writes them under ascending numbers."""

    def __init__(self, options: argparse.Namespace, url: str, bucket: Bucket) -> None:
        self._options, self._bucket = options, bucket
        self._server = httpx.Client(base_url=url, timeout=120.0, trust_env=False)
        self._environment = httpx.Client(base_url=options.environment, timeout=15.0, trust_env=False)
        self._version: int | None = None
        self._played = 0  # batches since the server began to serve that version
        listed = [item.key for item in bucket.list(f"trajectories/{options.worker}/")]
        self._number = 1 + max((int(Path(key).name.split(".")[0]) for key in listed), default=-1)
        emit("ready", number=self._number)

    def _retry(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Repeat a call while ``what`` is unreachable, up to ``--give-up``. A status below 500 is raised at once."""
        began, away = time.monotonic(), False
        while True:
            try:
                result = call(*arguments)
            except httpx.HTTPError as error:
                refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                if refused or time.monotonic() - began > self._options.give_up:
                    raise
                if not away:
                    emit("away", what=what, error=f"{type(error).__name__}: {error}"[:300])
                away = True
                time.sleep(RETRY_SECONDS)
            else:
                if away:
                    emit("back", what=what, seconds=time.monotonic() - began)
                return result

    def run(self) -> None:
        """Play until the server serves the last version. Raises httpx.HTTPError: away for too long."""
        while (run := self._next_run()) is not None:
            began = time.monotonic()
            key = self._put(run, self._play())
            self._played += 1
            emit("batch", key=key, version=self._version, seconds=time.monotonic() - began)
        verified = self._retry("server", lambda: self._server.post("/delta_sync/verify").raise_for_status().json())
        emit("verified", **verified)

    def _next_run(self) -> str | None:
        """Wait until another batch is due; return the id of the served run, or None after the last version."""
        began = time.monotonic()
        while True:
            status = self._retry("server", lambda: self._server.get("/delta_sync/status").raise_for_status().json())
            if status["served"] is not None:
                served = status["served"]["version"]
                if served >= self._options.versions:
                    return None
                if served != self._version:
                    self._version, self._played = served, 0
                if self._played < self._options.ahead:
                    return str(status["run"])
            if time.monotonic() - began > self._options.patience:
                # The trainer may lack just the batch that was lost or too old: both would wait endlessly.
                emit("impatient", version=self._version)
                began, self._played = time.monotonic(), 0
            time.sleep(0.1)

    def _play(self) -> list[Play]:
        """Play a batch of games, each ``plays`` times, one turn of all of them at once."""
        chosen = random.Random(f"{self._options.worker} {self._number}").sample(range(2**31), self._options.groups)
        plays = [Play(game) for game in chosen for _ in range(self._options.plays)]
        while left := [play for play in plays if not play.answer.get("done")]:
            turns = self._retry("server", self._complete, [play.prompt for play in left])
            for play, turn in zip(left, turns, strict=True):
                play.turns.append(turn)
                play.guesses.append("".join(CHARACTERS[token] for token in turn["output"]))
            for play, turn, answer in zip(left, turns, self._retry("environment", self._rate, left), strict=True):
                play.answer = answer
                play.prompt = turn["prompt"] + turn["output"] + encode(reply(play.guesses[-1], answer["feedback"]))
        return plays

    def _complete(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """One guess for each prompt: output, log-probs and spans."""
        body = {"model": MODEL, "prompt": prompts, "max_tokens": LETTERS, "temperature": 1.0}
        body |= {"logprobs": 0, "return_token_ids": True}
        answer = self._server.post("/v1/completions", json=body).raise_for_status().json()
        turns: list[dict[str, Any]] = [{"prompt": prompt, "spans": []} for prompt in prompts]
        for choice in answer["choices"]:
            logprobs = [min(0.0, value) for value in choice["logprobs"]["token_logprobs"]]
            turns[choice["index"]] |= {"output": choice["token_ids"], "logprobs": logprobs}
        for span in answer["delta_sync"]["spans"]:
            if span["version"] is None:
                raise httpx.HTTPError("the server has not proven yet which version it serves")
            turns[span["index"]]["spans"].append({name: span[name] for name in ("version", "start", "end")})
        return turns

    def _rate(self, plays: list[Play]) -> list[dict[str, Any]]:
        body = [{"game": play.game, "guesses": play.guesses} for play in plays]
        return list(self._environment.post("/guess", json=body).raise_for_status().json())

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
            self._number += 1
            try:
                self._bucket.put(key, data, if_absent=True)
            except ConflictError:
                # Another process has written this number, or this one: if an answer is lost, the put is repeated.
                if self._bucket.get(key) != data:
                    continue
            return key


def main(arguments: Sequence[str]) -> int:
    """Run as the module's docstring says."""
    parser = argparse.ArgumentParser(description="Serve a run's weights with vLLM, play games, write trajectories.")
    add = parser.add_argument
    add("--bucket", required=True, metavar="RUN", help="URL of the run to serve")
    add("--games", required=True, metavar="URL", help="bucket to write trajectories to")
    add("--environment", required=True, metavar="URL", help="of environment.py")
    add("--folder", required=True, type=Path, metavar="DIR", help="for the server's cache and log")
    add("--versions", required=True, type=int, metavar="N", help="end when this version is served")
    add("--worker", default="rollout", metavar="NAME", help="part of the keys: A-Z a-z 0-9 _ - (default %(default)s)")
    add("--server", metavar="URL", help="of a server that runs already; default: start one")
    add("--host", default="127.0.0.1", help="for the server to listen on (default %(default)s)")
    add("--port", type=int, default=8000, help="the same (default %(default)s)")
    add("--groups", type=int, default=16, help="different games in a batch (default %(default)s)")
    add("--plays", type=int, default=8, help="times that each is played (default %(default)s)")
    add("--ahead", type=int, default=1, help="batches per weight version (default %(default)s)")
    add("--patience", type=float, default=60.0, help="seconds to wait for a new version (default %(default)g)")
    add("--give-up", type=float, default=300.0, help="seconds to wait for server or environment (default %(default)g)")
    options = parser.parse_args(arguments)
    url = options.server or f"http://127.0.0.1:{options.port}"
    try:
        with serving(options, url), open_bucket(options.games) as bucket:
            threading.Thread(target=follow, args=[url], daemon=True).start()
            Worker(options, url, bucket).run()
    except (httpx.HTTPError, DeltaSyncError) as error:
        print(f"rollouts: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

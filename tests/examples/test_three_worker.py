"""The three machines' worker as a real process, with a real environment and a server that answers at random."""

import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from examples.demo.characters import IDS
from examples.three_machines import game
from examples.three_machines.environment import Service
from examples.three_machines.reading import next_part
from examples.three_machines.trajectories import Batch, Reader
from examples.three_machines.worker import games_of
from tests.support.three import RUN
from vllm_delta_sync.bucket import open_bucket

SECONDS = 60
SEED = 3


class Server(ThreadingHTTPServer):
    """What a worker sees of a server: random words, their versions, and a status.

    Attributes:
        version: served; None: not proven. crossing: whether a new version comes amid each answer.
        failing: answers left that are an error.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.version: int | None = 0
        self.crossing = False
        self.failing = 0
        self.chance = random.Random(1)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        version = self.server.version
        self._send(200, {"run": RUN, "served": None if version is None else {"version": version}})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.failing:
            self.server.failing -= 1
            self._send(503, {"error": "not now"})
            return
        choices, spans = [], []
        for index in range(len(asked["prompt"])):
            word = self.server.chance.choice(game.WORDS)
            choices.append(
                {
                    "index": index,
                    "text": word,
                    "token_ids": [IDS[letter] for letter in word],
                    "logprobs": {"token_logprobs": [-1.5, -0.5, -0.25]},
                    "finish_reason": "length",
                }
            )
            spans += self._spans(index)
        self._send(200, {"choices": choices, "delta_sync": {"run": RUN, "spans": spans}})

    def _spans(self, index: int) -> list[dict[str, Any]]:
        version = self.server.version
        if version is None or not self.server.crossing:
            return [{"index": index, "version": version, "start": 0, "end": 3}]
        return [
            {"index": index, "version": version, "start": 0, "end": 1},
            {"index": index, "version": version + 1, "start": 1, "end": 3},
        ]

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class World:
    """A server, an environment, a bucket, and workers that are started."""

    def __init__(self, folder: Path) -> None:
        self.server, self.environment = Server(), Service("127.0.0.1", 0, SEED)
        self.url = str(folder / "trajectories")
        for service in (self.server, self.environment):
            threading.Thread(target=service.serve_forever, daemon=True).start()

    @contextmanager
    def worker(self, **options: Any) -> "Iterator[subprocess.Popen[str]]":
        settings = {
            "server": self.server.url,
            "environment": f"http://127.0.0.1:{self.environment.server_address[1]}",
            "trajectories": self.url,
            "worker": "w1",
            "groups": 3,
            "plays": 4,
            "give-up": SECONDS,
            **options,
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "examples.three_machines.worker", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def batches(self) -> list[Batch]:
        with open_bucket(self.url) as bucket:
            reader = Reader(bucket)
            return [reader.read(found) for found in reader.new()]

    def close(self) -> None:
        for service in (self.server, self.environment):
            service.shutdown()
            service.server_close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def told(process: "subprocess.Popen[str]", event: str) -> dict[str, Any]:
    """The next event of a kind; ends with the process."""
    assert process.stdout is not None
    for line in process.stdout:
        found: dict[str, Any] = json.loads(line)
        if found["event"] == event:
            return found
    raise AssertionError(f"the worker ended without {event!r}: {process.communicate()[1]}")


def test_batches_hold_whole_games_with_the_versions_of_every_token(world: World) -> None:
    world.server.crossing = True
    with world.worker(batches=2, ahead=2) as process:
        assert process.wait(SECONDS) == 0
    first, second = world.batches()
    assert (first.number, second.number, first.run) == (0, 1, RUN)
    assert (first.lowest, first.highest) == (0, 1)
    assert [play.game for play in first.games] == [number for number in games_of("w1", 0, 3) for _ in range(4)]
    letters = {number: letter for letter, number in IDS.items()}
    for play in first.games + second.games:
        secret = game.secret_of(SEED, play.game)
        guesses = ["".join(letters[token] for token in turn.output) for turn in play.turns]
        signs = [game.feedback(secret, guess) for guess in guesses]
        assert game.is_done(signs)
        assert not game.is_done(signs[:-1])
        assert play.reward == pytest.approx(game.reward(signs))
        assert play.solved == (signs[-1] == game.SOLVED)
        for number, turn in enumerate(play.turns):
            assert turn.logprobs == [-1.5, -0.5, -0.25]
            assert [(span.version, span.start, span.end) for span in turn.spans] == [(0, 0, 1), (1, 1, 3)]
            if number:
                before = play.turns[number - 1]
                assert turn.prompt == before.prompt + before.output + next_part(guesses[number - 1], signs[number - 1])


def test_it_plays_so_many_batches_per_version_and_then_waits_for_another(world: World) -> None:
    with world.worker(ahead=2, patience=SECONDS) as process:
        assert [told(process, "batch")["lowest"] for _ in range(2)] == [0, 0]
        world.server.version = 1
        assert [told(process, "batch")["lowest"] for _ in range(2)] == [1, 1]
        world.server.version = 3
        assert told(process, "batch")["lowest"] == 3


def test_it_plays_on_when_no_version_comes_for_longer_than_its_patience(world: World) -> None:
    with world.worker(ahead=1, patience=0.3) as process:
        assert told(process, "batch")["number"] == 0
        assert told(process, "impatient")["version"] == 0
        assert told(process, "batch")["number"] == 1


def test_killed_it_goes_on_under_the_next_number_with_other_games(world: World) -> None:
    with world.worker(ahead=100) as process:
        told(process, "batch")
        told(process, "batch")
    held = world.batches()
    with world.worker(batches=1) as process:
        assert told(process, "ready")["number"] == len(held)
        assert process.wait(SECONDS) == 0
    after = world.batches()
    assert [batch.number for batch in after] == list(range(len(held) + 1))
    assert after[:-1] == held
    assert len({play.game for batch in after for play in batch.games}) == 3 * len(after)


def test_a_server_that_fails_or_has_proven_nothing_is_waited_for(world: World) -> None:
    world.server.version = None
    world.server.failing = 3
    with world.worker(batches=1) as process:
        told(process, "ready")
        world.server.version = 4
        assert "HTTP 503" in told(process, "away")["error"]
        assert told(process, "back")["what"] == "server"
        assert told(process, "batch")["lowest"] == 4


def test_who_is_away_for_too_long_is_named_in_one_line(world: World) -> None:
    with world.worker(**{"environment": "http://127.0.0.1:9", "give-up": 0.1}) as process:
        assert process.wait(SECONDS) == 1
        assert process.stderr is not None
        assert process.stderr.read().startswith("worker: POST /game: ConnectionRefusedError")
    assert world.batches() == []

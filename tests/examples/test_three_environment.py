"""The environment's service as a real process: what it answers, refuses, and that it may be killed at any time."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from examples.demo.rollouts import JsonClient, ServerError
from examples.three_machines import game
from examples.three_machines.environment import MAX_BODY_BYTES, MAX_PLAYS

SEED = 11
SECONDS = 30


@contextmanager
def running(port: int = 0) -> "Iterator[tuple[subprocess.Popen[str], int]]":
    """The process, and the port that it listens at."""
    command = [sys.executable, "-m", "examples.three_machines.environment", "--port", str(port), "--seed", str(SEED)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["port"]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., Any]]:
    with running() as (_, port):
        client = JsonClient(f"http://127.0.0.1:{port}")
        yield lambda path, body: client.request("POST", path, body, SECONDS)


def test_a_game_from_its_first_prompt_to_its_end(ask: Callable[..., Any]) -> None:
    secret = game.secret_of(SEED, 17)
    wrong = next(word for word in game.WORDS if word != secret)
    signs = game.feedback(secret, wrong)
    assert ask("/game", {"game": 17}) == {"prompt": ">"}
    assert ask("/guess", {"game": 17, "guesses": [wrong]}) == {
        "feedback": signs,
        "done": False,
        "solved": False,
        "reward": 0.0,
    }
    solved = ask("/guess", {"game": 17, "guesses": [wrong, secret]})
    assert solved == {"feedback": game.SOLVED, "done": True, "solved": True, "reward": 0.9}
    lost = ask("/guess", {"game": 17, "guesses": [wrong] * game.GUESSES})
    assert lost == {"feedback": signs, "done": True, "solved": False, "reward": game.reward([signs])}


def test_a_list_of_games_is_one_request(ask: Callable[..., Any]) -> None:
    plays = [{"game": number, "guesses": ["zzz", "ear"]} for number in range(200)]
    assert ask("/guess", plays) == [ask("/guess", play) for play in plays]
    assert ask("/game", []) == []


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/game", {}, 400, "field 'game' is None; give a whole number"),
        ("/game", {"game": True}, 400, "field 'game' is True"),
        ("/game", {"game": -1}, 400, "field 'game' is -1"),
        ("/game", {"game": 2**60}, 400, "field 'game' is"),
        ("/game", [17], 400, "holds 17; give objects"),
        ("/game", "17", 400, "give objects"),
        ("/guess", {"game": 17}, 400, "field 'guesses' is None; give 1 to 4"),
        ("/guess", {"game": 17, "guesses": []}, 400, "field 'guesses' is"),
        ("/guess", {"game": 17, "guesses": ["ear"] * 5}, 400, "field 'guesses' is"),
        ("/guess", {"game": 17, "guesses": [3]}, 400, "field 'guesses' holds 3"),
        ("/guess", {"game": 17, "guesses": ["x" * 100]}, 400, "field 'guesses' holds"),
        ("/guess", {"game": 17, "guesses": [game.secret_of(SEED, 17), "ear"]}, 400, "which solved the game"),
        ("/guess", [{"game": 17}] * (MAX_PLAYS + 1), 413, f"give at most {MAX_PLAYS}"),
        ("/game", [{"game": 17, "pad": "x" * MAX_BODY_BYTES}], 413, f"give at most {MAX_BODY_BYTES}"),
        ("/secret", {"game": 17}, 404, "POST to /game or /guess"),
    ],
)
def test_refusals_name_field_and_value(
    ask: Callable[..., Any], path: str, body: Any, status: int, message: str
) -> None:
    with pytest.raises(ServerError, match=message.replace("[", r"\[")) as refused:
        ask(path, body)
    assert refused.value.status == status


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /game HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n{{{", b"400"),
        (b"POST /game HTTP/1.1\r\nHost: x\r\n\r\n", b"411"),
        (b"POST /game HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", b"411"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
    ],
)
def test_requests_that_are_no_json_get_a_status(request_bytes: bytes, status: bytes) -> None:
    with running() as (_, port), socket.create_connection(("127.0.0.1", port), SECONDS) as connection:
        connection.sendall(request_bytes)
        assert connection.recv(1 << 16).split()[1] == status


def test_killed_and_started_again_it_answers_the_same() -> None:
    plays = [{"game": number, "guesses": ["ear"]} for number in range(50)]
    with running() as (process, port):
        before = JsonClient(f"http://127.0.0.1:{port}").request("POST", "/guess", plays, SECONDS)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(SECONDS)
        with running(port) as (_, again):
            assert again == port
            assert JsonClient(f"http://127.0.0.1:{port}").request("POST", "/guess", plays, SECONDS) == before


def test_a_port_that_is_taken_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "examples.three_machines.environment", "--port", str(port), "--seed", "1"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 1
    assert ended.stderr == f"environment: cannot listen on 127.0.0.1:{port}: [Errno 98] Address already in use\n"

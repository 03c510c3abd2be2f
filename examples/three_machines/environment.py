"""The environment's machine: a small HTTP service that rates guesses, with nothing but Python's standard library.

    python -m examples.three_machines.environment --port P [--host H] --seed N

    POST /game   {"game": 17}                       → {"prompt": ">"}
    POST /guess  {"game": 17, "guesses": ["ear"]}   → {"feedback": "gy-", "done": false, "solved": false, "reward": 0.1}
    GET  /health                                    → {"status": "ok"}

Both take a list of up to ``MAX_PLAYS`` such objects too and answer with a list: one round trip for a whole batch.
The service keeps nothing between requests: killed and started again with the same seed it answers the same.
"""

import argparse
import json
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from examples.three_machines import game

PROMPT = ">"
MAX_BODY_BYTES = 1 << 20
DRAINED_BYTES = 16 * MAX_BODY_BYTES
"""Of a larger body so much is read and thrown away, for whoever sends it to see why it is refused."""
MAX_PLAYS = 4096
MAX_GAME = 2**53 - 1
MAX_GUESS_CHARACTERS = 64
IDLE_SECONDS = 300.0
"""After which a connection that says nothing is closed."""


class RefusedError(Exception):
    """A request that makes no sense; ``status`` is what HTTP calls it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def begin(seed: int, play: dict[str, Any]) -> dict[str, Any]:
    """Answer one ``/game``. Raises RefusedError."""
    _number(play)
    return {"prompt": PROMPT}


def rate(seed: int, play: dict[str, Any]) -> dict[str, Any]:
    """Answer one ``/guess``: feedback on the last of all guesses of a game so far. Raises RefusedError."""
    secret = game.secret_of(seed, _number(play))
    guesses = play.get("guesses")
    if not isinstance(guesses, list) or not 1 <= len(guesses) <= game.GUESSES:
        raise RefusedError(400, f"field 'guesses' is {_shown(guesses)}; give 1 to {game.GUESSES} strings")
    for guess in guesses:
        if not isinstance(guess, str) or len(guess) > MAX_GUESS_CHARACTERS:
            raise RefusedError(400, f"field 'guesses' holds {_shown(guess)}; give strings of {game.LETTERS} letters")
    signs = [game.feedback(secret, guess) for guess in guesses]
    if game.is_done(signs[:-1]):
        raise RefusedError(400, f"field 'guesses' goes on after guess {len(guesses) - 1}, which solved the game")
    done = game.is_done(signs)
    return {
        "feedback": signs[-1],
        "done": done,
        "solved": signs[-1] == game.SOLVED,
        "reward": game.reward(signs) if done else 0.0,
    }


ROUTES: dict[str, Callable[[int, dict[str, Any]], dict[str, Any]]] = {"/game": begin, "/guess": rate}


def answer(seed: int, path: str, body: bytes) -> Any:
    """What a POST gets back. Raises RefusedError."""
    route = ROUTES.get(path)
    if route is None:
        raise RefusedError(404, f"path {path[:80]!r} is not served; POST to {' or '.join(ROUTES)}")
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON: {str(error)[:200]}") from error
    plays = asked if isinstance(asked, list) else [asked]
    if len(plays) > MAX_PLAYS:
        raise RefusedError(413, f"the list has {len(plays)} entries; give at most {MAX_PLAYS}")
    for play in plays:
        if not isinstance(play, dict):
            raise RefusedError(400, f"the body is or holds {_shown(play)}; give objects with a field 'game'")
    answers = [route(seed, play) for play in plays]
    return answers if isinstance(asked, list) else answers[0]


def _number(play: dict[str, Any]) -> int:
    number = play.get("game")
    if type(number) is not int or not 0 <= number <= MAX_GAME:
        raise RefusedError(400, f"field 'game' is {_shown(number)}; give a whole number from 0 to 2^53 - 1")
    return number


def _shown(value: object) -> str:
    return repr(value)[:80]


class Handler(BaseHTTPRequestHandler):
    """One connection; ``server`` is the Service."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    # Header and body are two writes, which Nagle would keep a round trip apart.
    disable_nagle_algorithm = True
    server: "Service"

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, {"status": "ok"})
        else:
            self._send(404, {"error": f"path {self.path[:80]!r} is not served; GET /health"})

    def do_POST(self) -> None:
        try:
            self._send(200, answer(self.server.seed, self.path, self._body()))
        except RefusedError as error:
            # What was not read of a body would be taken for the next request.
            self.close_connection = True
            self._send(error.status, {"error": str(error)})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: one line per request would be most of what the log holds."""

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise RefusedError(411, f"header Content-Length is {_shown(length)}; give the body's size")
        if int(length[:20]) > MAX_BODY_BYTES:
            # Bytes that nobody has read when a connection is closed would take the answer with them.
            for read in range(0, min(int(length[:20]), DRAINED_BYTES), MAX_BODY_BYTES):
                self.rfile.read(min(MAX_BODY_BYTES, int(length[:20]) - read))
            raise RefusedError(413, f"the body has {length[:20]} bytes; give at most {MAX_BODY_BYTES}")
        return self.rfile.read(int(length))

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Service(ThreadingHTTPServer):
    """Listens at (host, port) at once; ``serve_forever`` answers."""

    daemon_threads = True

    def __init__(self, host: str, port: int, seed: int) -> None:
        super().__init__((host, port), Handler)
        self.seed = seed

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong, unless it is only that somebody is gone, as those who are killed are."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def main(arguments: list[str]) -> int:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m examples.three_machines.environment", description="The word game.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, required=True, help="port to listen on; 0 for any")
    parser.add_argument("--seed", type=int, required=True, help="of the secrets")
    options = parser.parse_args(arguments)
    try:
        service = Service(options.host, options.port, options.seed)
    except (OSError, OverflowError) as error:
        print(f"environment: cannot listen on {options.host}:{options.port}: {error}", file=sys.stderr)
        return 1
    with service:
        host, port = service.server_address[:2]
        print(json.dumps({"event": "listening", "host": host, "port": port}), flush=True)
        try:
            service.serve_forever()
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

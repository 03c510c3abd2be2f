"""The environment's machine: an HTTP service that rates guesses in a word game. Needs only Python's standard library.

    python environment.py --port 7000

    POST /guess [{"game": 17, "guesses": ["ear"]}] → [{"feedback": "gy-", "done": false, "solved": false, "reward": 0}]

A player has four guesses to find a secret word of three letters. The secret follows from the seed and the number of the
game, so the service keeps no state: restarted with the same seed it answers the same.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ["ant", "are", "ate", "ear", "eat", "net", "not", "oat", "one", "ore", "rat", "rot", "sea", "tan", "ten", "toe"]
GUESSES = 4
SOLVED = "ggg"
MAX_BODY_BYTES = 1 << 20
IDLE_SECONDS = 300.0


class BadRequestError(Exception):
    """The request is invalid; the message names the field."""


def secret_of(seed: int, game: int) -> str:
    """The secret word of a game; every word is equally likely."""
    return random.Random(f"{seed} {game}").choice(WORDS)


def feedback(secret: str, guess: str) -> str:
    """One sign per letter: ``g`` right place, ``y`` elsewhere in the secret, ``-`` not in it, or not once more."""
    guess = guess if len(guess) == len(secret) else " " * len(secret)
    left = [letter for letter, guessed in zip(secret, guess, strict=True) if letter != guessed]
    signs = ""
    for letter, guessed in zip(secret, guess, strict=True):
        if letter == guessed:
            signs += "g"
        elif guessed in left:
            signs += "y"
            left.remove(guessed)
        else:
            signs += "-"
    return signs


def reward(signs: Sequence[str]) -> float:
    """Reward of a finished game: 1.0 to 0.7 if solved, else 0.1 for each letter in place in the best guess."""
    if SOLVED in signs:
        return 1.0 - 0.1 * signs.index(SOLVED)
    return 0.1 * max(found.count("g") for found in signs)


def rate(seed: int, play: Any) -> dict[str, Any]:
    """Feedback on the last guess of a game, given all its guesses so far. Raises BadRequestError."""
    game, guesses = (play.get("game"), play.get("guesses")) if isinstance(play, dict) else (None, None)
    if type(game) is not int or not 0 <= game < 2**53:
        raise BadRequestError(f"field 'game' is {str(game)[:80]!r}; give a whole number from 0 to 2^53 - 1")
    if not isinstance(guesses, list) or not 1 <= len(guesses) <= GUESSES or {type(one) for one in guesses} != {str}:
        raise BadRequestError(f"field 'guesses' is {str(guesses)[:80]!r}; give 1 to {GUESSES} strings")
    signs = [feedback(secret_of(seed, game), guess) for guess in guesses]
    if SOLVED in signs[:-1]:
        raise BadRequestError("field 'guesses' goes on after the guess that solved the game")
    done = SOLVED in signs or len(signs) == GUESSES
    answer = {"feedback": signs[-1], "done": done, "solved": signs[-1] == SOLVED}
    return answer | {"reward": reward(signs) if done else 0.0}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True
    server: "Service"

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            # The body is not read, so the connection cannot be reused.
            self.close_connection = True
            self._send(413, {"error": f"header Content-Length is {length[:20]!r}; give up to {MAX_BODY_BYTES} bytes"})
            return
        body = self.rfile.read(int(length))
        if self.path != "/guess":
            self._send(404, {"error": f"path {self.path[:80]!r} is not served; POST to /guess"})
            return
        try:
            plays = json.loads(body)
            if not isinstance(plays, list):
                raise BadRequestError("the body is not a list of objects with fields 'game' and 'guesses'")
            self._send(200, [rate(self.server.seed, play) for play in plays])
        except (BadRequestError, ValueError, RecursionError) as error:
            self._send(400, {"error": str(error)[:300]})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: one line per request would fill the log."""

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
        """Report errors, except for a client that disconnected."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def main(arguments: Sequence[str]) -> int:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description="Serve the word game of the three-machines example over HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, required=True, help="port to listen on; 0 for any")
    parser.add_argument("--seed", type=int, default=0, help="of the secret words (default %(default)s)")
    options = parser.parse_args(arguments)
    try:
        service = Service(options.host, options.port, options.seed)
    except (OSError, OverflowError) as error:
        print(f"environment: cannot listen on {options.host}:{options.port}: {error}", file=sys.stderr)
        return 1
    with service:
        print(json.dumps({"event": "listening", "port": service.server_address[1]}), flush=True)
        try:
            service.serve_forever()
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

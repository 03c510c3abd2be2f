"""The environment's machine: an HTTP service that rates guesses in a word game. Needs only Python's standard library.

    python environment.py --port 7000

    POST /guess [{"game": 17, "guesses": ["ear"]}] → [{"feedback": "gy-", "done": false, "solved": false, "reward": 0}]

A player has four guesses to find a secret word of three letters. The secret follows from the seed and the number of the
game, so the service keeps no state: restarted with the same seed it answers the same.
"""

import argparse
import json
import random
import socket
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ["ant", "are", "ate", "ear", "eat", "net", "not", "oat", "one", "ore", "rat", "rot", "sea", "tan", "ten", "toe"]
GUESSES = 4
SOLVED = "ggg"


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
    """Feedback on the last guess of a game, given all its guesses so far. Raises ValueError."""
    game, guesses = (play.get("game"), play.get("guesses")) if isinstance(play, dict) else (None, None)
    if type(game) is not int or not 0 <= game < 2**53:
        raise ValueError(f"field 'game' is {str(game)[:80]!r}; give a whole number from 0 to 2^53 - 1")
    if not isinstance(guesses, list) or not 1 <= len(guesses) <= GUESSES or {type(one) for one in guesses} != {str}:
        raise ValueError(f"field 'guesses' is {str(guesses)[:80]!r}; give 1 to {GUESSES} strings")
    signs = [feedback(secret_of(seed, game), guess) for guess in guesses]
    solved = signs[-1] == SOLVED
    done = solved or len(signs) == GUESSES
    return {"feedback": signs[-1], "done": done, "solved": solved, "reward": reward(signs) if done else 0.0}


class Handler(BaseHTTPRequestHandler):
    """One connection, which several requests may use."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    seed = 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            status, data = 200, json.dumps([rate(self.seed, play) for play in json.loads(body)]).encode()
        except (TypeError, ValueError) as error:
            status, data = 400, json.dumps({"error": str(error)[:300]}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: one line per request would fill the log."""


class Server(ThreadingHTTPServer):
    """Answers each request in a thread of its own."""


def main(arguments: Sequence[str]) -> int:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description="Serve the word game of the three-machines example over HTTP.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, required=True, help="port to listen on; 0 for any")
    parser.add_argument("--seed", type=int, default=0, help="of the secret words (default %(default)s)")
    options = parser.parse_args(arguments)
    Handler.seed = options.seed
    Server.address_family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        service = Server((options.host, options.port), Handler)
    except (OSError, OverflowError) as error:
        print(f"environment: cannot listen on {options.host}:{options.port}: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"event": "listening", "port": service.server_address[1]}), flush=True)
    try:
        service.serve_forever()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

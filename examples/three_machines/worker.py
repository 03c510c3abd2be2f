"""The rollout machine's worker: plays games with the server beside it and writes what came of them to the bucket.

    python -m examples.three_machines.worker --server http://127.0.0.1:8000 --environment http://HOST:PORT \\
        --trajectories URL --worker NAME

It knows no trainer. How far it runs ahead of one it tells by the versions that the server comes to serve. Whatever is
away is waited for; a worker that is killed loses the games under way, and goes on under the next free number. Writes
JSON lines of events to standard output.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence

from examples.demo.rollouts import JsonClient, ServerClient, ServerError
from examples.demo.settings import MODEL_NAME
from examples.three_machines.playing import Player
from examples.three_machines.telling import Events, Patience
from examples.three_machines.trajectories import Batch, Game, Writer
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.wire.manifest import timestamp

LOOK_SECONDS = 0.1


class Worker:
    """Plays batch after batch."""

    def __init__(self, options: argparse.Namespace, server: ServerClient, player: Player, events: Events) -> None:
        self._options, self._server, self._player, self._events = options, server, player, events
        self._patience = Patience(events, options.give_up)
        self._version: int | None = None
        self._played = 0
        """Batches since the server came to serve ``_version``."""

    def run(self, writer: Writer) -> None:
        """Until it has written as many batches as it was asked for, or for ever.

        Raises:
            ServerError, StoreError: something is away for too long, or refuses.
        """
        left = self._options.batches
        while left is None or left > 0:
            self._one_batch(writer, self._await_weights())
            left = None if left is None else left - 1

    def _one_batch(self, writer: Writer, run: str) -> None:
        began = time.monotonic()
        numbers = games_of(writer.worker, writer.number, self._options.groups)
        games = self._player.play(numbers, self._options.plays)
        played = time.monotonic()
        # Made once: what is put again has to be the same bytes, or it could be there twice.
        made = self._batch(writer, run, games)
        batch = self._patience.until_done("store", lambda: writer.put(made))
        self._played += 1
        self._tell(batch, played - began, time.monotonic() - played)

    def _batch(self, writer: Writer, run: str, games: Sequence[Game]) -> Batch:
        versions = set().union(*(play.versions for play in games))
        return Batch(
            run=run,
            worker=writer.worker,
            number=writer.number,
            created_at=timestamp(),
            lowest=min(versions),
            highest=max(versions),
            plays=self._options.plays,
            games=list(games),
        )

    def _await_weights(self) -> str:
        """Wait until there is reason to play another batch; returns the id of the run that is served."""
        began: float | None = None
        while True:
            status = self._patience.until_done("server", lambda: self._server.request("GET", "/delta_sync/status"))
            served = None if status["served"] is None else status["served"]["version"]
            if served is not None and served != self._version:
                self._version, self._played = served, 0
            if served is not None and self._played < self._options.ahead:
                return str(status["run"])
            if began is None:
                began = time.monotonic()
            elif time.monotonic() - began > self._options.patience:
                # Whoever trains may lack just what was lost or too old: waiting on would be for ever, on both sides.
                self._events.tell("impatient", version=served, seconds=time.monotonic() - began)
                began, self._played = None, 0
            time.sleep(LOOK_SECONDS)

    def _tell(self, batch: Batch, played: float, stored: float) -> None:
        count = len(batch.games)
        self._events.tell(
            "batch",
            key=batch.key,
            number=batch.number,
            lowest=batch.lowest,
            highest=batch.highest,
            games=count,
            reward=sum(play.reward for play in batch.games) / count,
            solved=sum(play.solved for play in batch.games) / count,
            guesses=sum(len(play.turns) for play in batch.games) / count,
            play_s=played,
            store_s=stored,
        )


def games_of(worker: str, number: int, count: int) -> list[int]:
    """The games of a batch: the same whenever that batch is played, others for any other batch or worker."""
    return random.Random(f"{worker} {number}").sample(range(2**31), count)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with status 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.three_machines.worker", description="Plays games and writes trajectories."
    )
    parser.add_argument("--server", required=True, metavar="URL", help="of the vLLM server beside it")
    parser.add_argument("--environment", required=True, metavar="URL", help="of the environment's service")
    parser.add_argument("--trajectories", required=True, metavar="URL", help="bucket to write to")
    parser.add_argument("--worker", required=True, metavar="NAME", help="of this worker, part of its keys")
    parser.add_argument("--model", default=MODEL_NAME, help="as the server calls it (default %(default)s)")
    parser.add_argument("--groups", type=int, default=16, help="different games in a batch (default %(default)s)")
    parser.add_argument("--plays", type=int, default=8, help="times that each is played (default %(default)s)")
    parser.add_argument("--ahead", type=int, default=1, help="batches per weight version (default %(default)s)")
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="seconds to wait for a newer version after that; then as many batches again (default %(default)s)",
    )
    parser.add_argument(
        "--give-up", type=float, default=300.0, help="seconds to wait for what is away, then end (default %(default)s)"
    )
    parser.add_argument("--batches", type=int, default=None, help="end after so many (default: never)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the worker as its module's docstring says."""
    options = parse_options(arguments)
    events = Events.on_stdout()
    patience = Patience(events, options.give_up)
    environment = JsonClient(options.environment)
    try:
        with open_bucket(options.trajectories) as bucket, ServerClient(options.server, options.model) as server:
            writer = patience.until_done("store", lambda: Writer(bucket, options.worker))
            events.tell("ready", worker=writer.worker, number=writer.number)
            Worker(options, server, Player(server, environment, patience), events).run(writer)
    except (ServerError, DeltaSyncError) as error:
        print(f"worker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Stands on the rollout machine and says what its server serves: the orchestrator has no connection to it either.

    python -m examples.three_machines.witness SERVER_URL

Speaks JSON lines. ``served`` comes with each version, with the time by the monotonic clock that all processes share,
and with pauses of generation in ms, as (version, pause); a server that is away is waited for. A line ``verify`` on
standard input has it rescan the server's weights: ``verified`` is the answer of ``POST /delta_sync/verify``.
"""

import json
import os
import sys
import threading
import time
from typing import Any

from examples.demo.rollouts import ServerClient, ServerError
from examples.three_machines.settings import MODEL_NAME

WAIT_SECONDS = 5
TOO_EARLY = 408
AWAY_SECONDS = 0.5
VERIFY = "verify"


def follow(client: ServerClient) -> None:
    """Say each version as it comes, for ever."""
    last, told = -1, -1
    while True:
        try:
            status = client.request("GET", "/delta_sync/status")
            served = status["served"]
            if served is not None and served["version"] != last:
                last = served["version"]
                recent = [(one["version"], one["timings_ms"].get("pause")) for one in status["recent"]]
                pauses = [(version, pause) for version, pause in recent if version > told and pause is not None]
                told = max([told, last])
                say("served", version=last, at=time.monotonic(), pauses_ms=pauses)
            client.request("GET", f"/delta_sync/wait?version={last + 1}&timeout={WAIT_SECONDS}")
        except ServerError as error:
            if error.status != TOO_EARLY:
                time.sleep(AWAY_SECONDS)


def say(event: str, **fields: Any) -> None:
    """One line; whole lines only, as two threads speak."""
    os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())


def main(arguments: list[str]) -> None:
    """Follow, and verify when told to, until standard input ends."""
    with ServerClient(arguments[0], MODEL_NAME) as client:
        threading.Thread(target=follow, args=(client,), daemon=True).start()
        for line in sys.stdin:
            if line.strip() == VERIFY:
                try:
                    say("verified", **client.request("POST", "/delta_sync/verify"))
                except ServerError as error:
                    say("verified", verdict=False, reason=str(error))


if __name__ == "__main__":
    main(sys.argv[1:])

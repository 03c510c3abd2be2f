"""``Pages`` writes a report of each state of the page, for the tests and for the screenshots."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.answers import Answer, answering
from tests.support.commands import answer
from tests.support.page_runs import PageRun, broken_run, busy_run, empty_run, hostile_run, hostile_status, long_run


@dataclass(frozen=True)
class State:
    """What a page shows.

    Attributes:
        make: writes the run into a folder; of how many versions, if it is long. words: of the page.
        statuses: of the servers of the run.
    """

    make: Callable[[Path, int], Any]
    words: tuple[str, ...]
    statuses: Callable[[PageRun], list[dict[str, Any]]] = lambda run: []


STATES = {
    "busy": State(
        lambda folder, versions: busy_run(folder),
        ("2 of 5 receivers serve the newest version, 200", "rollout-3", "holds version 196", "release-1"),
        lambda run: [run.status(200, "rollout-1"), run.status(199, "rollout-4")],
    ),
    "long": State(long_run, ("1 of 1 receiver serves the newest version",)),
    "empty": State(lambda folder, versions: empty_run(folder), ("Nothing is published yet", "Start the publisher.")),
    "broken": State(
        lambda folder, versions: broken_run(folder),
        ("Needs action", "version 30 cannot be read", "delta-sync repair", "52 times the median"),
    ),
    "hostile": State(
        lambda folder, versions: hostile_run(folder),
        ("toString", "</script><script>"),
        lambda run: [hostile_status(run)],
    ),
}


class Pages:
    """Reports below a folder, each written when it is first asked for.

    Args:
        versions: of the long run.
    """

    def __init__(self, folder: Path, versions: int = 10_000) -> None:
        self._folder, self._versions = folder, versions

    def url(self, name: str) -> str:
        """Where a browser finds the report of a state."""
        file = self._folder / f"{name}.html"
        if not file.exists():
            run = self._folder / name
            state = STATES[name]
            statuses = state.statuses(state.make(run, self._versions))
            with answering() as servers:
                bodies = {
                    f"/{number}/delta_sync/status": json.dumps(status) for number, status in enumerate(statuses, 1)
                }
                servers.reply = lambda asked: Answer(
                    200, bodies[asked.path].encode(), {"Content-Type": "application/json"}
                )
                named = [f"--server={servers.url}/{number}" for number in range(1, len(statuses) + 1)]
                answer("report", "--bucket", run, *named, "--last", 10_000 if name == "long" else 200, "--to", file)
        return file.as_uri()

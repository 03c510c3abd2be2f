"""``Pages`` writes a report of each state of the page, for the tests and for the screenshots."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.answers import Answer, answering
from tests.support.commands import answer
from tests.support.page_runs import broken_run, busy_run, empty_run, hostile_run, hostile_status, long_run


@dataclass(frozen=True)
class State:
    """What a page shows.

    Attributes:
        make: writes the run into a folder, and returns the statuses of its servers. words: of the page.
    """

    make: Callable[[Path, int], list[dict[str, Any]]]
    words: tuple[str, ...]


def _busy(folder: Path, versions: int) -> list[dict[str, Any]]:
    run = busy_run(folder)
    return [run.status(200, "rollout-1"), run.status(199, "rollout-4")]


def _long(folder: Path, versions: int) -> list[dict[str, Any]]:
    long_run(folder, versions)
    return []


def _empty(folder: Path, versions: int) -> list[dict[str, Any]]:
    empty_run(folder)
    return []


def _broken(folder: Path, versions: int) -> list[dict[str, Any]]:
    broken_run(folder)
    return []


def _hostile(folder: Path, versions: int) -> list[dict[str, Any]]:
    return [hostile_status(hostile_run(folder))]


STATES = {
    "busy": State(
        _busy, ("2 of 5 receivers serve the newest version, 200", "rollout-3", "holds version 196", "release-1")
    ),
    "long": State(_long, ("1 of 1 receiver serves the newest version", "What", "quarantined")[:1]),
    "empty": State(_empty, ("Nothing is published yet", "Start the publisher.")),
    "broken": State(_broken, ("Needs action", "version 30 cannot be read", "delta-sync repair", "52 times the median")),
    "hostile": State(_hostile, ("toString", "</script><script>")),
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
            statuses = STATES[name].make(run, self._versions)
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

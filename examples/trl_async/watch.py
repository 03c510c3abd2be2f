"""TRL's log and the server's status, brought together into the steps that the demo shows."""

import time
from typing import Any

from examples.demo import task
from examples.demo.characters import encode
from examples.demo.orchestrate import Events
from examples.demo.processes import Child
from examples.demo.rollouts import ServerClient, ServerError
from examples.demo.verdict import greedy_answers
from examples.trl_async.record import Record

LOOK_SECONDS = 1.0
"""Between two looks at the server's status, which keeps the last 64 commits."""


class ServerWatch:
    """What the server tells of itself, asked for at most once a second. ``client``: None before there is a server."""

    def __init__(self) -> None:
        self.client: ServerClient | None = None
        self._last = 0.0
        self._seen: dict[str, Any] = {"served": None, "pauses_ms": [], "sample": [task.SHOWN_WORDS[0], "", 0.0]}
        self._commits = 0

    def look(self) -> dict[str, Any]:
        """Version served, pauses (version, ms) that are new, and the answer to one of the fixed words, in turn.

        Raises:
            ServerError: the server does not answer, or has stopped to follow the run.
        """
        if self.client is None:
            return self._seen
        status = self.client.request("GET", "/delta_sync/status")
        if status["last_error"] is not None:
            raise ServerError(f"the server stopped following: {status['last_error']['message']}")
        new = [
            [one["version"], one["timings_ms"]["pause"]] for one in status["recent"] if one["version"] > self._commits
        ]
        self._commits = max([self._commits, *(version for version, _ in new)])
        words = task.SHOWN_WORDS
        word = words[(words.index(self._seen["sample"][0]) + 1) % len(words)]
        served = status["served"]["version"] if status["served"] else None
        self._seen = {"served": served, "pauses_ms": new, "sample": self._answers([word])[0]}
        self._last = time.monotonic()
        return self._seen

    def glance(self) -> dict[str, Any]:
        """The same; what was seen last if that was within a second."""
        return self._seen if time.monotonic() - self._last < LOOK_SECONDS else self.look()

    def fixed_words(self) -> list[list[Any]]:
        """(word, greedy answer, reward) of the fixed words."""
        return self._answers(list(task.SHOWN_WORDS))

    def _answers(self, words: list[str]) -> list[list[Any]]:
        if self.client is None:
            return []
        answers = greedy_answers(self.client, [encode(task.prompt_of(word)) for word in words])
        pairs = zip(words, answers, strict=True)
        return [[word, one.text, task.reward(word, one.text, one.finished)] for word, one in pairs]


class LogEvents(Events):
    """Events of the trainer; a line of TRL's log that is that of a step comes as ``step``."""

    def __init__(self, child: Child, record: Record, watch: ServerWatch) -> None:
        super().__init__(child)
        self._record = record
        self._watch = watch

    def next(self, seconds: float) -> dict[str, Any] | None:
        """See ``Events``. Raises ServerError: the server does not answer, or has stopped to follow the run."""
        event = super().next(seconds)
        if event is None or event["event"] != "log":
            return event
        step = self._record.take(event["step"], event["logs"])
        return event if step is None else {"event": "step", **step, **self._watch.glance()}

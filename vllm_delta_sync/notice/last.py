"""What was announced last: sent again to whoever comes new, and to everybody about every second."""

import time
from collections import OrderedDict
from dataclasses import dataclass

REPEAT_SECONDS = 1.0
SOONEST_SECONDS = 0.02
"""Subscribers that come in a storm share what is sent to them."""


@dataclass(slots=True)
class _LastEntry:
    frames: list[bytes]
    due: float
    sent: float


class LastValues:
    """The last message of each topic, and when it is due again.

    Args:
        topics: how many are kept; of more, those renewed last.
    """

    def __init__(self, topics: int, repeat_seconds: float) -> None:
        self._topics = topics
        self._repeat = repeat_seconds
        self._entries: OrderedDict[bytes, _LastEntry] = OrderedDict()

    def put(self, frames: list[bytes]) -> None:
        """Keep a message that is just being sent; its first frame is the topic."""
        now = time.monotonic()
        self._entries[frames[0]] = _LastEntry(frames, now + self._repeat, now)
        self._entries.move_to_end(frames[0])
        if len(self._entries) > self._topics:
            self._entries.popitem(last=False)

    def wanted(self, prefix: bytes) -> None:
        """Somebody subscribed to topics that begin so."""
        for topic, entry in self._entries.items():
            if topic.startswith(prefix):
                entry.due = min(entry.due, entry.sent + SOONEST_SECONDS)

    def due(self) -> list[list[bytes]]:
        """Messages to send now; they count as sent."""
        now = time.monotonic()
        found = []
        for entry in self._entries.values():
            if entry.due <= now:
                entry.due, entry.sent = now + self._repeat, now
                found.append(entry.frames)
        return found

    def next_at(self) -> float:
        """When something is due, by the monotonic clock; infinity if nothing is kept."""
        return min((entry.due for entry in self._entries.values()), default=float("inf"))


def wait_ms(until: float) -> int | None:
    """Milliseconds to poll until a moment of the monotonic clock, rounded up; None for ever."""
    return None if until == float("inf") else max(0, int((until - time.monotonic()) * 1000) + 1)

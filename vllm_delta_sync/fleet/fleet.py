"""``Fleet``: the receivers of a run, from their heartbeats: what each serves, which have ended, and ``wait``.

There is no coordinator process, and heartbeats are unverified. A receiver counts as ended when its heartbeat expires.
This needs no clock that agrees with the store's: later timestamps of the store show it, or a heartbeat that has not
changed for as long as it was valid.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.errors import DeltaSyncError, NotFoundError, UsageError
from vllm_delta_sync.fleet.heartbeats import LEFT, StoredHeartbeat, read_heartbeats
from vllm_delta_sync.format.documents import Heartbeat
from vllm_delta_sync.format.manifest import version_key
from vllm_delta_sync.run.run_reader import RunReader

SHORTEST_POLL_SECONDS = 0.1
LONGEST_POLL_SECONDS = 1.0
SETTLED_SECONDS = 2.0
"""Age from which a heartbeat cannot be rewritten with the same time: times are in whole seconds."""
MAX_NAMED = 8
"""Maximum number of receivers that a message names."""
SHOWN_FIELDS = {
    *("receiver", "served", "step", "head", "lag", "state", "following", "holding", "paused", "pause_ms"),
    *("error", "started_at"),
}
"""Of a heartbeat: fields that ``Replica.document`` shows."""


class StoreClock:
    """A lower bound on the store's current time, from the times at which objects were put.

    The bound is exact if an object was observed right after its put, and otherwise too low by the time in between. It
    is never too high, however wrong this machine's clock is. Times are seconds since the epoch; the store truncates
    them to whole seconds, so the actual time may be one second later.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._bound: tuple[float, float] | None = None

    def observe(self, modified: float) -> None:
        """Note that the store put an object at that time."""
        if modified > self.earliest:
            self._bound = modified, self._monotonic()

    @property
    def earliest(self) -> float:
        """The lower bound; -inf before any object was observed."""
        if self._bound is None:
            return float("-inf")
        modified, at = self._bound
        return modified + self._monotonic() - at


def versions_behind(
    served: int | None, lag: int | None, seen: int | None, target: str | None, head: int, sound: int | None
) -> int | None:
    """Return how many versions a receiver is behind the newest one of a run that is not quarantined; None if unknown.

    Args:
        served, lag, seen, target: what it says of itself: the version served, its own lag, the newest version that it
            has seen, and what it follows.
        head, sound: the run's newest version, and the newest that is not quarantined.
    """
    if served is None:
        return None
    if target == "head" and lag is not None and seen is not None and seen >= head:
        return lag  # it may skip versions, such as inexact ones, which the run does not tell
    # One that is held does not read the bucket, so its own lag is that of the time when it was held.
    return None if sound is None else max(0, sound - served)


class FleetLateError(DeltaSyncError):
    """Not all receivers served a version before the timeout."""

    kind = "fleet_late"


@dataclass(frozen=True)
class Replica:
    """One receiver.

    Attributes:
        heartbeat: its last heartbeat. live: whether that is still valid. age: of the heartbeat in seconds, at most.
        expires: when the heartbeat expires, by the store's clock.
    """

    heartbeat: Heartbeat
    live: bool
    age: float
    expires: float

    @property
    def receiver(self) -> str:
        return self.heartbeat.receiver

    @property
    def left(self) -> bool:
        """Whether it has shut down in an orderly way."""
        return self.heartbeat.state == LEFT

    def document(self) -> dict[str, Any]:
        """Return what commands, with ``--json``, and the page show of it."""
        return {
            **self.heartbeat.model_dump(include=SHOWN_FIELDS),
            "live": self.live,
            "left": self.left,
            "age_seconds": round(self.age, 1),
        }

    def serves(self, version: int) -> bool:
        """Return whether it serves that version or a newer one."""
        return self.heartbeat.served is not None and self.heartbeat.served >= version


class Fleet:
    """The receivers of one run that write heartbeats. Use it in one thread at a time.

    Attributes:
        replicas: as of the last poll, by name. ignored: why heartbeats were ignored, one text each.

    Args:
        time: has this machine's clocks, as the module ``time``. ``poll`` uses the one of the day as the store's clock,
            unless that is known to be ahead; ``wait`` never does.
    """

    def __init__(self, run: RunReader, time: Any = time) -> None:
        self._run = run
        self._time = time
        self._store = StoreClock(time.monotonic)
        # By key: the object, since when it is as it is, and whether it replaced another one while this process watched.
        self._seen: dict[str, tuple[ObjectInfo, float, bool]] = {}
        self._known: dict[ObjectInfo, StoredHeartbeat] = {}
        self.replicas: list[Replica] = []
        self.ignored: list[str] = []

    @property
    def live(self) -> list[Replica]:
        """Replicas whose heartbeat is valid."""
        return [replica for replica in self.replicas if replica.live]

    @property
    def ended(self) -> list[Replica]:
        """Replicas that have shut down or whose heartbeat has expired. Garbage collection deletes old heartbeats."""
        return [replica for replica in self.replicas if not replica.live]

    def poll(self) -> list[Replica]:
        """Read the heartbeats again.

        Raises:
            StoreError: the store failed.
        """
        return self._poll(self._time.time())

    def _poll(self, local_time: float) -> list[Replica]:
        settled = self._store.earliest - SETTLED_SECONDS
        found = read_heartbeats(self._run, self._known)
        for stored in found.stored:
            self._store.observe(stored.modified)
        now = max(local_time, self._store.earliest)
        self._known = {stored.info: stored for stored in found.stored if stored.modified <= settled}
        seen, self._seen = self._seen, {}
        for stored in found.stored:
            before = seen.get(stored.info.key)
            if before is None or before[0] != stored.info:
                before = stored.info, self._time.monotonic(), before is not None
            self._seen[stored.info.key] = before
        self.replicas = sorted((self._replica(stored, now) for stored in found.stored), key=lambda item: item.receiver)
        self.ignored = found.ignored
        return self.replicas

    def _replica(self, stored: StoredHeartbeat, now: float) -> Replica:
        _, since, renewed = self._seen[stored.info.key]
        unchanged_seconds = self._time.monotonic() - since
        # The store truncates times to whole seconds, and this machine's clock may be ahead of the store's.
        expired = unchanged_seconds >= stored.expires - stored.modified + 1
        expired = expired or (now >= stored.expires + 1 and not renewed)
        live = not expired and stored.heartbeat.state != LEFT
        return Replica(stored.heartbeat, live, max(0.0, unchanged_seconds, now - stored.modified), stored.expires)

    def wait(self, version: int, replicas: int = 1, timeout: float = 60.0) -> list[Replica]:
        """Wait until a version is served everywhere.

        This is the case once every live replica serves that version or a newer one, and the live replicas and those
        that ended after its publication are together at least ``replicas``. So a replica that dies delays the others
        until its heartbeat expires, and one that is held at an older version until the timeout.

        Args:
            replicas: expected number of replicas, at least. timeout: seconds.

        Returns:
            all replicas, as of the last poll.

        Raises:
            UsageError: a number is out of range. FleetLateError: the timeout passed; the message names the replicas
            that lag. StoreError: the store failed.
        """
        _check_numbers(version, replicas, timeout)
        deadline = self._time.monotonic() + timeout
        interval = SHORTEST_POLL_SECONDS
        while True:
            published = self._published(version)
            found = self._poll(float("-inf"))
            if published is not None and self._is_served(version, replicas, published):
                return found
            left = deadline - self._time.monotonic()
            if left <= 0:
                raise FleetLateError(self._late_message(version, replicas, timeout, published))
            self._time.sleep(min(interval, left))
            interval = min(2 * interval, LONGEST_POLL_SECONDS)

    def _published(self, version: int) -> float | None:
        """Return when a version was published, by the store's clock; None if it is not."""
        try:
            modified = self._run.bucket.stat(version_key(version)).modified
        except NotFoundError:
            return None
        self._store.observe(modified)
        return modified

    def _ended_since(self, published: float) -> int:
        return sum(replica.expires > published for replica in self.ended)

    def _is_served(self, version: int, replicas: int, published: float) -> bool:
        serving = [replica for replica in self.live if replica.serves(version)]
        return len(serving) == len(self.live) and len(serving) + self._ended_since(published) >= replicas

    def _late_message(self, version: int, replicas: int, timeout: float, published: float | None) -> str:
        if published is None:
            return f"version {version} is not published after {timeout:g} s"
        lagging = [replica for replica in self.live if not replica.serves(version)]
        serving, ended = len(self.live) - len(lagging), self._ended_since(published)
        named = "; ".join(_describe(replica) for replica in lagging[:MAX_NAMED])
        more = f"; and {len(lagging) - MAX_NAMED} more" if len(lagging) > MAX_NAMED else ""
        absent = replicas - serving - ended - len(lagging)
        missing = f"; {absent} of {replicas} replicas have no heartbeat (setting receiver_id)" if absent > 0 else ""
        return (
            f"version {version} is served by {serving} of {len(self.live)} live replicas after {timeout:g} s, "
            f"{ended} ended since it was published{': ' if named else ''}{named}{more}{missing}{self._skipped(version)}"
        )

    def _skipped(self, version: int) -> str:
        """Return, for a message, that servers skip the version, if they do by default."""
        try:
            is_sound = self._run.manifest(version).quarantine is None
        except DeltaSyncError:
            return ""
        return "" if is_sound else "; it is quarantined, and servers skip it unless delta-sync sync --version names it"


def _describe(replica: Replica) -> str:
    heartbeat = replica.heartbeat
    serves = "nothing yet" if heartbeat.served is None else f"version {heartbeat.served}"
    notes = [] if heartbeat.state is None else [heartbeat.state]
    notes += [f"{heartbeat.error.kind}: {heartbeat.error.message[:120]}"] if heartbeat.error is not None else []
    text = ", ".join(notes)
    return f"{heartbeat.receiver!r} serves {serves}" + (f" ({text})" if text else "")


def _check_numbers(version: int, replicas: int, timeout: float) -> None:
    if type(version) is not int or version < 0:
        raise UsageError(f"version is {version!r}; give a number from 0 on")
    if type(replicas) is not int or replicas < 0:
        raise UsageError(f"replicas is {replicas!r}; give a number from 0 on")
    if not isinstance(timeout, int | float) or not 0 <= timeout < float("inf"):
        raise UsageError(f"timeout is {timeout!r}; give seconds from 0 on")

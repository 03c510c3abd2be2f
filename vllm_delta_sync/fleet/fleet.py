"""The receivers of a run, as their leases tell of them: who serves what, who is gone, and waiting for a version.

Nobody coordinates them, and nothing here is more than what each has said of itself. Who is gone is told without a clock
that agrees with the store's: by what else the store has put since, or by a lease that does not change for as long as it
was to hold.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.errors import DeltaSyncError, NotFoundError, UsageError
from vllm_delta_sync.fleet.heartbeats import LEFT, StoredHeartbeat, read_heartbeats
from vllm_delta_sync.fleet.store_clock import StoreClock
from vllm_delta_sync.format.documents import Lease
from vllm_delta_sync.format.manifest import version_key
from vllm_delta_sync.run.documents import RunDocuments

SHORTEST_LOOK_SECONDS = 0.1
LONGEST_LOOK_SECONDS = 1.0
SETTLED_SECONDS = 2.0
"""A lease put so long ago cannot be put again with the same time, which is in whole seconds."""
NAMED = 8
"""How many receivers a message names."""


class FleetLateError(DeltaSyncError):
    """Not all receivers served a version in the time that they were given."""

    kind = "fleet_late"


@dataclass(frozen=True)
class Replica:
    """One receiver.

    Attributes:
        lease: what it said last. live: whether that still holds. age: seconds since it said so, at most.
        expires: when the lease ends, by the store's clock.
    """

    lease: Lease
    live: bool
    age: float
    expires: float

    @property
    def receiver(self) -> str:
        return self.lease.receiver

    @property
    def left(self) -> bool:
        """Whether it has ended and said so."""
        return self.lease.state == LEFT

    def serves(self, version: int) -> bool:
        """Whether it serves that version or a newer one."""
        return self.lease.served is not None and self.lease.served >= version


class Fleet:
    """The receivers of one run that write leases. Not for several threads at once.

    Attributes:
        replicas: as of the last look, by name. ignored: leases that were not believed, and why.

    Args:
        clock: this machine's, in seconds since the epoch; ``look`` takes it for the store's if that is not known to be
            later, ``wait`` never does. monotonic, sleep: as in ``time``.
    """

    def __init__(
        self,
        run: RunDocuments,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._clock, self._monotonic, self._sleep = clock, monotonic, sleep
        self._store = StoreClock(monotonic)
        self._seen: dict[str, tuple[ObjectInfo, float]] = {}
        self._known: dict[ObjectInfo, StoredHeartbeat] = {}
        self.replicas: list[Replica] = []
        self.ignored: list[str] = []

    @property
    def live(self) -> list[Replica]:
        """Those whose word holds."""
        return [replica for replica in self.replicas if replica.live]

    @property
    def ended(self) -> list[Replica]:
        """Those that have left, or have said nothing for too long. Retention removes their leases after some days."""
        return [replica for replica in self.replicas if not replica.live]

    def poll(self) -> list[Replica]:
        """Read the leases again.

        Raises:
            StoreError: the store failed.
        """
        return self._look(self._clock())

    def _look(self, hint: float) -> list[Replica]:
        settled = self._store.earliest - SETTLED_SECONDS
        found = read_heartbeats(self._run, self._known)
        for held in found.stored:
            self._store.saw(held.modified)
        now = max(hint, self._store.earliest)
        self._known = {held.info: held for held in found.stored if held.modified <= settled}
        seen, self._seen = self._seen, {}
        for held in found.stored:
            before = seen.get(held.info.key)
            same = before is not None and before[0] == held.info
            self._seen[held.info.key] = before if before is not None and same else (held.info, self._monotonic())
        self.replicas = sorted((self._replica(held, now) for held in found.stored), key=lambda item: item.receiver)
        self.ignored = found.ignored
        return self.replicas

    def _replica(self, held: StoredHeartbeat, now: float) -> Replica:
        watched = self._monotonic() - self._seen[held.info.key][1]
        # The store's times are cut to whole seconds.
        over = now >= held.expires + 1 or watched >= held.expires - held.modified + 1
        live = not over and held.lease.state != LEFT
        return Replica(held.lease, live, max(0.0, watched, now - held.modified), held.expires)

    def wait(self, version: int, replicas: int = 1, timeout: float = 60.0) -> list[Replica]:
        """Wait until a version is served everywhere.

        That is so once every live replica serves it or a newer one, and those, with the ones that have left or gone
        silent since it was published, are at least ``replicas``. So one that dies holds the others up for no longer
        than its lease, and one that is held at an older version until the time is over.

        Args:
            replicas: how many there are in all. timeout: seconds.

        Returns:
            all replicas, as they were then.

        Raises:
            UsageError: a number makes no sense. FleetLateError: time is over; the message names who lags.
            StoreError: the store failed.
        """
        _check_numbers(version, replicas, timeout)
        deadline = self._monotonic() + timeout
        pace = SHORTEST_LOOK_SECONDS
        while True:
            published = self._published(version)
            found = self._look(float("-inf"))
            if published is not None and self._arrived(version, replicas, published):
                return found
            left = deadline - self._monotonic()
            if left <= 0:
                raise FleetLateError(self._late(version, replicas, timeout, published))
            self._sleep(min(pace, left))
            pace = min(2 * pace, LONGEST_LOOK_SECONDS)

    def _published(self, version: int) -> float | None:
        """When a version was published, by the store's clock; None if it is not."""
        try:
            modified = self._run.bucket.stat(version_key(version)).modified
        except NotFoundError:
            return None
        self._store.saw(modified)
        return modified

    def _gone_since(self, published: float) -> int:
        return sum(replica.expires > published for replica in self.ended)

    def _arrived(self, version: int, replicas: int, published: float) -> bool:
        there = [replica for replica in self.live if replica.serves(version)]
        return len(there) == len(self.live) and len(there) + self._gone_since(published) >= replicas

    def _late(self, version: int, replicas: int, timeout: float, published: float | None) -> str:
        if published is None:
            return f"version {version} is not published after {timeout:g} s"
        lagging = [replica for replica in self.live if not replica.serves(version)]
        there, gone = len(self.live) - len(lagging), self._gone_since(published)
        named = "; ".join(_where(replica) for replica in lagging[:NAMED])
        more = f"; and {len(lagging) - NAMED} more" if len(lagging) > NAMED else ""
        short = replicas - there - gone - len(lagging)
        missing = f"; {short} of {replicas} replicas have no lease (setting receiver_id)" if short > 0 else ""
        return (
            f"version {version} is served by {there} of {len(self.live)} live replicas after {timeout:g} s, "
            f"{gone} ended since it was published{': ' if named else ''}{named}{more}{missing}"
        )


def _where(replica: Replica) -> str:
    lease = replica.lease
    serves = "nothing yet" if lease.served is None else f"version {lease.served}"
    notes = [lease.state or "", "waiting for its turn" if lease.waiting else ""]
    notes += [f"{lease.error.kind}: {lease.error.message[:120]}"] if lease.error is not None else []
    text = ", ".join(note for note in notes if note)
    return f"{lease.receiver!r} serves {serves}" + (f" ({text})" if text else "")


def _check_numbers(version: int, replicas: int, timeout: float) -> None:
    if type(version) is not int or version < 0:
        raise UsageError(f"version is {version!r}; give a number from 0 on")
    if type(replicas) is not int or replicas < 0:
        raise UsageError(f"replicas is {replicas!r}; give a number from 0 on")
    if not 0 <= timeout < float("inf"):
        raise UsageError(f"timeout is {timeout!r}; give seconds from 0 on")

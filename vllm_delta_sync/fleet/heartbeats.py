"""``write_heartbeat`` and ``read_heartbeats``: the heartbeats in which receivers report what they serve.

Heartbeats are unsigned hints: write access to the bucket is enough to write one. So a heartbeat is valid from the time
of its put by the store's clock, for at most MAX_HEARTBEAT_SECONDS, and garbage collection limits how long it can retain
a version (``maintenance.gc.policy``).
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.errors import DataError, FormatError, NotFoundError, UsageError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.documents import HEARTBEATS_PREFIX, Heartbeat, heartbeat_key
from vllm_delta_sync.run.run_reader import RunReader

MAX_HEARTBEATS = 10_000
"""Maximum number of heartbeats to read, newest first; a run with more is being flooded."""
LEFT = "left"
"""The state of a receiver that has shut down, in its last heartbeat."""


@dataclass(frozen=True)
class StoredHeartbeat:
    """A heartbeat and its object in the bucket. Times are seconds since the epoch by the store's clock."""

    heartbeat: Heartbeat
    info: ObjectInfo

    @property
    def modified(self) -> float:
        """When the heartbeat was put."""
        return self.info.modified

    @property
    def expires(self) -> float:
        """When the heartbeat expires."""
        return self.modified + min(self.heartbeat.seconds, limits.MAX_HEARTBEAT_SECONDS)


@dataclass
class Heartbeats:
    """The heartbeats of a run, read from heartbeats/.

    Attributes:
        stored: heartbeats of this run, expired ones included. ignored: why other objects were ignored, one text each.
    """

    stored: list[StoredHeartbeat] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def live(self, now: float) -> list[Heartbeat]:
        """Return those that have not expired at ``now``, by the store's clock."""
        return [item.heartbeat for item in self.stored if now < item.expires]


def read_heartbeats(run: RunReader, unchanged: Mapping[ObjectInfo, StoredHeartbeat] | None = None) -> Heartbeats:
    """Read all heartbeats of a run. Malformed or too large ones and those of another run go to ``ignored``.

    Args:
        unchanged: heartbeats read before, which are reused for objects that were not put again.
    """
    found = Heartbeats()
    unchanged = {} if unchanged is None else unchanged
    listed = heapq.nlargest(MAX_HEARTBEATS + 1, run.bucket.list(HEARTBEATS_PREFIX), key=lambda item: item.modified)
    if len(listed) > MAX_HEARTBEATS:
        found.ignored.append(f"more than {MAX_HEARTBEATS} heartbeats: the older ones were not read")
    for answer in in_parallel(lambda item: unchanged.get(item) or _read(run, item), listed[:MAX_HEARTBEATS]):
        if isinstance(answer, StoredHeartbeat):
            found.stored.append(answer)
        elif answer is not None:
            found.ignored.append(answer)
    return found


def _read(run: RunReader, item: ObjectInfo) -> StoredHeartbeat | str | None:
    """Read one heartbeat; returns the reason if it is ignored, None if it has just been deleted."""
    try:
        heartbeat = Heartbeat.from_bytes(run.bucket.get(item.key, max_bytes=limits.MAX_SIDE_BYTES), item.key)
        if heartbeat.run != run.info.run:
            raise FormatError(f"{item.key} belongs to run {heartbeat.run}")
        if heartbeat_key(heartbeat.receiver) != item.key:
            raise FormatError(f"{item.key} is not the key of receiver {heartbeat.receiver!r}")
    except NotFoundError:
        return None
    except DataError as error:
        return error.message
    return StoredHeartbeat(heartbeat, item)


def write_heartbeat(
    run: RunReader,
    receiver_id: str,
    served: int | None,
    seconds: int = 600,
    **more: Any,
) -> Heartbeat:
    """Write a receiver's heartbeat, replacing its former one. Repeat this well before ``seconds`` have passed.

    Args:
        served: version served; None before it is identified. seconds: its validity.
        more: other fields of ``Heartbeat``.

    Raises:
        UsageError: the id is not a valid name, or a value is out of bounds. StoreError: the store failed.
    """
    key = heartbeat_key(receiver_id)
    try:
        heartbeat = Heartbeat(
            run=run.info.run,
            receiver=receiver_id,
            served=served,
            seconds=seconds,
            created_at=timestamp(),
            **more,
        )
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise UsageError(
            f"heartbeat of {receiver_id!r}: {where} is {str(problem['input'])[:80]}: {problem['msg']}"
        ) from error
    run.bucket.put(key, heartbeat.to_bytes())
    return heartbeat

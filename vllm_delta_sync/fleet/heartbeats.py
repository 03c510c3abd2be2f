"""Leases: what each receiver of a run says of itself. Hints, written by anybody.

A lease proves nothing about who wrote it. So it counts from when the store says that it was put, for at most
MAX_LEASE_SECONDS, and retention bounds how long it may hold a version (``retention.Policy.longest_pin``).
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.errors import DeltaSyncError, FormatError, NotFoundError, StoreError, UsageError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import LEASES_PREFIX, Lease, lease_key
from vllm_delta_sync.format.manifest import timestamp
from vllm_delta_sync.run.documents import RunDocuments

MAX_HEARTBEATS = 10_000
"""How many are read, the newest first; a run that has more is being flooded."""
LEFT = "left"
"""The state of a receiver that has ended, in its last lease."""


@dataclass(frozen=True)
class StoredHeartbeat:
    """A lease, and when it was put, in seconds since the epoch by the store's clock."""

    lease: Lease
    info: ObjectInfo

    @property
    def modified(self) -> float:
        """When it was put."""
        return self.info.modified

    @property
    def expires(self) -> float:
        """When it ends, by the store's clock."""
        return self.modified + min(self.lease.seconds, limits.MAX_LEASE_SECONDS)


@dataclass
class Heartbeats:
    """What lies under receivers/.

    Attributes:
        held: leases of this run, the ones that have ended included. ignored: what was not believed, and why.
    """

    stored: list[StoredHeartbeat] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def live(self, now: float) -> list[Lease]:
        """Those that have not ended at ``now``, by the store's clock."""
        return [item.lease for item in self.stored if now < item.expires]


def read_heartbeats(run: RunDocuments, known: Mapping[ObjectInfo, StoredHeartbeat] | None = None) -> Heartbeats:
    """All leases of a run. One that is malformed, too large or of another run is ignored, and said so.

    Args:
        known: leases that need not be read again, unless they were put again.

    Raises:
        StoreError: the store failed.
    """
    found = Heartbeats()
    known = {} if known is None else known
    listed = heapq.nlargest(MAX_HEARTBEATS + 1, run.bucket.list(LEASES_PREFIX), key=lambda item: item.modified)
    if len(listed) > MAX_HEARTBEATS:
        found.ignored.append(f"more than {MAX_HEARTBEATS} leases: the older ones were not read")
    for answer in in_parallel(lambda item: known.get(item) or _read(run, item), listed[:MAX_HEARTBEATS]):
        if isinstance(answer, StoredHeartbeat):
            found.stored.append(answer)
        elif answer is not None:
            found.ignored.append(answer)
    return found


def _read(run: RunDocuments, item: ObjectInfo) -> StoredHeartbeat | str | None:
    """A lease, or why it is ignored; None if it has just been taken back."""
    try:
        lease = Lease.from_bytes(run.bucket.get(item.key, max_bytes=limits.MAX_SIDE_BYTES), item.key)
        if lease.run != run.info.run:
            raise FormatError(f"{item.key} belongs to run {lease.run}")
        if lease_key(lease.receiver) != item.key:
            raise FormatError(f"{item.key} is of receiver {lease.receiver!r}")
    except NotFoundError:
        return None
    except StoreError:
        raise
    except DeltaSyncError as error:
        return error.message
    return StoredHeartbeat(lease, item)


def write_heartbeat(
    run: RunDocuments,
    receiver_id: str,
    served: int | None,
    target: int | None = None,
    pins: list[int] | None = None,
    seconds: int = 600,
    **more: Any,
) -> Lease:
    """Say what a receiver serves; replaces what it said before. Repeat well before ``seconds`` are over.

    Args:
        served: version, None before one is proven. target: version on its way to. pins: others to keep readable.
        more: further members of ``Lease``.

    Raises:
        UsageError: the id is not a name, or a value is out of bounds. StoreError: the store failed.
    """
    key = lease_key(receiver_id)
    fields: dict[str, Any] = {
        "run": run.info.run,
        "receiver": receiver_id,
        "served": served,
        "target": target,
        "pins": [] if pins is None else pins,
        "seconds": seconds,
        "created_at": timestamp(),
        **more,
    }
    try:
        lease = Lease.model_validate(fields)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise UsageError(
            f"lease of {receiver_id!r}: {where} is {str(problem['input'])[:80]}: {problem['msg']}"
        ) from error
    run.bucket.put(key, lease.to_bytes())
    return lease

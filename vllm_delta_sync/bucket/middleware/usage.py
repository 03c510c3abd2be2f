"""``Metrics``: sums of a store's calls, failures, retries, bytes and seconds in each direction."""

import threading
from collections.abc import Mapping

from vllm_delta_sync.bucket.transfer_observers import TransferObserver
from vllm_delta_sync.errors import AccessError, DeadlineError, StoreError, UnavailableError

FAILURE_KINDS = tuple(error.kind for error in (StoreError, AccessError, UnavailableError, DeadlineError))
_COUNTS = ("calls", "failures", *(f"failures_{kind}" for kind in FAILURE_KINDS), "retries")
_COUNTS_OF_BYTES = ("sent_bytes", "received_bytes")
_SECONDS = ("send_seconds", "receive_seconds", "waited_seconds")


class Metrics:
    """Sums over all calls of the buckets that share this object. Any number of threads may use it.

    ``calls``: requests to the store; a listing counts once. ``failures``: calls that raised StoreError, and by its kind
    ``failures_store``, ``failures_access``, ``failures_unavailable``, ``failures_deadline``; a missing or existing
    object is not a failure. ``retries``: tries after the first one. ``sent_bytes``, ``received_bytes``: failed tries
    included. ``send_seconds``, ``receive_seconds``: time spent in transfers, summed over parallel ones, without
    ``waited_seconds``, the time in which a limit delayed them.

    Args:
        parent: metrics to which everything is added too.
    """

    def __init__(self, parent: "Metrics | None" = None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._values: dict[str, float | int] = dict.fromkeys((*_COUNTS, *_COUNTS_OF_BYTES), 0)
        self._values.update(dict.fromkeys(_SECONDS, 0.0))

    def add(self, **amounts: float | int) -> None:
        """Add to some of the sums, by their names."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount
        if self._parent is not None:
            self._parent.add(**amounts)

    def count_failure(self, error: StoreError) -> None:
        """Count a failure by its kind; an unlisted kind counts as ``store``."""
        kind = error.kind if error.kind in FAILURE_KINDS else StoreError.kind
        self.add(failures=1, **{f"failures_{kind}": 1})

    def snapshot(self) -> dict[str, float | int]:
        """Return all sums."""
        with self._lock:
            return dict(self._values)

    def since(self, earlier: Mapping[str, float | int]) -> dict[str, float | int]:
        """Return what was added since the snapshot ``earlier``."""
        return {name: value - earlier.get(name, 0) for name, value in self.snapshot().items()}


PROCESS = Metrics()
"""Metrics of all stores that this process uses, except plain directories."""


class Tally(TransferObserver):
    """Sums the bytes of one call, and the seconds in which limits delayed it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes = 0
        self.wait_seconds = 0.0

    def on_bytes(self, count: int) -> None:
        with self._lock:
            self.bytes += count

    def on_wait(self, seconds: float) -> None:
        with self._lock:
            self.wait_seconds += seconds

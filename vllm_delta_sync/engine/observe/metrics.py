"""Prometheus metrics of a server, on vLLM's own ``/metrics``.

vLLM exports the default registry of ``prometheus_client``. With several API servers, it merges files that each process
writes (``PROMETHEUS_MULTIPROC_DIR``), so a collector that runs at scrape time is impossible: every value is written
when it changes. Counters and histograms of all processes are summed. Gauges are written by the API server leader only,
and the newest value wins, so the next leader replaces them. Ages are exported as points in time for the same reason:
``time() - delta_sync_look_timestamp_seconds``.
"""

import math
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_delta_sync.errors import error_kinds

PREFIX = "delta_sync_"
BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Upper bounds in seconds: a pause takes milliseconds, an anchor over a slow link minutes."""
PHASES = {
    "fetch": "fetched",
    "verify": "verified",
    "decode": "decoded",
    "route": "routed",
    "rescan": "rescanned",
    "wait": "waited",
    "commit": "committed",
    "resume": "resumed",
}
"""Phases in the order of ``timings_ms``, and their words in the log. Those up to ``rescan`` run beside generation."""
OUTCOMES = ("served", "late", "unreachable", "version", "malformed", "gone")
MOVES = {"forward": "served", "rollback": "rolled_back", "repair": "repaired"}
"""Changes of the weights served, and the ``event`` of the log line for each."""

HISTOGRAMS = {
    "phase_seconds": "duration of each phase of an update on the slowest rank, as in timings_ms of the status",
    "pause_seconds": "upper bound of the time that generation stops for a commit: wait, commit and resume",
    "admission_seconds": "how long requests that ask for a version were kept waiting",
}
COUNTERS = {
    "commits_total": "commits: changes of the weights served",
    "versions_total": "versions that commits applied; one commit may apply several",
    "payload_bytes_total": "bytes of the objects that these versions are made of; a rebuild counts none",
    "changed_elements_total": "elements that these versions changed; all of them for one read or rebuilt whole",
    "failures_total": "attempts that failed, by the kind of last_error",
    "interrupted_total": "requests for exactly one version that a commit ended",
}
GAUGES = {
    "served_version": "version served now; NaN until one is identified",
    "served_step": "the trainer's step of that version; NaN until one is identified",
    "head_version": "newest version seen in the bucket; NaN before the first poll",
    "head_quarantined": "1 if that version is quarantined, else 0; NaN before the first poll",
    "lag_versions": "versions from the one served to the one that the target names; NaN if unknown, as with a tag",
    "ready": "1 if GET /delta_sync/ready answers 200, else 0",
    "undo_versions": "versions that a rollback can reach without the bucket",
    "look_timestamp_seconds": "Unix time at which the bucket was last read without an error; NaN before",
    "served_timestamp_seconds": "Unix time at which the server began to serve its version; NaN if it serves none",
    "state": "1 for the state in the status, 0 for all others",
}
"""Names without prefix, and help texts."""
LABELS = {
    "phase_seconds": ("phase", (*PHASES,)),
    "admission_seconds": ("outcome", OUTCOMES),
    "commits_total": ("move", (*MOVES,)),
    "failures_total": ("kind", ()),
    "state": ("state", ()),
}
"""Metrics with a label, and its values; empty: error kinds, and states."""

_lock = threading.Lock()
_made: dict[str, Any] = {}


def _metric(name: str, *value: str) -> Any:
    """Return a metric, of one value of its label if that is given; registered at first use."""
    with _lock:
        if name not in _made:
            _made[name] = _make(name)
    return _made[name].labels(*value) if value else _made[name]


def _make(name: str) -> Any:
    """Register a metric with every value of its label, so that each begins at zero."""
    # Imported late: vLLM sets PROMETHEUS_MULTIPROC_DIR, which prometheus_client reads on import.
    import prometheus_client as client

    label, values = LABELS.get(name, (None, ()))
    labels = [] if label is None else [label]
    if name in HISTOGRAMS:
        metric: Any = client.Histogram(PREFIX + name, HISTOGRAMS[name], labels, buckets=BUCKETS)
    elif name in COUNTERS:
        metric = client.Counter(PREFIX + name, COUNTERS[name], labels)
    else:
        metric = client.Gauge(PREFIX + name, GAUGES[name], labels, multiprocess_mode="mostrecent")
    for value in error_kinds() if name == "failures_total" else values:
        metric.labels(value)
    return metric


def register() -> None:
    """Register histograms and counters, at zero."""
    for name in (*HISTOGRAMS, *COUNTERS):
        _metric(name)


def observe_admission(outcome: str, seconds: float) -> None:
    """Record a request that asks for a version.

    Args:
        outcome: one of ``OUTCOMES``; ``version`` is another version than exactly the one asked for, ``gone`` a client
            that did not wait.
        seconds: how long it waited.
    """
    _metric("admission_seconds", outcome).observe(seconds)


def count_interrupted() -> None:
    """Record a request for exactly one version that ended in an error after it was admitted."""
    _metric("interrupted_total").inc()


def count_move(move: str, ms: Mapping[str, float], versions: int = 0, payload_bytes: int = 0, changed: int = 0) -> None:
    """Record a change of the served weights.

    Args:
        move: ``forward``, ``rollback`` or ``repair``. ms: see ``timings_ms`` in the status.
        versions, payload_bytes, changed: versions, bytes and changed elements read from the bucket for it.
    """
    _metric("commits_total", move).inc()
    _metric("versions_total").inc(versions)
    _metric("payload_bytes_total").inc(payload_bytes)
    _metric("changed_elements_total").inc(changed)
    for phase, value in ms.items():
        if phase == "pause":
            _metric("pause_seconds").observe(value / 1e3)
        elif phase in PHASES:
            _metric("phase_seconds", phase).observe(value / 1e3)


def count_failure(kind: str) -> None:
    """Record a failure by its error's ``kind``."""
    _metric("failures_total", kind).inc()


def show(values: Mapping[str, float | None], state: str, states: Iterable[str]) -> None:
    """Set all gauges; called in the API server leader only.

    Args:
        values: by name in ``GAUGES``, except ``state``; None becomes NaN. states: all states that exist.
    """
    for name, value in values.items():
        _metric(name).set(math.nan if value is None else value)
    for each in states:
        _metric("state", each).set(each == state)

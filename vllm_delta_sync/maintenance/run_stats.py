"""``version_stats`` and ``summarize`` compute from manifests what a trainer published, how often, and what it saved."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np

from vllm_delta_sync.maintenance.accounting import Progress, full_bytes, read_history
from vllm_delta_sync.run.run_reader import RunReader

_COPIED = [
    "version",
    "step",
    "kind",
    "created_at",
    "codec",
    "compression",
    "changed",
    "total",
    "payload_bytes",
    "full_bytes",
]


@dataclass(frozen=True)
class Spread:
    """Median, 95th percentile (linear interpolation) and maximum of some values."""

    median: float
    p95: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Return the spread of values, None if there are none."""
        return cls(*(float(found) for found in np.percentile(values, (50, 95, 100)))) if values else None


def version_stats(run: RunReader, last: int | None = None, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Return a row for each of the newest ``last`` versions, all if None, oldest first; reads manifests only.

    A row has fields of the manifest, which takes much more memory; ``changed_share``; ``seconds`` since the version
    before it by the publisher's clock, None for version 0 and where the clock went back. Of the versions up to it, from
    the first one that was asked for: ``published_bytes``; ``published_full_bytes``, of full checkpoints of them,
    without a version 0 that refers to a checkpoint elsewhere; and ``saved_share``, None while there are none.

    Raises:
        As ``RunReader.log``.
    """
    head = run.head()
    first = 0 if last is None else head.version - last + 1
    found: list[dict[str, Any]] = []
    published = full = 0
    before: str | None = None
    # One more, for the time since the version before the first.
    for manifest in read_history(run, None if last is None else last + 1, progress, head):
        if manifest.version >= first:
            published += manifest.payload_bytes
            full += full_bytes([manifest])
            found.append(
                {
                    **{name: getattr(manifest, name) for name in _COPIED},
                    "seconds": None if before is None else seconds_between(before, manifest.created_at),
                    "changed_share": manifest.changed / manifest.total if manifest.total else 0.0,
                    "saved_share": 1 - published / full if full else None,
                    "published_bytes": published,
                    "published_full_bytes": full,
                }
            )
        before = manifest.created_at
    return found


def seconds_between(earlier: str, later: str) -> float | None:
    """Return the time between two timestamps; None if one does not exist, such as 25:00, or the clock went back."""
    try:
        passed = (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
    except ValueError:
        return None
    return passed if passed >= 0 else None


def summarize(versions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarize rows of versions, at least one.

    Returns:
        the spread of ``payload_bytes`` and ``changed_share`` of deltas, and of ``seconds``; ``hours`` from the first
        version to the last; ``versions_per_hour`` and ``bytes_per_hour`` of the versions after the first, None where
        the clock shows no time between them.
    """
    deltas = [version for version in versions if version["kind"] == "delta"]
    hours = (seconds_between(versions[0]["created_at"], versions[-1]["created_at"]) or 0.0) / 3600
    later = versions[-1]["published_bytes"] - versions[0]["published_bytes"]
    return {
        "payload_bytes": _spread([version["payload_bytes"] for version in deltas]),
        "changed_share": _spread([version["changed_share"] for version in deltas]),
        "seconds": _spread([version["seconds"] for version in versions if version["seconds"] is not None]),
        "hours": hours,
        "versions_per_hour": (len(versions) - 1) / hours if hours > 0 else None,
        "bytes_per_hour": later / hours if hours > 0 else None,
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    found = Spread.of(values)
    return None if found is None else asdict(found)

"""``version_stats`` and ``summarize`` compute from manifests what a trainer published, how often, and what it saved."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from vllm_delta_sync.maintenance.accounting import Progress, full_bytes, read_history
from vllm_delta_sync.run.run_reader import RunReader


@dataclass(frozen=True, slots=True)
class VersionStats:
    """One version.

    Attributes:
        version, step, kind, created_at, codec, compression, changed, total, payload_bytes, full_bytes: as in its
            manifest, which takes much more memory.
        seconds: since the version before it, by the publisher's clock; None for version 0, and where it went back.
        published: payload bytes of the versions up to this one. full: bytes of full checkpoints of the same versions,
            without a version 0 that refers to a checkpoint elsewhere. Both count from the first version that was asked
            for.
    """

    version: int
    step: int
    kind: str
    created_at: str
    codec: str | None
    compression: str | None
    changed: int
    total: int
    payload_bytes: int
    full_bytes: int
    seconds: float | None
    published: int
    full: int

    @property
    def changed_share(self) -> float:
        return self.changed / self.total if self.total else 0.0

    @property
    def saved_share(self) -> float | None:
        """Share of the bytes of full checkpoints that was not published so far; None while there are none."""
        return 1 - self.published / self.full if self.full else None


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


@dataclass(frozen=True)
class StatsSummary:
    """Several versions together.

    Attributes:
        payload_bytes, changed_share: of the deltas. seconds: between versions.
        hours: from the first version to the last. versions_per_hour, bytes_per_hour: of the versions after the first;
            None where the clock shows no time between them.
    """

    payload_bytes: Spread | None
    changed_share: Spread | None
    seconds: Spread | None
    hours: float
    versions_per_hour: float | None
    bytes_per_hour: float | None


def version_stats(run: RunReader, last: int | None = None, progress: Progress | None = None) -> list[VersionStats]:
    """Return the newest ``last`` versions, all if None, oldest first; reads manifests only.

    Raises:
        As ``RunReader.log``.
    """
    head = run.head()
    first = 0 if last is None else head.version - last + 1
    found: list[VersionStats] = []
    published = full = 0
    before: str | None = None
    # One more, for the time since the version before the first.
    for manifest in read_history(run, None if last is None else last + 1, progress, head):
        if manifest.version >= first:
            published += manifest.payload_bytes
            full += full_bytes([manifest])
            found.append(
                VersionStats(
                    manifest.version, manifest.step, manifest.kind, manifest.created_at, manifest.codec,
                    manifest.compression, manifest.changed, manifest.total, manifest.payload_bytes,
                    manifest.full_bytes, None if before is None else seconds_between(before, manifest.created_at),
                    published, full,
                )
            )  # fmt: skip
        before = manifest.created_at
    return found


def seconds_between(earlier: str, later: str) -> float | None:
    """Return the time between two timestamps; None if one does not exist, such as 25:00, or the clock went back."""
    try:
        passed = (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
    except ValueError:
        return None
    return passed if passed >= 0 else None


def summarize(versions: Sequence[VersionStats]) -> StatsSummary:
    """Summarize versions, at least one."""
    deltas = [version for version in versions if version.kind == "delta"]
    hours = (seconds_between(versions[0].created_at, versions[-1].created_at) or 0.0) / 3600
    passed = hours > 0
    return StatsSummary(
        Spread.of([version.payload_bytes for version in deltas]),
        Spread.of([version.changed_share for version in deltas]),
        Spread.of([version.seconds for version in versions if version.seconds is not None]),
        hours,
        (len(versions) - 1) / hours if passed else None,
        (versions[-1].published - versions[0].published) / hours if passed else None,
    )

"""``VersionRow`` is what is kept of a manifest; ``summarize`` says what was published, how often, and what it saved."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Self

import numpy as np

from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.run.run_reader import RunReader

Progress = Callable[[int, int], None]
"""Called with documents done and in total."""
MAX_REASONS, MAX_REASON = 4, 600


@dataclass(frozen=True, slots=True)
class VersionRow:
    """What is kept of a manifest, which takes much more memory, where many versions are shown.

    Attributes:
        objects: number of its objects. reasons: of a quarantine, the first few, cut. exact: whether the version is the
            trainer's exact state. Others: as in the manifest.
    """

    version: int
    digest: str
    parent: str | None
    epoch: int
    step: int
    kind: str
    codec: str | None
    compression: str | None
    created_at: str
    changed: int
    total: int
    payload_bytes: int
    full_bytes: int
    objects: int
    reasons: tuple[str, ...]
    exact: bool

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Return the row of a manifest."""
        reasons = [] if manifest.quarantine is None else manifest.quarantine.reasons
        return cls(
            manifest.version, manifest.digest, manifest.parent, manifest.epoch, manifest.step, manifest.kind,
            manifest.codec, manifest.compression, manifest.created_at, manifest.changed, manifest.total,
            manifest.payload_bytes, manifest.full_bytes, len(manifest.objects),
            tuple(reason[:MAX_REASON] for reason in reasons[:MAX_REASONS]), manifest.held_back is None,
        )  # fmt: skip

    @property
    def changed_share(self) -> float:
        return self.changed / self.total if self.total else 0.0

    @property
    def saved_from(self) -> int:
        """Bytes of a full checkpoint of it; 0 if it refers to one elsewhere, which would not be stored again either."""
        return 0 if self.kind == "reference" else self.full_bytes

    @property
    def created(self) -> float | None:
        """Unix time; None if the manifest names a time that does not exist, such as 25:00."""
        return unix_time(self.created_at)


def unix_time(timestamp: str) -> float | None:
    """Return the Unix time of a timestamp in a document; None if it does not exist."""
    try:
        return round(datetime.fromisoformat(timestamp).timestamp(), 3)
    except ValueError:
        return None


def seconds_between(earlier: VersionRow, later: VersionRow) -> float | None:
    """Return the time between two versions; None if one of the times does not exist, or the clock went back."""
    try:
        passed = datetime.fromisoformat(later.created_at) - datetime.fromisoformat(earlier.created_at)
    except ValueError:
        return None
    return passed.total_seconds() if passed.total_seconds() >= 0 else None


def seconds_since(rows: Sequence[VersionRow]) -> dict[int, float]:
    """Return version → seconds since the version before it, of those that both are in the rows, as far as known."""
    pairs = [(before, row) for before, row in pairwise(rows) if row.version == before.version + 1]
    found = {row.version: seconds_between(before, row) for before, row in pairs}
    return {version: seconds for version, seconds in found.items() if seconds is not None}


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
        published_bytes: payload bytes. full_bytes: bytes of full checkpoints of the same versions, without a version 0
            that refers to a checkpoint elsewhere. saved_share: of the latter; None if they are 0.
    """

    payload_bytes: Spread | None
    changed_share: Spread | None
    seconds: Spread | None
    hours: float
    versions_per_hour: float | None
    bytes_per_hour: float | None
    published_bytes: int
    full_bytes: int
    saved_share: float | None


def read_history(run: RunReader, last: int | None, progress: Progress | None) -> Iterator[Manifest]:
    """Yield the manifests of the newest ``last`` versions, all if None, oldest first; reads in parallel.

    Raises:
        As ``RunReader.log``.
    """
    head = run.head()
    count = head.version + 1 if last is None else min(last, head.version + 1)
    for done, manifest in enumerate(run.log(last, head), 1):
        yield manifest
        if progress is not None:
            progress(done, count)


def read_rows(run: RunReader, last: int | None = None, progress: Progress | None = None) -> list[VersionRow]:
    """Return rows of what ``read_history`` yields."""
    return [VersionRow.of(manifest) for manifest in read_history(run, last, progress)]


def summarize(rows: Sequence[VersionRow], since: dict[int, float]) -> StatsSummary:
    """Summarize versions, oldest first. Args: since: as ``seconds_since`` returns it."""
    deltas = [row for row in rows if row.kind == "delta"]
    published, full = sum(row.payload_bytes for row in rows), sum(row.saved_from for row in rows)
    hours = ((seconds_between(rows[0], rows[-1]) if rows else None) or 0.0) / 3600
    return StatsSummary(
        Spread.of([row.payload_bytes for row in deltas]),
        Spread.of([row.changed_share for row in deltas]),
        Spread.of([since[row.version] for row in rows if row.version in since]),
        hours,
        (len(rows) - 1) / hours if hours else None,
        (published - rows[0].payload_bytes) / hours if hours else None,
        published,
        full,
        1 - published / full if full else None,
    )

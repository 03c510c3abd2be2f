"""``PageReader`` reads from a bucket what the page shows of a run; each document that does not change is read once."""

import heapq
import threading
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.client import Run
from vllm_delta_sync.dashboard.heat_map import HEAT_OBJECTS, HEAT_VERSIONS, HeatMap
from vllm_delta_sync.errors import ChainError, DataError, DeltaSyncError, NotFoundError
from vllm_delta_sync.fleet.fleet import Fleet, Replica, versions_behind
from vllm_delta_sync.format.documents import TAGS_PREFIX, Tag, tag_of_key
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.logs import public_url
from vllm_delta_sync.maintenance.accounting import is_empty
from vllm_delta_sync.maintenance.run_stats import VersionRow, seconds_since, summarize, unix_time
from vllm_delta_sync.run.graph import broken_link
from vllm_delta_sync.run.run_reader import MAX_BAD_DOCUMENTS, read_ahead

LAST = 200
"""Versions to show, if nothing else is asked for."""
MAX_DAMAGED = 16
"""Most damaged versions that are read again each time, and that are listed."""
MAX_QUARANTINED = 32
MAX_TAGS = 32
MAX_RECEIVERS = 256
MAX_TEXT = 600
COLUMNS = ("version", "step", "kind", "codec", "created", "exact")
"""Fields of ``VersionRow`` that the page gets under the same names."""


class PageReader:
    """Reads one run again and again, in one thread at a time.

    Args:
        open_run: opens the run; called at the first ``read``, and again if another run takes its place.
        last: newest versions to show. heat: whether to read the headers of some objects for the heat map.
        show_url: whether the document names the bucket.
    """

    def __init__(self, open_run: Callable[[], Run], last: int = LAST, heat: bool = True, show_url: bool = True) -> None:
        self._open, self._last, self._heat_wanted, self._show_url = open_run, last, heat, show_url
        self._run: Run | None = None

    def _begin(self, run: Run) -> None:
        self._run = run
        # By version: what its manifest says, or what is wrong with it.
        self._found: dict[int, VersionRow | DataError] = {}
        self._tags: dict[ObjectInfo, Tag | None] = {}
        self._fleet = Fleet(run)
        self._heat = HeatMap(run) if self._heat_wanted else None

    def read(self) -> dict[str, Any]:
        """Return the part ``run`` of the page's document.

        Damage within the run is part of the document (``error``, ``damaged``).

        Raises:
            DeltaSyncError: the run cannot be opened, or the store failed.
        """
        if self._run is None or not self._run.is_current():
            replaced = self._run
            self._begin(self._open())
            if replaced is not None:
                replaced.close()
        run = self._run
        assert run is not None
        head, error = self._read_versions(run)
        self._fleet.poll()
        rows = [found for _, found in sorted(self._found.items()) if isinstance(found, VersionRow)]
        created = {row.version: row.created for row in rows}
        receivers = [_receiver(replica, head, created) for replica in [*self._fleet.live, *self._fleet.ended]]
        unread = {version: found for version, found in self._found.items() if isinstance(found, DataError)}
        damaged = sorted({**unread, **_unconnected(rows)}.items(), reverse=True)
        return {
            "id": run.info.run,
            "url": public_url(run.bucket.url) if self._show_url else None,
            "created": unix_time(run.info.created_at),
            "signed": run.info.signature is not None,
            "trusted_keys": bool(run.keyring.trusted),
            "tensors": len(run.table),
            "elements": run.info.total,
            "full_bytes": run.info.full_bytes,
            "head": None
            if head is None
            else {
                "version": head.version,
                "step": head.step,
                "created": unix_time(head.created_at),
                "sound": head.sound,
                "exact": head.exact,
            },
            "error": None if error is None else _error(error),
            # One list for each field: a third of the size.
            "versions": {
                **{name: [getattr(row, name) for row in rows] for name in COLUMNS},
                "payload": [row.payload_bytes for row in rows],
                "share": [row.changed_share if row.kind == "delta" else None for row in rows],
                "quarantined": [bool(row.reasons) for row in rows],
            },
            "summary": _summary(rows),
            "quarantined": [
                {"version": row.version, "step": row.step, "reasons": row.reasons, "created": row.created}
                for row in reversed(rows)
                if row.reasons
            ][:MAX_QUARANTINED],
            "damaged": [{"version": version, **_error(problem)} for version, problem in damaged[:MAX_DAMAGED]],
            "damaged_count": len(damaged),
            "tags": self._read_tags(run),
            "receivers": _most_urgent(receivers),
            "fleet": {
                "live": len(self._fleet.live),
                "ended": len(self._fleet.ended),
                "newest": sum(row["live"] and row["behind"] == 0 for row in receivers),
            },
            "ignored": [text[:MAX_TEXT] for text in self._fleet.ignored[:MAX_DAMAGED]],
            "heat": None if self._heat is None or head is None else self._heat.read(_newest_deltas(rows)),
        }

    def _read_versions(self, run: Run) -> tuple[Manifest | None, DeltaSyncError | None]:
        """Read the manifests that are not known yet; return the newest good one, and what is wrong after it."""
        try:
            head, error = run.reachable_head()
        except NotFoundError as missing:
            return None, None if is_empty(run) else missing
        except DataError as damage:
            return None, damage
        known = self._found.get(head.version)
        if isinstance(known, VersionRow) and known.digest != head.digest:
            self._found.clear()
        first = max(0, head.version - self._last + 1)
        self._found = {version: found for version, found in self._found.items() if first <= version < head.version}
        damaged = [version for version, found in self._found.items() if isinstance(found, DataError)]
        wanted = [version for version in range(head.version - 1, first - 1, -1) if version not in self._found]
        wanted += heapq.nlargest(MAX_DAMAGED, damaged)
        parsing, left = threading.Lock(), MAX_BAD_DOCUMENTS * run.document_limit

        def read(version: int) -> VersionRow | DataError | None:
            """Return the row, or why it is bad; None once so many bytes were bad that this one is left for later.

            A hostile one takes many times its bytes of memory, and seconds, so they are parsed one at a time.
            """
            nonlocal left
            size = 0
            try:
                if left <= 0:
                    return None
                data = run.raw_manifest(version, run.document_limit)
                with parsing:
                    if left <= 0:
                        return None
                    size = len(data)
                    return VersionRow.of(run.parsed_manifest(version, data))
            except DataError as damage:
                left -= size
                # Its frames and causes hold what was read.
                damage.__cause__ = damage.__context__ = None
                return damage.with_traceback(None)

        rows = zip(wanted, read_ahead(read, wanted), strict=True)
        self._found |= {version: row for version, row in rows if row is not None}
        self._found[head.version] = VersionRow.of(head)
        return head, error

    def _read_tags(self, run: Run) -> list[dict[str, Any]]:
        """Return the newest tags; one that cannot be read is left out."""
        listed = [item for item in run.bucket.list(TAGS_PREFIX) if tag_of_key(item.key) is not None]
        newest = heapq.nlargest(MAX_TAGS, listed, key=lambda item: item.modified)

        def read(item: ObjectInfo) -> Tag | None:
            try:
                return self._tags[item] if item in self._tags else run.tag(str(tag_of_key(item.key)))
            except DataError:
                return None

        self._tags = dict(zip(newest, read_ahead(read, newest), strict=True))
        tags = [tag for tag in self._tags.values() if tag is not None]
        return [
            {"name": tag.name, "version": tag.version} for tag in sorted(tags, key=lambda tag: (-tag.version, tag.name))
        ]


def _unconnected(rows: list[VersionRow]) -> dict[int, DeltaSyncError]:
    """Return the versions whose manifest does not follow the one before it."""
    return {
        row.version: ChainError(f"it {why}")
        for before, row in pairwise(rows)
        if row.version == before.version + 1 and (why := broken_link(before, row))
    }


def _newest_deltas(rows: list[VersionRow]) -> dict[int, str]:
    """Return version → digest of the deltas that the heat map shows, newest first."""
    chosen: dict[int, str] = {}
    objects = 0
    for row in reversed(rows[-HEAT_VERSIONS:]):
        if row.kind == "delta":
            objects += row.objects
            if objects > HEAT_OBJECTS:
                break
            chosen[row.version] = row.digest
    return chosen


def _receiver(replica: Replica, head: Manifest | None, created: dict[int, float | None]) -> dict[str, Any]:
    """Return a receiver, with the versions and the time between what it serves and the newest sound version.

    Args:
        created: of the versions that are shown.
    """
    seen, sound = replica.heartbeat, None if head is None else head.sound
    behind = seconds = None
    if seen.served is not None and sound is not None and head is not None:
        behind = versions_behind(seen.served, seen.lag, seen.head, seen.following, head.version, sound)
        served, newest = created.get(seen.served), created.get(sound)
        seconds = None if served is None or newest is None else max(0.0, newest - served)
    return {**replica.document(), "behind": behind, "behind_seconds": seconds}


def _most_urgent(receivers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most ``MAX_RECEIVERS``, in their order: those with an error first, then those furthest behind."""

    def urgency(row: dict[str, Any]) -> tuple[bool, bool, float]:
        behind = float("inf") if row["behind"] is None else row["behind"]
        return row["live"], row["error"] is not None, behind

    kept = heapq.nlargest(MAX_RECEIVERS, range(len(receivers)), key=lambda at: urgency(receivers[at]))
    return [receivers[at] for at in sorted(kept)]


def _error(error: DeltaSyncError) -> dict[str, Any]:
    return {"kind": error.kind, "message": error.message[:MAX_TEXT]}


def _summary(rows: list[VersionRow]) -> dict[str, Any]:
    """Return figures of all versions shown; savings are against a full checkpoint for each."""
    found = asdict(summarize(rows, seconds_since(rows)))
    return {
        "payload": found["payload_bytes"],
        "share": found["changed_share"],
        "seconds": found["seconds"],
        "per_hour": found["versions_per_hour"],
        "published": found["published_bytes"],
        "full": found["full_bytes"],
        "saved": found["saved_share"],
    }

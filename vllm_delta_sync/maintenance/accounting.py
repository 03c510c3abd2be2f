"""``account`` says what a run's bucket holds and what each version costs.

Sizes come from one listing of the bucket, and what an object is for from the documents that name it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from vllm_delta_sync.errors import DataError, NotFoundError
from vllm_delta_sync.format.documents import (
    ANCHORS_PREFIX,
    COLLECTIONS_CLOCK,
    HEARTBEATS_PREFIX,
    MERGED_PREFIX,
    RETENTION_KEY,
    Anchor,
    MergedDelta,
    anchor_of_key,
    claim_of_key,
    collection_of_key,
    merged_delta_of_key,
    tag_of_key,
)
from vllm_delta_sync.format.manifest import HEAD_KEY, RUN_KEY, TABLE_KEY, version_of_key
from vllm_delta_sync.maintenance.run_stats import Progress, VersionRow, read_history
from vllm_delta_sync.run.run_reader import RunReader

Kind = Literal[
    "deltas", "anchors", "standalone anchors", "merged deltas", "sidecars", "files", "manifests", "documents", "unnamed"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of objects. ``anchors`` are those in the history; ``unnamed`` is what no readable document names."""

_DOCUMENTS = (RUN_KEY, TABLE_KEY, HEAD_KEY, RETENTION_KEY, COLLECTIONS_CLOCK)
_HEARTBEAT = re.compile(re.escape(HEARTBEATS_PREFIX) + r"[^/]+\.json")


@dataclass(slots=True)
class VersionCost:
    """What a version takes in the bucket; what several versions name counts for the first of them.

    Attributes:
        row: of the version. objects: keys of its own objects.
        stored: kind → bytes in the bucket, of its manifest, its own objects, its sidecars and its standalone anchor.
        lost: its own objects that are not stored; garbage collection removed them.
    """

    row: VersionRow
    objects: tuple[str, ...]
    stored: dict[Kind, int] = field(default_factory=dict)
    lost: int = 0


@dataclass
class BucketAccount:
    """What a run's bucket holds; each object counts once.

    Attributes:
        versions: oldest first. counts, bytes: of objects, by kind.
        full_bytes: of full checkpoints of the same versions. A version 0 that refers to a checkpoint elsewhere does not
            count: it would not be stored again either.
        documents: anchors and merged deltas that were read. unreadable: key of one of them → why it cannot be read; its
            objects count as unnamed.
    """

    versions: list[VersionCost] = field(default_factory=list)
    counts: Counter[Kind] = field(default_factory=Counter)
    bytes: Counter[Kind] = field(default_factory=Counter)
    full_bytes: int = 0
    documents: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)


def is_empty(run: RunReader) -> bool:
    """Return whether nothing was published, after ``run.head`` raised NotFoundError. Raises StoreError."""
    return run.pointer is None and not run.versions()


def account(run: RunReader, progress: Progress | None = None) -> BucketAccount:
    """Read all manifests, anchors and merged deltas, list the bucket, and count each object once.

    Documents come first: writers put objects before the document that names them, so the later listing has them. A run
    without versions has an account too.

    Raises:
        DeltaSyncError: as ``RunReader.log``, for example because a manifest is damaged.
    """
    found = BucketAccount()
    named: dict[str, tuple[Kind, int | None]] = {}

    def name(refs: Iterable[str], kind: Kind, version: int | None = None) -> None:
        for key in refs:
            named.setdefault(key, (kind, version))

    try:
        for manifest in read_history(run, None, progress):
            cost = VersionCost(VersionRow.of(manifest), tuple(ref.key for ref in manifest.objects))
            found.versions.append(cost)
            found.full_bytes += cost.row.saved_from
            name(cost.objects, "anchors" if manifest.kind == "anchor" else "deltas", manifest.version)
            name((item.key for item in manifest.sidecars), "sidecars", manifest.version)
    except NotFoundError:
        if not is_empty(run):
            raise
    for document in _read_standalone(run, found):
        keys = [ref.key for ref in document.objects]
        if isinstance(document, MergedDelta):
            name(keys, "merged deltas")
        else:
            name(keys, "standalone anchors", document.version if document.version < len(found.versions) else None)
    name((item.key for item in run.info.files), "files")
    stored: set[str] = set()
    for info in run.bucket.list():
        kind, owner = named.get(info.key) or _document(info.key, len(found.versions))
        stored.add(info.key)
        found.counts[kind] += 1
        found.bytes[kind] += info.bytes
        if owner is not None:
            costs = found.versions[owner].stored
            costs[kind] = costs.get(kind, 0) + info.bytes
    for cost in found.versions:
        cost.lost = sum(key not in stored for key in cost.objects)
    return found


def _document(key: str, versions: int) -> tuple[Kind, int | None]:
    """Return the kind of a key that no document names, and the version whose manifest it is."""
    version = version_of_key(key)
    if version is not None:
        return "manifests", version if version < versions else None
    parsers: tuple[Callable[[str], object], ...] = (
        *(anchor_of_key, merged_delta_of_key, tag_of_key, claim_of_key, collection_of_key, _HEARTBEAT.fullmatch),
    )
    is_document = key in _DOCUMENTS or any(parse(key) is not None for parse in parsers)
    return ("documents" if is_document else "unnamed"), None


def _read_standalone(run: RunReader, found: BucketAccount) -> Iterator[Anchor | MergedDelta]:
    """Yield the anchors and merged deltas one at a time: an anchor has the fingerprints of all tensors."""
    keys = [item.key for prefix in (ANCHORS_PREFIX, MERGED_PREFIX) for item in run.bucket.list(prefix)]
    for key, document in run.standalones(keys):
        if isinstance(document, DataError):
            found.unreadable[key] = document.message
        elif isinstance(document, Anchor | MergedDelta):
            found.documents += 1
            yield document

"""``RunGraph``: a run's bucket as a graph. Versions are nodes; documents whose objects are all stored are edges."""

import heapq
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.errors import ChainError, ConflictError, DataError, DeltaSyncError, NotFoundError
from vllm_delta_sync.fleet.heartbeats import Heartbeats, read_heartbeats
from vllm_delta_sync.format.documents import (
    ANCHORS_PREFIX,
    MERGED_PREFIX,
    TAGS_PREFIX,
    Retention,
    Tag,
    anchor_of_key,
    merged_delta_of_key,
    tag_key,
    tag_of_key,
)
from vllm_delta_sync.format.manifest import (
    OBJECTS_PREFIX,
    SIDECARS_PREFIX,
    VERSIONS_PREFIX,
    Manifest,
    ObjectRef,
    version_key,
    version_of_key,
)
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.prefetch import read_ahead
from vllm_delta_sync.run.read_plan import is_merge_range

NOTHING = -1
"""The node where anchors and references start: they need no other version."""

_OBJECT = re.compile(re.escape(OBJECTS_PREFIX) + r"[0-9a-f]{64}\.safetensors")
_SIDECAR = re.compile(re.escape(SIDECARS_PREFIX) + r"[0-9a-f]{64}")
Neighbours = dict[int, list[tuple[int, "Edge"]]]


@dataclass(frozen=True, slots=True)
class Edge:
    """A document that lists objects: a manifest, a standalone anchor, or a merged delta.

    Attributes:
        info: of the document. start, end: versions that it leads from and to.
        refs: (key, bytes) of its objects. reversible: whether it can be reverted.
        used: whether readers use it.
        digest, parent, sidecars (keys), quarantined, exact: of a manifest.
    """

    info: ObjectInfo
    start: int
    end: int
    refs: tuple[tuple[str, int], ...]
    reversible: bool = False
    used: bool = True
    digest: str = ""
    parent: str | None = None
    quarantined: bool = False
    exact: bool = True
    sidecars: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.info.key

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.refs)


@dataclass
class RunGraph:
    """Everything that a run's bucket holds.

    Attributes:
        history: manifests by version; the last is the head. standalone: anchors and merged deltas.
        unrelated: documents that do not fit the history. unreadable: key of a document → why it cannot be read.
        tags: by name. heartbeats: heartbeats of receivers.
        objects, sidecars: by key; only keys that have the form of an object's or sidecar's.
        notes: for the operator.
    """

    history: list[Edge] = field(default_factory=list)
    standalone: list[Edge] = field(default_factory=list)
    unrelated: list[Edge] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    tags: dict[str, Tag] = field(default_factory=dict)
    heartbeats: Heartbeats = field(default_factory=Heartbeats)
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    sidecars: dict[str, ObjectInfo] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def head(self) -> int:
        return len(self.history) - 1

    @property
    def sound(self) -> int | None:
        """Newest version that is not quarantined; None if there is none."""
        return next((edge.end for edge in reversed(self.history) if not edge.quarantined), None)

    @property
    def exact(self) -> int | None:
        """Newest version that servers with ``require_exact`` accept; ``sound`` in a run without byte budgets."""
        return next((edge.end for edge in reversed(self.history) if not edge.quarantined and edge.exact), None)

    def is_complete(self, edge: Edge) -> bool:
        """Return whether all objects of a document are stored with their declared sizes."""
        return all(key in self.objects and self.objects[key].bytes == size for key, size in edge.refs)

    def newest(self, edge: Edge) -> float:
        """Return when the document or one of its objects was last put."""
        stored = (self.objects[key].modified for key, _ in edge.refs if key in self.objects)
        return max(edge.info.modified, max(stored, default=0.0))

    def edges(self) -> list[Edge]:
        """Return the documents that are complete and that readers use."""
        return [edge for edge in (*self.history, *self.standalone) if edge.used and self.is_complete(edge)]


def survey(run: RunDocuments, known: RunGraph | None = None, record: Retention | None = None) -> RunGraph:
    """Read each document of the run once, then list its objects.

    Documents come first: writers put objects before the document that lists them, so the later listing has them.

    Args:
        known: an earlier survey; documents not put again since then are not read again.
        record: retention.json of the last collection. Objects for which it contradicts the listing are checked one by
            one, because a listing may lag.

    Raises:
        NotFoundError: nothing is published. ConflictError: another run took the URL meanwhile.
        DeltaSyncError: a manifest or a tag cannot be read. StoreError: the store failed.
    """
    known_edges = {edge.info: edge for edge in (*known.history, *known.standalone)} if known else {}
    found = RunGraph()
    found.history = _read_history(run, known_edges)
    breaks = {edge.end for edge in found.history if edge.end and edge.start != edge.end - 1}
    _read_standalone(run, found, known_edges, breaks)
    found.tags = _tags(run, found.notes)
    found.heartbeats = read_heartbeats(run)
    found.notes += [f"heartbeat ignored: {reason}" for reason in found.heartbeats.ignored]
    found.objects = {item.key: item for item in run.bucket.list(OBJECTS_PREFIX) if _OBJECT.fullmatch(item.key)}
    found.sidecars = {item.key: item for item in run.bucket.list(SIDECARS_PREFIX) if _SIDECAR.fullmatch(item.key)}
    _recheck_listing(run, found, record)
    check_current(run)
    return found


def check_current(run: RunDocuments) -> None:
    """Raise ConflictError if another run took the URL, NotFoundError if there is no run any more."""
    if not run.is_current():
        raise ConflictError(f"{run.bucket.url} no longer holds run {run.info.run} but another; open it again")


def _recheck_listing(run: RunDocuments, found: RunGraph, record: Retention | None) -> None:
    """Check one by one the objects that are unexpectedly missing from the listing, or unexpectedly in it."""

    def stat(key: str) -> ObjectInfo | None:
        try:
            return run.bucket.stat(key)
        except NotFoundError:
            return None

    removed = {edge.end for edge in found.history if record is not None and record.is_gone(edge.end)}
    expected = {key: edge.end not in removed for edge in found.history for key, _ in edge.refs}
    expected |= {key: True for edge in found.standalone for key, _ in edge.refs}
    doubtful = sorted(key for key, stored in expected.items() if stored != (key in found.objects))
    for key, info in zip(doubtful, in_parallel(stat, doubtful), strict=True):
        if info is None:
            found.objects.pop(key, None)
        else:
            found.objects[key] = info


def _read_history(run: RunDocuments, known_edges: dict[ObjectInfo, Edge]) -> list[Edge]:
    head = run.head().version
    listed = _versions(run)
    if max(listed, default=0) > head:
        head = run.head().version  # the head moved while the listing was made
    lost = _find_unlisted(run, head, listed)
    if lost is not None or max(listed) > head:
        what = f"{version_key(lost)} is missing" if lost is not None else "there are manifests after the head"
        raise ChainError(f"{what}: gc removes nothing from a history with holes; run `delta-sync repair`")

    def edge_of(version: int) -> Edge:
        info = listed[version]
        if info in known_edges:
            return known_edges[info]
        try:
            return _edge_of_manifest(run.manifest(version), info)
        except DataError as error:
            raise _unreadable(info.key, error) from error

    history: list[Edge] = []
    for edge in read_ahead(edge_of, range(head + 1)):
        if history and edge.parent != history[-1].digest:
            raise ChainError(f"{edge.key} does not name the manifest before it: the history was rewritten")
        history.append(edge)
    return history


def _versions(run: RunDocuments) -> dict[int, ObjectInfo]:
    listed = run.bucket.list(VERSIONS_PREFIX)
    return {number: item for item in listed if (number := version_of_key(item.key)) is not None}


def _find_unlisted(run: RunDocuments, head: int, listed: dict[int, ObjectInfo]) -> int | None:
    """Add manifests put during the listing, which it lacks; return the first missing version."""
    for version in range(head + 1):
        if version not in listed:
            try:
                listed[version] = run.bucket.stat(version_key(version))
            except NotFoundError:
                return version
    return None


def _edge_of_manifest(manifest: Manifest, info: ObjectInfo) -> Edge:
    return Edge(
        info=info,
        start=NOTHING if manifest.base_version is None else manifest.base_version,
        end=manifest.version,
        refs=_refs(manifest.objects),
        reversible=manifest.reversible,
        digest=manifest.digest,
        parent=manifest.parent,
        quarantined=manifest.quarantine is not None,
        exact=manifest.held_back is None,
        sidecars=tuple(item.key for item in manifest.sidecars),
    )


def _refs(objects: Iterable[ObjectRef]) -> tuple[tuple[str, int], ...]:
    return tuple((item.key, item.bytes) for item in objects)


def _unreadable(key: str, error: DeltaSyncError) -> DeltaSyncError:
    return type(error)(
        f"{error.message}; {key} cannot be read, so what it needs is unknown and gc removes nothing: fix it first, a "
        "version with `delta-sync repair`, a tag with `delta-sync tag rm`"
    )


def _read_standalone(run: RunDocuments, found: RunGraph, known_edges: dict[ObjectInfo, Edge], breaks: set[int]) -> None:
    listed = [
        item
        for prefix in (ANCHORS_PREFIX, MERGED_PREFIX)
        for item in run.bucket.list(prefix)
        if anchor_of_key(item.key) is not None or merged_delta_of_key(item.key) is not None
    ]

    def read(item: ObjectInfo) -> tuple[Edge, bool] | str | None:
        try:
            return _edge_of_standalone(run, item, found.history, breaks)
        except NotFoundError:
            return None
        except DataError as error:
            return error.message

    fresh = [item for item in listed if item not in known_edges]
    answers = dict(zip(fresh, read_ahead(read, fresh), strict=True))
    for item in listed:
        answer = answers[item] if item in answers else (known_edges[item], True)
        if isinstance(answer, str):
            found.unreadable[item.key] = answer
            found.notes.append(f"{item.key} cannot be read; it stays, and so do all unlisted objects: {answer}")
        elif answer is not None:
            edge, fits = answer
            (found.standalone if fits else found.unrelated).append(edge)
    found.notes += [f"{edge.key} does not fit the history, and stays" for edge in found.unrelated]


def _edge_of_standalone(
    run: RunDocuments, item: ObjectInfo, history: list[Edge], breaks: set[int]
) -> tuple[Edge, bool]:
    """Return an anchor or a merged delta, and whether it belongs to this history."""
    version = anchor_of_key(item.key)
    if version is not None:
        anchor = run.anchor(version)
        fits = version < len(history) and anchor.manifest == history[version].digest
        return Edge(item, NOTHING, version, _refs(anchor.objects), used=fits), fits
    first, last = merged_delta_of_key(item.key) or (0, 0)
    merged = run.merged_delta(first, last)
    ends = ((first, merged.first_manifest), (last, merged.last_manifest))
    fits = last < len(history) and all(history[number].digest == digest for number, digest in ends)
    used = fits and is_merge_range(first, last) and not any(first < number <= last for number in breaks)
    return Edge(item, first, last, _refs(merged.objects), merged.reversible, used), fits


def _tags(run: RunDocuments, notes: list[str]) -> dict[str, Tag]:
    found: dict[str, Tag] = {}
    names = [tag_of_key(item.key) for item in run.bucket.list(TAGS_PREFIX)]
    for name in names:
        if name is None:
            continue
        try:
            found[name] = run.tag(name)
        except NotFoundError:
            continue  # deleted meanwhile
        except ChainError as error:
            notes.append(f"tag ignored: {error.message}")
        except DataError as error:
            raise _unreadable(tag_key(name), error) from error
    return found


def paths_from(edges: Iterable[Edge], begin: int, unsettled: Callable[[Edge], bool]) -> "ShortestPaths":
    """Return the cheapest path from a node to each node reachable from it."""
    neighbours: Neighbours = {}
    for edge in edges:
        neighbours.setdefault(edge.start, []).append((edge.end, edge))
    return _cheapest(neighbours, begin, unsettled)


def paths_to(edges: Iterable[Edge], end: int, unsettled: Callable[[Edge], bool], back: bool = True) -> "ShortestPaths":
    """Return the cheapest path to a version from each other version. Args: back: whether it may revert deltas."""
    neighbours: Neighbours = {}
    for edge in edges:
        if edge.start != NOTHING:
            neighbours.setdefault(edge.end, []).append((edge.start, edge))
            if back and edge.reversible:
                neighbours.setdefault(edge.start, []).append((edge.end, edge))
    return _cheapest(neighbours, end, unsettled)


@dataclass
class ShortestPaths:
    """Cheapest paths between one node and all others.

    Attributes:
        last: connected node → the node before it on its path, and the edge between the two.
    """

    last: dict[int, tuple[int, Edge]]

    def __contains__(self, node: int) -> bool:
        return node in self.last

    def path_to(self, node: int) -> list[Edge]:
        """Return the edges between the start node and this node."""
        found = []
        while node in self.last:
            node, edge = self.last[node]
            found.append(edge)
        return found


def _cheapest(neighbours: Neighbours, begin: int, unsettled: Callable[[Edge], bool]) -> ShortestPaths:
    """Run Dijkstra's algorithm, by bytes; a path uses unsettled edges only where there is no other.

    The path found for a node depends on the edges of that path only. So two collections find the same paths, even while
    one removes edges that are on no kept path.
    """
    last: dict[int, tuple[int, Edge]] = {}
    edges: dict[str, Edge] = {}
    done: set[int] = set()
    # Cost: unsettled edges, bytes, edges. Keys break ties the same way on every machine. The count of edges makes every
    # step cost something, so that all candidates for a node are known when it is popped.
    pending: list[tuple[int, int, int, int, str, int]] = [(0, 0, 0, begin, "", begin)]
    while pending:
        bad, size, count, node, key, origin = heapq.heappop(pending)
        if node in done:
            continue
        done.add(node)
        if key:
            last[node] = (origin, edges[key])
        for other, edge in neighbours.get(node, []):
            if other not in done:
                edges[edge.key] = edge
                heapq.heappush(pending, (bad + unsettled(edge), size + edge.bytes, count + 1, other, edge.key, node))
    return ShortestPaths(last)

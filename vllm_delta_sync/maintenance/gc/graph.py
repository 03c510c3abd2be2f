"""What is in a run's bucket, as a graph: versions are nodes, documents whose objects are all there are edges."""

import heapq
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.bucket.parallel import in_parallel
from vllm_delta_sync.errors import ChainError, ConflictError, DeltaSyncError, NotFoundError, SignatureError, StoreError
from vllm_delta_sync.fleet.heartbeats import Leases, read_leases
from vllm_delta_sync.format.documents import (
    ANCHORS_PREFIX,
    FOLDS_PREFIX,
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
from vllm_delta_sync.run.plan import FOLD_WIDTH
from vllm_delta_sync.run.revoked import refused_manifest

NOTHING = -1
"""The node that anchors and references begin at: they need no other version."""

_OBJECT = re.compile(re.escape(OBJECTS_PREFIX) + r"[0-9a-f]{64}\.safetensors")
_SIDECAR = re.compile(re.escape(SIDECARS_PREFIX) + r"[0-9a-f]{64}")
Moves = dict[int, list[tuple[int, "Edge"]]]


@dataclass(frozen=True, slots=True)
class Edge:
    """A document that lists objects: a manifest, an anchor beside the chain, or a folded range.

    Attributes:
        info: of the document. digest, parent: of a manifest.
        start, end: it leads from the one version to the other.
        refs: (key, bytes) of its objects. sidecars: keys of a manifest's. reversible: whether it can be taken back.
        used: whether readers go this way. quarantined: of a manifest: whether servers skip it.
        refused: of a manifest: whether its key's word does not hold for it, so that nobody takes it.
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
    refused: bool = False
    sidecars: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.info.key

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.refs)


@dataclass
class RunGraph:
    """A look at the whole run.

    Attributes:
        chain: manifests, by version; the last is the head. sides: anchors and folded ranges.
        strange: documents that do not fit the chain. unread: keys of those that cannot be read, and why.
        tags: by name. leases: of receivers. objects: by key, those that are named as objects are. sidecars: likewise.
        notes: what people should know.
    """

    chain: list[Edge] = field(default_factory=list)
    sides: list[Edge] = field(default_factory=list)
    strange: list[Edge] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    tags: dict[str, Tag] = field(default_factory=dict)
    leases: Leases = field(default_factory=Leases)
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    sidecars: dict[str, ObjectInfo] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def head(self) -> int:
        return len(self.chain) - 1

    @property
    def sound(self) -> int | None:
        """Newest version that is not quarantined: where servers that follow are; None if all are."""
        return next((owner.end for owner in reversed(self.chain) if not owner.quarantined and not owner.refused), None)

    def whole(self, owner: Edge) -> bool:
        """Whether all objects are there, at their size."""
        return all(key in self.objects and self.objects[key].bytes == size for key, size in owner.refs)

    def newest(self, owner: Edge) -> float:
        """When the document or one of its objects was put last."""
        there = (self.objects[key].modified for key, _ in owner.refs if key in self.objects)
        return max(owner.info.modified, max(there, default=0.0))

    def edges(self) -> list[Edge]:
        """What leads anywhere: whole, and of use to readers."""
        return [owner for owner in (*self.chain, *self.sides) if owner.used and self.whole(owner)]


def survey(run: RunDocuments, known: RunGraph | None = None, record: Retention | None = None) -> RunGraph:
    """Look at everything in the run: each document once, then what objects there are.

    Documents come first: whatever one lists was put before it, so the listing of objects that follows has it.

    Args:
        known: an earlier look; what has not been put again since is not read again.
        record: what the last collection wrote. Where the listing of objects says otherwise, they are asked for one by
            one: a listing may lag behind.

    Raises:
        NotFoundError: nothing is published. ConflictError: another run took the URL meanwhile.
        DeltaSyncError: a manifest or a tag cannot be read. StoreError: the store failed.
    """
    seen = {owner.info: owner for owner in (*known.chain, *known.sides)} if known else {}
    found = RunGraph()
    found.chain = _chain(run, seen)
    breaks = {owner.end for owner in found.chain if owner.end and owner.start != owner.end - 1}
    _read_sides(run, found, seen, breaks)
    found.tags = _tags(run, found.notes)
    found.leases = read_leases(run)
    found.notes += [f"lease ignored: {reason}" for reason in found.leases.ignored]
    found.objects = {item.key: item for item in run.bucket.list(OBJECTS_PREFIX) if _OBJECT.fullmatch(item.key)}
    found.sidecars = {item.key: item for item in run.bucket.list(SIDECARS_PREFIX) if _SIDECAR.fullmatch(item.key)}
    _confirm(run, found, record)
    check_current(run)
    return found


def check_current(run: RunDocuments) -> None:
    """Raise ConflictError if another run took the URL, NotFoundError if the run is gone."""
    if not run.is_current():
        raise ConflictError(f"{run.bucket.url} holds another run than {run.info.run} by now; open it again")


def _confirm(run: RunDocuments, found: RunGraph, record: Retention | None) -> None:
    """Look for objects that should be there and are not listed, or are listed and were removed."""

    def look(key: str) -> ObjectInfo | None:
        try:
            return run.bucket.stat(key)
        except NotFoundError:
            return None

    removed = {owner.end for owner in found.chain if record is not None and record.is_gone(owner.end)}
    expected = {key: owner.end not in removed for owner in found.chain for key, _ in owner.refs}
    expected |= {key: True for owner in found.sides for key, _ in owner.refs}
    doubtful = sorted(key for key, there in expected.items() if there != (key in found.objects))
    for key, info in zip(doubtful, in_parallel(look, doubtful), strict=True):
        if info is None:
            found.objects.pop(key, None)
        else:
            found.objects[key] = info


def _chain(run: RunDocuments, seen: dict[ObjectInfo, Edge]) -> list[Edge]:
    head = run.head().version
    listed = _versions(run)
    if max(listed, default=0) > head:
        head = run.head().version  # it moved while the listing was made
    lost = _find_unlisted(run, head, listed)
    if lost is not None or max(listed) > head:
        what = f"{version_key(lost)} is missing" if lost is not None else "there are manifests after the head"
        raise ChainError(f"{what}: nothing is removed from a chain with holes; see `delta-sync repair`")

    def owner_of(version: int) -> Edge:
        info = listed[version]
        if info in seen:
            return seen[info]
        try:
            return _of_manifest(run.manifest(version), info)
        except StoreError:
            raise
        except DeltaSyncError as error:
            refused = refused_manifest(run, version) if isinstance(error, SignatureError) else None
            if refused is not None:
                return replace(_of_manifest(refused, info), used=False, refused=True)
            raise _unreadable(info.key, error) from error

    chain: list[Edge] = []
    for owner in in_parallel(owner_of, range(head + 1)):
        if chain and owner.parent != chain[-1].digest:
            raise ChainError(f"{owner.key} does not name the manifest before it: the history was rewritten")
        chain.append(owner)
    return chain


def _versions(run: RunDocuments) -> dict[int, ObjectInfo]:
    listed = run.bucket.list(VERSIONS_PREFIX)
    return {number: item for item in listed if (number := version_of_key(item.key)) is not None}


def _find_unlisted(run: RunDocuments, head: int, listed: dict[int, ObjectInfo]) -> int | None:
    """Look for manifests that were put while the listing was made, and may be in it or not; one that is not there."""
    for version in range(head + 1):
        if version not in listed:
            try:
                listed[version] = run.bucket.stat(version_key(version))
            except NotFoundError:
                return version
    return None


def _of_manifest(manifest: Manifest, info: ObjectInfo) -> Edge:
    return Edge(
        info=info,
        start=NOTHING if manifest.base_version is None else manifest.base_version,
        end=manifest.version,
        refs=_refs(manifest.objects),
        reversible=manifest.reversible,
        digest=manifest.digest,
        parent=manifest.parent,
        quarantined=manifest.quarantine is not None,
        sidecars=tuple(item.key for item in manifest.sidecars),
    )


def _refs(objects: Iterable[ObjectRef]) -> tuple[tuple[str, int], ...]:
    return tuple((item.key, item.bytes) for item in objects)


def _unreadable(key: str, error: DeltaSyncError) -> DeltaSyncError:
    return type(error)(
        f"{error.message}; while {key} cannot be read nobody knows what it needs, so nothing is removed: mend it "
        "first, see `delta-sync repair` for a version and `delta-sync tag --delete` for a tag"
    )


def _read_sides(run: RunDocuments, found: RunGraph, seen: dict[ObjectInfo, Edge], breaks: set[int]) -> None:
    listed = [
        item
        for prefix in (ANCHORS_PREFIX, FOLDS_PREFIX)
        for item in run.bucket.list(prefix)
        if anchor_of_key(item.key) is not None or merged_delta_of_key(item.key) is not None
    ]

    def read(item: ObjectInfo) -> tuple[Edge, bool] | str | None:
        try:
            return _side(run, item, found.chain, breaks)
        except NotFoundError:
            return None
        except StoreError:
            raise
        except DeltaSyncError as error:
            return error.message

    fresh = [item for item in listed if item not in seen]
    answers = dict(zip(fresh, in_parallel(read, fresh), strict=True))
    for item in listed:
        answer = answers[item] if item in answers else (seen[item], True)
        if isinstance(answer, str):
            found.unread[item.key] = answer
            found.notes.append(f"{item.key} stays, and objects that no document lists too: {answer}")
        elif answer is not None:
            owner, fits = answer
            (found.sides if fits else found.strange).append(owner)
    found.notes += [f"{owner.key} does not fit the chain, and stays" for owner in found.strange]


def _side(run: RunDocuments, item: ObjectInfo, chain: list[Edge], breaks: set[int]) -> tuple[Edge, bool]:
    """An anchor or a folded range, and whether it is of this chain."""
    version = anchor_of_key(item.key)
    if version is not None:
        anchor = run.anchor(version)
        fits = version < len(chain) and anchor.manifest == chain[version].digest
        return Edge(item, NOTHING, version, _refs(anchor.objects), used=fits), fits
    first, last = merged_delta_of_key(item.key) or (0, 0)
    folded = run.folded(first, last)
    ends = ((first, folded.first_manifest), (last, folded.last_manifest))
    fits = last < len(chain) and all(chain[number].digest == digest for number, digest in ends)
    used = fits and _is_step(first, last) and not any(first < number <= last for number in breaks)
    return Edge(item, first, last, _refs(folded.objects), folded.reversible, used), fits


def _is_step(first: int, last: int) -> bool:
    """Whether readers look for a range of these versions: see ``run.plan``."""
    size = last - first
    power = 1
    while power < size:
        power *= FOLD_WIDTH
    return size == power and first % size == 0


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
        except StoreError:
            raise
        except DeltaSyncError as error:
            raise _unreadable(tag_key(name), error) from error
    return found


def ways_from(edges: Iterable[Edge], begin: int, unripe: Callable[[Edge], bool]) -> "ShortestPaths":
    """The cheapest way from a node to each other node that it leads to."""
    moves: Moves = {}
    for edge in edges:
        moves.setdefault(edge.start, []).append((edge.end, edge))
    return _cheapest(moves, begin, unripe)


def ways_to(edges: Iterable[Edge], end: int, unripe: Callable[[Edge], bool], back: bool = True) -> "ShortestPaths":
    """The cheapest way to a version from each other version. Args: back: whether deltas may be taken back on it."""
    moves: Moves = {}
    for edge in edges:
        if edge.start != NOTHING:
            moves.setdefault(edge.end, []).append((edge.start, edge))
            if back and edge.reversible:
                moves.setdefault(edge.start, []).append((edge.end, edge))
    return _cheapest(moves, end, unripe)


@dataclass
class ShortestPaths:
    """Ways between one node and all others.

    Attributes:
        last: for each node that there is a way to, the edge at its end and the node at that edge's other end.
    """

    last: dict[int, tuple[int, Edge]]

    def __contains__(self, node: int) -> bool:
        return node in self.last

    def way(self, node: int) -> list[Edge]:
        """The edges between the one node and this."""
        found = []
        while node in self.last:
            node, edge = self.last[node]
            found.append(edge)
        return found


def _cheapest(moves: Moves, begin: int, unripe: Callable[[Edge], bool]) -> ShortestPaths:
    """Dijkstra's algorithm, by bytes; an unripe edge is gone by only where there is no other way.

    What is found for a node depends on no edge but those on the way to it: while somebody else removes edges that are
    on no way that is kept, both find the same ways.
    """
    last: dict[int, tuple[int, Edge]] = {}
    edges: dict[str, Edge] = {}
    done: set[int] = set()
    # Cost: unripe edges, bytes, edges. Keys make ties come out the same for everybody, and the count of edges makes
    # every step cost something, so that all candidates for a node are known when it is taken.
    pending: list[tuple[int, int, int, int, str, int]] = [(0, 0, 0, begin, "", begin)]
    while pending:
        bad, size, count, node, key, origin = heapq.heappop(pending)
        if node in done:
            continue
        done.add(node)
        if key:
            last[node] = (origin, edges[key])
        for other, edge in moves.get(node, []):
            if other not in done:
                edges[edge.key] = edge
                heapq.heappush(pending, (bad + unripe(edge), size + edge.bytes, count + 1, other, edge.key, node))
    return ShortestPaths(last)

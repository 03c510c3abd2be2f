"""``ReadPlanner`` plans how to read a version: a root, then deltas and merged deltas.

It fills the graph of the run (``run.graph``) from listings, finds the cheapest way, and reads the documents on it. What
turns out to be absent, damaged or contradicted leaves the graph, and the next cheapest way is taken. Until a document
is read its cost is a guess, the same for each, so that a way takes the longest merged deltas: O(log n) documents for n
versions. Readers, servers and retention share the graph, so whatever a collection keeps, a reader finds.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from vllm_delta_sync.errors import ChainError, DataError, LimitError, NotFoundError
from vllm_delta_sync.format.documents import (
    Anchor,
    MergedDelta,
    anchor_key,
    anchor_of_key,
    merged_delta_key,
    merged_delta_of_key,
    named_versions,
    shared_digits,
)
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, ObjectRef, version_key, version_of_key
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.run.graph import ROOT, Edge, Move, VersionGraph, broken_link, contradicted, contradiction
from vllm_delta_sync.run.run_reader import MAX_BAD_IN_A_ROW, RunReader, read_ahead

logger = guarded_logger(__name__)

MERGE_WIDTH = 4
"""How many of the next shorter merged deltas one merged delta spans. Smaller ones mean more bytes for a writer, which
writes each change once per level; larger ones more steps and bytes for a reader. Over 100 versions of SmolLM2-135M at
learning rate 1e-6 (``benchmarks.catchup``), 2, 4 and 8 write 3.0, 1.3 and 0.7 times the bytes of the deltas, and a
reader reads 4, 6 and 13 objects, 9.6, 11.3 and 13.8 MB, on average."""

MAX_PLANNED_VERSIONS = 4_000_000
"""Maximum number of versions in a graph, which is held in memory: without trusted keys, a forged manifest can claim any
number."""


class GapError(ChainError):
    """No documents in the bucket lead from one version to the other."""


@dataclass(frozen=True)
class Step:
    """One delta or merged delta to apply, or to revert.

    Attributes:
        run: the run that has its objects. document: the manifest of a delta, or a merged delta.
        backwards: whether it is reverted.
    """

    run: RunReader
    document: Manifest | MergedDelta
    backwards: bool = False

    @property
    def low(self) -> int:
        """The version that the document builds on."""
        if isinstance(self.document, MergedDelta):
            return self.document.first
        if self.document.base_version is None:
            raise ChainError(f"version {self.document.version} builds on no version")
        return self.document.base_version

    @property
    def high(self) -> int:
        """The version that the document leads to."""
        return self.document.last if isinstance(self.document, MergedDelta) else self.document.version

    @property
    def start(self) -> int:
        """The version that it is applied to."""
        return self.high if self.backwards else self.low

    @property
    def end(self) -> int:
        """The version that it results in."""
        return self.low if self.backwards else self.high

    @property
    def objects(self) -> list[ObjectRef]:
        return self.document.objects

    @property
    def changed(self) -> int:
        return self.document.changed

    @property
    def payload_bytes(self) -> int:
        return self.document.payload_bytes

    @property
    def key(self) -> str:
        """Key of the document, which is avoided if it turns out to be bad."""
        if isinstance(self.document, MergedDelta):
            return merged_delta_key(self.document.first, self.document.last)
        return version_key(self.document.version)

    @property
    def high_digest(self) -> str:
        """Digest of the manifest of ``high``."""
        return self.document.last_manifest if isinstance(self.document, MergedDelta) else self.document.digest

    @property
    def high_fingerprint(self) -> Fingerprint:
        """Of the model at ``high``."""
        declared = (
            self.document.last_fingerprint if isinstance(self.document, MergedDelta) else self.document.fingerprint
        )
        return Fingerprint.from_hex(declared)


@dataclass(frozen=True)
class Root:
    """Where a read begins without weights: a version that is stored whole, or that refers to a checkpoint or run.

    Attributes:
        anchor: the version's standalone anchor, if its weights are read from there instead of where the manifest says.
    """

    manifest: Manifest
    anchor: Anchor | None = None

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def document(self) -> Manifest | Anchor:
        """Declares the tensors and their fingerprints."""
        return self.anchor or self.manifest

    @property
    def key(self) -> str:
        """Key of ``document``, which is avoided if it turns out to be bad."""
        return version_key(self.version) if self.anchor is None else anchor_key(self.version)

    @property
    def is_stored(self) -> bool:
        """Whether the run's own objects hold the weights."""
        return self.anchor is not None or self.manifest.kind == "anchor"

    @property
    def is_branch(self) -> bool:
        """Whether the weights are read from another run."""
        return not self.is_stored and self.manifest.base is not None and self.manifest.base.run is not None


@dataclass(frozen=True)
class Plan:
    """How to rebuild a version: a root, and steps from there.

    Attributes:
        bytes: total to read. A local checkpoint costs nothing; a branch at most the whole model, which only its source
            run shows.
    """

    run: RunReader
    root: Root
    steps: list[Step]

    @property
    def bytes(self) -> int:
        root = self.run.table.full_bytes if self.root.is_branch else self.root.document.payload_bytes
        return root + sum(step.payload_bytes for step in self.steps)


class ReadPlanner:
    """Plans how versions of one run are read. It caches documents, so make a new one after new versions.

    Args:
        avoid: keys of documents that turned out to be bad; the caller may add more later.
    """

    def __init__(self, run: RunReader, avoid: Collection[str] = ()) -> None:
        self._run = run
        self._avoid = avoid
        self._graph = VersionGraph()
        self._documents: dict[str, Manifest | MergedDelta | Anchor] = {}
        # Keys of documents whose edges have their real cost; and why others are absent, for messages.
        self._settled: set[str] = set()
        self._absent: dict[str, str | DataError] = {}
        # The newest manifest, which names all breaks; and the versions whose deltas the graph has, unless absent.
        self._top: Manifest | None = None
        self._covered = range(0)
        # Prefixes of the versions with which the merged deltas that were listed begin.
        self._listed: set[str] = set()
        self._gone: list[list[int]] = []
        self._has_retention = self._has_anchors = self._is_wide = False

    def add_manifests(self, *manifests: Manifest) -> None:
        """Add manifests that were read already, so that they are not read again."""
        self._documents.update({version_key(manifest.version): manifest for manifest in manifests})

    def manifest(self, version: int) -> Manifest:
        """Return a version's manifest. Errors as ``RunReader.manifest``."""
        found = self._documents.get(version_key(version))
        if not isinstance(found, Manifest):
            found = self._documents[version_key(version)] = self._run.manifest(version)
        return found

    def path(self, start: int, target: int) -> list[Step]:
        """Return the steps from one version to another, none if they are equal; each fits the manifests at its ends.

        Raises:
            GapError: there is no path; the message names the obstacle. StoreError: the store failed.
        """
        if (steps := self._single_step(start, target)) is not None:
            return steps
        self._cover(max(start, target), start if start < target else ROOT)
        self._list(start, target)
        moves = self._usable((start, target), lambda: self._graph.way(start, target))
        if moves is None:
            raise self._gap(start, target)
        return self._steps(moves)

    def path_towards(self, start: int, target: int) -> list[Step]:
        """Return the steps to the newest version up to ``target`` that steps lead to; none if no newer one than
        ``start`` is reached.

        Raises:
            StoreError: the store failed. DataError: the manifest of ``target`` cannot be read.
        """
        self._cover(max(start, target))
        self._list(start, target)
        return self._steps(self._usable((start,), lambda: self._towards(start, target)) or [])

    def newest_before(self, target: Manifest) -> Manifest | None:
        """Return the newest version before another that can be rebuilt; None if there is none.

        Raises:
            StoreError: the store failed.
        """
        self._look_up_to(target)
        limit = target.version - 1
        while moves := self._usable((target.version,), lambda: self._towards(ROOT, limit)):  # noqa: B023
            limit = moves[-1].end
            with suppress(DataError):
                return self.manifest(limit)
            limit -= 1
        return None

    def _towards(self, start: int, limit: int) -> list[Move]:
        ways = self._graph.ways(start)
        return ways.to(max((version for version in ways.last if start < version <= limit), default=start)) or []

    def cheapest(self, target: Manifest) -> Plan:
        """Plan the cheapest way to rebuild a version from the bucket and, if the run refers to one, its base.

        Raises:
            DataError: of the first bad anchor, else of what is in the way. StoreError: the store failed.
        """
        self._look_up_to(target)
        moves = self._usable((target.version,), lambda: self._graph.way(ROOT, target.version))
        if moves is None:
            raise self._no_root(target.version)
        return self._plan(moves)

    def roots(self, target: Manifest) -> list[tuple[str, int]]:
        """Return the documents up to ``target`` that a read may begin with: (key, version), the newest first."""
        self._look_up_to(target)
        found = [edge for edge in self._graph if edge.low == ROOT and edge.high <= target.version]
        return sorted(((edge.key, edge.high) for edge in found), key=lambda root: (root[1], root[0]), reverse=True)

    def plan_from(self, root: str, target: int) -> Plan:
        """Plan a version from one of ``roots``; if the root is the target itself, the plan has no steps.

        Raises:
            GapError: the root is absent, or no steps lead from it to the target.
        """
        self._cover(target)
        self._list(ROOT, target)

        def onward() -> list[Move] | None:
            edge = self._graph.get(root)
            further = None if edge is None else self._graph.way(edge.high, target)
            return None if edge is None or further is None else [Move(edge), *further]

        moves = self._usable((target,), onward)
        if moves is None:
            edge = self._graph.get(root)
            raise self._no_root(target) if edge is None else self._gap(edge.high, target)
        return self._plan(moves)

    # The graph

    def _look_up_to(self, target: Manifest) -> None:
        """Put all that may lead from a root to a version into the graph."""
        self.add_manifests(target)
        self._cover(target.version)
        self._list(ROOT, target.version)

    def _cover(self, version: int, start: int = ROOT) -> None:
        """Put the versions up to one, and how each is reached from the one that it builds on, into the graph.

        Args:
            start: put only those after it, if each builds on the one before: ways up from it do not lead below it. Of a
                long run these are few.
        """
        if version > MAX_PLANNED_VERSIONS:
            raise LimitError(
                f"version {version} builds on up to {version} others, more than MAX_PLANNED_VERSIONS = "
                f"{MAX_PLANNED_VERSIONS}; if no publisher wrote so many, that manifest is forged"
            )
        if self._top is None or version > self._top.version:
            self._top = self.manifest(version)
        breaks = {item.version: item.base_version for item in self._top.breaks}
        if any(start < number <= version for number in breaks):
            start = ROOT
        covered = self._covered or range(start + 1, start + 1)
        self._covered = range(min(start + 1, covered.start), max(version + 1, covered.stop))
        for added in (range(self._covered.start, covered.start), range(covered.stop, self._covered.stop)):
            for number in added:
                base = breaks.get(number, number - 1 if number else None)
                key = version_key(number)
                if key not in self._absent:
                    self._graph.put(Edge(key, ROOT, number) if base is None else _unread(key, base, number))
            self._drop_collected(added)

    def _widen(self) -> bool:
        """Put all merged deltas, and older and newer versions, into the graph, since one may lead back.

        Returns:
            whether that was not done before.
        """
        if self._is_wide:
            return False
        self._is_wide = True
        self._listed.add("")
        self._put_merged("")
        newest = -1 if self._top is None else self._top.version
        if newest >= 0:
            self._cover(newest)
        newer = [version for version in self._run.versions() if version > newest]
        for version in reversed(newer[-MAX_BAD_IN_A_ROW:]):
            with suppress(DataError):
                self._cover(version)
                break
        return True

    def _list(self, first: int, last: int) -> None:
        """Put the documents between two nodes into the graph, and take out the deltas that retention has removed.

        Of a long run only the merged deltas are listed whose keys begin like those of both versions; ``_widen`` lists
        the others. Only a way from ``ROOT`` needs anchors.
        """
        from_root = first == ROOT
        prefix = "" if from_root else shared_digits(first, last)
        reads: list[Callable[[], None]] = []
        if not any(prefix.startswith(listed) for listed in self._listed):
            self._listed.add(prefix)
            reads.append(lambda: self._put_merged(prefix))
        if not self._has_retention:
            self._has_retention = True
            reads.append(self._read_retention)
        if from_root and not self._has_anchors:
            self._has_anchors = True
            reads.append(self._put_anchors)
        for _ in read_ahead(lambda read: read(), reads):
            pass

    def _put_merged(self, prefix: str) -> None:
        for ends in self._run.merged_deltas(prefix):
            key = merged_delta_key(*ends)
            if key not in self._absent and key not in self._settled:
                self._graph.put(_unread(key, *ends))

    def _put_anchors(self) -> None:
        for version in self._run.anchors():
            self._graph.put(Edge(anchor_key(version), ROOT, version, self._run.table.full_bytes))

    def _read_retention(self) -> None:
        record = self._run.retention()
        self._gone = [] if record is None else record.gone
        self._drop_collected(self._covered)

    def _drop_collected(self, covered: range) -> None:
        # Only what the graph covers: the record is not signed, and may name ten billion versions.
        for first, last in self._gone:
            for version in range(max(first, covered.start), min(last + 1, covered.stop)):
                self._drop(version_key(version), "is no longer kept")

    def _drop(self, key: str, why: str | DataError) -> None:
        self._absent.setdefault(key, why)
        self._graph.drop(key)

    def _usable(self, ends: tuple[int, ...], find: Callable[[], list[Move] | None]) -> list[Move] | None:
        """Find a way and read its documents, until all of them are read and none is absent.

        Args:
            ends: versions whose manifest, if it was read already, is right.
        """
        manifests = [self._documents.get(version_key(version)) for version in ends]
        trusted = {item.version: item.digest for item in manifests if isinstance(item, Manifest)}
        while True:
            for key in self._avoid:
                self._drop(key, "is damaged or missing")
            moves = find()
            if moves is None and self._widen():
                continue
            if moves is None:
                return None
            unsettled = [move.edge for move in moves if move.edge.key not in self._settled]
            for edge, document in zip(unsettled, read_ahead(self._read, unsettled), strict=True):
                self._settle(edge, document)
            self._drop_contradicted(trusted, [move.edge.key for move in moves])
            if not unsettled and all(move.edge.key in self._graph for move in moves):
                return moves

    def _read(self, edge: Edge) -> Manifest | MergedDelta | Anchor | DataError:
        key = edge.key
        try:
            if version_of_key(key) is not None:
                return self.manifest(edge.high)
            if merged_delta_of_key(key) is not None:
                return self._run.merged_delta(edge.low, edge.high)
            anchor, manifest = self._run.anchor(edge.high), self.manifest(edge.high)
            return contradiction(anchor, {edge.high: manifest}) or anchor
        except DataError as error:
            return error

    def _settle(self, edge: Edge, document: Manifest | MergedDelta | Anchor | DataError) -> None:
        """Give an edge the cost and the directions that its document declares; without a document it is absent."""
        key, low = edge.key, edge.low
        self._settled.add(key)
        if isinstance(document, DataError):
            if version_of_key(key) is None and not isinstance(document, NotFoundError):
                logger.warning("%s cannot be used: %s", key, document)
            self._drop(key, document)
            return
        if isinstance(document, Manifest):
            # Not what the newest manifest says of it, which nothing may confirm.
            low = ROOT if document.base_version is None else document.base_version
        self._documents[key] = document
        # Only its source run shows what a branch takes: at most the whole model.
        is_branch = isinstance(document, Manifest) and low == ROOT and Root(document).is_branch
        cost = self._run.table.full_bytes if is_branch else document.payload_bytes
        reversible = low != ROOT and not isinstance(document, Anchor) and document.reversible
        self._graph.put(Edge(key, low, edge.high, cost, reversible))
        self._graph.guess = max(self._graph.guess, 0 if low == ROOT else cost)

    def _drop_contradicted(self, trusted: dict[int, str], keys: list[str]) -> None:
        """Take out what other documents contradict: manifests by the ones after them, the others by the manifests."""
        tried = set[int]()
        while True:
            manifests = [item for item in self._documents.values() if isinstance(item, Manifest)]
            known, wrong = contradicted(manifests, trusted)
            for version, why in wrong.items():
                self._drop(version_key(version), why)
            right = {manifest.version: manifest for manifest in manifests if manifest.version not in wrong}
            named: dict[int, set[str]] = {}
            merged = [(key, item) for key in keys if isinstance(item := self._documents.get(key), MergedDelta)]
            for key, item in merged:
                for version, digest, _ in named_versions(item):
                    named.setdefault(version, set()).add(digest)
                if (error := contradiction(item, right, known)) is not None:
                    self._drop(key, error)
            # Of two that disagree, the manifest of that version, or the one after it, tells which is right.
            doubtful = [at for at, digests in named.items() if len(digests) > 1 and at not in known and at not in tried]
            if not doubtful:
                return
            tried.update(doubtful)
            for version in doubtful:
                for number in (version, version + 1):
                    with suppress(DataError):
                        self.manifest(number)

    # Answers

    def _single_step(self, start: int, target: int) -> list[Step] | None:
        """Return the step between two versions of which one builds on the other, without listing the bucket."""
        if start == target:
            return []
        lower = self._documents.get(version_key(min(start, target)))
        if abs(start - target) > 1 or not isinstance(lower, Manifest):
            return None
        upper = self.manifest(max(start, target))
        fits = upper.base_version == lower.version == upper.version - 1 and broken_link(lower, upper) is None
        fits &= target > start or upper.reversible
        fits &= not any(first <= upper.version <= last for first, last in self._gone)
        if not fits or version_key(upper.version) in {*self._avoid, *self._absent}:
            return None
        return [Step(self._run, upper, backwards=target < start)]

    def _steps(self, moves: list[Move]) -> list[Step]:
        found = []
        for move in moves:
            document = self._documents[move.edge.key]
            if not isinstance(document, Anchor):
                found.append(Step(self._run, document, move.backwards))
        return found

    def _plan(self, moves: list[Move]) -> Plan:
        document = self._documents[moves[0].edge.key]
        root = Root(self.manifest(moves[0].end), document if isinstance(document, Anchor) else None)
        return Plan(self._run, root, self._steps(moves[1:]))

    # Why not

    def _gap(self, start: int, target: int) -> GapError:
        """Return the error for two versions without a way: it names the first obstacle above or below."""
        reached = self._graph.ways(start)
        onward = self._lineage(target)
        below = next((version for version in onward if version in reached), None)
        if below is not None:
            obstacle = onward[onward.index(below) - 1]
            return self._blocked(obstacle)
        back = self._lineage(start)
        lowest = next((version for version in reversed(back) if version in reached), start)
        key = version_key(lowest)
        document = self._documents.get(key)
        if key in self._graph and isinstance(document, Manifest) and document.base_version is not None:
            return GapError(f"version {lowest} cannot be reverted to {document.base_version}: its delta replaced bits")
        if key in self._graph:
            return GapError(f"version {target} does not descend from version {start}: an anchor lies between them")
        return self._blocked(lowest)

    def _blocked(self, version: int) -> GapError:
        why = self._absent.get(version_key(version), "is an anchor")
        reason = f"cannot be read ({why.message})" if isinstance(why, DataError) else why
        error = GapError(f"version {version} {reason}, and nothing else leads to it")
        error.__cause__ = why if isinstance(why, DataError) else None
        return error

    def _no_root(self, target: int) -> DataError:
        """Return the error for a version that nothing leads to: of a damaged anchor, else of the first obstacle."""
        anchors = [why for key, why in self._absent.items() if anchor_of_key(key) is not None]
        bad = next((why for why in anchors if isinstance(why, DataError)), None)
        if bad is not None and not isinstance(bad, NotFoundError):
            return bad
        lineage = self._lineage(target)
        reached = self._graph.ways()
        below = next((index for index, version in enumerate(lineage) if version in reached), len(lineage))
        obstacle = lineage[below - 1]
        why = self._absent.get(version_key(obstacle))
        if below == len(lineage) and not isinstance(why, str) and why is not None:
            return why
        if below == len(lineage):
            return NotFoundError(f"version {obstacle}, which version {target} builds on, is damaged or missing")
        return self._blocked(obstacle)

    def _lineage(self, version: int) -> list[int]:
        """Return a version and those that it builds on, the youngest first."""
        breaks = {} if self._top is None else {item.version: item.base_version for item in self._top.breaks}
        found: list[int] = []
        at: int | None = version
        while at is not None and at >= 0:
            found.append(at)
            at = breaks.get(at, at - 1)
        return found


def _unread(key: str, low: int, high: int) -> Edge:
    """Return an edge whose document is not read yet: it may lead in both directions, at any cost."""
    return Edge(key, low, high, None, True)


def plan_read(run: RunReader, target: Manifest, avoid: Collection[str] = ()) -> Plan:
    """Return the cheapest plan to rebuild a version; see ``ReadPlanner.cheapest``."""
    return ReadPlanner(run, avoid).cheapest(target)

"""``ReadPlanner`` plans how to read a version: a root, then deltas and merged deltas. The cost is the bytes to read.

The versions of a run form a tree: each builds on the one before, except where ``Manifest.breaks`` says otherwise. A
path goes up from the start to the nearest common ancestor by reverting versions, then down to the target. Within a
segment without breaks it takes the longest merged delta that begins at the current version, so that n versions take
O(log n) steps: merged deltas across 4, 16, 64 … versions begin and end at multiples of their length.

Readers and servers share this planner. Garbage collection has read every document, so it finds cheapest paths over all
of them (``maintenance.gc.graph``); a reader that did the same would read O(n) documents. Whatever a collection keeps, a
reader finds: ``tests/run/test_gc.py`` checks it.
"""

from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from vllm_delta_sync.errors import ChainError, DataError, DeltaSyncError, NotFoundError
from vllm_delta_sync.format.documents import Anchor, MergedDelta, Retention, anchor_key, merged_delta_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, ObjectRef, version_key
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.prefetch import read_ahead

logger = guarded_logger(__name__)

MERGE_WIDTH = 4
"""How many of the next shorter merged deltas one merged delta spans. Smaller ones mean more bytes for a writer, which
writes each change once per level; larger ones more steps and bytes for a reader. Over 100 versions of SmolLM2-135M at
learning rate 1e-6 (``benchmarks.catchup``), 2, 4 and 8 write 3.0, 1.3 and 0.7 times the bytes of the deltas, and a
reader reads 4, 6 and 13 objects, 9.6, 11.3 and 13.8 MB, on average. Readers find no merged deltas of another width."""


GALLOP = 1024
"""Versions that ``ReadPlanner.reach`` first tries to cross at once."""


class GapError(ChainError):
    """No documents in the bucket lead from one version to the other."""


@dataclass(frozen=True)
class Step:
    """One delta or merged delta to apply, or to revert.

    Attributes:
        run: the run that has its objects. document: the manifest of a delta, or a merged delta.
        backwards: whether it is reverted.
    """

    run: RunDocuments
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
    def reversible(self) -> bool:
        return self.document.reversible

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
    def low_digest(self) -> str | None:
        """Digest of the manifest of ``low``; None if the document does not contain it."""
        if isinstance(self.document, MergedDelta):
            return self.document.first_manifest
        return self.document.parent if self.document.base_version == self.document.version - 1 else None

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

    run: RunDocuments
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

    def __init__(self, run: RunDocuments, avoid: Collection[str] = ()) -> None:
        self._run = run
        self._avoid = avoid
        self._manifests: dict[int, Manifest] = {}
        self._merged: dict[tuple[int, int], MergedDelta | None] = {}
        self._breaks: dict[int, int | None] = {}
        self._rewritten: set[int] = set()
        self._retention: Retention | None = None
        self._retention_read = False
        self._damaged = False

    def add_manifests(self, *manifests: Manifest) -> None:
        """Add manifests that were read already, so that they are not read again."""
        self._manifests.update({manifest.version: manifest for manifest in manifests})

    def path(self, start: int, target: int) -> list[Step]:
        """Return the steps from one version to another, none if they are equal; each fits the manifests at its ends.

        Raises:
            GapError: there is no path; the message names the obstacle. StoreError: the store failed.
        """
        while start != target:
            steps = self._find_steps(start, target)
            mismatch = self._first_contradiction(steps, (start, target))
            if mismatch is None:
                return steps
            if not isinstance(mismatch.document, MergedDelta):
                self._rewritten.add(mismatch.high)
            elif not self._read_ends(mismatch):
                self._merged[mismatch.low, mismatch.high] = None
        return []

    def _read_ends(self, mismatch: Step) -> bool:
        """Read the manifests at both ends of a merged delta, to find out which of two documents that disagree is wrong.

        Also reads the manifest after each, which tells whether it is itself the one that is wrong.

        Returns:
            Whether a manifest was read that was not known before.
        """
        known = len(self._manifests)
        for version in (mismatch.low, mismatch.low + 1, mismatch.high, mismatch.high + 1):
            try:
                self.manifest(version)
            except DataError:
                continue
        return len(self._manifests) > known

    def _find_steps(self, start: int, target: int) -> list[Step]:
        top = self.manifest(max(start, target))
        self._breaks = {item.version: item.base_version for item in top.breaks}
        up, down = _lineage(start, self._breaks), _lineage(target, self._breaks)
        starts = [begin for begin, _ in down]
        common = next((index for index, (begin, _) in enumerate(up) if begin in starts), None)
        if common is None:
            raise GapError(f"version {target} does not descend from version {start}: an anchor lies between them")
        steps: list[Step] = []
        for begin, end in up[:common]:
            self._back(end, begin, steps)
            steps.append(self._reversed(self._delta(begin)))
        shared = starts.index(up[common][0])
        ancestor = min(up[common][1], down[shared][1])
        self._back(up[common][1], ancestor, steps)
        self._forward_or_around(ancestor, down[shared], steps)
        for begin, end in reversed(down[:shared]):
            steps.append(self._delta(begin))
            self._forward(begin, end, steps)
        return steps

    def manifest(self, version: int) -> Manifest:
        """Return a version's manifest. Errors as ``RunDocuments.manifest``."""
        if version not in self._manifests:
            self._manifests[version] = self._run.manifest(version)
        return self._manifests[version]

    def reach(self, start: int, target: int) -> list[int]:
        """Return the versions up to ``target`` that steps lead to, each from the one before, the first from ``start``.

        Found by a galloping search. A version may be reachable from one version and not from the one before it, by a
        merged delta that leads back, for example.

        Raises:
            StoreError: the store failed.
        """
        stops: list[int] = []
        at, span = start, GALLOP
        while at < target and span:
            tried = min(target, at + span)
            try:
                self.path(at, tried)
            except DataError:
                span = (tried - at) // 2
                continue
            stops.append(tried)
            at = tried
        return stops

    def roots(self, target: Manifest) -> list[tuple[int, bool]]:
        """Return where a read may begin: the versions up to ``target`` that build on none or have a standalone anchor.

        Returns:
            (version, whether that is its standalone anchor), newest first.
        """
        inside = [(0, False), *((item.version, False) for item in target.breaks if item.base_version is None)]
        found = [*inside, *((version, True) for version in self._run.anchors())]
        return sorted(((version, anchored) for version, anchored in found if version <= target.version), reverse=True)

    def plan_from(self, version: int, anchored: bool, target: int) -> Plan:
        """Plan a version from one of ``roots``; if the root is the target itself, the plan has no steps.

        Raises:
            NotFoundError, ChainError, FormatError: the root is missing, bad, or avoided. Otherwise as ``path``.
        """
        return Plan(self._run, self._root(version, anchored, target), self.path(version, target))

    def is_avoided(self, version: int, anchored: bool) -> bool:
        """Return whether the document of one of ``roots`` turned out to be bad."""
        return (anchor_key(version) if anchored else version_key(version)) in self._avoid

    def _root(self, version: int, anchored: bool, target: int) -> Root:
        if self.is_avoided(version, anchored):
            raise NotFoundError(f"version {version}, which version {target} builds on, is damaged or missing")
        manifest = self.manifest(version)
        anchor = self._run.anchor(version) if anchored else None
        if anchor is not None and (anchor.manifest, anchor.fingerprint) != (manifest.digest, manifest.fingerprint):
            raise ChainError(
                f"the anchor of version {version} was made from another manifest of that version, {anchor.manifest}"
            )
        return Root(manifest, anchor)

    def cheapest(self, target: Manifest) -> Plan:
        """Plan the cheapest way to rebuild a version from the bucket and, if the run refers to one, its base.

        Compares the newest usable standalone anchor with the version that all others build on.

        Raises:
            DataError: of the first bad anchor, else of the last root tried. StoreError: the store failed.
        """
        self.add_manifests(target)
        segments = _lineage(target.version, {item.version: item.base_version for item in target.breaks})
        best: Plan | None = None
        bad_anchor: DataError | None = None
        failure: DeltaSyncError = GapError(f"version {target.version} cannot be rebuilt: no usable root is left")
        for version, anchored in self.roots(target):
            if anchored:
                # All anchors cost the same, and from the newest one the path is the shortest.
                if best is not None or not any(first <= version <= last for first, last in segments):
                    continue
            elif version != segments[-1][0]:
                continue
            try:
                root = self._root(version, anchored, target.version)
            except DataError as error:
                failure = error
                if anchored and not self.is_avoided(version, anchored):
                    logger.warning("%s cannot be used: %s", anchor_key(version), error)
                    bad_anchor = bad_anchor or error
                    self._damaged = True
                continue
            try:
                found = Plan(self._run, root, self.path(version, target.version))
            except DataError as error:
                failure = error
                continue
            if best is None or found.bytes < best.bytes:
                best = found
        if best is None:
            raise bad_anchor or failure
        return best

    def _read_early(self, at: int, to: int) -> None:
        """Read in parallel what the fewest steps forward need. Mostly all of it exists; if not, it costs requests."""
        wanted: list[tuple[int, int]] = []
        while at < to:
            size = next(iter(_sizes(at, to - at)), 1)
            wanted.append((at, at + size))
            at += size

        def read(ends: tuple[int, int]) -> None:
            if ends[1] - ends[0] > 1:
                self._merged_delta(*ends)
            else:
                with suppress(DataError):
                    self.manifest(ends[1])

        if self._run.is_remote and len(wanted) > 1:
            deque(read_ahead(read, wanted), maxlen=0)

    def _forward(self, at: int, to: int, steps: list[Step]) -> None:
        self._read_early(at, to)
        while at < to:
            steps.append(self._merged_from(at, to) or self._delta(at + 1))
            at = steps[-1].high

    def _forward_or_around(self, at: int, segment: tuple[int, int], steps: list[Step]) -> None:
        """Add steps to the end of a segment. If versions are missing, go back first, to a merged delta that spans them.

        Garbage collection keeps the cheapest path from a served version to the head, which may begin with a step back.
        """
        begin, to = segment
        found: list[Step] = []
        try:
            self._forward(at, to, found)
        except GapError as gap:
            starts = {at - at % size for size in _sizes(0, to)}
            for start in sorted((start for start in starts if begin <= start < at), reverse=True):
                found = []
                try:
                    self._back(at, start, found)
                    self._forward(start, to, found)
                    break
                except GapError:
                    continue
            else:
                raise gap
        steps += found

    def _back(self, at: int, to: int, steps: list[Step]) -> None:
        while at > to:
            steps.append(self._reversed(self._merged_to(at, to) or self._delta(at)))
            at = steps[-1].low

    def _reversed(self, step: Step) -> Step:
        if not step.reversible:
            # A merged delta over that version alone may be. There is none for a version that builds on an older one.
            merged = None if step.high in self._breaks else self._merged_delta(step.high - 1, step.high)
            if merged is None or not merged.reversible:
                raise GapError(f"version {step.high} cannot be reverted to {step.low}: its delta replaced bits")
            step = Step(self._run, merged)
        return Step(step.run, step.document, backwards=True)

    def _merged_from(self, at: int, to: int) -> Step | None:
        return self._first([(at, at + size) for size in _sizes(at, to - at)])

    def _merged_to(self, at: int, to: int) -> Step | None:
        found = self._first([(at - size, at) for size in _sizes(at, at - to)])
        return found if found is not None and found.reversible else None

    def _first(self, ranges: list[tuple[int, int]]) -> Step | None:
        for first, last in ranges:
            merged = self._merged_delta(first, last)
            if merged is not None:
                return Step(self._run, merged)
        return None

    def _merged_delta(self, first: int, last: int) -> MergedDelta | None:
        if merged_delta_key(first, last) in self._avoid:
            return None
        if (first, last) not in self._merged:
            try:
                self._merged[first, last] = self._run.merged_delta(first, last)
            except DataError:
                # Missing or damaged: the deltas of its versions may lead there too.
                self._merged[first, last] = None
        return self._merged[first, last]

    def _delta(self, version: int) -> Step:
        """Return the step into a version from the one it builds on: its delta, or a merged delta if that is lost."""
        reason, problem = "", None
        if self._is_collected(version):
            reason = "is no longer kept"
        elif version_key(version) in self._avoid:
            reason = "is damaged or missing"
        elif version in self._rewritten:
            reason = "is not the one that the next version names: the history was rewritten"
        else:
            try:
                manifest = self.manifest(version)
                if manifest.kind == "delta":
                    return Step(self._run, manifest)
                reason = f"is of kind {manifest.kind!r}"
            except DataError as error:
                reason, problem = f"cannot be read ({error.message})", error
        # No merged delta ends at a version that does not build on the one before.
        repaired = None if version in self._breaks else self._merged_delta(version - 1, version)
        if repaired is None:
            raise GapError(f"version {version} {reason}, and no merged delta spans it") from problem
        return Step(self._run, repaired)

    def _is_collected(self, version: int) -> bool:
        # Reading retention.json is one more request, so it is read only after something turned out to be bad.
        if not self._avoid and not self._damaged:
            return False
        if not self._retention_read:
            self._retention_read, self._retention = True, self._run.retention()
        return self._retention is not None and self._retention.is_gone(version)

    def _first_contradiction(self, steps: list[Step], ends: tuple[int, int]) -> Step | None:
        """Return the first step, if any, that names other manifests than those at its ends or than adjacent steps.

        The newest manifest speaks first, because each is confirmed by the one after it.
        """
        known = {version: self._manifests[version].digest for version in ends if version in self._manifests}
        for version, manifest in sorted(self._manifests.items(), reverse=True):
            if known.setdefault(version, manifest.digest) == manifest.digest and manifest.parent is not None:
                known.setdefault(version - 1, manifest.parent)
        steps = sorted(steps, key=lambda step: (isinstance(step.document, MergedDelta), -step.high))
        return next((step for step in steps if _contradicts(step, known)), None)


def _contradicts(step: Step, known: dict[int, str]) -> bool:
    """Return whether the step contradicts ``known``. Adds the manifests that it names to ``known``."""
    named = (step.high, step.high_digest), (step.low, step.low_digest)
    return any(digest is not None and known.setdefault(version, digest) != digest for version, digest in named)


def _lineage(version: int, breaks: dict[int, int | None]) -> list[tuple[int, int]]:
    """Return a version and its ancestors as segments (first, last) of consecutive versions, youngest first."""
    found: list[tuple[int, int]] = []
    while True:
        begin = max((number for number in breaks if number <= version), default=0)
        found.append((begin, version))
        base = breaks.get(begin)
        if base is None:
            return found
        version = base


def _sizes(at: int, span: int) -> list[int]:
    """Return the lengths of merged deltas that can begin or end at version ``at``, up to ``span``, longest first."""
    sizes = []
    size = MERGE_WIDTH
    while size <= span and at % size == 0:
        sizes.append(size)
        size *= MERGE_WIDTH
    return sizes[::-1]


def is_merge_range(first: int, last: int) -> bool:
    """Return whether readers look for a merged delta between two versions."""
    # One across a single version stands in for that version's delta.
    return last - first == 1 or last - first in _sizes(first, last - first)


def find_steps(run: RunDocuments, start: int, target: int, avoid: Collection[str] = ()) -> list[Step]:
    """Return the steps from one version of a run to another; see ``ReadPlanner.path``."""
    return ReadPlanner(run, avoid).path(start, target)


def plan_read(run: RunDocuments, target: Manifest, avoid: Collection[str] = ()) -> Plan:
    """Return the cheapest plan to rebuild a version; see ``ReadPlanner.cheapest``."""
    return ReadPlanner(run, avoid).cheapest(target)

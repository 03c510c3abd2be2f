"""The way from one version to another: which deltas and folded ranges to apply, in which direction, from which root.

The versions of a run form a tree: each builds on the one before, except where ``Manifest.breaks`` says otherwise. A
way goes up from what is held to the nearest common ancestor, taking versions back, and down to the target. Along a
stretch without breaks it takes the longest folded range that begins where it is, so that n versions are O(log n)
steps: ranges of 4, 16, 64 … versions begin and end at multiples of their length.
"""

from collections.abc import Collection
from dataclasses import dataclass

from vllm_delta_sync.errors import ChainError, DeltaSyncError, NotFoundError, StoreError
from vllm_delta_sync.format.documents import MergedDelta, Retention, anchor_key, merged_delta_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, ObjectRef, version_key
from vllm_delta_sync.run.documents import RunDocuments

FOLD_WIDTH = 4
"""A folded range takes so many of the next shorter ones. A power of two up to 8 makes little difference: fewer steps
for a reader against more bytes for a writer, who writes what changed once for every level."""


class GapError(ChainError):
    """Nothing in the bucket leads from one version to the other."""


@dataclass(frozen=True)
class Step:
    """One document applied, or taken back.

    Attributes:
        run: where its objects are. document: a delta's manifest, or a folded range.
        backwards: whether it is taken back.
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
        """The version that is there afterwards."""
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
        """Key of the document: what to avoid if it turns out to be bad."""
        if isinstance(self.document, MergedDelta):
            return merged_delta_key(self.document.first, self.document.last)
        return version_key(self.document.version)

    @property
    def high_digest(self) -> str:
        """Digest of the manifest of ``high``."""
        return self.document.last_manifest if isinstance(self.document, MergedDelta) else self.document.digest

    @property
    def low_digest(self) -> str | None:
        """Digest of the manifest of ``low``; None where the document does not say."""
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
class Plan:
    """How to come to a version from nothing.

    Attributes:
        run, root: the version to begin with. beside: whether its weights are in an anchor beside the chain, rather
            than where the manifest says.
        steps: from there on. bytes: to read in all.
    """

    run: RunDocuments
    root: Manifest
    beside: bool
    steps: list[Step]
    bytes: int

    @property
    def root_key(self) -> str:
        """Key of the document that the root is read from: what to avoid if it turns out to be bad."""
        return anchor_key(self.root.version) if self.beside else version_key(self.root.version)


class Planner:
    """Plans ways in one run. Remembers what it has read: make a new one after new versions.

    Args:
        avoid: keys of documents that turned out to be bad; may grow afterwards.
    """

    def __init__(self, run: RunDocuments, avoid: Collection[str] = ()) -> None:
        self._run = run
        self._avoid = avoid
        self._manifests: dict[int, Manifest] = {}
        self._folds: dict[tuple[int, int], MergedDelta | None] = {}
        self._breaks: dict[int, int | None] = {}
        self._rewritten: set[int] = set()
        self._retention: Retention | None = None
        self._asked = False

    def know(self, *manifests: Manifest) -> None:
        """Spare reading these."""
        self._manifests.update({manifest.version: manifest for manifest in manifests})

    def path(self, held: int, target: int) -> list[Step]:
        """The steps from one version to another, none if they are the same; each names the manifests of both its ends.

        Raises:
            GapError: there is no way; the message names what is in between. StoreError: the store failed.
        """
        while held != target:
            steps = self._walk(held, target)
            odd = self._unlinked(steps, (held, target))
            if odd is None:
                return steps
            if not isinstance(odd.document, MergedDelta):
                self._rewritten.add(odd.high)
            elif not self._learn(odd):
                self._folds[odd.low, odd.high] = None
        return []

    def _learn(self, odd: Step) -> bool:
        """Read the manifests at both ends of a folded range, to tell which of two that disagree is wrong."""
        known = len(self._manifests)
        for version in (odd.low, odd.high):
            try:
                self.manifest(version)
            except StoreError:
                raise
            except DeltaSyncError:
                continue
        return len(self._manifests) > known

    def _walk(self, held: int, target: int) -> list[Step]:
        top = self.manifest(max(held, target))
        self._breaks = {item.version: item.base_version for item in top.breaks}
        up, down = _stretches(held, self._breaks), _stretches(target, self._breaks)
        starts = [begin for begin, _ in down]
        common = next((place for place, (begin, _) in enumerate(up) if begin in starts), None)
        if common is None:
            raise GapError(f"version {target} does not come from version {held}: an anchor lies between them")
        steps: list[Step] = []
        for begin, end in up[:common]:
            self._back(end, begin, steps)
            steps.append(self._reversed(self._delta(begin)))
        across = starts.index(up[common][0])
        meet = min(up[common][1], down[across][1])
        self._back(up[common][1], meet, steps)
        self._forward_or_around(meet, down[across], steps)
        for begin, end in reversed(down[:across]):
            steps.append(self._delta(begin))
            self._forward(begin, end, steps)
        return steps

    def manifest(self, version: int) -> Manifest:
        """A version's manifest. Errors as ``RunDocuments.manifest``."""
        if version not in self._manifests:
            self._manifests[version] = self._run.manifest(version)
        return self._manifests[version]

    def _forward(self, at: int, to: int, steps: list[Step]) -> None:
        while at < to:
            steps.append(self._fold_from(at, to) or self._delta(at + 1))
            at = steps[-1].high

    def _forward_or_around(self, at: int, stretch: tuple[int, int], steps: list[Step]) -> None:
        """Steps to the end of a stretch. Where versions are missing: back first, to a merged delta that spans them.

        Garbage collection keeps the cheapest path from a served version to the head, which may begin with a step back.
        """
        begin, to = stretch
        way: list[Step] = []
        try:
            self._forward(at, to, way)
        except GapError as gap:
            starts = {at - at % size for size in _sizes(0, to)}
            for start in sorted((start for start in starts if begin <= start < at), reverse=True):
                way = []
                try:
                    self._back(at, start, way)
                    self._forward(start, to, way)
                    break
                except GapError:
                    continue
            else:
                raise gap
        steps += way

    def _back(self, at: int, to: int, steps: list[Step]) -> None:
        while at > to:
            steps.append(self._reversed(self._fold_to(at, to) or self._delta(at)))
            at = steps[-1].low

    def _reversed(self, step: Step) -> Step:
        if not step.reversible:
            raise GapError(f"version {step.high} cannot be taken back to {step.low}: it replaced bits")
        return Step(step.run, step.document, backwards=True)

    def _fold_from(self, at: int, to: int) -> Step | None:
        return self._first([(at, at + size) for size in _sizes(at, to - at)])

    def _fold_to(self, at: int, to: int) -> Step | None:
        found = self._first([(at - size, at) for size in _sizes(at, at - to)])
        return found if found is not None and found.reversible else None

    def _first(self, ranges: list[tuple[int, int]]) -> Step | None:
        for first, last in ranges:
            folded = self._folded(first, last)
            if folded is not None:
                return Step(self._run, folded)
        return None

    def _folded(self, first: int, last: int) -> MergedDelta | None:
        if merged_delta_key(first, last) in self._avoid:
            return None
        if (first, last) not in self._folds:
            try:
                self._folds[first, last] = self._run.folded(first, last)
            except StoreError:
                raise
            except DeltaSyncError:
                # Missing, or damaged: the versions themselves are another way.
                self._folds[first, last] = None
        return self._folds[first, last]

    def _delta(self, version: int) -> Step:
        """The step into a version from the one that it builds on; a folded range in its place if it is lost."""
        reason, problem = "", None
        if self._gone(version):
            reason = "is no longer kept"
        elif version_key(version) in self._avoid:
            reason = "is damaged or missing"
        elif version in self._rewritten:
            reason = "is not the one that the version after it names: the history was rewritten"
        else:
            try:
                manifest = self.manifest(version)
                if manifest.kind == "delta":
                    return Step(self._run, manifest)
                reason = f"is of kind {manifest.kind!r}"
            except StoreError:
                raise
            except DeltaSyncError as error:
                reason, problem = f"cannot be read ({error.message})", error
        # A range never ends at a version that does not build on the one before.
        repaired = None if version in self._breaks else self._folded(version - 1, version)
        if repaired is None:
            raise GapError(f"version {version} {reason}, and no folded range leads across it") from problem
        return Step(self._run, repaired)

    def _gone(self, version: int) -> bool:
        # Only for those who have met a hole: it is one more request.
        if not self._avoid:
            return False
        if not self._asked:
            self._asked, self._retention = True, self._run.retention()
        return self._retention is not None and self._retention.is_gone(version)

    def _unlinked(self, steps: list[Step], ends: tuple[int, int]) -> Step | None:
        """The first step that names another manifest than those at both ends, or than the steps beside it.

        Deltas are asked first, the newest first: each is vouched for by the one after it.
        """
        known = {version: self._manifests[version].digest for version in ends if version in self._manifests}
        deltas = [step for step in steps if not isinstance(step.document, MergedDelta)]
        for step in sorted(deltas, key=lambda step: -step.high):
            if (odd := _contradicts(step, known)) is not None:
                return odd
        for version, manifest in self._manifests.items():
            known.setdefault(version, manifest.digest)
        folds = (step for step in steps if isinstance(step.document, MergedDelta))
        return next((odd for step in folds if (odd := _contradicts(step, known)) is not None), None)


def _contradicts(step: Step, known: dict[int, str]) -> Step | None:
    """The step, if it names other manifests than those known; they are known afterwards."""
    for version, digest in ((step.high, step.high_digest), (step.low, step.low_digest)):
        if digest is not None and known.setdefault(version, digest) != digest:
            return step
    return None


def _stretches(version: int, breaks: dict[int, int | None]) -> list[tuple[int, int]]:
    """The ancestors of a version as runs of consecutive versions (first, last), youngest first."""
    found: list[tuple[int, int]] = []
    while True:
        begin = max((number for number in breaks if number <= version), default=0)
        found.append((begin, version))
        base = breaks.get(begin)
        if base is None:
            return found
        version = base


def _sizes(at: int, span: int) -> list[int]:
    """Lengths of folded ranges that can begin or end at a version, longest first."""
    sizes = []
    size = FOLD_WIDTH
    while size <= span and at % size == 0:
        sizes.append(size)
        size *= FOLD_WIDTH
    return sizes[::-1]


def path(run: RunDocuments, held: int, target: int, avoid: Collection[str] = ()) -> list[Step]:
    """The steps from one version of a run to another; see ``Planner.path``."""
    return Planner(run, avoid).path(held, target)


def plan(run: RunDocuments, target: Manifest, avoid: Collection[str] = (), anchors: bool = True) -> Plan:
    """The cheapest way to a version from nothing but the bucket and, if the run refers to one, the base's checkpoint.

    Compares the version that everything else builds on with the newest anchors beside the chain, by bytes to read. A
    checkpoint that is at hand costs nothing.

    Args:
        avoid: keys of documents that turned out to be bad. anchors: whether to look at those beside the chain.

    Raises:
        GapError, or what else was wrong with the last root tried. StoreError: the store failed.
    """
    planner = Planner(run, avoid)
    planner.know(target)
    best: Plan | None = None
    failure: DeltaSyncError = GapError(f"version {target.version}: nothing that could be built on is left")
    breaks = {item.version: item.base_version for item in target.breaks}
    ancestors = _stretches(target.version, breaks)
    roots = [(ancestors[-1][0], False)]
    if anchors:
        usable = (version for version in run.anchors() if any(first <= version <= last for first, last in ancestors))
        # Newest first: the way from there is the shortest.
        beside = [(version, True) for version in usable if anchor_key(version) not in avoid]
        roots = beside[::-1] + roots
    for version, is_beside in roots:
        if best is not None and is_beside:
            continue
        try:
            found = _from_root(run, planner, version, is_beside, target, avoid)
        except StoreError:
            raise
        except DeltaSyncError as error:
            failure = error
            continue
        if best is None or found.bytes < best.bytes:
            best = found
    if best is None:
        raise failure
    return best


def _from_root(
    run: RunDocuments, planner: Planner, version: int, beside: bool, target: Manifest, avoid: Collection[str]
) -> Plan:
    if not beside and version_key(version) in avoid:
        raise NotFoundError(f"version {version}, which version {target.version} builds on, is damaged or missing")
    root = planner.manifest(version)
    if beside:
        cost = run.table.full_bytes
    else:
        cost = root.payload_bytes
        if root.base is not None and root.base.run is not None:
            # A branch: what the run that it comes from costs is known only there; at most all of the model.
            cost = run.table.full_bytes
    steps = planner.path(version, target.version)
    return Plan(run, root, beside, steps, cost + sum(step.payload_bytes for step in steps))

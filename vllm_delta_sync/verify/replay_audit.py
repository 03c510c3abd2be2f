"""``ReplayAudit`` checks the objects of a run, and the weights that they lead to, version by version.

What proves good goes into a graph of versions (``run.graph``). In the end a version exists if that graph reaches it.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vllm_delta_sync.errors import BaseUnavailableError, DataError, FingerprintError, NotFoundError, UsageError
from vllm_delta_sync.format.documents import Anchor, MergedDelta, anchor_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, version_key
from vllm_delta_sync.run.checks import describe_document
from vllm_delta_sync.run.graph import ROOT, Edge, Move, VersionGraph, Ways
from vllm_delta_sync.run.read_plan import GapError, Root, Step
from vllm_delta_sync.run.restore import BaseMissingError, apply_step, check_step, load_root
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.early_reads import EarlyReads
from vllm_delta_sync.verify.object_audit import ObjectAudit
from vllm_delta_sync.verify.report import Finding, Findings, VerifyReport
from vllm_delta_sync.verify.simulate import first_wrong_tensor


class ReplayAudit:
    """Checks a run whose documents were audited. Call ``audit_version`` for each of ``versions``, then ``finish``.

    Args:
        base: as ``run.restore.restore``.

    Attributes:
        good: the documents whose objects are good, as far as they were checked.
        loaded, state: the version that is loaded, and its weights; None if there is none.
    """

    def __init__(
        self,
        run: RunReader,
        documents: DocumentAudit,
        base: str | Path | None,
        findings: Findings,
        report: VerifyReport,
    ) -> None:
        self._run, self._documents, self._base, self._findings, self._report = run, documents, base, findings, report
        self._record = run.retention()
        self._starts: dict[int, list[int]] = {}
        for first, last in sorted(documents.merged_deltas):
            self._starts.setdefault(first, []).append(last)
        self._early = EarlyReads(run, documents.manifest, self._starts, self._is_gone)
        self._objects = ObjectAudit(run, self._early, report)
        # What the weights can be rebuilt from: without the roots whose base is not there.
        self._usable = VersionGraph()
        # Found anew once something is added next to it or dropped: not for each version behind one that is lost.
        self._reached: Ways | None = None
        self.good = VersionGraph()
        self.loaded: int | None = None
        self.state: ModelState | None = None

    def versions(self) -> Iterator[tuple[int, Manifest | None]]:
        """Yield what ``audit_version`` takes, version by version."""
        return self._early.versions(self._documents.top)

    def audit_version(self, version: int, manifest: Manifest | None) -> None:
        """Check the objects of a version, of its standalone anchor, and of the merged deltas that begin with it.

        Args:
            manifest: the version's manifest; None if it is not good.

        Raises:
            BaseUnavailableError: the base that the caller gave is not the run's. StoreError: the store failed.
        """
        if manifest is not None and self._is_gone(version):
            self._report.gone += 1
        elif manifest is not None and manifest.kind == "delta":
            self._check_step(manifest)
        elif manifest is not None:
            self._check_whole(manifest)
        # Only the document may be missing: a collection may have removed it since it was listed.
        if manifest is not None and version in self._documents.anchors:
            anchor = None
            with suppress(NotFoundError):
                anchor = self._run.anchor(version)
            self._report.anchors += anchor is not None and self._check_whole(anchor)
        for last in self._starts.get(version, ()):
            merged = None
            with suppress(NotFoundError):
                merged = self._early.merged_delta(version, last)
            self._report.merged_deltas += merged is not None and self._check_step(merged)

    def finish(self) -> None:
        """Add the versions that nothing leads to, and that retention did not give up, to the report.

        Raises:
            GapError: there is one, nothing else was found, and findings are raised. StoreError: the store failed.
        """
        record = self._run.retention()  # a collection may have removed something during this audit
        reached = self.good.ways()
        exists = {version for version in self._documents.manifests if version in reached}
        versions = range(self._documents.top + 1)
        kept = [version for version in versions if record is None or not record.gave_up(version)]
        self._report.unreadable = [version for version in kept if version not in exists]
        self._report.replayed &= not self._report.unreadable
        if self._report.unreadable and not self._findings.items:
            version = self._report.unreadable[0]
            missing = GapError(f"version {version} is kept, but no document that is left leads to it")
            self._findings.add(Finding(version_key(version), missing, version))

    def _check_step(self, document: Manifest | MergedDelta) -> bool:
        """Return whether a delta or merged delta is good: its objects, what they declare, and what they make of the
        weights that they are for, if these can be rebuilt."""
        step = Step(self._run, document)
        key, low, high = step.key, step.low, step.high
        if isinstance(document, MergedDelta):
            before: str | None = document.first_fingerprint
        else:
            base = self._documents.manifests.get(low)
            before = None if base is None else base.fingerprint
        state = self.state if self._move(low) else None
        changes, found = self._objects.read(document, key, high, state)
        if changes is not None:
            try:
                if before is not None:
                    check_step(step, Fingerprint.from_hex(before), changes.fingerprint)
            except FingerprintError as error:
                shown = FingerprintError(f"{describe_document(document)}: {error.message}")
                found.append(Finding(key, shown, high))
            wrong = None if state is None or found else first_wrong_tensor(state, changes)
            if wrong is not None:
                other = FingerprintError(
                    f"{describe_document(document)}: tensor {wrong!r} does not have the declared fingerprint after the "
                    "change: the object was made against other weights, or is damaged"
                )
                found.append(Finding(key, other, high, tensor=wrong))
            elif state is not None and not found and isinstance(document, Manifest):
                state.apply(changes)
                self.loaded = high
        return self._settle(Edge(key, low, high, document.payload_bytes, document.reversible), found)

    def _check_whole(self, document: Manifest | Anchor) -> bool:
        """Return whether an anchor is good, or a version that is stored whole or refers to a base."""
        version = document.version
        key = anchor_key(version) if isinstance(document, Anchor) else version_key(version)
        found: list[Finding] = []
        if isinstance(document, Anchor) or document.kind == "anchor":
            state = self.state if self.loaded == version else None
            found = self._objects.check_whole(document, key, version, state)
        return self._settle(Edge(key, ROOT, version, document.payload_bytes), found)

    def _settle(self, edge: Edge, found: list[Finding]) -> bool:
        if found and self._was_removed(edge, found):
            return False
        for finding in found:
            self._findings.add(finding)
        if found:
            return False
        self.good.put(edge)
        self._usable.put(edge)
        if self._reached is not None and (edge.low in self._reached or edge.high in self._reached):
            self._reached = None
        return True

    def _drop(self, key: str) -> None:
        self._usable.drop(key)
        self._reached = None

    def _was_removed(self, edge: Edge, found: list[Finding]) -> bool:
        """Return whether a collection removed a document during this audit: then its objects are missing on purpose."""
        if not all(isinstance(finding.error, NotFoundError) for finding in found):
            return False
        if edge.key == version_key(edge.high):
            self._record = self._run.retention()
            gone = self._is_gone(edge.high)
            self._report.gone += gone
            return gone
        try:
            self._run.bucket.stat(edge.key)
        except NotFoundError:
            return True
        return False

    # Weights

    def _move(self, target: int) -> bool:
        """Load a version, by documents that proved good; return whether that was possible."""
        way = None if self.loaded is None else self._usable.way(self.loaded, target)
        while way is None:
            # Released before loading: one model is in memory at a time.
            self.loaded = self.state = None
            if self._reached is None:
                self._reached = self._usable.ways()
            way = self._reached.to(target)
            if way is None:
                return False
            if not self._load(way[0]):
                way = None
                continue
            way = way[1:]
        for move in way:
            if not self._apply(move):
                return self._move(target)
        return True

    def _load(self, move: Move) -> bool:
        """Load a root. One whose base is not there is not tried again."""
        version, key = move.end, move.edge.key
        try:
            anchor = self._run.anchor(version) if key == anchor_key(version) else None
            self.state = load_root(self._run, Root(self._run.manifest(version), anchor), base=self._base)
            self.loaded = version
            return True
        except BaseUnavailableError as error:
            self._report.replayed = False
            if self._base is not None:
                # It is an operand of the caller, and says nothing about the run.
                raise
            if isinstance(error, BaseMissingError):
                note = f"weights were not rebuilt: {error}"
                self._report.notes += [] if note in self._report.notes else [note]
            else:
                self._findings.add(Finding(key, error, version))
        except (DataError, UsageError):
            pass  # removed or replaced since it was checked
        self._drop(key)
        return False

    def _apply(self, move: Move) -> bool:
        low, high = move.edge.low, move.edge.high
        document: Manifest | MergedDelta
        try:
            is_delta = move.edge.key == version_key(high)
            document = self._run.manifest(high) if is_delta else self._run.merged_delta(low, high)
            if self.state is not None:
                apply_step(Step(self._run, document, move.backwards), self.state, in_pieces=False)
        except DataError:
            # Removed or replaced since it was checked. A change that does not fit leaves the weights unusable.
            self._drop(move.edge.key)
            self.loaded = self.state = None
            return False
        self.loaded = move.end
        return True

    def _is_gone(self, version: int) -> bool:
        return self._record is not None and self._record.is_gone(version)

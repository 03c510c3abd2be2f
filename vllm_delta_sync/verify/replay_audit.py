"""``ReplayAudit`` rebuilds the versions of a run in order, one at a time, and checks their objects and weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from vllm_delta_sync.errors import (
    BaseUnavailableError,
    DataError,
    FingerprintError,
    NotFoundError,
    UsageError,
)
from vllm_delta_sync.format.documents import Retention, anchor_key, merged_delta_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, version_key
from vllm_delta_sync.run.checks import check_fingerprint, describe_document
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.read_plan import GapError, ReadPlanner, Root, Step, plan_read
from vllm_delta_sync.run.restore import check_step, load_root, restore, step_changes
from vllm_delta_sync.run.roots import BaseMissingError
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.early_reads import EarlyReads
from vllm_delta_sync.verify.object_audit import ObjectAudit, wrong_tensor
from vllm_delta_sync.verify.report import Finding, Findings, VerifyReport
from vllm_delta_sync.verify.simulate import first_mismatch, first_wrong_tensor, simulate_fingerprints

_Cause = Literal["bad", "gone", "base"]


class ReplayAudit:
    """Replays a run; call ``audit_version`` for each of ``versions``, in order.

    Args:
        base: as ``run.restore.restore``.

    Attributes:
        loaded, state: the version that is loaded, and its weights; None if there is none.
        causes: why versions were not reached: damage (``bad``), retention (``gone``), a missing or other base
            (``base``).
        unreadable: versions that cannot be rebuilt because of damage.
    """

    def __init__(
        self,
        run: RunDocuments,
        documents: DocumentAudit,
        base: str | Path | None,
        findings: Findings,
        report: VerifyReport,
    ) -> None:
        self._run, self._documents, self._base, self._findings, self._report = run, documents, base, findings, report
        self._record: Retention | None = run.retention()
        # Keys of documents that no path may use: damaged, or without their objects.
        self._avoid = {finding.key for finding in documents.findings}
        self._starts: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}
        for first, last in documents.usable_merged_deltas():
            self._starts.setdefault(first, []).append(last)
            self._ends.setdefault(last, []).append(first)
        self._anchors = documents.usable_anchors()
        self._early = EarlyReads(run, documents.manifest, self._starts, self._is_gone)
        self._objects = ObjectAudit(run, self._early, report)
        self._good: set[str] = set()
        # (first, last) of a merged delta → the fingerprints by tensor id that it should lead to.
        self._expected: dict[tuple[int, int], list[Fingerprint]] = {}
        self.loaded: int | None = None
        self.state: ModelState | None = None
        self.causes: dict[int, _Cause] = {}
        self.unreadable: set[int] = set()

    def versions(self) -> Iterator[tuple[int, Manifest | None]]:
        """Yield what ``audit_version`` takes, version by version."""
        return self._early.versions(self._documents.top)

    def audit_version(self, version: int, manifest: Manifest | None) -> None:
        """Check a version, its standalone anchor, and the merged deltas that begin with it.

        Args:
            manifest: the version's manifest; None if it is not good.

        Raises:
            StoreError: the store failed. DeltaSyncError: the first finding, if findings are raised.
        """
        if manifest is None:
            self._skip_lost_manifest(version)
        else:
            self._audit_manifest(manifest)
        for last in self._starts.get(version, []):
            self._check_merged_delta(version, last)

    def _skip_lost_manifest(self, version: int) -> None:
        """Load a version whose manifest is lost from a merged delta that ends there, if there is one."""
        self.unreadable.add(version)
        for first in self._ends.get(version, []):
            if first not in self.causes and self._move(first) and self._apply_merged_delta(first, version):
                return
        self.causes[version] = "bad"

    def _audit_manifest(self, manifest: Manifest) -> None:
        version = manifest.version
        collected = self._is_gone(version)
        lost: list[Finding] = []
        if collected:
            self._report.gone += 1
        elif manifest.kind == "delta":
            lost = self._apply_delta(manifest)
        else:
            lost = self._load_whole(manifest)
        if collected or lost:
            self._avoid.add(version_key(version))
        # A version that builds on the one before it can only be reached otherwise by a merged delta, or if that one's
        # manifest is lost and a merged delta leads across it.
        continues = manifest.base_version == version - 1 and version - 1 in self._documents.digests
        if self.loaded != version and (version in self._ends or not continues):
            self._reach_otherwise(manifest)
        if version in self._anchors:
            self._check_anchor(manifest)
        if lost and all(isinstance(finding.error, NotFoundError) for finding in lost):
            self._record = self._run.retention()
            if self._is_gone(version):
                # Garbage collection removed the version during this audit.
                collected, lost = True, []
                self._report.gone += 1
        self._settle_lost(manifest, lost)
        if self.loaded == version:
            self._compare(manifest)
        else:
            self._explain(manifest, collected, lost)

    # A version's own objects

    def _apply_delta(self, manifest: Manifest) -> list[Finding]:
        """Read and check a delta, and apply it if its base version can be reached; returns what is wrong."""
        base = manifest.base_version if manifest.base_version is not None else 0
        at_base = base not in self.causes and self._move(base)
        key = version_key(manifest.version)
        base_state = self.state if at_base else None
        changes, lost = self._objects.read(manifest, key, manifest.version, base_state)
        if changes is None:
            return lost
        before = self._documents.fingerprints.get(base)
        error = self._objects.fingerprint_error(manifest, changes, before, manifest.fingerprint)
        if error is None and base_state is not None:
            wrong = first_wrong_tensor(base_state, changes)
            if wrong is None:
                base_state.apply(changes)
                self.loaded = manifest.version
                return []
            error = wrong_tensor(f"version {manifest.version}", wrong)
            return [Finding(key, error, manifest.version, tensor=wrong)]
        return [] if error is None else [Finding(key, error, manifest.version)]

    def _load_whole(self, manifest: Manifest) -> list[Finding]:
        """Check and load a version that is an anchor or refers to a checkpoint or run; returns what is wrong."""
        key = version_key(manifest.version)
        lost = self._objects.check_whole(manifest, key, manifest.version, None) if manifest.kind == "anchor" else []
        if lost:
            return lost
        self.loaded = self.state = None
        try:
            self.state = load_root(self._run, Root(manifest), base=self._base)
            self.loaded = manifest.version
        except BaseUnavailableError as error:
            self.causes[manifest.version] = "base"
            # A caller who gives a base wants the weights rebuilt; only the recorded base may be missing.
            if self._base is None and isinstance(error, BaseMissingError):
                self._note(f"weights were not rebuilt: {error}")
            else:
                self._findings.add(Finding(key, error, manifest.version))
        except (DataError, UsageError) as error:
            return [Finding(key, error, manifest.version)]
        return []

    # Standalone documents

    def _check_anchor(self, manifest: Manifest) -> None:
        """Check a version's standalone anchor, and load it if the version could not be reached otherwise."""
        version, key = manifest.version, anchor_key(manifest.version)
        try:
            anchor = self._run.anchor(version)
        except NotFoundError:
            return  # removed after it was listed
        state = self.state if self.loaded == version else None
        if self._report_standalone(key, self._objects.check_whole(anchor, key, version, state)):
            self._report.anchors += 1
            if state is None:
                self.loaded = self.state = None
                self.state = load_root(self._run, Root(manifest, anchor))
                self.loaded = version

    def _check_merged_delta(self, first: int, last: int) -> None:
        """Check a merged delta: its objects, what they declare, and what they would make of the loaded weights."""
        key = merged_delta_key(first, last)
        try:
            merged = self._early.merged_delta(first, last)
        except NotFoundError:
            return
        state = self.state if self.loaded == first else None
        changes, found = self._objects.read(merged, key, last, state)
        if changes is not None:
            ends = merged.first_fingerprint, merged.last_fingerprint
            error = self._objects.fingerprint_error(merged, changes, *ends)
            if error is not None:
                found.append(Finding(key, error, last))
            elif state is not None:
                measured = simulate_fingerprints(state, changes)
                wrong = first_mismatch(self._run.table, changes.fingerprints, measured)
                if wrong is not None:
                    found.append(Finding(key, wrong_tensor(describe_document(merged), wrong), last, tensor=wrong))
                else:
                    self._expected[first, last] = [
                        value + measured.get(tensor, Fingerprint()) for tensor, value in enumerate(state.fingerprints)
                    ]
        if self._report_standalone(key, found):
            self._report.merged_deltas += 1

    def _report_standalone(self, key: str, found: list[Finding]) -> bool:
        """Return whether a document is good; a bad one is reported and avoided from here on."""
        if found and all(isinstance(finding.error, NotFoundError) for finding in found):
            try:
                self._run.bucket.stat(key)
            except NotFoundError:
                found = []  # removed during this audit, with its objects
                self._avoid.add(key)
                return False
        for finding in found:
            self._findings.add(finding)
        (self._avoid if found else self._good).add(key)
        return not found

    # Moving from version to version

    def _move(self, target: int) -> bool:
        """Load a version that was reached before."""
        if self.loaded == target:
            return True
        manifest = self._documents.manifest(target)
        return self._follow(target) or (manifest is not None and self._restart(manifest))

    def _reach_otherwise(self, manifest: Manifest) -> None:
        """Reach a version without its own delta, as a reader would: from an older version or a root."""
        newest_break = max((item.version for item in manifest.breaks), default=0)
        if self.loaded is None or self.loaded < newest_break or not self._follow(manifest.version):
            self._restart(manifest)

    def _follow(self, target: int) -> bool:
        """Apply or revert deltas and merged deltas from the loaded version to ``target``."""
        while self.loaded is not None and self.loaded != target:
            try:
                steps = ReadPlanner(self._run, self._avoid).path(self.loaded, target)
            except DataError:
                return False
            for step in steps:
                if not self._apply(step):
                    break
        return self.loaded == target

    def _apply(self, step: Step) -> bool:
        state = self.state
        if state is None:
            return False
        try:
            apply_checked(step, state)
        except DataError:
            # It is a finding already, or becomes one when its version is audited.
            self._avoid.add(step.key)
            return False
        self.loaded = step.end
        return True

    def _apply_merged_delta(self, first: int, last: int) -> bool:
        try:
            return self._apply(Step(self._run, self._run.merged_delta(first, last)))
        except DataError:
            return False

    def _restart(self, manifest: Manifest) -> bool:
        """Rebuild a version from a root, if there is a path."""
        try:
            plan_read(self._run, manifest, self._avoid)
            # Released only when a plan exists, and before loading: one model is in memory at a time.
            self.loaded = self.state = None
            self.state = restore(self._run, manifest, self._base).state
        except (DataError, UsageError):
            return False
        self.loaded = manifest.version
        return True

    # Results

    def _compare(self, manifest: Manifest) -> None:
        """Compare the weights with the version's fingerprint, and with what merged deltas should lead to."""
        if self.state is None:
            return
        try:
            check_fingerprint(manifest, self.state.fingerprint)
        except FingerprintError as error:
            self._findings.add(Finding(version_key(manifest.version), error, manifest.version))
        for first in self._ends.get(manifest.version, []):
            expected = self._expected.pop((first, manifest.version), None)
            names = [
                spec.name
                for spec, one, other in zip(self._run.table, expected or [], self.state.fingerprints, strict=False)
                if one != other
            ]
            if names:
                key = merged_delta_key(first, manifest.version)
                wrong = wrong_tensor(f"merged delta {first} to {manifest.version}", names[0])
                self._report_standalone(key, [Finding(key, wrong, manifest.version, tensor=names[0])])

    def _settle_lost(self, manifest: Manifest, lost: list[Finding]) -> None:
        """Report lost objects, unless a merged delta or anchor replaces them."""
        if not lost:
            return
        version = manifest.version
        before = version - 1
        if manifest.base_version == before and before not in self.causes:
            replacement = merged_delta_key(before, version)
        else:
            replacement = anchor_key(version)
        if replacement in self._good and self.loaded == version:
            self._note(f"version {version}: its own objects are damaged or missing; {replacement} replaces them")
            return
        for finding in lost:
            self._findings.add(finding)

    def _explain(self, manifest: Manifest, collected: bool, lost: list[Finding]) -> None:
        """Record why a version was not reached; a finding if it should be kept and nothing else explains it."""
        version = manifest.version
        base = manifest.base_version
        below = self.causes.get(base) if base is not None else None
        alternatives = {
            anchor_key(version),
            *(merged_delta_key(first, version) for first in self._ends.get(version, [])),
        }
        if version not in self.causes:
            if lost or (alternatives & self._avoid and below != "base"):
                self.causes[version] = "bad"
            else:
                self.causes[version] = below or ("gone" if collected else "bad")
        if self.causes[version] == "gone" and not self._may_be_gone(version, collected):
            error = GapError(
                f"version {version} is kept, but neither a merged delta nor an anchor that is left leads to it"
            )
            self._findings.add(Finding(version_key(version), error, version))
            self.causes[version] = "bad"
        if self.causes[version] == "bad":
            self.unreadable.add(version)

    def _is_gone(self, version: int) -> bool:
        return self._record is not None and self._record.is_gone(version)

    def _may_be_gone(self, version: int, collected: bool) -> bool:
        """Return whether retention allowed the version to become unreachable."""
        if self._record is None or self._record.head is None:
            return collected
        return self._record.gave_up(version)

    def _note(self, text: str) -> None:
        if text not in self._report.notes:
            self._report.notes.append(text)


def apply_checked(step: Step, state: ModelState) -> None:
    """Apply a step; if it turns out to be bad, the weights are not touched.

    Raises:
        FingerprintError: a tensor would not have the declared fingerprint. Otherwise as ``restore.step_changes``.
    """
    changes = step_changes(step, state.base_tensor)
    check_step(step, state.fingerprint, changes.fingerprint)
    wrong = first_wrong_tensor(state, changes)
    if wrong is not None:
        raise wrong_tensor(step.key, wrong)
    state.apply(changes)

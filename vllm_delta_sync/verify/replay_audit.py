"""Go through a run from version 0 to the newest, with the weights of one version at a time."""

from pathlib import Path
from typing import Literal

from vllm_delta_sync.errors import (
    DeltaSyncError,
    FingerprintError,
    NotFoundError,
    SignatureError,
    StoreError,
)
from vllm_delta_sync.format.documents import Retention, anchor_key, merged_delta_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, version_key
from vllm_delta_sync.run.checks import check_fingerprint
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.plan import GapError, Planner, Step, plan
from vllm_delta_sync.run.report import Finding, Findings, VerifyReport
from vllm_delta_sync.run.restore import BaseError, check_step, restore, step_changes, whole
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.object_audit import ObjectAudit, what_of, wrong_tensor
from vllm_delta_sync.verify.simulate import first_wrong, measure

_Cause = Literal["bad", "gone", "base", "refused"]


class ReplayAudit:
    """One walk; ``visit`` takes the versions in order.

    Args:
        base: as ``run.restore.restore``.

    Attributes:
        held, state: a version and its weights; None if there are none.
        causes: why versions were not reached: damage, retention, a base that is not at hand, or a key's last word.
        unreadable: versions that damage took away.
    """

    def __init__(
        self,
        run: RunDocuments,
        census: DocumentAudit,
        base: str | Path | None,
        findings: Findings,
        report: VerifyReport,
    ) -> None:
        self._run, self._census, self._base, self._findings, self._report = run, census, base, findings, report
        self._contents = ObjectAudit(run, report)
        self._record: Retention | None = run.retention()
        # Documents that no way may lead through: damaged, or with their objects gone.
        self._avoid = {finding.key for finding in census.findings}
        self._starts: dict[int, list[int]] = {}
        self._ends: dict[int, list[int]] = {}
        for first, last in census.usable_folds():
            self._starts.setdefault(first, []).append(last)
            self._ends.setdefault(last, []).append(first)
        self._anchors = census.usable_anchors()
        self._good: set[str] = set()
        self._promised: dict[tuple[int, int], list[Fingerprint]] = {}
        self.held: int | None = None
        self.state: ModelState | None = None
        self.causes: dict[int, _Cause] = {}
        self.unreadable: set[int] = set()

    def visit(self, version: int, manifest: Manifest | None) -> None:
        """Check a version, the anchor beside it, and the folded ranges that begin with it.

        Args:
            manifest: the version's; None if it is not good.

        Raises:
            StoreError: the store failed. DeltaSyncError: the first finding, if findings are raised.
        """
        if version in self._census.refused:
            self.causes[version] = "refused"
        elif manifest is None:
            self._cross(version)
        else:
            self._visit(manifest)
        for last in self._starts.get(version, []):
            self._check_fold(version, last)

    def _cross(self, version: int) -> None:
        """Go on over a version whose manifest is lost, if a folded range stands in for it."""
        self.unreadable.add(version)
        # A manifest that is well-formed and wrong stops readers: they see that what follows names another.
        ends = self._ends.get(version, []) if version in self._census.unreadable else []
        for first in ends:
            if first not in self.causes and self._move(first) and self._over(first, version):
                return
        self.causes[version] = "bad"

    def _visit(self, manifest: Manifest) -> None:
        version = manifest.version
        gone = self._is_gone(version)
        lost: list[Finding] = []
        if gone:
            self._report.gone += 1
        elif manifest.kind == "delta":
            lost = self._take_delta(manifest)
        else:
            lost = self._take_whole(manifest)
        if gone or lost:
            self._avoid.add(version_key(version))
        # Elsewhere there is no way if the version before was not reached.
        if self.held != version and (version in self._ends or manifest.base_version != version - 1):
            self._by_another_way(manifest)
        if version in self._anchors:
            self._check_beside(manifest)
        if lost and all(isinstance(finding.error, NotFoundError) for finding in lost):
            self._record = self._run.retention()
            if self._is_gone(version):
                # Removed while this was under way.
                gone, lost = True, []
                self._report.gone += 1
        self._settle_lost(manifest, lost)
        if self.held == version:
            self._compare(manifest)
        else:
            self._explain(manifest, gone, lost)

    # A version's own objects

    def _take_delta(self, manifest: Manifest) -> list[Finding]:
        """Read and check a delta, and move to its version if what it builds on can be reached; what is wrong."""
        base = manifest.base_version if manifest.base_version is not None else 0
        at_base = base not in self.causes and self._move(base)
        key = version_key(manifest.version)
        held = self.state if at_base else None
        changes, lost = self._contents.read(manifest, key, manifest.version, held)
        if changes is None:
            return lost
        error = self._contents.undeclared(manifest, changes, self._census.fingerprints.get(base), manifest.fingerprint)
        if error is None and held is not None:
            wrong = first_wrong(self._run.table, changes.fingerprints, measure(held, changes))
            if wrong is None:
                held.apply(changes)
                self.held = manifest.version
                return []
            error = wrong_tensor(f"version {manifest.version}", wrong)
            return [Finding(key, error, manifest.version, tensor=wrong)]
        return [] if error is None else [Finding(key, error, manifest.version)]

    def _take_whole(self, manifest: Manifest) -> list[Finding]:
        """Read and check an anchor in the chain or a reference, and hold its weights; what is wrong."""
        key = version_key(manifest.version)
        lost = self._contents.check_whole(manifest, key, manifest.version, None) if manifest.kind == "anchor" else []
        if lost:
            return lost
        self.held = self.state = None
        try:
            self.state = whole(self._run, manifest, base=self._base)
            self.held = manifest.version
        except StoreError:
            raise
        except BaseError as error:
            # Somebody who names a base wants the weights rebuilt; only the recorded one may be elsewhere.
            if self._base is not None:
                self._findings.add(Finding(key, error, manifest.version))
            else:
                self._note(f"weights were not rebuilt: {error}")
            self.causes[manifest.version] = "base"
        except DeltaSyncError as error:
            return [Finding(key, error, manifest.version)]
        return []

    # Documents beside the chain

    def _check_beside(self, manifest: Manifest) -> None:
        """Check the anchor beside a version, and begin anew with it if there is no other way to the version."""
        version, key = manifest.version, anchor_key(manifest.version)
        try:
            anchor = self._run.anchor(version)
        except NotFoundError:
            return  # removed since it was listed
        state = self.state if self.held == version else None
        if self._report_beside(key, self._contents.check_whole(anchor, key, version, state)):
            self._report.anchors += 1
            if state is None:
                self.held = self.state = None
                self.state = whole(self._run, manifest, beside=True)
                self.held = version

    def _check_fold(self, first: int, last: int) -> None:
        """Check a folded range: its objects, what they declare, and what they would make of the weights at hand."""
        key = merged_delta_key(first, last)
        try:
            folded = self._run.folded(first, last)
        except NotFoundError:
            return
        state = self.state if self.held == first else None
        changes, found = self._contents.read(folded, key, last, state)
        if changes is not None:
            ends = folded.first_fingerprint, folded.last_fingerprint
            error = self._contents.undeclared(folded, changes, *ends)
            if error is not None:
                found.append(Finding(key, error, last))
            elif state is not None:
                measured = measure(state, changes)
                wrong = first_wrong(self._run.table, changes.fingerprints, measured)
                if wrong is not None:
                    found.append(Finding(key, wrong_tensor(what_of(folded), wrong), last, tensor=wrong))
                else:
                    self._promised[first, last] = [
                        value + measured.get(tensor, Fingerprint()) for tensor, value in enumerate(state.fingerprints)
                    ]
        if self._report_beside(key, found):
            self._report.folds += 1

    def _report_beside(self, key: str, found: list[Finding]) -> bool:
        """Whether a document is good; otherwise it is avoided from here on."""
        if found and all(isinstance(finding.error, NotFoundError) for finding in found):
            try:
                self._run.bucket.stat(key)
            except NotFoundError:
                found = []  # removed meanwhile, and its objects with it
                self._avoid.add(key)
                return False
        for finding in found:
            self._findings.add(finding)
        (self._avoid if found else self._good).add(key)
        return not found

    # Ways

    def _move(self, target: int) -> bool:
        """Hold the weights of a version that was reached before."""
        if self.held == target:
            return True
        manifest = self._census.manifest(target)
        return self._follow(target) or (manifest is not None and self._restart(manifest))

    def _by_another_way(self, manifest: Manifest) -> None:
        """Reach a version as a reader would, who begins with an older one and does not go beyond."""
        newest_break = max((item.version for item in manifest.breaks), default=0)
        if self.held is None or self.held < newest_break or not self._follow(manifest.version):
            self._restart(manifest)

    def _follow(self, target: int) -> bool:
        """Go from the weights at hand to a version, over folded ranges, forwards or backwards."""
        while self.held is not None and self.held != target:
            try:
                steps = Planner(self._run, self._avoid).path(self.held, target)
            except StoreError:
                raise
            except DeltaSyncError:
                return False
            for step in steps:
                if not self._step(step):
                    break
        return self.held == target

    def _step(self, step: Step) -> bool:
        state = self.state
        if state is None:
            return False
        try:
            take(step, state)
        except StoreError:
            raise
        except DeltaSyncError:
            # A finding when its turn comes, or one already.
            self._avoid.add(step.key)
            return False
        self.held = step.end
        return True

    def _over(self, first: int, last: int) -> bool:
        try:
            return self._step(Step(self._run, self._run.folded(first, last)))
        except StoreError:
            raise
        except DeltaSyncError:
            return False

    def _restart(self, manifest: Manifest) -> bool:
        """Rebuild a version from whatever it builds on, if there is a way."""
        try:
            plan(self._run, manifest, self._avoid)
            # Only now, so that one model is held at a time, and none is given up for nothing.
            self.held = self.state = None
            self.state = restore(self._run, manifest, self._base).state
        except StoreError:
            raise
        except DeltaSyncError:
            return False
        self.held = manifest.version
        return True

    # What it comes to

    def _compare(self, manifest: Manifest) -> None:
        """Hold the weights against the version's fingerprint, and against what folded ranges lead to."""
        if self.state is None:
            return
        try:
            check_fingerprint(manifest, self.state.fingerprint)
        except FingerprintError as error:
            self._findings.add(Finding(version_key(manifest.version), error, manifest.version))
        for first in self._ends.get(manifest.version, []):
            promised = self._promised.pop((first, manifest.version), None)
            names = [
                spec.name
                for spec, one, other in zip(self._run.table, promised or [], self.state.fingerprints, strict=False)
                if one != other
            ]
            if names:
                key = merged_delta_key(first, manifest.version)
                wrong = wrong_tensor(f"folded range {first} to {manifest.version}", names[0])
                self._report_beside(key, [Finding(key, wrong, manifest.version, tensor=names[0])])

    def _settle_lost(self, manifest: Manifest, lost: list[Finding]) -> None:
        """Report lost objects, unless something stands in for them."""
        if not lost:
            return
        version = manifest.version
        before = version - 1
        if manifest.base_version == before and before not in self.causes:
            stand_in = merged_delta_key(before, version)
        else:
            stand_in = anchor_key(version)
        if stand_in in self._good and self.held == version:
            self._note(f"version {version}: its own objects are damaged or missing; {stand_in} stands in for them")
            return
        for finding in lost:
            self._findings.add(finding)

    def _explain(self, manifest: Manifest, gone: bool, lost: list[Finding]) -> None:
        """Note why a version was not reached; it is a finding if it was to be kept, and nothing else explains it."""
        version = manifest.version
        base = manifest.base_version
        below = self.causes.get(base) if base is not None else None
        beside = {anchor_key(version), *(merged_delta_key(first, version) for first in self._ends.get(version, []))}
        if below == "refused" and version not in self.causes:
            refused = SignatureError(
                f"version {version} builds on version {base}, whose key's word does not hold for it any more; nobody "
                "takes either"
            )
            self._findings.add(Finding(version_key(version), refused, version))
            self.causes[version] = "bad"
        if version not in self.causes:
            if lost or (beside & self._avoid and below != "base"):
                self.causes[version] = "bad"
            else:
                self.causes[version] = below or ("gone" if gone else "bad")
        if self.causes[version] == "gone" and not self._given_up(version, gone):
            error = GapError(
                f"version {version} is kept, and nothing that is left leads to it: neither a folded range nor an anchor"
            )
            self._findings.add(Finding(version_key(version), error, version))
            self.causes[version] = "bad"
        if self.causes[version] == "bad":
            self.unreadable.add(version)

    def _is_gone(self, version: int) -> bool:
        return self._record is not None and self._record.is_gone(version)

    def _given_up(self, version: int, gone: bool) -> bool:
        if self._record is None or self._record.head is None:
            return gone
        return self._record.gave_up(version)

    def _note(self, text: str) -> None:
        if text not in self._report.notes:
            self._report.notes.append(text)


def take(step: Step, state: ModelState) -> None:
    """Apply a step to weights that stay whole if it turns out to be bad.

    Raises:
        FingerprintError: a tensor would not come out as declared. Else as ``chain_read.step_changes``.
    """
    changes = step_changes(step, old=state.base_tensor)
    check_step(step, state.fingerprint, changes)
    wrong = first_wrong(state.table, changes.fingerprints, measure(state, changes))
    if wrong is not None:
        raise wrong_tensor(step.key, wrong)
    state.apply(changes)

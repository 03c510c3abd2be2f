"""Rebuild what a run lacks from what is left of it: states on both sides of a gap, and orphaned objects.

Everything that is written is proven first: a state is taken only if it has the fingerprint that its manifest declares,
tensor by tensor as every step on the way to it declares.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVarTuple

from vllm_delta_sync.errors import DeltaSyncError, SettingsError, StoreError
from vllm_delta_sync.format.documents import anchor_of_key, merged_delta_of_key
from vllm_delta_sync.format.manifest import Manifest, ObjectRef, version_key
from vllm_delta_sync.maintenance.key_list import check_signer
from vllm_delta_sync.maintenance.repair.deltas import lost_object, put_anchor, put_fold, put_lost_shard
from vllm_delta_sync.maintenance.repair.orphans import bridge, orphans
from vllm_delta_sync.run.checks import check_fingerprint
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.plan import Planner
from vllm_delta_sync.run.report import Finding, VerifyReport
from vllm_delta_sync.run.restore import restore
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.replay_audit import take

_Given = TypeVarTuple("_Given")


class Rebuilder:
    """Mends a run after one examination of it.

    Args:
        base: as ``run.restore.restore``. report, census: what the examination found.

    Attributes:
        done: what was rebuilt, for people. unsigned: what could not be, for lack of a key to sign it with.
    """

    def __init__(self, run: RunDocuments, base: str | Path | None, report: VerifyReport, census: DocumentAudit) -> None:
        self._run, self._base, self._report, self._census = run, base, report, census
        self._unreadable = set(report.unreadable)
        self._avoid = {finding.document or finding.key for finding in report.findings}
        self.done: list[str] = []
        self.unsigned: list[str] = []

    def versions(self) -> None:
        """Lost objects of versions, versions that nothing leads to, and ways over lost manifests.

        Raises:
            StoreError: the store failed.
        """
        for manifest in self._broken():
            if manifest.version not in self._unreadable:
                self._attempt(self._mend_readable, manifest)
        for first, last in self._stretches():
            self._attempt(self._from_above, first, last)
        lost = sorted(self._census.unreadable & set(range(1, self._census.top)))
        candidates = orphans(self._run, self._census) if lost else []
        for version in lost:
            self._attempt(self._cross, version, candidates)

    def beside(self) -> None:
        """Anchors and folded ranges that are damaged: made again, if their versions can be read.

        Raises:
            StoreError: the store failed.
        """
        found = {finding.document or finding.key for finding in self._report.findings}
        for key in sorted(found):
            if (version := anchor_of_key(key)) is not None:
                self._attempt(self._anchor, version, key)
            elif (pair := merged_delta_of_key(key)) is not None:
                self._attempt(self._fold, pair, key)

    def _attempt(self, mend: Callable[[*_Given], None], *given: *_Given) -> None:
        try:
            mend(*given)
        except StoreError:
            raise
        except SettingsError as error:
            if f"something was not written: {error.message}" not in self.unsigned:
                self.unsigned.append(f"something was not written: {error.message}")
        except DeltaSyncError:
            return  # it stays among the findings

    def _readable(self, version: int) -> bool:
        return version in self._census.digests and version not in self._unreadable

    def _manifest(self, version: int) -> Manifest | None:
        return self._census.manifest(version)

    def _state(self, manifest: Manifest) -> ModelState:
        state = restore(self._run, manifest, self._base).state
        check_fingerprint(manifest, state.fingerprint)
        return state

    def _lost(self, version: int) -> list[Finding]:
        key = version_key(version)
        return [finding for finding in self._report.findings if finding.document == key]

    def _broken(self) -> Iterator[Manifest]:
        """Good manifests of versions with lost objects."""
        for version in sorted(
            {f.version for f in self._report.findings if f.ref is not None and f.version is not None}
        ):
            manifest = self._manifest(version) if self._lost(version) else None
            if manifest is not None:
                yield manifest

    def _stretches(self) -> Iterator[tuple[int, int]]:
        """Consecutive unreadable versions with good manifests, none of which is a break but the first."""
        begin: int | None = None
        for version in range(self._census.top + 2):
            manifest = self._manifest(version) if version in self._unreadable else None
            regular = manifest is not None and manifest.base_version == version - 1
            if begin is not None and not regular:
                yield begin, version - 1
                begin = None
            if manifest is not None and begin is None:
                begin = version

    def _from_above(self, first: int, last: int) -> None:
        """Reach unreadable versions from the one after them, by taking versions back, as far as that goes."""
        above = self._manifest(last + 1)
        if above is None or above.base_version != last or not self._readable(last + 1):
            return
        state = self._state(above)
        at = last + 1
        while at > first:
            try:
                for step in Planner(self._run, self._avoid).path(at, at - 1):
                    take(step, state)
            except StoreError:
                raise
            except DeltaSyncError:
                break
            at -= 1
        reached = self._manifest(at)
        if at > last or reached is None or state.fingerprint != reached.model_fingerprint:
            return
        self._mend(reached, state)

    def _mend_readable(self, manifest: Manifest) -> None:
        self._mend(manifest, self._state(manifest))

    def _mend(self, manifest: Manifest, state: ModelState) -> None:
        """Make a version readable whose weights are known: its object again, or something that stands in for it."""
        version = manifest.version
        lost = [finding.ref for finding in self._lost(version) if finding.ref is not None]
        base = self._manifest(manifest.base_version) if manifest.base_version is not None else None
        if base is None or not self._readable(base.version):
            if manifest.kind != "anchor" or not self._shard(manifest, lost, state):
                self.done.append(f"{put_anchor(self._run, manifest, state)}: stands in for version {version}")
            return
        before = self._state(base)
        if len(lost) == 1:
            data = lost_object(self._run, manifest, lost[0], before, state)
            if data is not None:
                self._run.bucket.put(lost[0].key, data)
                self.done.append(f"{lost[0].key}: encoded again from the weights on both sides of version {version}")
                return
        if base.version == version - 1:
            key = put_fold(self._run, base, manifest, before, state)
        else:
            key = put_anchor(self._run, manifest, state)
        self.done.append(f"{key}: stands in for version {version}")

    def _shard(self, manifest: Manifest, lost: list[ObjectRef], state: ModelState) -> bool:
        if len(lost) != 1 or not put_lost_shard(self._run, manifest, lost[0], state):
            return False
        self.done.append(f"{lost[0].key}: written again from the weights of version {manifest.version}")
        return True

    def _cross(self, version: int, candidates: list[ObjectRef]) -> None:
        first, after = self._manifest(version - 1), self._manifest(version + 1)
        if first is None or after is None or not self._readable(first.version):
            return
        if (version - 1, version) in self._census.usable_folds():
            return
        key = bridge(self._run, self._state(first), first, after, candidates)
        if key is not None:
            self.done.append(f"{key}: leads across version {version}, whose manifest is lost")

    def _anchor(self, version: int, key: str) -> None:
        from vllm_delta_sync.maintenance.compact import make_anchor

        if version in self._census.refused:
            self._forget(key, version)
        if version not in self._census.digests:
            return
        check_signer(self._run)
        make_anchor(self._run, version, self._base, replace=True)
        self.done.append(f"{key}: made again from the chain")

    def _forget(self, key: str, version: int) -> None:
        """Remove a document about a version that nobody takes."""
        self._run.bucket.delete(key)
        self.done.append(f"{key}: removed, since nobody takes version {version}")

    def _fold(self, pair: tuple[int, int], key: str) -> None:
        from vllm_delta_sync.maintenance.compact import make_fold
        from vllm_delta_sync.maintenance.rolling_weights import RollingWeights

        first, last = (self._manifest(version) for version in pair)
        if pair[1] in self._census.refused:
            self._forget(key, pair[1])
        if first is None or last is None:
            return
        check_signer(self._run)
        try:
            make_fold(self._run, *pair, replace=True, weights=RollingWeights(self._run, self._base))
        except StoreError:
            raise
        except DeltaSyncError:
            # Versions of codec raw, or no way that leads through both ends: from the weights of both.
            put_fold(self._run, first, last, self._state(first), self._state(last))
        self.done.append(f"{key}: made again from the chain")

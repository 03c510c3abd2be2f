"""``Rebuilder`` rebuilds what a run lacks from the rest of it: states on both sides of a gap, and orphaned objects.

Everything is proven before it is written: a state is used only if it has the fingerprint that its manifest declares,
and if each tensor changes as every step on the path to it declares.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from vllm_delta_sync.errors import DataError, SettingsError, UsageError
from vllm_delta_sync.format.documents import anchor_key, anchor_of_key, merged_delta_of_key
from vllm_delta_sync.format.manifest import Manifest, ObjectRef, version_key
from vllm_delta_sync.maintenance.anchor_writer import make_anchor
from vllm_delta_sync.maintenance.merge_writer import make_merged_delta, put_merged_delta
from vllm_delta_sync.maintenance.repair.orphans import bridge, orphans
from vllm_delta_sync.maintenance.rolling_weights import RollingWeights
from vllm_delta_sync.run.checks import check_fingerprint
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.read_plan import ReadPlanner
from vllm_delta_sync.run.restore import restore
from vllm_delta_sync.tensors.state import ModelState
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.replay_audit import apply_checked
from vllm_delta_sync.verify.report import VerifyReport


class Rebuilder:
    """Rebuilds parts of a run after one examination of it.

    Args:
        base: as ``run.restore.restore``. report, audit: results of the examination.

    Attributes:
        done: lines of text for what was rebuilt. unsigned: lines for what could not be signed for lack of a key.
    """

    def __init__(self, run: RunDocuments, base: str | Path | None, report: VerifyReport, audit: DocumentAudit) -> None:
        self._run, self._base, self._report, self._audit = run, base, report, audit
        self._unreadable = set(report.unreadable)
        self._avoid = {finding.document or finding.key for finding in report.findings}
        self.done: list[str] = []
        self.unsigned: list[str] = []

    def versions(self) -> None:
        """Replace lost objects, rebuild versions that no path reaches, and bridge lost manifests."""
        listing = {finding.document for finding in self._report.findings if finding.ref is not None}
        for version in sorted(self._audit.digests.keys() - self._unreadable):
            if version_key(version) in listing:
                self._attempt(partial(self._rebuild_readable, version))
        for first, last in self._unreadable_ranges():
            self._attempt(partial(self._rebuild_from_above, first, last))
        lost = sorted(self._audit.unreadable & set(range(1, self._audit.top)))
        candidates = orphans(self._run, self._audit) if lost else []
        for version in lost:
            self._attempt(partial(self._bridge, version, candidates))

    def standalone_documents(self) -> None:
        """Rebuild damaged anchors and merged deltas whose versions can be read."""
        for key in sorted(self._avoid):
            if (version := anchor_of_key(key)) is not None:
                self._attempt(partial(self._anchor, version, key))
            elif (pair := merged_delta_of_key(key)) is not None:
                self._attempt(partial(self._merged_delta, pair, key))

    def _attempt(self, rebuild: Callable[[], None]) -> None:
        try:
            rebuild()
        except SettingsError as error:
            line = f"a repair was not written: {error.message}"
            if line not in self.unsigned:
                self.unsigned.append(line)
        except (DataError, UsageError):
            return  # stays among the findings

    def _readable(self, version: int) -> bool:
        return version in self._audit.digests and version not in self._unreadable

    def _state(self, manifest: Manifest) -> ModelState:
        state = restore(self._run, manifest, self._base).state
        check_fingerprint(manifest, state.fingerprint)
        return state

    def _unreadable_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of consecutive unreadable versions with good manifests, in which each but the first builds on
        the one before."""
        begin: int | None = None
        for version in range(self._audit.top + 2):
            manifest = self._audit.manifest(version) if version in self._unreadable else None
            regular = manifest is not None and manifest.base_version == version - 1
            if begin is not None and not regular:
                yield begin, version - 1
                begin = None
            if manifest is not None and begin is None:
                begin = version

    def _rebuild_from_above(self, first: int, last: int) -> None:
        """Reach unreadable versions from the version after them, by reverting deltas, as far as possible."""
        above = self._audit.manifest(last + 1)
        if above is None or above.base_version != last or not self._readable(last + 1):
            return
        state = self._state(above)
        at = last + 1
        while at > first:
            try:
                for step in ReadPlanner(self._run, self._avoid).path(at, at - 1):
                    apply_checked(step, state)
            except DataError:
                break
            at -= 1
        reached = self._audit.manifest(at)
        if at > last or reached is None or state.fingerprint != reached.model_fingerprint:
            return
        self._replace_objects(reached, state)

    def _rebuild_readable(self, version: int) -> None:
        manifest = self._run.manifest(version)
        self._replace_objects(manifest, self._state(manifest))

    def _replace_objects(self, manifest: Manifest, state: ModelState) -> None:
        """Write what replaces the objects of a version with known weights: a merged delta, or a standalone anchor."""
        self._run.keyring.check_can_sign(self._run.info)
        version = manifest.version
        before = self._audit.manifest(version - 1) if manifest.base_version == version - 1 else None
        if before is not None and self._readable(before.version):
            key = put_merged_delta(self._run, before, manifest, self._state(before), state)
        else:
            make_anchor(self._run, version, replace=True, state=state)
            key = anchor_key(version)
        self.done.append(f"{key}: replaces the objects of version {version}")

    def _bridge(self, version: int, candidates: list[ObjectRef]) -> None:
        first, after = self._audit.manifest(version - 1), self._audit.manifest(version + 1)
        if first is None or after is None or not self._readable(first.version):
            return
        if (version - 1, version) in self._audit.usable_merged_deltas():
            return
        key = bridge(self._run, self._state(first), first, after, candidates)
        if key is not None:
            self.done.append(f"{key}: leads across version {version}, whose manifest is lost")

    def _anchor(self, version: int, key: str) -> None:
        if version not in self._audit.digests:
            return
        self._run.keyring.check_can_sign(self._run.info)
        make_anchor(self._run, version, self._base, replace=True)
        self.done.append(f"{key}: rebuilt from the history")

    def _merged_delta(self, pair: tuple[int, int], key: str) -> None:
        first, last = (self._audit.manifest(version) for version in pair)
        if first is None or last is None:
            return
        self._run.keyring.check_can_sign(self._run.info)
        try:
            make_merged_delta(self._run, *pair, replace=True, weights=RollingWeights(self._run, self._base))
        except (DataError, UsageError):
            # Versions of codec raw, or no path between both ends: use the weights at both ends.
            put_merged_delta(self._run, first, last, self._state(first), self._state(last))
        self.done.append(f"{key}: rebuilt from the history")

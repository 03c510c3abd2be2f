"""``UpdatePlanner`` plans the next commit towards a version: deltas, a full snapshot, or a rebuild.

Documents that turn out to be bad are avoided until the next poll, and another path is planned. If there is none, the
versions before the bad one are still taken, and then the planner raises.
"""

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import NoReturn

from vllm_delta_sync.client import Run
from vllm_delta_sync.engine.planning.commit_plan import REBUILD, UpdatePlan, WeightPosition, step_key
from vllm_delta_sync.engine.planning.feedback import PlanFeedback
from vllm_delta_sync.engine.planning.lineage import RunSegment, RunVersion, ancestry, connect_runs
from vllm_delta_sync.engine.planning.run_history import History
from vllm_delta_sync.errors import ChainError, DataError, DeltaSyncError, NotFoundError
from vllm_delta_sync.format.documents import anchor_key
from vllm_delta_sync.format.manifest import Manifest, version_key
from vllm_delta_sync.run.read_plan import MERGE_WIDTH, ReadPlanner, Step, plan_read

STAGED_BYTES = 32
"""Upper bound of staging memory in bytes per changed element of a 16-bit dtype: 10 decoded, 10 more merged, 14 routed,
never all at once."""
MAX_SNAPSHOTS = 8
"""Maximum number of anchors, or versions to rebuild, that are tried, newest first."""

StepPath = list[tuple[Step, int | None]]
"""Steps, each with the version of the followed run that it ends at, or None if it ends in another run."""


class UpdatePlanner:
    """Plans commits in the run of a history.

    Args:
        quarantined: whether any quarantined version may be served.

    Attributes:
        requested_version: an explicitly requested version, served even if it is quarantined.
        feedback: what staging and commits found out; the updater reports to it.
    """

    def __init__(self, history: History, quarantined: bool = False) -> None:
        self._history = history
        self._quarantined = quarantined
        self.requested_version: int | None = None
        self.feedback = PlanFeedback()
        self._planners: dict[str, ReadPlanner] = {}

    def reset(self) -> None:
        """Forget everything: another run is followed."""
        self.refresh()
        self.feedback.reset()

    def refresh(self) -> None:
        """Forget what was bad, after a poll: it may be good now, and shorter paths may exist."""
        self.feedback.refresh()
        self._planners.clear()

    @property
    def avoided_keys(self) -> list[str]:
        """Keys of documents that were bad since the last poll, for the log."""
        return [key for _, key in self.feedback.bad]

    def plan_towards(self, position: WeightPosition | None, target: int, memory_bytes: int) -> UpdatePlan:
        """Do ``plan_forward``, or ``plan_back`` if the version is older than the one held."""
        if position is not None and self._history.is_followed_run(position) and target < position.version:
            return self.plan_back(position, target, memory_bytes)
        return self.plan_forward(position, target, memory_bytes)

    def plan_forward(self, position: WeightPosition | None, target: int, memory_bytes: int) -> UpdatePlan:
        """Return the next commit towards a version of the followed run, or as close to it as possible.

        Args:
            position: what is held; None means weights that are no known version.
            memory_bytes: memory that the steps merged into one commit may take; a single step may exceed it.

        Raises:
            DeltaSyncError: no commit leads further; the first reason. ForkError: the head does not descend from the
                version that the commit would end at.
        """
        plan = self._plan_forward(position, target, memory_bytes)
        self._history.check_in_history(plan.target)
        return plan

    def _plan_forward(self, position: WeightPosition | None, target: int, memory_bytes: int) -> UpdatePlan:
        if position is None:
            return self._plan_without_base(target)
        while True:
            try:
                path = self._find_path(position, target)
                plan = (
                    None
                    if self.feedback.contains_rejected(step for step, _ in path)
                    else self._plan_prefix(position, path, memory_bytes)
                )
            except DataError as error:
                known = len(self.feedback.bad)
                plan = self._plan_around(position, target, memory_bytes)
                if plan is not None:
                    return plan
                if len(self.feedback.bad) == known:
                    self._raise_cause(position, target, error)
                continue
            if plan is not None:
                return self._cheaper_anchor(position, target, path) or plan

    # Backwards

    def plan_back(self, position: WeightPosition, target: int, memory_bytes: int) -> UpdatePlan:
        """Return one commit from a version of the followed run to an older, requested one.

        Steps are reverted if that is possible and fits; otherwise the version is read whole, or rebuilt.

        Raises:
            NotFoundError: the version is no longer retained. ForkError: the head does not descend from it.
            DeltaSyncError: no commit leads there.
        """
        plan = self._plan_back(position, target, memory_bytes)
        self._history.check_in_history(plan.target)
        return plan

    def _plan_back(self, position: WeightPosition, target: int, memory_bytes: int) -> UpdatePlan:
        manifest = self._own.manifest(target)
        self._check_same_history(position)
        whole = self._plan_whole_version(manifest)
        problem: DeltaSyncError | None = None
        try:
            steps = [step for step, _ in self._find_path(position, target)]
            unsuitable = self.feedback.contains_rejected(steps) or self.feedback.contains_undecodable(steps)
            # The commit must end at the target, so it cannot be split to fit.
            unsuitable = unsuitable or STAGED_BYTES * sum(step.changed for step in steps) > memory_bytes
            if steps and (whole is None or not unsuitable):
                return UpdatePlan(manifest, steps)
        except DataError as error:
            problem = error
        if whole is not None:
            return whole
        self._check_retained(manifest, problem)
        raise (
            next(iter(self.feedback.bad.values()), None)
            or problem
            or ChainError(f"no update leads to version {target}")
        )

    def _plan_whole_version(self, manifest: Manifest) -> UpdatePlan | None:
        """Plan a version as a whole: from an anchor of it, else rebuilt; None if neither is possible."""
        for version, standalone in self._snapshots(manifest.version - 1, manifest.version):
            try:
                return self._plan_snapshot(version, standalone)
            except DataError:
                continue
        return self._plan_rebuild(manifest.version)

    def _check_retained(self, manifest: Manifest, problem: DeltaSyncError | None) -> None:
        record = self._run.retention()
        if record is not None and record.gave_up(manifest.version):
            raise NotFoundError(
                f"version {manifest.version} is no longer retained: delta-sync gc removed what leads to it; choose "
                "another version"
            ) from problem

    # Steps

    @property
    def _run(self) -> Run:
        return self._history.run

    @property
    def _own(self) -> ReadPlanner:
        return self._planner(self._run)

    def _planner(self, run: Run) -> ReadPlanner:
        name = run.info.run
        if name not in self._planners:
            # The set is shared, so documents found bad later are avoided too.
            self._planners[name] = ReadPlanner(run, self.feedback.avoid.setdefault(name, set()))
            if name == self._run.info.run and self._history.head is not None:
                self._planners[name].add_manifests(self._history.head)
        return self._planners[name]

    def _find_path(self, position: WeightPosition, target: int) -> StepPath:
        """Find a path of steps. Errors as ``ReadPlanner.path``."""
        self._planner(position.run).add_manifests(position.manifest)
        if self._history.is_followed_run(position):
            steps = self._own.path(position.version, target)
            self._check_epochs(
                [position.manifest, *(step.document for step in steps if isinstance(step.document, Manifest))]
            )
            return [(step, step.end) for step in steps]
        wanted = [RunVersion(self._run, target), *self._history.origins()]
        segments = connect_runs(ancestry(position.run, position.version), wanted)
        path = [found for segment in segments or [] for found in self._segment_steps(segment)]
        if not path:
            raise ChainError(f"no update leads from run {position.run.info.run} to run {self._run.info.run}")
        if path[-1][1] is None:
            # The path ends in the source run, at the version that is version 0 of the branch.
            path[-1] = (path[-1][0], 0)
        return path

    def _segment_steps(self, segment: RunSegment) -> StepPath:
        steps = self._planner(segment.run).path(segment.first, segment.last)
        if segment.run.info.run == self._run.info.run:
            return [(step, step.end) for step in steps]
        return [(step, None) for step in steps]

    def _check_epochs(self, manifests: list[Manifest]) -> None:
        ordered = sorted(manifests, key=lambda manifest: manifest.version)
        for before, after in pairwise(ordered):
            if after.epoch < before.epoch:
                raise ChainError(
                    f"version {after.version} was written in epoch {after.epoch}, version {before.version} before it "
                    f"in epoch {before.epoch}: another publisher had already taken over the run"
                )

    def _plan_prefix(self, position: WeightPosition, path: StepPath, memory_bytes: int) -> UpdatePlan | None:
        """Plan as many steps of a path as fit, ending beyond the served version; return None if a document was marked
        bad, so that the caller tries again.

        Raises:
            ChainError: no version on the path can be served.
        """
        floor = position.version if self._history.is_followed_run(position) else -1
        if self.feedback.contains_undecodable(step for step, _ in path):
            ends = (end for _, end in reversed(path) if end is not None and end > floor)
            for last in islice(ends, MAX_SNAPSHOTS):
                if (plan := self._plan_rebuild(last)) is not None:
                    return plan
        fitting: list[int] = []
        beyond: list[int] = []
        for number, (step, end) in enumerate(path, 1):
            memory_bytes -= STAGED_BYTES * step.changed
            if end is not None and end > floor:
                (fitting if memory_bytes >= 0 and number <= self.feedback.max_steps else beyond).append(number)
        for number in [*reversed(fitting), *beyond]:
            step, end = path[number - 1]
            try:
                target = self._own.manifest(-1 if end is None else end)
            except DataError:
                continue
            if not self._may_serve(target):
                continue
            if not step.backwards and self._has_other_digest(target, step):
                self.feedback.mark_bad(
                    step_key(step), ChainError(f"{step.key} leads to another version {end} than the manifest")
                )
                return None
            return UpdatePlan(target, [taken for taken, _ in path[:number]])
        raise ChainError(f"no version after {position.version} on the path is readable and not quarantined")

    def _has_other_digest(self, target: Manifest, step: Step) -> bool:
        if step.run.info.run == target.run:
            return target.digest != step.high_digest
        # Version 0 of a branch has another manifest than the step leads to, with the same weights.
        return target.fingerprint != step.high_fingerprint.hex()

    def _may_serve(self, manifest: Manifest) -> bool:
        """Return whether a commit may end at a version, which then generates."""
        return manifest.quarantine is None or self._quarantined or manifest.version == self.requested_version

    # Snapshots and rebuilds instead of steps

    def _cheaper_anchor(self, position: WeightPosition, target: int, path: StepPath) -> UpdatePlan | None:
        """Plan an anchor, if it is smaller than the steps of a path; else None."""
        cost = sum(step.payload_bytes for step, _ in path)
        if cost <= self._run.info.full_bytes:
            return None
        found = self._newest_snapshot(position.version if self._history.is_followed_run(position) else -1, target)
        return found[0] if found is not None and found[1] < cost else None

    def _plan_without_base(self, target: int) -> UpdatePlan:
        found = self._newest_snapshot(-1, target) or self._newest_snapshot(-1, target, complete=False)
        plan = found[0] if found is not None else self._plan_rebuild(target)
        if plan is None:
            raise next(iter(self.feedback.bad.values()), ChainError(f"no update leads to version {target}"))
        return plan

    # Around missing or bad documents

    def _plan_around(self, position: WeightPosition, target: int, memory_bytes: int) -> UpdatePlan | None:
        """Plan where no steps lead to the target; None if that is impossible or a document was just marked bad."""
        own = self._history.is_followed_run(position)
        if own:
            self._check_same_history(position)
        above = position.version if own else -1
        found = self._newest_snapshot(above, target)
        if found is not None:
            return found[0]
        stops = reachable_stops(self._own, position.version, target) if own else []
        reached = stops[-1] if stops else above
        plan = None
        if reached < target:
            plan = self._plan_detour(position, reached + 1, target, memory_bytes) if own else self._plan_rebuild(target)
        if plan is None and reached < target:
            found = self._newest_snapshot(reached, target, complete=False)
            plan = None if found is None else found[0]
        return plan or self._plan_part_way(position, stops, memory_bytes)

    def _plan_part_way(self, position: WeightPosition, stops: list[int], memory_bytes: int) -> UpdatePlan | None:
        """Plan to the last version that steps reach, or at least to the first."""
        for stop in [*stops[-1:], *stops[:1]]:
            try:
                return self._plan_prefix(position, self._find_path(position, stop), memory_bytes)
            except DataError:
                continue
        return None

    def _check_same_history(self, position: WeightPosition) -> None:
        """Raise ChainError unless the version held is part of the bucket's history."""
        try:
            there = self._run.manifest(position.version)
        except DataError:
            return
        if there.digest != position.manifest.digest:
            raise ChainError(
                f"version {position.version} is {position.manifest.digest} here and {there.digest} in the bucket: the "
                "history was rewritten"
            )

    def _plan_detour(self, position: WeightPosition, blocked: int, target: int, memory_bytes: int) -> UpdatePlan | None:
        """Plan across a version that is unusable: back to where a merged delta begins, or by a rebuild."""
        breaks = {item.version for item in self._own.manifest(target).breaks}
        anew = blocked in breaks
        for first in merged_delta_starts(blocked, target):
            if first >= position.version:
                continue
            try:
                onward = self._own.path(first, target)
                anew = True
                steps = [*self._own.path(position.version, first), *onward]
                return self._plan_prefix(position, [(step, step.end) for step in steps], memory_bytes)
            except DataError:
                continue
        return self._plan_rebuild(target) if anew else None

    def _plan_rebuild(self, target: int) -> UpdatePlan | None:
        avoid = self.feedback.avoid.get(self._run.info.run, set())
        if REBUILD in avoid:
            return None
        try:
            manifest = self._own.manifest(target)
            plan_read(self._run, manifest, avoid)
        except DataError:
            return None
        return UpdatePlan(manifest, rebuild=True) if self._may_serve(manifest) else None

    def _newest_snapshot(self, above: int, target: int, complete: bool = True) -> tuple[UpdatePlan, int] | None:
        """Plan the newest full snapshot beyond ``above``; also returns the bytes to read from it to the target.

        Args:
            complete: whether steps must lead from it to the target.
        """
        for version, standalone in self._snapshots(above, target):
            try:
                plan = self._plan_snapshot(version, standalone)
                steps = self._own.path(version, target) if complete else []
            except DataError:
                continue
            if not self._may_serve(plan.target):
                continue
            return plan, plan.payload_bytes + sum(step.payload_bytes for step in steps)
        return None

    def _snapshots(self, above: int, target: int) -> list[tuple[int, bool]]:
        """Return the versions with a full snapshot, newest first, and whether that is a standalone anchor."""
        inside = [item.version for item in self._own.manifest(target).breaks if item.base_version is None]
        if above < 0 and self._history.manifest(0).kind == "anchor":
            inside.append(0)
        avoid = self.feedback.avoid.get(self._run.info.run, set())
        found = [(version, False) for version in inside if version_key(version) not in avoid]
        found += [(version, True) for version in self._run.anchors() if anchor_key(version) not in avoid]
        return sorted(((v, standalone) for v, standalone in found if above < v <= target), reverse=True)[:MAX_SNAPSHOTS]

    def _plan_snapshot(self, version: int, standalone: bool) -> UpdatePlan:
        manifest = self._own.manifest(version)
        if not standalone:
            if manifest.kind != "anchor":
                raise ChainError(f"version {version} is not an anchor")
            return UpdatePlan(manifest)
        anchor = self._run.anchor(version)
        if anchor.manifest != manifest.digest or anchor.fingerprint != manifest.fingerprint:
            raise ChainError(f"the anchor of version {version} was made of another version {anchor.manifest}")
        return UpdatePlan(manifest, anchor=anchor)

    def _raise_cause(self, position: WeightPosition, target: int, error: DeltaSyncError) -> NoReturn:
        """Raise the error of the next version, which says more than that there is no path."""
        if not self._history.is_followed_run(position):
            raise next(iter(self.feedback.bad.values()), error)
        blocked = [position.version, *reachable_stops(self._own, position.version, target)][-1] + 1
        known = self.feedback.bad.get((self._run.info.run, version_key(blocked)))
        if known is None and blocked <= target:
            self._history.manifest(blocked)
        raise known or error


GALLOP = 1024
"""Versions that ``reachable_stops`` first tries to cross at once."""


def reachable_stops(planner: ReadPlanner, start: int, target: int) -> list[int]:
    """Return the versions up to ``target`` that steps lead to, each from the one before, the first from ``start``.

    Found by a galloping search. A version may be reachable from one version and not from the one before it, by a merged
    delta that leads back, for example.

    Raises:
        StoreError: the store failed.
    """
    stops: list[int] = []
    at, span = start, GALLOP
    while at < target and span:
        tried = min(target, at + span)
        try:
            planner.path(at, tried)
        except DataError:
            span = (tried - at) // 2
            continue
        stops.append(tried)
        at = tried
    return stops


def merged_delta_starts(version: int, target: int) -> Iterator[int]:
    """Yield where merged deltas that lead across ``version``, and not beyond ``target``, would begin."""
    size = MERGE_WIDTH
    while (first := (version - 1) // size * size) + size <= target:
        yield first
        size *= MERGE_WIDTH

"""``UpdatePlanner`` plans the next commit towards a version: deltas, a full snapshot, or a rebuild.

``PlanFeedback`` records what staging and commits found out: documents to avoid, and how many steps to take. Documents
that turn out to be bad are avoided until the next poll, and another path is planned. If there is none, the
versions before the bad one are still taken, and then the planner raises.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NoReturn

from vllm_delta_sync.client import Run
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.planning.run_history import History, RunVersion, WeightPosition, ancestry, connect_runs
from vllm_delta_sync.engine.protocol import PlainStep, Stage, failed_step
from vllm_delta_sync.errors import (
    BusyError,
    ChainError,
    DataError,
    DeltaSyncError,
    EngineError,
    FingerprintError,
    MemoryLimitError,
    NotFoundError,
    StoreError,
    UnsupportedError,
)
from vllm_delta_sync.format.documents import Anchor, MergedDelta, anchor_key
from vllm_delta_sync.format.manifest import Manifest, version_key
from vllm_delta_sync.logs import ONCE, LogThrottle
from vllm_delta_sync.run.objects import needs_base_bits
from vllm_delta_sync.run.read_plan import ReadPlanner, Step
from vllm_delta_sync.run.service_policy import ServicePolicy, may_be_served

STAGED_BYTES = 14
"""Memory of a patch per changed element of a 16-bit dtype: address, distance, half a hash. The changes of all ranks are
an upper bound of this rank's; decoding and merging take the memory of a few tensors besides."""
MAX_SNAPSHOTS = 8
"""Maximum number of anchors, or versions to rebuild, that are tried, newest first."""

NOTHING_READ = {"versions": 0, "changed": 0, "payload_bytes": 0}
"""``UpdatePlan.read`` where nothing is read from the bucket, as for the undo log, or what is read is not known."""
MAX_STEPS = 1024
"""Maximum number of steps in one commit."""
StepPath = list[tuple[Step, int | None]]
"""Steps, each with the version of the followed run that it ends at, or None if it ends in another run."""

Key = tuple[str, str]
"""Run id and key of a document."""
REBUILD = "rebuild"
"""Stands for a document's key if the version is rebuilt from what the bucket holds."""


@dataclass(frozen=True)
class UpdatePlan:
    """One commit.

    Attributes:
        target: the version of the followed run that it ends at.
        steps: merged into one commit; of several runs, if the path crosses branches. Empty: the target is read whole.
        anchor: the standalone anchor that holds the target; None if the target is an anchor itself.
        rebuild: whether each rank rebuilds the target from what the bucket holds.
    """

    target: Manifest
    steps: list[Step] = field(default_factory=list)
    anchor: Anchor | None = None
    rebuild: bool = False

    @property
    def versions(self) -> int:
        """How many versions the commit spans."""
        spans = (step.high - step.low if isinstance(step.document, MergedDelta) else 1 for step in self.steps)
        return sum(spans) or 1

    @property
    def needs_base_bits(self) -> bool:
        """Whether decoding a step needs the weights held."""
        return any(needs_base_bits(step.document) for step in self.steps)

    @property
    def changed(self) -> int:
        """Changed elements in all steps."""
        return sum(step.changed for step in self.steps) if self.steps else self.target.total

    @property
    def payload_bytes(self) -> int:
        """Bytes of objects to read; 0 for a rebuild, because only the ranks know them."""
        if self.steps:
            return sum(step.payload_bytes for step in self.steps)
        return 0 if self.rebuild else (self.anchor or self.target).payload_bytes

    def read(self) -> dict[str, int]:
        """Return how many versions, changed elements and bytes are read from the bucket for it."""
        return {"versions": self.versions, "changed": self.changed, "payload_bytes": self.payload_bytes}

    def key(self, index: int) -> Key:
        """Return the document to avoid if step number ``index`` is bad."""
        if self.steps:
            return step_key(self.steps[index])
        if self.rebuild:
            return self.target.run, REBUILD
        version = self.target.version
        return self.target.run, anchor_key(version) if self.anchor is not None else version_key(version)

    def request(self, current: int | None, rescan: list[int]) -> Stage:
        """Return the request to stage it. Runs other than the followed one are named by URL and digest of run.json."""
        steps = [
            PlainStep(
                document=step.document.to_bytes(),
                merged=isinstance(step.document, MergedDelta),
                backwards=step.backwards,
                run=None if step.run.info.run == self.target.run else (step.run.bucket.url, step.run.info.digest),
            )
            for step in self.steps
        ]
        anchor = None if self.anchor is None else self.anchor.to_bytes()
        return Stage(self.target.to_bytes(), steps, anchor, self.rebuild, current, rescan)

    @classmethod
    def of_request(cls, request: Stage, run_at: Callable[[tuple[str, str] | None], Run]) -> "UpdatePlan":
        """Inverse of ``request``.

        Args:
            run_at: the run at a URL, whose run.json has a digest; None means the followed one.
        """
        documents = ((MergedDelta if step.merged else Manifest).from_bytes(step.document) for step in request.steps)
        steps = [
            Step(run_at(step.run), document, step.backwards)
            for step, document in zip(request.steps, documents, strict=True)
        ]
        anchor = None if request.anchor is None else Anchor.from_bytes(request.anchor)
        return cls(Manifest.from_bytes(request.target), steps, anchor, request.rebuild)


def step_key(step: Step) -> Key:
    """Return the document to avoid if a step is bad."""
    return step.run.info.run, step.key


class PlanFeedback:
    """Feedback about the documents of a run and its branches.

    Attributes:
        bad: documents that turned out to be bad since the last poll, and why.
        avoid: the same keys by run id. The sets stay the same objects until the next poll.
        max_steps: maximum number of steps in one commit.
    """

    def __init__(self) -> None:
        self.max_steps = MAX_STEPS
        self._max_steps_until = -1
        self.bad: dict[Key, DeltaSyncError] = {}
        self.avoid: dict[str, set[str]] = {}
        # Digest and message per document whose commit was reverted: trying again would only pause again.
        self._rejected: dict[Key, tuple[str, str]] = {}
        self._undecodable: set[Key] = set()
        self._log = LogThrottle(logger, ONCE)

    def refresh(self) -> None:
        """Forget what was bad, after a poll: it may be good now."""
        self.bad.clear()
        self.avoid.clear()

    def exclude(self, plan: UpdatePlan, error: DeltaSyncError) -> bool:
        """Record that staging failed, so that it is planned otherwise; False if the error is not about the versions."""
        if isinstance(error, StoreError | BusyError | EngineError) and not isinstance(error, MemoryLimitError):
            # Fewer versions at once would fail too, after as long; and there would be a pause for each.
            return False
        index = failed_step(error)
        if index is None and len(plan.steps) > 1:
            if self._shorten(plan):
                return True
            index = len(plan.steps) - 1
        key = plan.key(index or 0)
        if isinstance(error, UnsupportedError) and plan.needs_base_bits and key not in self._undecodable:
            self._undecodable.add(key)
            # With the same sharding, later versions need a rebuild too.
            self._log.warn(
                f"version {plan.target.version} is rebuilt from the bucket, which reads the whole model; later "
                f"versions may be too: {error.message}",
                UnsupportedError.kind,
            )
            return True
        if isinstance(error, MemoryLimitError) or key in self.bad:
            return False
        self.mark_bad(key, error)
        return True

    def record_mismatch(self, plan: UpdatePlan, reason: str) -> None:
        """Record that a commit was reverted although the weights before it were right: one of its steps is wrong."""
        if len(plan.steps) > 1 and self._shorten(plan):
            return
        document = plan.steps[-1].document if plan.steps else plan.anchor or plan.target
        key = plan.key(len(plan.steps) - 1)
        self._rejected[key] = (document.digest, reason)
        self.mark_bad(key, FingerprintError(reason))
        # The bad step is found, so long commits are allowed again.
        self.max_steps, self._max_steps_until = MAX_STEPS, -1

    def record_commit(self, version: int) -> None:
        """Record that a version was committed."""
        self._undecodable.clear()
        if version >= self._max_steps_until:
            self.max_steps = MAX_STEPS

    def _shorten(self, plan: UpdatePlan) -> bool:
        """Halve the steps per commit until the plan's target is passed; False if one step is left."""
        if self.max_steps <= len(plan.steps) // 2:
            return False
        self.max_steps = max(1, len(plan.steps) // 2)
        self._max_steps_until = max(self._max_steps_until, plan.target.version)
        return True

    def mark_bad(self, key: Key, error: DeltaSyncError) -> None:
        """Avoid a document until the next poll."""
        self.bad[key] = error
        self.avoid.setdefault(key[0], set()).add(key[1])

    def contains_rejected(self, steps: Iterable[Step]) -> bool:
        """Return whether a step's commit was reverted before; marks the step as bad if so."""
        for step in steps:
            key = step_key(step)
            digest, reason = self._rejected.get(key, ("", ""))
            if digest == step.document.digest:
                self.mark_bad(key, FingerprintError(reason))
                return True
        return False

    def contains_undecodable(self, steps: Iterable[Step]) -> bool:
        """Return whether a step cannot be decoded with the parts of tensors that the ranks hold."""
        return any(step_key(step) in self._undecodable for step in steps)


class UpdatePlanner:
    """Plans commits in the run of a history.

    Args:
        policy: which versions a commit may end at.

    Attributes:
        requested_version: an explicitly requested version, served whatever the policy says.
        feedback: what staging and commits found out; the updater reports to it.
    """

    def __init__(self, history: History, policy: ServicePolicy) -> None:
        self._history = history
        self._policy = policy
        self.requested_version: int | None = None
        self.feedback = PlanFeedback()
        self._planners: dict[str, ReadPlanner] = {}

    def reset(self) -> None:
        """Forget everything: another run is followed."""
        self.feedback = PlanFeedback()
        self._planners.clear()

    def refresh(self) -> None:
        """Forget what was bad, after a poll: it may be good now, and shorter paths may exist."""
        self.feedback.refresh()
        self._planners.clear()

    def plan_towards(self, position: WeightPosition | None, target: int, memory_bytes: int) -> UpdatePlan:
        """Return the next commit towards a version of the followed run, or as close to it as possible.

        Towards a version older than the one held, one commit leads there: steps are reverted if that is possible and
        fits; otherwise the version is read whole, or rebuilt.

        Args:
            position: what is held; None means weights that are no known version.
            memory_bytes: memory that the steps merged into one commit may take; a single step may exceed it.

        Raises:
            NotFoundError: the older version is no longer retained. ForkError: the head does not descend from the
                version that the commit would end at. DeltaSyncError: no commit leads further; the first reason.
        """
        if position is not None and self._history.is_followed_run(position) and target < position.version:
            plan = self._plan_back(position, target, memory_bytes)
        else:
            plan = self._plan_forward(position, target, memory_bytes)
        self._history.check_in_history(plan.target)
        return plan

    def _plan_forward(self, held: WeightPosition | None, target: int, memory_bytes: int) -> UpdatePlan:
        position = held
        while True:
            known = len(self.feedback.bad)
            try:
                if position is None:
                    raise ChainError(f"no update leads to version {target}")
                path = self._find_path(position, target)
                if not self.feedback.contains_rejected(step for step, _ in path):
                    plan = self._plan_prefix(position, path, memory_bytes)
                    if plan is not None:
                        return self._cheaper_snapshot(position, target, path) or plan
            except DataError as error:
                there = self._as_in_bucket(held)
                if there is not held:
                    # What contradicts one manifest may fit the other.
                    self._planners.clear()
                    if position is held:
                        position = there
                        continue
                    position = held
                plan = self._plan_around(position, target, memory_bytes)
                if plan is not None:
                    return plan
                if len(self.feedback.bad) == known:
                    self._raise_cause(position, target, error)

    def _plan_back(self, position: WeightPosition, target: int, memory_bytes: int) -> UpdatePlan:
        manifest = self._own.manifest(target)
        position = self._as_in_bucket(position) or position
        whole = self._snapshot_after(target - 1, target) or self._plan_rebuild(target)
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
        record = self._run.retention()
        if record is not None and record.gave_up(target):
            raise NotFoundError(
                f"version {target} is no longer retained: delta-sync gc removed what leads to it; choose another "
                "version"
            ) from problem
        raise (
            next(iter(self.feedback.bad.values()), None)
            or problem
            or ChainError(f"no update leads to version {target}")
        )

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
            return [(step, step.end) for step in steps]
        wanted = [RunVersion(self._run, target), *self._history.origins()]
        path: StepPath = []
        for run, first, last in connect_runs(ancestry(position.run, position.version), wanted) or []:
            own = run.info.run == self._run.info.run
            path += [(step, step.end if own else None) for step in self._planner(run).path(first, last)]
        if not path:
            raise ChainError(f"no update leads from run {position.run.info.run} to run {self._run.info.run}")
        if path[-1][1] is None:
            # The path ends in the source run, at the version that is version 0 of the branch.
            path[-1] = (path[-1][0], 0)
        return path

    def _plan_prefix(self, position: WeightPosition, path: StepPath, memory_bytes: int) -> UpdatePlan | None:
        """Plan as many steps of a path as fit, ending beyond the served version; return None if a document was marked
        bad, so that the caller tries again.

        Raises:
            ChainError: no version on the path can be served.
        """
        floor = self._held_version(position)
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
            if step.run.info.run == target.run:
                differs = target.digest != step.high_digest
            else:
                # Version 0 of a branch has another manifest than the step leads to, with the same weights.
                differs = target.fingerprint != step.high_fingerprint.hex()
            if differs and not step.backwards:
                self.feedback.mark_bad(
                    step_key(step), ChainError(f"{step.key} leads to another version {end} than the manifest")
                )
                return None
            return UpdatePlan(target, [taken for taken, _ in path[:number]])
        raise ChainError(f"no version after {position.version} on the path is readable and may be served")

    def _may_serve(self, manifest: Manifest) -> bool:
        """Return whether a commit may end at a version, which then generates."""
        return may_be_served(manifest, replace(self._policy, requested=self.requested_version))

    # Snapshots and rebuilds instead of steps

    def _cheaper_snapshot(self, position: WeightPosition, target: int, path: StepPath) -> UpdatePlan | None:
        """Plan a snapshot, if reading it and the steps from there is less than the steps of a path; else None."""
        cost = sum(step.payload_bytes for step, _ in path)
        if cost <= self._run.info.full_bytes:
            return None
        return self._snapshot_after(self._held_version(position), target, below=cost)

    def _plan_around(self, position: WeightPosition | None, target: int, memory_bytes: int) -> UpdatePlan | None:
        """Plan where no steps lead to the target; None if that is impossible or a document was just marked bad."""
        above = self._held_version(position)
        plan = self._snapshot_after(above, target)
        if plan is not None:
            return plan
        steps = self._own.path_towards(above, target) if above >= 0 else []
        reached = steps[-1].end if steps else above
        if reached < target:
            plan = self._plan_rebuild(target) or self._snapshot_after(reached, target, complete=False)
        if plan is None and position is not None and steps:
            with suppress(DataError):
                return self._plan_prefix(position, [(step, step.end) for step in steps], memory_bytes)
        return plan

    def _as_in_bucket(self, position: WeightPosition | None) -> WeightPosition | None:
        """Return the position with the bucket's manifest of the version held, where that is another one.

        The receiver may have read an unsigned manifest while it was damaged, which nothing showed. If both manifests
        declare the same weights, the ranks hold those weights.

        Raises:
            ChainError: the bucket has other weights under that version: the history was rewritten.
        """
        if position is None or not self._history.is_followed_run(position):
            return position
        try:
            there = self._run.manifest(position.version)
        except DataError:
            return position
        if there.digest == position.manifest.digest:
            return position
        if there.fingerprint != position.manifest.fingerprint:
            raise ChainError(
                f"version {position.version} is {position.manifest.digest} here and {there.digest} in the bucket: the "
                "history was rewritten"
            )
        return WeightPosition(position.run, there)

    def _held_version(self, position: WeightPosition | None) -> int:
        """Return the version held, which plans forward must pass; -1 for another run or unknown weights."""
        return position.version if position is not None and self._history.is_followed_run(position) else -1

    def _plan_rebuild(self, target: int) -> UpdatePlan | None:
        if REBUILD in self.feedback.avoid.get(self._run.info.run, set()):
            return None
        try:
            manifest = self._own.manifest(target)
            self._own.cheapest(manifest)
        except DataError:
            return None
        return UpdatePlan(manifest, rebuild=True) if self._may_serve(manifest) else None

    def _snapshot_after(
        self, above: int, target: int, complete: bool = True, below: int | None = None
    ) -> UpdatePlan | None:
        """Plan the newest version after ``above`` that the run stores whole; None if there is none.

        Args:
            complete: whether steps must lead from it to the target.
            below: what reading it and these steps must be less than, in bytes; None for any amount.
        """
        roots = self._own.roots(self._own.manifest(target))
        newer = [(key, version) for key, version in roots if version > above]
        for key, version in newer[:MAX_SNAPSHOTS]:
            try:
                found = self._own.plan_from(key, target if complete else version)
            except DataError:
                continue
            if found.root.is_stored and self._may_serve(found.root.manifest):
                fits = below is None or found.bytes < below
                return UpdatePlan(found.root.manifest, anchor=found.root.anchor) if fits else None
        return None

    def _raise_cause(self, position: WeightPosition | None, target: int, error: DeltaSyncError) -> NoReturn:
        """Raise the error of the target or of the next version, which says more than that there is no path."""
        if position is None or not self._history.is_followed_run(position):
            raise next(iter(self.feedback.bad.values()), error)
        steps = self._own.path_towards(position.version, target)
        blocked = (steps[-1].end if steps else position.version) + 1
        known = self.feedback.bad.get((self._run.info.run, version_key(blocked)))
        if known is None and blocked <= target:
            self._history.manifest(blocked)
        raise known or error

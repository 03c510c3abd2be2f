"""Which way to take from what is held to a version: steps, the weights of a version as a whole, or a rebuild.

What turns out to be bad is avoided until the next look into the bucket, and another way is looked for. Only when there
is none, the versions before it are taken, and then it is an error.
"""

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import NoReturn

from vllm_delta_sync.client import Run
from vllm_delta_sync.engine.planning.commit_plan import REBUILD, UpdatePlan, WeightPosition, step_key
from vllm_delta_sync.engine.planning.feedback import PlanFeedback
from vllm_delta_sync.engine.planning.lineage import RunSegment, RunVersion, across, line
from vllm_delta_sync.engine.planning.run_history import History
from vllm_delta_sync.errors import ChainError, DeltaSyncError, NotFoundError, StoreError
from vllm_delta_sync.format.documents import anchor_key
from vllm_delta_sync.format.manifest import Manifest, version_key
from vllm_delta_sync.run.plan import FOLD_WIDTH, Planner, Step, plan

STAGED_BYTES = 32
"""Memory that staging takes at most per changed element of a 16-bit dtype: decoded 10, folded 10 more, routed 14, and
never all of it at once."""
ROOTS = 8
"""Anchors, and versions to rebuild, that are tried, newest first."""

StepPath = list[tuple[Step, int | None]]
"""Steps, each with the version of the followed run that it ends at; None if that is none of it."""


class UpdatePlanner:
    """Plans commits in the run of a history.

    Attributes:
        named: the version that somebody named, which is served even if it is quarantined.
        lessons: what staging and committing have shown, to be told by whoever does either.

    Args:
        quarantined: whether any quarantined version may be served.
    """

    def __init__(self, history: History, quarantined: bool = False) -> None:
        self._history = history
        self._quarantined = quarantined
        self.named: int | None = None
        self.lessons = PlanFeedback()
        self._planners: dict[str, Planner] = {}

    def forget(self) -> None:
        """Another run is followed."""
        self.refresh()
        self.lessons.forget()

    def refresh(self) -> None:
        """The bucket was looked into again: what was bad may have healed, and there may be shorter ways."""
        self.lessons.refresh()
        self._planners.clear()

    @property
    def avoided(self) -> list[str]:
        """What turned out to be bad since the last look, for the log."""
        return [key for _, key in self.lessons.bad]

    def towards(self, place: WeightPosition | None, target: int, room: int) -> UpdatePlan:
        """``next``, or ``back`` where the version lies behind what is held."""
        if place is not None and self._history.is_own(place) and target < place.version:
            return self.back(place, target, room)
        return self.next(place, target, room)

    def next(self, place: WeightPosition | None, target: int, room: int) -> UpdatePlan:
        """The next commit on the way to a version of the followed run, or as close to it as anything leads.

        Args:
            place: what is held; None: weights that are no version of any run known.
            room: bytes of memory that steps folded into one commit may take. One that is needed is taken anyway.

        Raises:
            DeltaSyncError: nothing leads any further; the first reason. ForkError: the head does not descend from where
                it would end.
        """
        leg = self._next(place, target, room)
        self._history.check_ours(leg.target)
        return leg

    def _next(self, place: WeightPosition | None, target: int, room: int) -> UpdatePlan:
        if place is None:
            return self._from_nothing(target)
        while True:
            try:
                way = self._way(place, target)
                leg = None if self.lessons.meets_rejected(step for step, _ in way) else self._cut(place, way, room)
            except StoreError:
                raise
            except DeltaSyncError as error:
                known = len(self.lessons.bad)
                leg = self._around(place, target, room)
                if leg is not None:
                    return leg
                if len(self.lessons.bad) == known:
                    self._give_up(place, target, error)
                continue
            if leg is not None:
                return self._cheaper(place, target, way) or leg

    # Back

    def back(self, place: WeightPosition, target: int, room: int) -> UpdatePlan:
        """One commit from a version of the followed run to one that somebody named, of any place in it.

        Steps are taken back where they can be and fit; else the version is taken whole, or rebuilt.

        Raises:
            NotFoundError: the version is not kept any more. ForkError: the head does not descend from it.
            DeltaSyncError: nothing leads there.
        """
        leg = self._back(place, target, room)
        self._history.check_ours(leg.target)
        return leg

    def _back(self, place: WeightPosition, target: int, room: int) -> UpdatePlan:
        manifest = self._own.manifest(target)
        self._check_same_history(place)
        whole = self._at_once(manifest)
        problem: DeltaSyncError | None = None
        try:
            steps = [step for step, _ in self._way(place, target)]
            poor = self.lessons.meets_rejected(steps) or self.lessons.meets_undecodable(steps)
            # It ends there or nowhere, so it cannot be cut.
            poor = poor or STAGED_BYTES * sum(step.changed for step in steps) > room
            if steps and (whole is None or not poor):
                return UpdatePlan(manifest, steps)
        except StoreError:
            raise
        except DeltaSyncError as error:
            problem = error
        if whole is not None:
            return whole
        self._check_kept(manifest, problem)
        raise next(iter(self.lessons.bad.values()), None) or problem or ChainError(f"nothing leads to version {target}")

    def _at_once(self, manifest: Manifest) -> UpdatePlan | None:
        """A version as a whole: from an anchor of it, else rebuilt; None if neither can be."""
        for version, beside in self._roots(manifest.version - 1, manifest.version):
            try:
                return self._whole(version, beside)
            except StoreError:
                raise
            except DeltaSyncError:
                continue
        return self._rebuilt(manifest.version)

    def _check_kept(self, manifest: Manifest, problem: DeltaSyncError | None) -> None:
        record = self._run.retention()
        if record is not None and record.gave_up(manifest.version):
            raise NotFoundError(
                f"version {manifest.version} is no longer kept: what leads to it was removed (delta-sync gc); choose "
                "another version"
            ) from problem

    # Steps

    @property
    def _run(self) -> Run:
        return self._history.run

    @property
    def _own(self) -> Planner:
        return self._planner(self._run)

    def _planner(self, run: Run) -> Planner:
        name = run.info.run
        if name not in self._planners:
            # The set is shared: what turns out to be bad later is avoided too.
            self._planners[name] = Planner(run, self.lessons.avoid.setdefault(name, set()))
            if name == self._run.info.run and self._history.head is not None:
                self._planners[name].know(self._history.head)
        return self._planners[name]

    def _way(self, place: WeightPosition, target: int) -> StepPath:
        """Errors as ``Planner.path``."""
        self._planner(place.run).know(place.manifest)
        if self._history.is_own(place):
            steps = self._own.path(place.version, target)
            self._check_epochs(
                [place.manifest, *(step.document for step in steps if isinstance(step.document, Manifest))]
            )
            return [(step, step.end) for step in steps]
        wanted = [RunVersion(self._run, target), *self._history.origins()]
        stretches = across(line(place.run, place.version), wanted)
        way = [found for stretch in stretches or [] for found in self._walk(stretch)]
        if not way:
            raise ChainError(f"nothing leads from run {place.run.info.run} to run {self._run.info.run}")
        if way[-1][1] is None:
            # It ends in the source, at what is version 0 of the branch.
            way[-1] = (way[-1][0], 0)
        return way

    def _walk(self, stretch: RunSegment) -> StepPath:
        steps = self._planner(stretch.run).path(stretch.first, stretch.last)
        if stretch.run.info.run == self._run.info.run:
            return [(step, step.end) for step in steps]
        return [(step, None) for step in steps]

    def _check_epochs(self, manifests: list[Manifest]) -> None:
        ordered = sorted(manifests, key=lambda manifest: manifest.version)
        for before, after in pairwise(ordered):
            if after.epoch < before.epoch:
                raise ChainError(
                    f"version {after.version} was written in epoch {after.epoch}, version {before.version} before it "
                    f"in epoch {before.epoch}: its publisher had lost the run to another"
                )

    def _cut(self, place: WeightPosition, way: StepPath, room: int) -> UpdatePlan | None:
        """As many steps as fit, ending at a version beyond what is served; None: try again, something was marked bad.

        Raises:
            ChainError: no manifest on the way can be read.
        """
        floor = place.version if self._history.is_own(place) else -1
        if self.lessons.meets_undecodable(step for step, _ in way):
            ends = (end for _, end in reversed(way) if end is not None and end > floor)
            for last in islice(ends, ROOTS):
                if (leg := self._rebuilt(last)) is not None:
                    return leg
        fitting: list[int] = []
        beyond: list[int] = []
        for number, (step, end) in enumerate(way, 1):
            room -= STAGED_BYTES * step.changed
            if end is not None and end > floor:
                (fitting if room >= 0 and number <= self.lessons.longest else beyond).append(number)
        for number in [*reversed(fitting), *beyond]:
            step, end = way[number - 1]
            try:
                target = self._own.manifest(-1 if end is None else end)
            except StoreError:
                raise
            except DeltaSyncError:
                continue
            if not self._may_serve(target):
                continue
            if not step.backwards and self._is_other(target, step):
                self.lessons.mark(step_key(step), ChainError(f"{step.key} is of another version {end}"))
                return None
            return UpdatePlan(target, [taken for taken, _ in way[:number]])
        raise ChainError(f"no version after {place.version} on the way has a manifest that can be read, and is sound")

    def _is_other(self, target: Manifest, step: Step) -> bool:
        if step.run.info.run == target.run:
            return target.digest != step.high_digest
        # Version 0 of a branch: it names the manifest that the step leads to, and has its weights.
        return target.fingerprint != step.high_fingerprint.hex()

    def _may_serve(self, manifest: Manifest) -> bool:
        """Whether a commit may end there: every one does what is generated from then on."""
        return manifest.quarantine is None or self._quarantined or manifest.version == self.named

    # Other ways

    def _cheaper(self, place: WeightPosition, target: int, way: StepPath) -> UpdatePlan | None:
        """An anchor that is less to read than many steps."""
        cost = sum(step.payload_bytes for step, _ in way)
        if cost <= self._run.info.full_bytes:
            return None
        found = self._root(place.version if self._history.is_own(place) else -1, target)
        return found[0] if found is not None and found[1] < cost else None

    def _from_nothing(self, target: int) -> UpdatePlan:
        found = self._root(-1, target) or self._root(-1, target, all_the_way=False)
        leg = found[0] if found is not None else self._rebuilt(target)
        if leg is None:
            raise next(iter(self.lessons.bad.values()), ChainError(f"nothing leads to version {target}"))
        return leg

    def _around(self, place: WeightPosition, target: int, room: int) -> UpdatePlan | None:
        """Where no steps lead to the target; None: there is no other way, unless something was just marked bad."""
        own = self._history.is_own(place)
        if own:
            self._check_same_history(place)
        above = place.version if own else -1
        found = self._root(above, target)
        if found is not None:
            return found[0]
        stops = reach(self._own, place.version, target) if own else []
        reached = stops[-1] if stops else above
        leg = None
        if reached < target:
            leg = self._detour(place, reached + 1, target, room) if own else self._rebuilt(target)
        if leg is None and reached < target:
            found = self._root(reached, target, all_the_way=False)
            leg = None if found is None else found[0]
        return leg or self._part_way(place, stops, room)

    def _part_way(self, place: WeightPosition, stops: list[int], room: int) -> UpdatePlan | None:
        """To the last of the versions that can be reached one from the other, or at least to the first."""
        for stop in [*stops[-1:], *stops[:1]]:
            try:
                return self._cut(place, self._way(place, stop), room)
            except StoreError:
                raise
            except DeltaSyncError:
                continue
        return None

    def _check_same_history(self, place: WeightPosition) -> None:
        """What is served must be part of the chain that is followed further."""
        try:
            there = self._run.manifest(place.version)
        except StoreError:
            raise
        except DeltaSyncError:
            return
        if there.digest != place.manifest.digest:
            raise ChainError(
                f"version {place.version} is {place.manifest.digest} here and {there.digest} in the bucket: the "
                "history was rewritten"
            )

    def _detour(self, place: WeightPosition, blocked: int, target: int, room: int) -> UpdatePlan | None:
        """Across a version that cannot be taken: back to where a folded range begins, or all anew from what is kept."""
        breaks = {item.version for item in self._own.manifest(target).breaks}
        anew = blocked in breaks
        for first in crossing(blocked, target):
            if first >= place.version:
                continue
            try:
                onward = self._own.path(first, target)
                anew = True
                steps = [*self._own.path(place.version, first), *onward]
                return self._cut(place, [(step, step.end) for step in steps], room)
            except StoreError:
                raise
            except DeltaSyncError:
                continue
        return self._rebuilt(target) if anew else None

    def _rebuilt(self, target: int) -> UpdatePlan | None:
        avoid = self.lessons.avoid.get(self._run.info.run, set())
        if REBUILD in avoid:
            return None
        try:
            manifest = self._own.manifest(target)
            plan(self._run, manifest, avoid)
        except StoreError:
            raise
        except DeltaSyncError:
            return None
        return UpdatePlan(manifest, rebuild=True) if self._may_serve(manifest) else None

    def _root(self, above: int, target: int, all_the_way: bool = True) -> tuple[UpdatePlan, int] | None:
        """The newest version beyond ``above`` that is there as a whole, and the bytes to read from it to the target.

        Args:
            all_the_way: whether steps must lead from it to the target.
        """
        for version, beside in self._roots(above, target):
            try:
                leg = self._whole(version, beside)
                steps = self._own.path(version, target) if all_the_way else []
            except StoreError:
                raise
            except DeltaSyncError:
                continue
            if not self._may_serve(leg.target):
                continue
            return leg, leg.payload_bytes + sum(step.payload_bytes for step in steps)
        return None

    def _roots(self, above: int, target: int) -> list[tuple[int, bool]]:
        inside = [item.version for item in self._own.manifest(target).breaks if item.base_version is None]
        if above < 0 and self._history.manifest(0).kind == "anchor":
            inside.append(0)
        avoid = self.lessons.avoid.get(self._run.info.run, set())
        found = [(version, False) for version in inside if version_key(version) not in avoid]
        found += [(version, True) for version in self._run.anchors() if anchor_key(version) not in avoid]
        return sorted(((v, beside) for v, beside in found if above < v <= target), reverse=True)[:ROOTS]

    def _whole(self, version: int, beside: bool) -> UpdatePlan:
        manifest = self._own.manifest(version)
        if not beside:
            if manifest.kind != "anchor":
                raise ChainError(f"version {version} is no anchor")
            return UpdatePlan(manifest)
        anchor = self._run.anchor(version)
        if anchor.manifest != manifest.digest or anchor.fingerprint != manifest.fingerprint:
            raise ChainError(f"the anchor of version {version} was made of another version {anchor.manifest}")
        return UpdatePlan(manifest, anchor=anchor)

    def _give_up(self, place: WeightPosition, target: int, error: DeltaSyncError) -> NoReturn:
        """Raise what is wrong with the next version, rather than that there is no way."""
        if not self._history.is_own(place):
            raise next(iter(self.lessons.bad.values()), error)
        blocked = [place.version, *reach(self._own, place.version, target)][-1] + 1
        known = self.lessons.bad.get((self._run.info.run, version_key(blocked)))
        if known is None and blocked <= target:
            self._history.manifest(blocked)
        raise known or error


GALLOP = 1024
"""Versions that are first tried at once."""


def reach(planner: Planner, start: int, target: int) -> list[int]:
    """Versions up to ``target`` that steps lead to, each from the one before, the first from ``start``; by galloping.

    From one version there may be a way that there is not from the one before it: a folded range back, for example.

    Raises:
        StoreError: the store failed.
    """
    stops: list[int] = []
    at, span = start, GALLOP
    while at < target and span:
        aim = min(target, at + span)
        try:
            planner.path(at, aim)
        except StoreError:
            raise
        except DeltaSyncError:
            span = (aim - at) // 2
            continue
        stops.append(aim)
        at = aim
    return stops


def crossing(version: int, target: int) -> Iterator[int]:
    """Where folded ranges that lead across a version, and not beyond the target, would begin."""
    size = FOLD_WIDTH
    while (first := (version - 1) // size * size) + size <= target:
        yield first
        size *= FOLD_WIDTH

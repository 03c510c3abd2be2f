"""``PlanFeedback`` records what staging and commits found out: documents to avoid, and how many steps to take."""

from collections.abc import Iterable

from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.planning.commit_plan import Key, UpdatePlan, step_key
from vllm_delta_sync.engine.protocol import failed_step
from vllm_delta_sync.errors import (
    DeltaSyncError,
    FingerprintError,
    MemoryLimitError,
    StoreError,
    UnsupportedError,
)
from vllm_delta_sync.log_throttle import ONCE, LogThrottle
from vllm_delta_sync.run.read_plan import Step

MAX_STEPS = 1024
"""Maximum number of steps in one commit."""


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

    def reset(self) -> None:
        """Forget everything: another run is followed."""
        self.refresh()
        self._rejected.clear()
        self._undecodable.clear()
        self._log.forget(UnsupportedError.kind)
        self.max_steps, self._max_steps_until = MAX_STEPS, -1

    def refresh(self) -> None:
        """Forget what was bad, after a poll: it may be good now."""
        self.bad.clear()
        self.avoid.clear()

    def exclude(self, plan: UpdatePlan, error: DeltaSyncError) -> bool:
        """Record that staging failed, so that it is planned otherwise; False if the error is not about the versions."""
        index = failed_step(error)
        passing = isinstance(error, StoreError | MemoryLimitError)
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
        if passing or key in self.bad:
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
        self.max_steps, self._max_steps_until = (
            max(1, len(plan.steps) // 2),
            max(self._max_steps_until, plan.target.version),
        )
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

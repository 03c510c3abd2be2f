"""What a receiver has learnt of documents that it staged or committed: which to avoid, and how many to take at once."""

from collections.abc import Iterable

from vllm_delta_sync.engine.commit.transaction import failed_step
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.engine.planning.commit_plan import Key, UpdatePlan, step_key
from vllm_delta_sync.errors import (
    DeltaSyncError,
    FingerprintError,
    MemoryLimitError,
    StoreError,
    UnsupportedError,
)
from vllm_delta_sync.run.read_plan import Step

LONGEST = 1024
"""Steps in one commit."""


class PlanFeedback:
    """What one run has taught.

    Attributes:
        bad: what turned out to be bad since the last look into the bucket, and why.
        avoid: the same, by run: keys of documents. The sets stay the same objects until the next look.
        longest: steps to take in one commit.
    """

    def __init__(self) -> None:
        self.longest = LONGEST
        self._longest_until = -1
        self.bad: dict[Key, DeltaSyncError] = {}
        self.avoid: dict[str, set[str]] = {}
        # Digest and message per document that was committed and taken back: trying again would only pause again.
        self._rejected: dict[Key, tuple[str, str]] = {}
        self._undecodable: set[Key] = set()
        self._told = False

    def forget(self) -> None:
        """Another run is followed."""
        self.refresh()
        self._rejected.clear()
        self._undecodable.clear()
        self._told = False
        self.longest, self._longest_until = LONGEST, -1

    def refresh(self) -> None:
        """The bucket was looked into again: what was bad may have healed."""
        self.bad.clear()
        self.avoid.clear()

    def without(self, leg: UpdatePlan, error: DeltaSyncError) -> bool:
        """Staging a commit failed: do not plan it so again. False if the error says nothing about the versions."""
        index = failed_step(error)
        passing = isinstance(error, StoreError | MemoryLimitError)
        if index is None and len(leg.steps) > 1:
            if self._shorten(leg):
                return True
            index = len(leg.steps) - 1
        key = leg.key(index or 0)
        if isinstance(error, UnsupportedError) and leg.needs_base_bits and key not in self._undecodable:
            self._undecodable.add(key)
            self._tell(leg, error)
            return True
        if passing or key in self.bad:
            return False
        self.mark(key, error)
        return True

    def _tell(self, leg: UpdatePlan, error: DeltaSyncError) -> None:
        """Once: under the same cuts, the versions after it go the same way."""
        if not self._told:
            logger.warning(
                "version %d is rebuilt from the bucket, which reads all of the model, and so will be those like it: %s",
                leg.target.version,
                error.message,
            )
        self._told = True

    def mismatched(self, leg: UpdatePlan, reason: str) -> None:
        """A commit was taken back though the weights were right: one of its steps is wrong."""
        if len(leg.steps) > 1 and self._shorten(leg):
            return
        document = leg.steps[-1].document if leg.steps else leg.anchor or leg.target
        key = leg.key(len(leg.steps) - 1)
        self._rejected[key] = (document.digest, reason)
        self.mark(key, FingerprintError(reason))
        # It is found.
        self.longest, self._longest_until = LONGEST, -1

    def committed(self, version: int) -> None:
        """A version was committed."""
        self._undecodable.clear()
        if version >= self._longest_until:
            self.longest = LONGEST

    def _shorten(self, leg: UpdatePlan) -> bool:
        """Take fewer steps at once until those of ``leg`` are behind; False if it was as short as can be."""
        if self.longest <= len(leg.steps) // 2:
            return False
        self.longest, self._longest_until = max(1, len(leg.steps) // 2), max(self._longest_until, leg.target.version)
        return True

    def mark(self, key: Key, error: DeltaSyncError) -> None:
        """A document is bad."""
        self.bad[key] = error
        self.avoid.setdefault(key[0], set()).add(key[1])

    def meets_rejected(self, steps: Iterable[Step]) -> bool:
        """Whether a step was committed and taken back before; it is marked as bad then."""
        for step in steps:
            key = step_key(step)
            digest, reason = self._rejected.get(key, ("", ""))
            if digest == step.document.digest:
                self.mark(key, FingerprintError(reason))
                return True
        return False

    def meets_undecodable(self, steps: Iterable[Step]) -> bool:
        """Whether a step cannot be decoded with what the ranks hold of each tensor."""
        return any(step_key(step) in self._undecodable for step in steps)

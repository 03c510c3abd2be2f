"""``UndoLog`` keeps applied patches, within a bound of memory, so that they can be reverted and applied again."""

from collections import deque
from dataclasses import dataclass
from functools import cached_property

from vllm_delta_sync.engine.commit.apply import GroupChanges
from vllm_delta_sync.engine.model.patch import StagedPatch
from vllm_delta_sync.errors import EngineError
from vllm_delta_sync.format.fingerprint import Fingerprint

FINGERPRINT_BYTES = 200
"""Python memory of one fingerprint: two integers and a list entry."""
ENTRIES = 256
"""Maximum number of commits in the log, even if they are small."""


@dataclass
class UndoEntry:
    """A patch that was committed, what its commit measured, and the version and fingerprints before it."""

    patch: StagedPatch
    measured: GroupChanges
    fingerprints: list[Fingerprint]
    version: int | None

    @cached_property
    def nbytes(self) -> int:
        """Memory, in bytes. An upper bound: fingerprints of unchanged tensors may be shared."""
        # A patch keeps its size when it is taken back and applied again.
        return self.patch.nbytes + FINGERPRINT_BYTES * len(self.fingerprints)

    def expected(self, reverse: bool) -> GroupChanges:
        """Return the measurement that applying the patch again, or taking it back, must give."""
        if not reverse:
            return self.measured
        return {group: Fingerprint() - value for group, value in self.measured.items()}


class UndoLog:
    """Commits that can be taken back, and commits that were taken back and can be applied again.

    Attributes:
        writes: how often weights were written: commits, and steps back or forward again.
        nbytes: host memory used, in bytes.
    """

    def __init__(self) -> None:
        self.writes = 0
        self.nbytes = 0
        self._applied: deque[UndoEntry] = deque()
        self._undone: list[UndoEntry] = []
        self._unconfirmed: list[UndoEntry] = []

    @property
    def versions(self) -> list[int | None]:
        """Versions that the log can return to, newest first; None stands for weights that were no version."""
        return [entry.version for entry in reversed(self._applied)]

    def push(self, entry: UndoEntry) -> None:
        """Add the newest commit. Forgets commits that were taken back: they belong to another history now."""
        self._forget_undone()
        self._applied.append(entry)
        self._unconfirmed.append(entry)
        self.nbytes += entry.nbytes
        self.writes += 1

    def path(self, version: int | None, current: int | None) -> tuple[list[UndoEntry], bool]:
        """Return the commits that lead from ``current`` to ``version``: those to take back, newest first, and True; or
        those to apply again, oldest first, and False.

        Raises:
            EngineError: the log does not reach that version.
        """
        redo_versions = [entry.patch.version for entry in reversed(self._undone)]
        if version in redo_versions:
            return list(reversed(self._undone))[: redo_versions.index(version) + 1], False
        if version in self.versions:
            return list(reversed(self._applied))[: self.versions.index(version) + 1], True
        known = ", ".join(str(known) for known in self.versions if known is not None)
        raise EngineError(
            f"version {version} is not in this rank's undo log, which holds {known or 'none'}; version {current} is "
            "kept. The log cannot return to versions that were merged into one commit or that exceeded undo_bytes"
        )

    def record_step(self, reverse: bool) -> None:
        """Record that the newest commit was taken back, or the last one taken back was applied again."""
        if reverse:
            self._undone.append(self._applied.pop())
        else:
            self._applied.append(self._undone.pop())
        self.writes += 1

    def trim(self, limit: int) -> None:
        """Forget the oldest commits until at most ``limit`` bytes are used, and all entries whose earlier weights were
        no version."""
        self._forget_undone()
        while self._applied and (
            self.nbytes > limit or len(self._applied) > ENTRIES or self._applied[0].version is None
        ):
            self.nbytes -= self._applied.popleft().nbytes

    def confirm(self) -> None:
        """Drop the device copies of patches, which only a revert within the same pause needs. Host memory keeps the
        patches."""
        for entry in self._unconfirmed:
            if entry.patch.on_device is not None:
                entry.patch.on_device.release()
        self._unconfirmed.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._applied.clear()
        self._undone.clear()
        self._unconfirmed.clear()
        self.nbytes = 0

    def _forget_undone(self) -> None:
        self.nbytes -= sum(entry.nbytes for entry in self._undone)
        forgotten = {id(entry) for entry in self._undone}
        self._unconfirmed = [entry for entry in self._unconfirmed if id(entry) not in forgotten]
        self._undone.clear()

"""``RollingWeights`` rebuilds a version's weights for making anchors and merged deltas; ``Stop`` interrupts both."""

from collections.abc import Callable
from pathlib import Path

from vllm_delta_sync.errors import DataError
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.run.objects import read_steps
from vllm_delta_sync.run.read_plan import ReadPlanner
from vllm_delta_sync.run.restore import DECODED_ELEMENTS, apply_step, restore
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.state import ModelState

OBJECT_BYTES = 1024**3
"""Size at which an object of an anchor or merged delta is full: the next tensor starts another. No tensor is split."""
IN_MEMORY_BYTES = 64 * 1024**2
"""Models above this size are rebuilt in a scratch file: training on the same machine needs the memory."""

Stop = Callable[[], bool]
"""Polled during long work; True asks to stop."""


class StoppedError(Exception):
    """The caller asked to stop; nothing was committed, and scratch files were removed.

    Not a DeltaSyncError: nothing is wrong, so handlers that try alternatives must not catch it.
    """


def never_stop() -> bool:
    """Return a ``Stop`` that never asks to stop."""
    return False


def check_stop(stop: Stop) -> None:
    """Raise StoppedError if the caller wants to stop."""
    if stop():
        raise StoppedError("stopped before the end; nothing was committed, and it can be started again")


class RollingWeights:
    """The weights of one version at a time, rebuilt and verified like a reader's.

    Moving to a later version applies only the deltas in between.

    Args:
        base, scratch: as ``run.restore.restore``. stop: polled during the work; True stops it.
    """

    def __init__(
        self,
        run: RunReader,
        base: str | Path | None = None,
        scratch: str | Path | None = None,
        stop: Stop = never_stop,
    ) -> None:
        self._run, self._base, self._scratch, self._stop = run, base, scratch, stop
        self._current: tuple[Manifest, ModelState] | None = None

    def at(self, target: Manifest) -> ModelState:
        """Return the weights of a version, valid until the next call. Callers must not change them.

        Raises:
            StoppedError: ``stop`` returned True. Otherwise as ``run.restore.restore``.
        """
        current, self._current = self._current, None
        state = None if current is None else self._advance_to(*current, target)
        current = None
        if state is None:
            small = self._run.table.full_bytes <= IN_MEMORY_BYTES
            restored = restore(
                self._run,
                target,
                self._base,
                in_memory=small,
                progress=lambda _read, _all: check_stop(self._stop),
                scratch=self._scratch,
            )
            state = restored.state
        self._current = target, state
        return state

    def _advance_to(self, current: Manifest, state: ModelState, target: Manifest) -> ModelState | None:
        """Apply the steps to a later version; None if there is no path or a step is damaged."""
        if current.version > target.version:
            return None
        planner = ReadPlanner(self._run)
        planner.add_manifests(current, target)
        try:
            steps = planner.path(current.version, target.version)
            for step, read in zip(steps, read_steps(steps, DECODED_ELEMENTS), strict=True):
                check_stop(self._stop)
                apply_step(step, state, self._scratch, read=read)
        except DataError:
            return None
        return state if state.fingerprint == target.model_fingerprint else None

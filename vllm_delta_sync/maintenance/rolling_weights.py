"""Weights for making what takes them: anchors, and folded ranges where codec ``context`` is read or written."""

from collections.abc import Callable
from pathlib import Path

from vllm_delta_sync.errors import DeltaSyncError, StoreError
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.plan import Planner
from vllm_delta_sync.run.restore import advance, restore
from vllm_delta_sync.tensors.state import ModelState

OBJECT_BYTES = 1024**3
"""An object is closed once it has this many bytes; the next tensor begins another."""

Stop = Callable[[], bool]


class StoppedError(Exception):
    """The caller asked to stop; nothing was committed, and scratch files are gone.

    Not a DeltaSyncError: nothing is wrong, and nobody should look for another way.
    """


def never() -> bool:
    """Nobody asks to stop."""
    return False


def check_stop(stop: Stop) -> None:
    """Raise StoppedError if the caller wants to stop."""
    if stop():
        raise StoppedError("stopped before it was finished; nothing was committed, start it again any time")


IN_MEMORY_BYTES = 64 * 1024**2
"""Larger models are rebuilt in a scratch file: this is done beside a training that needs the memory."""


class RollingWeights:
    """The weights of one version at a time, rebuilt and verified as any reader does it; later versions cost what
    leads to them.

    Args:
        base, scratch: as ``run.restore.restore``. stop: asked now and then; True ends it.
    """

    def __init__(
        self,
        run: RunDocuments,
        base: str | Path | None = None,
        scratch: str | Path | None = None,
        stop: Stop = never,
    ) -> None:
        self._run, self._base, self._scratch, self._stop = run, base, scratch, stop
        self._held: tuple[Manifest, ModelState] | None = None

    def at(self, target: Manifest) -> ModelState:
        """The weights of a version, until they are asked for again. Nobody but this may move them.

        Raises:
            StoppedError: ``stop`` said so. Else as ``run.restore.restore``.
        """
        held, self._held = self._held, None
        state = None if held is None else self._follow(*held, target)
        held = None
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
        self._held = target, state
        return state

    def _follow(self, held: Manifest, state: ModelState, target: Manifest) -> ModelState | None:
        """The same weights, moved; None if there is no way, or something on it is bad."""
        if held.version > target.version:
            return None
        planner = Planner(self._run)
        planner.know(held, target)
        try:
            for step in planner.path(held.version, target.version):
                check_stop(self._stop)
                advance(step, state, self._scratch)
        except StoreError:
            raise
        except DeltaSyncError:
            return None
        return state if state.fingerprint == target.model_fingerprint else None

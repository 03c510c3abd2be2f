"""``apply_patch`` commits a patch: gather old bits, add, scatter and hash, in one pass over the changed elements.

With ``reverse`` it takes the patch back. A compiled loop does this in host memory, ``device_patch`` on a device.
``UndoLog`` keeps applied patches, within a bound of memory, so that they can be reverted and applied again.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

import numpy as np
import torch

from vllm_delta_sync.engine.model.device_batch import Batch
from vllm_delta_sync.engine.model.patch import HostBatch, StagedPatch
from vllm_delta_sync.engine.model.route import DensePatch, Region, region_view, split_regions
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.model.undo_writes import undo_writes
from vllm_delta_sync.errors import EngineError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import DType
from vllm_delta_sync.tensors.changes import order_masks

EXCHANGE_ELEMENTS = 1 << 22
"""Elements that are exchanged at a time in host memory: bounds scratch memory."""

GroupChanges = dict[int, Fingerprint]
Step = HostBatch | Batch | DensePatch


def apply_patch(patch: StagedPatch, routes: RouteMap, reverse: bool = False) -> GroupChanges:
    """Apply a patch in place, or take it back, on the calling thread's current stream.

    The engine must be paused, and the caller is the worker's main thread. The device has finished on return. After any
    exception, an interrupt included, ``patch.applied`` tells whether the patch is applied: it is applied whole or not
    at all, unless the exception is WeightsLostError.

    Returns:
        per group of ranks, the change of fingerprint over ``patch.sparse``; also in ``patch.measured``.

    Raises:
        WeightsLostError: it failed midway, and undoing it failed too.
    """
    measured: GroupChanges = {}
    done: list[Step] = []
    with routes.memory.committing():
        # A rank has done this while staging; no other caller may skip weights.
        if patch.on_host is None:
            patch.prepare(routes)
        on_device = patch.on_device
        steps: list[Step] = [*(patch.on_host or ()), *([] if on_device is None else on_device.batches), *patch.dense]
        try:
            if on_device is not None:
                on_device.clear_sums()
            for step in reversed(steps) if reverse else steps:
                _add_changes(measured, _apply_step(step, patch, routes, reverse))
                done.append(step)
            if on_device is not None:
                # Waits for the device, which reports errors only then.
                _add_changes(measured, on_device.read_sums())
            patch.measured, patch.applied = measured, not reverse
        except BaseException as error:  # including interrupts: half a version must not remain
            undo = [partial(_apply_step, step, patch, routes, not reverse) for step in reversed(done)]
            undo_writes([*undo, routes.memory.synchronize], f"version {patch.version}", error)
            patch.applied = reverse
            raise
    return measured


def _add_changes(measured: GroupChanges, changes: GroupChanges) -> None:
    for group, change in changes.items():
        measured[group] = measured.get(group, Fingerprint()) + change


def _apply_step(step: Step, patch: StagedPatch, routes: RouteMap, reverse: bool) -> GroupChanges:
    """Apply one step or take it back, whole or not at all. Returns the changes of fingerprint in host memory."""
    if isinstance(step, HostBatch):
        return step.apply(reverse)
    if isinstance(step, DensePatch):
        _exchange(step, routes)
    elif patch.on_device is not None:
        patch.on_device.apply(step, reverse)
    return {}


def compile_kernels(elements: Iterable[DType], wide: bool = False) -> None:
    """Compile the loops for these element types now, so that no commit compiles while the engine is paused.

    Args:
        wide: whether a destination has ``NARROW_ELEMENTS`` or more.
    """
    from vllm_delta_sync.format import kernels

    for element, index in product(elements, (np.int32, np.int64) if wide else (np.int32,)):
        types, nothing = (np.empty(0, index), np.empty(0, element.uint)), np.empty(0, np.int64)
        addresses, sums = np.empty((0, 4), np.int64), np.empty((0, 2), np.uint64)
        kernels.commit_each(addresses, nothing, *types, *order_masks(element), True, False, sums)


def _exchange(dense: DensePatch, routes: RouteMap) -> None:
    """Exchange the elements of a route and of its patch, whole or not at all."""
    destination, accelerator = routes.destinations[dense.route.destination], routes.memory.accelerator
    if accelerator is not None and routes.is_on_device(dense.route):
        workspace = accelerator.workspace
        exchange, most = workspace.exchange, workspace.nbytes // 2 // dense.data.element_size()
    else:
        exchange, most = _exchange_on_host, EXCHANGE_ELEMENTS
    done: list[Callable[[], None]] = []
    try:
        whole = Region(0, dense.data.shape, dense.data.stride())
        for staged, live in split_regions(whole, dense.route.target, most):
            swap = partial(exchange, region_view(destination.flat, live), region_view(dense.data, staged))
            swap()
            done.append(swap)
    except BaseException as error:  # including interrupts: half a tensor must not remain
        undo_writes(reversed(done), "half a tensor", error)
        raise


def _exchange_on_host(live: torch.Tensor, staged: torch.Tensor) -> None:
    old = live.clone()
    try:
        live.copy_(staged)
        staged.copy_(old)
    except BaseException as error:  # including interrupts: the old bits must not be lost
        undo_writes([partial(live.copy_, old)], "a part of a tensor", error)
        raise


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
    """

    def __init__(self) -> None:
        self.writes = 0
        self._applied: deque[UndoEntry] = deque()
        self._undone: list[UndoEntry] = []

    @property
    def nbytes(self) -> int:
        """Host memory used, in bytes."""
        return sum(entry.nbytes for entry in (*self._applied, *self._undone))

    @property
    def versions(self) -> list[int | None]:
        """Versions that the log can return to, newest first; None stands for weights that were no version."""
        return [entry.version for entry in reversed(self._applied)]

    def push(self, entry: UndoEntry) -> None:
        """Add the newest commit. Forgets commits that were taken back: they belong to another history now."""
        self._undone.clear()
        self._applied.append(entry)
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
        self._undone.clear()
        while self._applied and (
            self.nbytes > limit or len(self._applied) > ENTRIES or self._applied[0].version is None
        ):
            self._applied.popleft()

    def confirm(self) -> None:
        """Drop the device copies of patches, which only a revert within the same pause needs. Host memory keeps the
        patches."""
        for entry in (*self._applied, *self._undone):
            if entry.patch.on_device is not None:
                entry.patch.on_device.release()

    def clear(self) -> None:
        """Forget everything."""
        self._applied.clear()
        self._undone.clear()

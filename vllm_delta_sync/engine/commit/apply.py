"""``apply_patch`` commits a patch: gather old bits, add, scatter and hash, in one pass over the changed elements.

With ``reverse`` it takes the patch back. A compiled loop does this in host memory, ``device_patch`` on a device.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product

import numpy as np
import torch

from vllm_delta_sync.engine.model.device_batch import Batch
from vllm_delta_sync.engine.model.device_patch import is_on_device
from vllm_delta_sync.engine.model.patch import HostBatch, StagedPatch
from vllm_delta_sync.engine.model.route import DensePatch, region_view
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.model.undo_writes import undo_writes
from vllm_delta_sync.format.dtypes import DType
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.tensors.bits import order_masks

EXCHANGE_ELEMENTS = 1 << 22
"""Elements that are exchanged at a time in host memory: bounds scratch memory."""

GroupChanges = dict[int, Fingerprint]
Exchange = Callable[[torch.Tensor, torch.Tensor], None]

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
        _exchange_tensor(step, routes)
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


def _exchange_tensor(dense: DensePatch, routes: RouteMap) -> None:
    done: list[Callable[[], None]] = []
    try:
        for route, buffer in dense.exchanges:
            destination, accelerator = routes.destinations[route.destination], routes.memory.accelerator
            view = region_view(destination.flat, route.target)
            if accelerator is not None and is_on_device(destination, routes):
                workspace = accelerator.workspace
                _exchange_rows(view, buffer, workspace.exchange, workspace.nbytes // 2 // view.element_size(), done)
            else:
                _exchange_rows(view, buffer, _exchange_on_host, EXCHANGE_ELEMENTS, done)
    except BaseException as error:  # including interrupts: half a tensor must not remain
        undo_writes(reversed(done), "half a tensor", error)
        raise


def _exchange_rows(
    view: torch.Tensor, buffer: torch.Tensor, exchange: Exchange, most: int, done: list[Callable[[], None]]
) -> None:
    """Exchange the contents of a view and a buffer of the same shape, at most ``most`` elements at a time."""
    if view.dim() == 0:
        view, buffer = view.view(1), buffer.view(1)
    if view.dim() > 1 and view[0].numel() > most:
        for row in range(view.shape[0]):
            _exchange_rows(view[row], buffer[row], exchange, most, done)
        return
    rows = max(1, most * view.shape[0] // max(1, view.numel()))
    for start in range(0, view.shape[0], rows):
        swap = partial(exchange, view[start : start + rows], buffer[start : start + rows])
        swap()
        done.append(swap)


def _exchange_on_host(live: torch.Tensor, staged: torch.Tensor) -> None:
    old = live.clone()
    try:
        live.copy_(staged)
        staged.copy_(old)
    except BaseException as error:  # including interrupts: the old bits must not be lost
        undo_writes([partial(live.copy_, old)], "a part of a tensor", error)
        raise

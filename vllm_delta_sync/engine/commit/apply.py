"""``apply_patch`` commits a patch: gather old bits, add, scatter and hash, in one pass over the changed elements.

With ``reverse`` it takes the patch back. On the CPU a compiled loop does this; on other devices the same arithmetic
runs as torch operations.
"""

from collections.abc import Callable

import numpy as np
import torch

from vllm_delta_sync.engine.model.patch import DensePatch, SparsePatch, StagedPatch, region_view, to_device
from vllm_delta_sync.engine.model.route_map import Destination, RouteMap
from vllm_delta_sync.errors import WeightsLostError
from vllm_delta_sync.format.dtypes import DType
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.tensors.bits import order_masks
from vllm_delta_sync.tensors.torch_views import SIGNED

HASH_ELEMENTS = 1 << 22
"""Elements per step of the torch path and of an exchange: bounds scratch memory."""

GroupChanges = dict[int, Fingerprint]


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
    done: list[SparsePatch | DensePatch] = []
    steps: list[SparsePatch | DensePatch] = [*patch.sparse, *patch.dense]
    with routes.memory.committing():
        try:
            for step in reversed(steps) if reverse else steps:
                if isinstance(step, DensePatch):
                    _exchange_tensor(step, routes)
                else:
                    change = apply_sparse(step, routes.destinations[step.destination], reverse)
                    measured[step.group] = measured.get(step.group, Fingerprint()) + change
                done.append(step)
            # A device reports errors only when it is synchronized.
            routes.memory.synchronize()
            patch.measured, patch.applied = measured, not reverse
        except BaseException as error:  # including interrupts: half a version must not remain
            _undo(done, routes, patch.version, reverse, error)
            patch.applied = reverse
            raise
    return measured


def _undo(
    done: list[SparsePatch | DensePatch], routes: RouteMap, version: int, reverse: bool, cause: BaseException
) -> None:
    try:
        for step in reversed(done):
            if isinstance(step, DensePatch):
                _exchange_tensor(step, routes)
            else:
                apply_sparse(step, routes.destinations[step.destination], not reverse)
        routes.memory.synchronize()
    except BaseException as error:  # after any failure here, an interrupt included, the weights are unknown
        raise WeightsLostError(
            f"taking back version {version} failed midway ({type(error).__name__}: {error}) after {cause}; start the "
            "server again"
        ) from error


def apply_sparse(sparse: SparsePatch, destination: Destination, reverse: bool) -> Fingerprint:
    """Apply one sparse patch, or take it back, whole or not at all. Returns the change of fingerprint."""
    if destination.flat.device.type != "cpu":
        return apply_torch(sparse, destination, reverse)
    from vllm_delta_sync.format import kernels

    if sparse.relative:
        masks = order_masks(sparse.element)
        change = kernels.commit_relative(
            destination.bits, sparse.positions, sparse.data, sparse.premix, *masks, reverse
        )
    else:
        change = kernels.exchange(destination.bits, sparse.positions, sparse.data, sparse.premix)
    return Fingerprint(int(change[0]), int(change[1]))


def compile_kernels(elements: set[DType]) -> None:
    """Compile the loops for these element types now, so that no commit compiles while the engine is paused."""
    from vllm_delta_sync.format import kernels

    for element in elements:
        for index in (np.int32, np.int64):
            bits, nowhere, words = np.empty(0, element.uint), np.empty(0, index), np.empty(0, np.uint64)
            kernels.commit_relative(bits, nowhere, bits, words, *order_masks(element), False)
            kernels.exchange(bits, nowhere, bits, words)


def _exchange_tensor(dense: DensePatch, routes: RouteMap) -> None:
    done: list[Callable[[], None]] = []
    try:
        for route, buffer in dense.exchanges:
            view = region_view(routes.destinations[route.destination].flat, route.target)
            _exchange_rows(view, buffer, done)
    except BaseException:  # including interrupts: half a tensor must not remain
        for undo in reversed(done):
            undo()
        raise


def _exchange_rows(view: torch.Tensor, buffer: torch.Tensor, done: list[Callable[[], None]]) -> None:
    """Exchange the contents of a view and a buffer of the same shape, some rows at a time."""
    if view.dim() == 0:
        view, buffer = view.view(1), buffer.view(1)
    if view.dim() > 1 and view[0].numel() > HASH_ELEMENTS:
        for row in range(view.shape[0]):
            _exchange_rows(view[row], buffer[row], done)
        return
    rows = max(1, HASH_ELEMENTS * view.shape[0] // max(1, view.numel()))
    for start in range(0, view.shape[0], rows):
        live, staged = view[start : start + rows], buffer[start : start + rows]

        def swap(live: torch.Tensor = live, staged: torch.Tensor = staged) -> None:
            old = live.to(staged.device, copy=True)
            try:
                live.copy_(staged)
                staged.copy_(old)
            except BaseException:  # including interrupts: the old bits must not be lost
                live.copy_(old)
                raise

        swap()
        done.append(swap)


def apply_torch(sparse: SparsePatch, destination: Destination, reverse: bool) -> Fingerprint:
    """Do ``apply_sparse`` with torch operations, on any device."""
    total = Fingerprint()
    done = 0
    try:
        for start in range(0, sparse.positions.size, HASH_ELEMENTS):
            total += _apply_piece(sparse, destination, start, reverse)
            done = start + HASH_ELEMENTS
    except BaseException:  # including interrupts: half a patch must not remain
        for start in reversed(range(0, done, HASH_ELEMENTS)):
            _apply_piece(sparse, destination, start, not reverse)
        raise
    return total


def _apply_piece(sparse: SparsePatch, destination: Destination, start: int, reverse: bool) -> Fingerprint:
    piece = slice(start, start + HASH_ELEMENTS)
    if sparse.uploaded is None:
        where, data, premix = to_device(sparse, piece, destination.flat.device)
    else:
        where, data, premix = (tensor[piece] for tensor in sparse.uploaded)
    where = where.long()
    before = destination.flat[where]
    after = _add(before, -data if reverse else data, sparse) if sparse.relative else data
    # All allocations come before the write: running out of memory leaves the piece untouched.
    change = _hash_change(premix, before, after)
    kept = None if sparse.relative else before.cpu().numpy()
    destination.flat[where] = after
    if kept is not None:
        sparse.data[piece] = kept.view(sparse.data.dtype)
        if sparse.uploaded is not None:
            data.copy_(before)
    return change


def _add(bits: torch.Tensor, distances: torch.Tensor, sparse: SparsePatch) -> torch.Tensor:
    # In two's complement the monotone key of a float is x for x >= 0, and x ^ max (which equals min − x − 1) for x < 0;
    # signed addition then wraps modulo 2^width.
    if not sparse.element.is_float:
        return bits + distances
    largest = torch.iinfo(SIGNED[sparse.element.itemsize]).max
    key = torch.where(bits < 0, bits ^ largest, bits) + distances
    return torch.where(key < 0, key ^ largest, key)


def _shift(words: torch.Tensor, count: int) -> torch.Tensor:
    return (words >> count) & ((1 << (64 - count)) - 1)


def _hash_change(premix: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> Fingerprint:
    """Return the sum of hash(after) − hash(before); int64 arithmetic wraps as the unsigned definition does."""
    from vllm_delta_sync.format import kernels

    factors = (kernels.BITS, kernels.FINAL, kernels.LANE)
    bits_factor, final_factor, lane_factor = (int(np.array(factor).view(np.int64)) for factor in factors)
    mask = -1 if before.element_size() == 8 else (1 << (8 * before.element_size())) - 1
    lows = []
    for bits in (before, after):
        words = premix + (bits.to(torch.int64) & mask) * bits_factor
        words = (words ^ _shift(words, 29)) * final_factor
        lows.append(words ^ _shift(words, 32))
    highs = [low * lane_factor for low in lows]
    highs = [high ^ _shift(high, 29) for high in highs]
    modulus = (1 << 64) - 1
    return Fingerprint(int((lows[1] - lows[0]).sum()) & modulus, int((highs[1] - highs[0]).sum()) & modulus)

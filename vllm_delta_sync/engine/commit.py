"""Commit: gather old bits, add, scatter and hash in one pass over what changed; or take all of it back.

The staged patch is its own undo log where it holds distances: subtracting them restores whatever was there. On
the CPU a compiled loop does it; on other devices the same arithmetic runs as torch operations.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_delta_sync.engine.patch import DensePatch, SparsePatch, StagedPatch, dense_view, source_view
from vllm_delta_sync.engine.routes import Destination, RouteMap
from vllm_delta_sync.errors import WeightsLostError
from vllm_delta_sync.torch_bits import SIGNED
from vllm_delta_sync.wire import kernels
from vllm_delta_sync.wire.bits import Bits, order_masks
from vllm_delta_sync.wire.dtypes import DType
from vllm_delta_sync.wire.fingerprint import Fingerprint

HASH_ELEMENTS = 1 << 22
"""Elements per step of the torch path: bounds its int64 scratch memory."""


@dataclass
class Undo:
    """What reverting needs beyond the patch: how many sparse patches were applied, and the old bits of absolute and
    dense ones, by their position there."""

    sparse: int = 0
    absolute: dict[int, torch.Tensor | Bits] = field(default_factory=dict)
    dense: dict[int, list[torch.Tensor]] = field(default_factory=dict)


def commit(patch: StagedPatch, routes: RouteMap) -> tuple[Fingerprint, Undo]:
    """Apply a patch in place.

    Returns:
        the measured change of fingerprint over ``patch.sparse``, to be compared with ``patch.declared``, and what
        ``revert`` needs.
    """
    undo = Undo()
    measured = Fingerprint()
    try:
        for position, sparse in enumerate(patch.sparse):
            destination = routes.destinations[sparse.destination]
            if destination.flat.device.type == "cpu":
                measured += _commit_compiled(sparse, destination, position, undo)
            else:
                measured += commit_torch(sparse, destination, position, undo)
            undo.sparse = position + 1
        for position, dense in enumerate(patch.dense):
            _commit_dense(dense, position, routes, undo)
    except BaseException:  # an interrupt too must not leave half a version
        revert_or_give_up(patch, routes, undo)
        raise
    return measured, undo


def revert_or_give_up(patch: StagedPatch, routes: RouteMap, undo: Undo) -> None:
    """``revert``; raises WeightsLostError if that fails, since nobody then knows the weights."""
    try:
        revert(patch, routes, undo)
    except Exception as error:  # whatever stops it, the weights are then unknown
        raise WeightsLostError(
            f"taking back version {patch.version} failed midway ({type(error).__name__}: {error}); start the server "
            "again"
        ) from error


def warm_up(elements: set[DType]) -> None:
    """Compile the loops for these element types now, so that no commit pays for it while the engine is paused."""
    nowhere = np.empty(0, np.int64)
    for element in elements:
        bits, words = np.empty(0, element.uint), np.empty(0, np.uint64)
        kernels.commit_relative(bits, nowhere, bits, words, *order_masks(element))
        kernels.commit_absolute(bits, nowhere, bits, words, bits)
        kernels.add_distances(bits, nowhere, bits, *order_masks(element), True)


def revert(patch: StagedPatch, routes: RouteMap, undo: Undo) -> None:
    """Put every bit back as it was before ``commit``, in the opposite order."""
    for position, olds in undo.dense.items():
        for route, old in zip(patch.dense[position].routes, olds, strict=True):
            dense_view(routes.destinations[route.destination].flat, route).copy_(old)
    for position in reversed(range(undo.sparse)):
        sparse = patch.sparse[position]
        destination = routes.destinations[sparse.destination]
        if destination.flat.device.type == "cpu":
            _revert_compiled(sparse, destination, undo.absolute.get(position))
        else:
            revert_torch(sparse, destination, undo.absolute.get(position))


def _commit_compiled(sparse: SparsePatch, destination: Destination, position: int, undo: Undo) -> Fingerprint:
    if sparse.relative:
        masks = order_masks(sparse.element)
        low, high = kernels.commit_relative(destination.bits, sparse.positions, sparse.data, sparse.premix, *masks)
    else:
        old = np.empty_like(sparse.data)
        low, high = kernels.commit_absolute(destination.bits, sparse.positions, sparse.data, sparse.premix, old)
        undo.absolute[position] = old
    return Fingerprint(int(low), int(high))


def _revert_compiled(sparse: SparsePatch, destination: Destination, old: torch.Tensor | Bits | None) -> None:
    if sparse.relative:
        masks = order_masks(sparse.element)
        kernels.add_distances(destination.bits, sparse.positions, sparse.data, *masks, True)
    elif isinstance(old, np.ndarray):
        destination.bits[sparse.positions] = old


def _commit_dense(dense: DensePatch, position: int, routes: RouteMap, undo: Undo) -> None:
    source = torch.from_numpy(dense.bits.view(f"<i{dense.bits.itemsize}"))
    targets = [dense_view(routes.destinations[route.destination].flat, route) for route in dense.routes]
    undo.dense[position] = [target.clone() for target in targets]
    for target, route in zip(targets, dense.routes, strict=True):
        target.copy_(source_view(source, route))


def commit_torch(sparse: SparsePatch, destination: Destination, position: int, undo: Undo) -> Fingerprint:
    """``commit`` of one sparse patch with torch operations, on any device."""
    total = Fingerprint()
    olds: list[torch.Tensor] = []
    done = 0
    try:
        for start in range(0, sparse.positions.size, HASH_ELEMENTS):
            piece = slice(start, start + HASH_ELEMENTS)
            where, data, premix = _upload(sparse, piece, destination.flat.device)
            before = destination.flat[where]
            after = _add(before, data, sparse) if sparse.relative else data
            # Everything that allocates comes before the write: running out of memory leaves the piece untouched.
            total += _hash_change(premix, before, after)
            if not sparse.relative:
                olds.append(before)
            destination.flat[where] = after
            done = start + where.numel()
    except BaseException:  # an interrupt too must not leave half a patch
        revert_torch(sparse, destination, torch.cat(olds) if olds else None, done)
        raise
    if not sparse.relative:
        undo.absolute[position] = torch.cat(olds)
    return total


def revert_torch(
    sparse: SparsePatch, destination: Destination, old: torch.Tensor | Bits | None, count: int | None = None
) -> None:
    """``revert`` of one sparse patch, or of its first ``count`` elements, with torch operations, on any device."""
    stop = sparse.positions.size if count is None else count
    for start in range(0, stop, HASH_ELEMENTS):
        piece = slice(start, min(start + HASH_ELEMENTS, stop))
        where, data, _ = _upload(sparse, piece, destination.flat.device)
        if sparse.relative:
            destination.flat[where] = _add(destination.flat[where], -data, sparse)
        elif isinstance(old, torch.Tensor):
            destination.flat[where] = old[piece]


def _upload(sparse: SparsePatch, piece: slice, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    signed = sparse.data[piece].view(f"<i{sparse.data.itemsize}")
    arrays = (sparse.positions[piece], signed, sparse.premix[piece].view(np.int64))
    positions, data, premix = (torch.from_numpy(array).to(device) for array in arrays)
    return positions, data, premix


def _add(bits: torch.Tensor, distances: torch.Tensor, sparse: SparsePatch) -> torch.Tensor:
    # In two's complement the monotone key of a float is x for x >= 0 and min − x − 1 … written as x ^ max for x < 0;
    # signed addition then wraps modulo 2^width by itself.
    if not sparse.element.is_float:
        return bits + distances
    largest = torch.iinfo(SIGNED[sparse.element.itemsize]).max
    key = torch.where(bits < 0, bits ^ largest, bits) + distances
    return torch.where(key < 0, key ^ largest, key)


_BITS, _FINAL, _LANE = (
    int(np.array(constant).view(np.int64)) for constant in (kernels.BITS, kernels.FINAL, kernels.LANE)
)


def _shift(words: torch.Tensor, count: int) -> torch.Tensor:
    return (words >> count) & ((1 << (64 - count)) - 1)


def _hash_change(premix: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> Fingerprint:
    """Sum of hash(after) − hash(before); int64 arithmetic wraps as the unsigned definition does."""
    mask = -1 if before.element_size() == 8 else (1 << (8 * before.element_size())) - 1
    lows = []
    for bits in (before, after):
        words = premix + (bits.to(torch.int64) & mask) * _BITS
        words = (words ^ _shift(words, 29)) * _FINAL
        lows.append(words ^ _shift(words, 32))
    highs = [low * _LANE for low in lows]
    highs = [high ^ _shift(high, 29) for high in highs]
    modulus = (1 << 64) - 1
    return Fingerprint(int((lows[1] - lows[0]).sum()) & modulus, int((highs[1] - highs[0]).sum()) & modulus)

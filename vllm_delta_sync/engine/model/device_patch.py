"""``DevicePatch`` is the part of a patch whose weights lie on a device: uploaded beside generation, applied in a pause.

It is cut into batches that fit the workspace. Beside generation, as many batches are uploaded as the setting
``device_staging_bytes`` and half of the device's free memory hold, since the engine took the rest for its cache; during
the commit, the others pass through the workspace one by one. A commit launches one kernel per batch, whatever the
number of destinations, reads the sums of hashes once, and allocates nothing.

What a kernel does: a negative pattern x of a float stands in the monotone order at x ^ largest, which in two's
complement equals smallest − x − 1; distances are added there, modulo 2^width. The hash is that of docs/FORMAT.md.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import torch

from vllm_delta_sync.engine.model.accelerator import Workspace
from vllm_delta_sync.engine.model.device_batch import FIXED_COLUMNS, Batch, BatchPart, PackedBatch, cut_batches, kind
from vllm_delta_sync.engine.model.route import Addresses, Route, RoutePatch
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.model.undo_writes import undo_writes
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import DType
from vllm_delta_sync.tensors.torch_hash import premix_in_place, write_lanes
from vllm_delta_sync.tensors.torch_views import SIGNED

TORCH_ELEMENTS = 1 << 20
"""Elements per step without Triton: bounds the scratch memory."""
TORCH_SCRATCH = 9
"""Arrays of 8 bytes per element that such a step needs."""


class DevicePatch:
    """The patches of one version whose destinations lie on the device.

    Args:
        patches: in any order; each element of a destination occurs at most once among those that are relative, and at
            most once among those that are not.
    """

    def __init__(self, patches: list[RoutePatch], routes: RouteMap, workspace: Workspace) -> None:
        self._workspace, self._memory = workspace, routes.memory
        self._groups = sorted({patch.group for patch in patches})
        # By kind, and near each other in memory.
        ordered = sorted(patches, key=lambda each: (kind(each), each.route.destination, each.route.target.offset))
        self.batches = list(cut_batches(ordered, routes, self._groups, workspace.nbytes))
        sums = 16 * len(self._groups)
        self._sums = workspace.accelerator.allocate(sums).view(torch.int64).view(-1, 2)
        self._sums_on_host = workspace.accelerator.allocate_pinned(sums).view(torch.int64).view(-1, 2)
        self._commit: CommitFunction
        if workspace.accelerator.has_triton:
            from vllm_delta_sync.engine.model.commit_triton import commit_triton

            self._commit = commit_triton
        else:
            # Allocated now, so that no commit allocates.
            self._commit = partial(commit_torch, workspace.scratch(TORCH_SCRATCH * TORCH_ELEMENTS * 8))

    def upload(self) -> None:
        """Upload batches as long as ``take_slab`` has memory; the others are uploaded during the commit.

        Raises:
            BusyError: the engine is asleep. What is free then is not ours: waking up needs it.
        """
        workspace = self._workspace
        for batch in self.batches:
            with self._memory.reading():
                slab = workspace.take_slab()
                if slab is None:
                    break
                with workspace.lock:
                    batch.pack(workspace.on_host)
                    workspace.upload(batch.nbytes, slab.memory)
            batch.uploaded = slab
        workspace.record_version(sum(batch.uploaded is not None for batch in self.batches))

    def release(self) -> None:
        """Free the uploaded batches. Host memory keeps the patches."""
        for batch in self.batches:
            batch.uploaded = None

    def clear_sums(self) -> None:
        """Begin to measure."""
        self._sums.zero_()

    def read_sums(self) -> dict[int, Fingerprint]:
        """Return the change of fingerprint per group since ``clear_sums``. Waits for the device."""
        self._sums_on_host.copy_(self._sums, non_blocking=True)
        self._workspace.accelerator.synchronize()
        words = self._sums_on_host.numpy().view(np.uint64)
        return {group: Fingerprint(int(low), int(high)) for group, (low, high) in zip(self._groups, words, strict=True)}

    def apply(self, batch: Batch, reverse: bool) -> None:
        """Launch a batch, or take it back. After an exchange, the patches in host memory hold the old bits.

        Raises:
            RuntimeError: the device failed; the batch is not applied. WeightsLostError: the device failed again.
        """
        workspace = self._workspace
        if batch.uploaded is not None and batch.parts[0].patch.relative:
            self._commit(batch.views(batch.uploaded.memory), batch, self._sums, reverse)
            return
        with workspace.lock:
            if batch.uploaded is None:
                memory = workspace.on_device
                batch.pack(workspace.on_host)
                workspace.upload(batch.nbytes, memory)
            else:
                memory = batch.uploaded.memory
            packed = batch.views(memory)
            self._commit(packed, batch, self._sums, reverse)
            try:
                if not packed.relative:
                    on_host = batch.views(workspace.on_host).data
                    on_host.copy_(packed.data, non_blocking=True)
                # The next batch overwrites the workspace.
                workspace.accelerator.synchronize_stream()
            except BaseException as error:  # including interrupts: the weights must not keep what the patch lost
                undo = partial(self._commit, packed, batch, self._sums, not reverse)
                undo_writes([undo, workspace.accelerator.synchronize], "a batch", error)
                raise
            if not packed.relative:
                batch.unpack_data(on_host)


def compile_kernels(elements: set[DType], routes: RouteMap) -> None:
    """Compile and load the kernels for these element types now, so that no commit does while the engine is paused."""
    accelerator = routes.memory.accelerator
    if accelerator is None or not accelerator.has_triton:
        return
    from vllm_delta_sync.engine.model.commit_triton import commit_triton

    workspace = accelerator.workspace
    there = (route for each in routes.routes for route in each if routes.is_on_device(route))
    kinds = {(len(route.steps), route.index): route for route in there}
    with workspace.lock:
        # All zeros is a batch with one block, whose segment is empty.
        workspace.on_device.zero_()
        for element, relative, route in product(elements, (True, False), kinds.values()):
            positions: Addresses = np.zeros(1, route.index)
            patch = RoutePatch(route, 0, 0, element, relative, positions, np.zeros(1, element.uint))
            batch = Batch([BatchPart(patch, routes.destinations[route.destination], 0, 0, 1)])
            packed, sums = batch.views(workspace.on_device), workspace.on_device[-16:].view(torch.int64)
            packed.table[:, FIXED_COLUMNS:] = 1
            for reverse in (False, True):
                commit_triton(packed, batch, sums, reverse)
        for element in elements:
            # torch too loads its kernels at the first use: this one copies a tensor that lies in strides.
            strided = workspace.on_device[:4096].view(SIGNED[element.itemsize]).view(16, -1)
            strided[:, ::2].copy_(strided[:, 1::2])
        accelerator.synchronize_stream()


CommitFunction = Callable[[PackedBatch, Batch, torch.Tensor, bool], None]
"""(batch, its views on the device, (groups, 2) int64 sums, reverse): write it and add to the sums, or do neither."""


def commit_torch(scratch: torch.Tensor, packed: PackedBatch, batch: Batch, sums: torch.Tensor, reverse: bool) -> None:
    """Apply a batch in torch operations, some elements at a time, or not at all.

    Args:
        scratch: (TORCH_SCRATCH · TORCH_ELEMENTS · 8,) uint8 on the device.
    """
    done: list[tuple[BatchPart, slice]] = []
    at = 0
    try:
        for part in batch.parts:
            for start in range(at, at + part.size, TORCH_ELEMENTS):
                piece = slice(start, min(start + TORCH_ELEMENTS, at + part.size))
                _commit_piece(scratch, packed, part, piece, sums, reverse)
                done.append((part, piece))
            at += part.size
    except BaseException as error:  # including interrupts: half a batch must not remain
        undo = [
            partial(_commit_piece, scratch, packed, part, piece, sums, not reverse) for part, piece in reversed(done)
        ]
        undo_writes(undo, "half a batch", error)
        raise


def _commit_piece(
    scratch: torch.Tensor, packed: PackedBatch, part: BatchPart, piece: slice, sums: torch.Tensor, reverse: bool
) -> None:
    flat, data = part.destination.flat, packed.data[piece]
    rows = scratch.view(torch.int64).view(TORCH_SCRATCH, -1)
    where, shifted, words, lanes = *rows[:3, : data.numel()], rows[3:7, : data.numel()]
    before, after = (row.view(flat.dtype)[: data.numel()] for row in rows[7:])
    # Two lanes are scratch until there are hashes.
    _locate(part.patch.route, packed.positions[piece], where, lanes[0], lanes[1])
    torch.index_select(flat, 0, where, out=before)
    if packed.relative:
        _add(before, data, packed.is_float, reverse, after, shifted.view(flat.dtype)[: data.numel()])
    else:
        after.copy_(data)
    words.copy_(packed.positions[piece]).add_(part.patch.route.source.offset)
    premix_in_place(part.patch.seed, words, shifted)
    for row, bits in ((0, before), (2, after)):
        write_lanes(words, bits, lanes[row], lanes[row + 1], shifted)
    change = torch.sum(lanes[2:].sub_(lanes[:2]), 1, out=rows[1, :2])
    # Whatever may fail for want of memory has come before the writes.
    try:
        flat.index_copy_(0, where, after)
        if not packed.relative:
            data.copy_(before)
        sums[part.row].add_(change)
    except BaseException as error:  # including interrupts: half a piece must not remain
        undo = [partial(flat.index_copy_, 0, where, before), *([] if packed.relative else [partial(data.copy_, after)])]
        undo_writes(undo, "a piece", error)
        raise


def _locate(
    route: Route, positions: torch.Tensor, where: torch.Tensor, rest: torch.Tensor, coordinate: torch.Tensor
) -> None:
    """Write (n,) int64 indices in a route's destination to ``where``; ``rest`` and ``coordinate`` are scratch."""
    rest.copy_(positions)
    where.fill_(route.target.offset)
    for stride, step in route.steps[:-1]:
        torch.div(rest, stride, rounding_mode="floor", out=coordinate)
        rest.sub_(coordinate, alpha=stride)
        where.add_(coordinate, alpha=step)
    where.add_(rest, alpha=route.steps[-1][1])


def _add(
    before: torch.Tensor,
    distances: torch.Tensor,
    is_float: bool,
    reverse: bool,
    after: torch.Tensor,
    mask: torch.Tensor,
) -> None:
    sign, largest = 8 * before.element_size() - 1, torch.iinfo(before.dtype).max
    after.copy_(before)
    if is_float:
        # The shift is arithmetic: all ones for a negative pattern, so that only those are mirrored.
        after.bitwise_xor_(torch.bitwise_right_shift(after, sign, out=mask).bitwise_and_(largest))
    if reverse:
        after.sub_(distances)
    else:
        after.add_(distances)
    if is_float:
        after.bitwise_xor_(torch.bitwise_right_shift(after, sign, out=mask).bitwise_and_(largest))

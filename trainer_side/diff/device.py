"""``collect``: compare a tensor on the live tensor's device, so that only its changes are copied to the host.

Runs with plain torch operations on any device, the CPU included; on CUDA the loop over elements is one Triton kernel.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from trainer_side.diff.buffers import BaselineBuffer, DeviceBuffer, HostBuffer
from trainer_side.diff.reader import boxes
from trainer_side.diff.undo_log import ChangeLog, ExpandedChanges, PendingWrite
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_change
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.bits import Bits, order_masks
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, bits_of

WINDOW_ELEMENTS = 32 * 1024**2
"""Elements compared at once: bounds the device memory of a comparison, see docs/design/costs.md."""

Differences = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Extract = Callable[[torch.Tensor, torch.Tensor, str], Differences]


def collect(spec: TensorSpec, buffer: BaselineBuffer, live: torch.Tensor, log: ChangeLog) -> Fingerprint:
    """Do ``Detector.collect`` for a live tensor or baseline on a device."""
    extract = _extract_for(live)
    entries = log.parts[0]
    change = Fingerprint()
    flat = live.view(-1) if live.is_contiguous() else live
    for start, index in boxes(tuple(flat.shape), WINDOW_ELEMENTS):
        box = flat[index]
        window = buffer.window(start, start + box.numel(), live.device)
        where, old, new = extract(box, window, spec.dtype)
        if not where.numel():
            continue
        positions, before, after = where.cpu().numpy() + start, bits_of(old.cpu()), bits_of(new.cpu())
        changes = ExpandedChanges(positions, distances_between(spec, before, after))
        # From here on an interrupt may leave the window half updated; ``PendingWrite`` restores the old bits.
        if isinstance(buffer, DeviceBuffer):
            positions_there = where + start
            entries.append(PendingWrite(partial(buffer.put, positions_there, old)))
            buffer.put(positions_there, new)
        elif isinstance(buffer, HostBuffer):
            entries.append(PendingWrite(partial(buffer.put, positions, before)))
            buffer.put(positions, after)
        entries[-1] = changes
        change += fingerprint_change(spec.name, positions, before, after)
    return change


def distances_between(spec: TensorSpec, old: Bits, new: Bits) -> Bits:
    """Return ULP distances new − old, element by element."""
    from vllm_delta_sync.tensors import diff_kernels

    distances = np.empty_like(old)
    diff_kernels.distances_between(old, new, *order_masks(spec.element), distances)
    return distances


def extract_torch(box: torch.Tensor, window: torch.Tensor, dtype: str) -> Differences:
    """Return the elements of a box that differ from the baseline.

    Args:
        box: live elements, any shape and strides. window: (n,) their baseline, signed integers, on the same device.
        dtype: served.

    Returns:
        (m,) int64 ascending indices in the window, and their bits in the baseline and in the box, signed integers.
    """
    # A copy: the comparison reads more than once, and the trainer may write meanwhile.
    fresh = torch.empty(box.shape, dtype=TORCH_DTYPES[dtype], device=box.device)
    fresh.copy_(box if box.dtype == fresh.dtype else box.contiguous())
    bits = fresh.view(-1).view(window.dtype)
    where = torch.nonzero(bits != window).view(-1)
    return where, window[where], bits[where]


def _extract_for(live: torch.Tensor) -> Extract:
    if live.device.type != "cuda":
        return extract_torch
    try:
        from trainer_side.diff.triton import extract_triton
    except ImportError:
        # torch's CUDA builds include Triton; without it the torch version does the same in several passes.
        return extract_torch
    return extract_triton

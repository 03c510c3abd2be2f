"""``collect``: compare a tensor on the live tensor's device, so that only its changes are copied to the host.

Runs with plain torch operations on any device, the CPU included; on CUDA the loops over elements are Triton kernels.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from trainer_side.diff.buffers import BaselineBuffer, DeviceBuffer, HostBuffer
from trainer_side.diff.change_log import ChangeLog, PendingWrite
from trainer_side.diff.differences import Differences, extract_torch
from trainer_side.diff.reader import boxes
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.bits import CHUNK_ELEMENTS
from vllm_delta_sync.tensors.segments import Segment, SegmentArrays

WINDOW_ELEMENTS = 32 * 1024**2
"""Elements compared at once: bounds the device memory of a comparison, see docs/design/costs.md."""

Extract = Callable[[TensorSpec, int, torch.Tensor, torch.Tensor], Iterator[Differences]]


def collect(spec: TensorSpec, buffer: BaselineBuffer, live: torch.Tensor, log: ChangeLog) -> Fingerprint:
    """Do ``Detector.collect`` for a live tensor or baseline on a device."""
    extract = _extract_for(live)
    change = Fingerprint()
    flat = live.view(-1) if live.is_contiguous() else live
    for start, index in boxes(tuple(flat.shape), WINDOW_ELEMENTS):
        box = flat[index]
        for found in extract(spec, start, box, buffer.window(start, start + box.numel(), live.device)):
            if found.where.numel():
                change += _record(spec, buffer, found, log)
    return change


def _record(spec: TensorSpec, buffer: BaselineBuffer, found: Differences, log: ChangeLog) -> Fingerprint:
    """Update the baseline to what was found, and log it; return the change of fingerprint."""
    relative, distances, new, sums = _on_host(found.relative, found.distances, found.new, found.sums)
    starts = found.start + CHUNK_ELEMENTS * np.arange(found.ends.size)
    # The transfer's memory is pinned, and these are kept until the version is durable, or moved to a file.
    kept = relative.view(np.uint16).copy(), distances.view(spec.element.uint).copy()
    arrays = SegmentArrays(*kept, starts, found.ends, np.zeros(3, np.int64))
    entries = log.parts[0]
    if isinstance(buffer, HostBuffer):
        from vllm_delta_sync.tensors import diff_kernels

        # Empty until the loop has written all.
        entries.append(Segment.open(arrays))
        diff_kernels.put(buffer.bits, new.view(spec.element.uint), *arrays.as_arguments())
    elif isinstance(buffer, DeviceBuffer):
        arrays.state[:2] = relative.size, starts.size
        complete = Segment(arrays, (0, 0), (relative.size, starts.size))
        where = found.where.long() + found.start
        # From here on an interrupt may leave the baseline half updated; this restores the old bits.
        entries.append(PendingWrite(partial(buffer.put, where, found.old)))
        buffer.put(where, found.new)
        entries[-1] = complete
    if log.spool is not None:
        log.spool.keep(arrays)
    low, high = sums.view(np.uint64).tolist()
    return Fingerprint(low, high)


def _on_host(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Copy tensors of one device to the host, all at once."""
    if tensors[0].device.type != "cuda":
        return [tensor.cpu().numpy() for tensor in tensors]
    pinned = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
    for target, tensor in zip(pinned, tensors, strict=True):
        target.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return [target.numpy() for target in pinned]


def _extract_for(live: torch.Tensor) -> Extract:
    if live.device.type != "cuda":
        return extract_torch
    try:
        from trainer_side.diff.triton import extract_triton
    except ImportError:
        # torch's CUDA builds include Triton; without it the torch version does the same in several passes.
        return extract_torch
    return extract_triton

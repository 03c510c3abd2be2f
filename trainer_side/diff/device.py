"""``collect``: compare a tensor on the live tensor's device, so that only its changes are copied to the host.

Runs with plain torch operations on any device, the CPU included; on CUDA the loops over elements are Triton kernels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from trainer_side.diff.buffers import BaselineBuffer, DeviceBuffer, HostBuffer
from trainer_side.diff.change_log import ChangeLog, PendingWrite
from trainer_side.diff.reader import boxes
from vllm_delta_sync.format.fingerprint import Fingerprint, tensor_seed
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors import torch_hash
from vllm_delta_sync.tensors.bits import CHUNK_ELEMENTS
from vllm_delta_sync.tensors.segments import Segment, SegmentArrays
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES

WINDOW_ELEMENTS = 32 * 1024**2
"""Elements compared at once: bounds the device memory of a comparison, see docs/design/costs.md."""
TORCH_ELEMENTS = 4 * 1024**2
"""Elements compared at once without Triton, where each changed one takes some 80 bytes for a moment."""


@dataclass(frozen=True)
class Differences:
    """Elements of a stretch of a tensor that differ from the baseline, ascending. All but ``ends`` is on the device.

    Attributes:
        start: flat index, in the tensor, of the first element of the stretch, where its first chunk begins.
        where: (m,) int32 or int64 indices from ``start``.
        old, new: (m,) signed integers: bits in the baseline, and those that were read.
        relative: (m,) int16 index in the chunk of ``CHUNK_ELEMENTS``.
        distances: (m,) signed integers: ULP distances new − old.
        sums: (2,) int64: low and high lane of the fingerprint after minus before.
        ends: (chunks,) int64 number of these elements up to the end of each chunk, in host memory.
    """

    start: int
    where: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    relative: torch.Tensor
    distances: torch.Tensor
    sums: torch.Tensor
    ends: npt.NDArray[np.int64]


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


def extract_torch(spec: TensorSpec, start: int, box: torch.Tensor, window: torch.Tensor) -> Iterator[Differences]:
    """Yield the elements of a box that differ from the baseline, stretch by stretch.

    Args:
        start: flat index of the box in the tensor.
        box: live elements, any shape and strides. window: (n,) their baseline, signed integers, on the same device.
    """
    # A copy: the comparison reads more than once, and the trainer may write meanwhile.
    fresh = torch.empty(box.shape, dtype=TORCH_DTYPES[spec.dtype], device=box.device)
    fresh.copy_(box if box.dtype == fresh.dtype else box.contiguous())
    bits = fresh.view(-1).view(window.dtype)
    for first in range(0, window.numel(), TORCH_ELEMENTS):
        stretch = slice(first, first + TORCH_ELEMENTS)
        yield _compared(spec, start + first, bits[stretch], window[stretch])


def _compared(spec: TensorSpec, start: int, bits: torch.Tensor, window: torch.Tensor) -> Differences:
    where = torch.nonzero(bits != window).view(-1)
    old, new = window[where], bits[where]
    chunks = torch.arange(1, 1 + -(-window.numel() // CHUNK_ELEMENTS), device=where.device)
    ends = torch.searchsorted(where, chunks * CHUNK_ELEMENTS).cpu().numpy()
    keys = [_key(side) if spec.element.is_float else side for side in (old, new)]
    lanes = torch.empty((5, where.numel()), dtype=torch.int64, device=where.device)
    premixed = torch_hash.premix(tensor_seed(spec.name), where + start)
    for side, row in ((old, 0), (new, 2)):
        torch_hash.write_lanes(premixed, side, lanes[row], lanes[row + 1], lanes[4])
    sums = torch.sum(lanes[2:4] - lanes[:2], 1)
    relative = (where % CHUNK_ELEMENTS).to(torch.int16)
    return Differences(start, where, old, new, relative, keys[1] - keys[0], sums, ends)


def _key(bits: torch.Tensor) -> torch.Tensor:
    """Return the place of floats' patterns in the monotone order, but for a constant."""
    sign, largest = 8 * bits.element_size() - 1, torch.iinfo(bits.dtype).max
    return bits ^ ((bits >> sign) & largest)


def _extract_for(live: torch.Tensor) -> Extract:
    if live.device.type != "cuda":
        return extract_torch
    try:
        from trainer_side.diff.triton import extract_triton
    except ImportError:
        # torch's CUDA builds include Triton; without it the torch version does the same in several passes.
        return extract_torch
    return extract_triton

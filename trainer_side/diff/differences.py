"""``Differences`` between a tensor and its baseline; ``extract_torch`` finds them on any device."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_delta_sync.format.fingerprint import tensor_seed
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors import torch_hash
from vllm_delta_sync.tensors.bits import CHUNK_ELEMENTS
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES

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

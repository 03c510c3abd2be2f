"""How a changed tensor is sent: its changed elements, or all of it."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trainer_side.diff.undo_log import ChangeLog
from vllm_delta_sync.codec.packed import value_planes
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.bits import Bits

SAMPLE_PIECES = 16
SAMPLE_ELEMENTS = 16_384
FEW = 32
"""Where fewer than one in so many elements changed nothing is estimated: what changed is smaller."""

BLOCK_BYTES = 512
"""What a block takes besides its planes. A tensor in full must save as much: what changed can also be taken back."""


def full_is_smaller(
    spec: TensorSpec, found: ChangeLog, codec: Codec, compression: Compression, bits: Callable[[], Bits]
) -> bool:
    """Whether all bits of a tensor take fewer bytes than what changed in it, as estimated from samples.

    Args:
        found: the changed elements, at least one. bits: gives the tensor's new (numel,) bits, where they are looked at.
    """
    changed, width = found.size, spec.element.itemsize
    if codec == "raw":
        index = 4 if spec.numel <= np.iinfo(np.int32).max else 8
        return changed * (index + width) >= spec.nbytes
    if changed * FEW < spec.numel:
        return False
    positions, distances = (np.concatenate(arrays) for arrays in zip(*found.samples(SAMPLE_PIECES), strict=True))
    planes = value_planes(distances, np.array([distances.size], np.int64)).values()
    mask = spec.numel / 8
    if compression == "none":
        values = sum(plane.size for plane in planes) / distances.size
        return min(mask, changed) + changed * values > spec.nbytes + BLOCK_BYTES
    values = sum(_entropy(plane) * plane.size for plane in planes) / distances.size
    share = changed / spec.numel
    where = -share * np.log2(share) - (1 - share) * np.log2(1 - share) if changed < spec.numel else 0.0
    # Where one sample ends and the next begins there is a gap that is none: one among thousands.
    gaps = np.clip(np.diff(positions, prepend=-1) - 1, 0, 255).astype(np.uint8)
    difference = min(mask * where, changed * _entropy(gaps)) + changed * values
    return difference > spec.numel * _bytes_per_element(bits()) + BLOCK_BYTES


def _bytes_per_element(bits: Bits) -> float:
    """Estimated size of an element of a tensor in full: its byte planes, each coded by itself."""
    starts = np.linspace(0, max(0, bits.size - SAMPLE_ELEMENTS), SAMPLE_PIECES).astype(np.int64).tolist()
    sample = np.concatenate([bits[start : start + SAMPLE_ELEMENTS] for start in starts])
    return sum(_entropy(plane) for plane in sample.view(np.uint8).reshape(sample.size, -1).T)


def _entropy(plane: npt.NDArray[np.uint8]) -> float:
    """Bytes per symbol of a memoryless source with these byte frequencies."""
    if not plane.size:
        return 0.0
    share = np.bincount(plane, minlength=256)[np.bincount(plane, minlength=256) > 0] / plane.size
    return float(-(share * np.log2(share)).sum() / 8)

"""``full_is_smaller``: whether to send a changed tensor in full, or only its changed elements."""

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
COUNTED_ELEMENTS = 64 * 1024
SPARSE_RATIO = 32
"""If fewer than one in this many elements changed, the changes are smaller, and nothing is estimated."""

BLOCK_BYTES = 512
"""Bytes of a block besides its planes. A full tensor must save as much, because changes can be reverted."""


def full_is_smaller(
    spec: TensorSpec, log: ChangeLog, codec: Codec, compression: Compression, bits: Callable[[], Bits]
) -> bool:
    """Return whether all bits of a tensor take fewer bytes than its changes, as estimated from samples.

    Args:
        log: the changed elements, at least one. bits: returns the tensor's new (numel,) bits, if they are needed.
    """
    changed, width = log.size, spec.element.itemsize
    if codec == "raw":
        index = 4 if spec.numel <= np.iinfo(np.int32).max else 8
        return changed * (index + width) >= spec.nbytes
    if changed * SPARSE_RATIO < spec.numel:
        return False
    gaps, distances = _sampled(log)
    planes = value_planes(distances, np.array([distances.size], np.int64)).values()
    mask = spec.numel / 8
    if compression == "none":
        values = sum(plane.size for plane in planes) / distances.size
        return min(mask, changed) + changed * values > spec.nbytes + BLOCK_BYTES
    values = sum(_entropy(plane) * plane.size for plane in planes) / distances.size
    share = changed / spec.numel
    where = -share * np.log2(share) - (1 - share) * np.log2(1 - share) if changed < spec.numel else 0.0
    difference = min(mask * where, changed * _entropy(gaps)) + changed * values
    return difference > spec.numel * _bytes_per_element(bits()) + BLOCK_BYTES


def _sampled(log: ChangeLog) -> tuple[npt.NDArray[np.uint8], Bits]:
    """Return (n,) gaps before changed elements, up to 255, and their (n,) distances, from samples of the log."""
    gaps, distances, last = [], [], np.int64(-1)
    for positions, values in log.samples(SAMPLE_PIECES):
        # At each border between samples one gap is wrong: one among thousands.
        gaps.append(np.clip(np.diff(positions, prepend=last) - 1, 0, 255).astype(np.uint8))
        distances.append(values.copy())
        last = positions[-1]
    return np.concatenate(gaps), np.concatenate(distances)


def _bytes_per_element(bits: Bits) -> float:
    """Return the estimated size of an element of a full tensor: its byte planes, each coded separately."""
    starts = np.linspace(0, max(0, bits.size - SAMPLE_ELEMENTS), SAMPLE_PIECES).astype(np.int64).tolist()
    sample = np.concatenate([bits[start : start + SAMPLE_ELEMENTS] for start in starts])
    return sum(_entropy(plane) for plane in sample.view(np.uint8).reshape(sample.size, -1).T)


def _entropy(plane: npt.NDArray[np.uint8]) -> float:
    """Return the bytes per symbol of a memoryless source with these byte frequencies."""
    if not plane.size:
        return 0.0
    # In pieces, because bincount makes 64-bit integers of its argument.
    starts = range(0, plane.size, COUNTED_ELEMENTS)
    counts = np.sum([np.bincount(plane[start : start + COUNTED_ELEMENTS], minlength=256) for start in starts], axis=0)
    share = counts[counts > 0] / plane.size
    return float(-(share * np.log2(share)).sum() / 8)

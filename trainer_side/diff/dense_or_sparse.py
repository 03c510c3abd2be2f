"""``full_is_smaller``: whether to send a changed tensor in full, or only its changed elements."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trainer_side.diff.undo_log import ChangeLog
from vllm_delta_sync.codec.tiles.coder import zigzag
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.dtypes import DType
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.tensors.bits import Bits

SAMPLE_PIECES = 16
SAMPLE_ELEMENTS = 16_384
COUNTED_ELEMENTS = 64 * 1024
SPARSE_RATIO = 32
"""If fewer than one in this many elements changed, the changes are smaller, and nothing is estimated."""

BLOCK_BYTES = 512
"""Bytes of a block besides its streams. A full tensor must save as much, because changes can be reverted."""


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
    values = _value_bytes(log, spec.element)
    share = changed / spec.numel
    where = -share * np.log2(share) - (1 - share) * np.log2(1 - share) if changed < spec.numel else 0.0
    each = width if compression == "none" else _bytes_per_element(bits())
    return spec.numel * where / 8 + changed * values > spec.numel * each + BLOCK_BYTES


def _value_bytes(log: ChangeLog, element: DType) -> float:
    """Return the estimated bytes of a distance, from samples: its token, which is entropy-coded, and raw bits."""
    counts = np.zeros(66, np.int64)
    for _, distances in log.samples(SAMPLE_PIECES):
        lengths = np.frexp(zigzag(distances, element).astype(np.float64))[1]
        counts += np.bincount(lengths, minlength=counts.size)
    share = counts / counts.sum()
    # Numbers of a length have up to four tokens, and their lowest bits but three are raw.
    length = np.arange(counts.size)
    raw = float((share * (np.minimum(length, 2) + np.maximum(length - 3, 0))).sum())
    used = share[share > 0]
    return float(raw - (used * np.log2(used)).sum()) / 8


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

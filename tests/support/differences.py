"""What differs between two arrays of bits, found by the loops that a publisher uses."""

import numpy as np

from vllm_delta_sync.format.fingerprint import Fingerprint, tensor_seed
from vllm_delta_sync.format.table import DType
from vllm_delta_sync.tensors import diff_kernels
from vllm_delta_sync.tensors.changes import Bits, Positions, order_masks
from vllm_delta_sync.tensors.segments import Segment, SegmentArrays


def joined(segments: list[Segment], element: DType) -> tuple[Positions, Bits]:
    """Return the positions (n,) and distances (n,) of consecutive segments."""
    size = sum(segment.size for segment in segments)
    positions, distances = np.empty(size, np.int64), np.empty(size, element.uint)
    cursor = 0
    for segment in segments:
        end = cursor + segment.size
        segment.expand(positions[cursor:end])
        distances[cursor:end] = segment.distances
        cursor = end
    return positions, distances


def diff(name: str, dtype: DType, old: Bits, new: Bits) -> tuple[Positions, Bits, Fingerprint]:
    """Find the changed elements and update ``old`` to ``new``.

    Args:
        name: tensor name, for the fingerprint.
        old: (numel,) baseline, updated in place.
        new: (numel,) current bits.

    Returns:
        positions (n,) int64 ascending, ULP distances (n,), fingerprint change.
    """
    masks, seed = order_masks(dtype), np.uint64(tensor_seed(name))
    segments, change, done = [], Fingerprint(), 0
    while done < old.size:
        arrays = SegmentArrays.empty(dtype)
        arrays.state[2] = done
        segments.append(Segment.open(arrays))
        low, high = diff_kernels.collect(old, new, 0, *masks, seed, *arrays.as_arguments())
        change += Fingerprint(int(low), int(high))
        done = int(arrays.state[2])
    return *joined(segments, dtype), change

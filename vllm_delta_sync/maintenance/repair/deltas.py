"""``put_merged_delta`` writes the merged delta between two versions from the weights on both sides."""

from collections.abc import Iterator

import numpy as np

from vllm_delta_sync.format.documents import merged_delta_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.maintenance.merge_writer import write_merged_delta
from vllm_delta_sync.maintenance.rolling_weights import OBJECT_BYTES
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.tensors.bits import diff
from vllm_delta_sync.tensors.changes import Full, Sparse
from vllm_delta_sync.tensors.state import ModelState


def put_merged_delta(
    run: RunDocuments,
    first: Manifest,
    last: Manifest,
    before: ModelState,
    after: ModelState,
    object_bytes: int = OBJECT_BYTES,
) -> str:
    """Write the merged delta between two versions from their weights; return its key.

    Takes the memory of a few tensors. Replaces a document under that key, which the caller knows to be bad or missing.

    Args:
        object_bytes: size at which an object is full.

    Raises:
        StoreError: the store failed, or there is no room for scratch files.
    """
    fingerprints: dict[int, Fingerprint] = {}
    write_merged_delta(run, (first, last), _pieces(before, after, fingerprints), fingerprints, object_bytes)
    return merged_delta_key(first.version, last.version)


def _pieces(before: ModelState, after: ModelState, fingerprints: dict[int, Fingerprint]) -> Iterator[Sparse | Full]:
    """Yield the changed tensors by dtype; before each, add the change of its fingerprint to ``fingerprints``."""
    table = before.table
    for tensor in sorted(range(len(table)), key=lambda tensor: (table[tensor].dtype, tensor)):
        if before.fingerprints[tensor] == after.fingerprints[tensor]:
            continue
        spec, new = table[tensor], after.bits[tensor]
        positions, distances, fingerprints[tensor] = diff(spec.name, spec.element, before.bits[tensor].copy(), new)
        if _is_smaller_in_full(spec, positions.size):
            yield Full(tensor, new)
        else:
            ids, counts = np.array([tensor], np.uint32), np.array([positions.size], np.int64)
            yield Sparse(spec.dtype, ids, counts, positions, distances, relative=True)


def _is_smaller_in_full(spec: TensorSpec, changed: int) -> bool:
    return changed * (1 + spec.element.itemsize) + 8 * (spec.numel // 255) >= spec.nbytes

"""Merging decoded changes: as objects, since that is what the product merges."""

from collections.abc import Sequence

from tests.support.samples import CONTEXT
from vllm_delta_sync.codec.delta_reader import DeltaReader
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.merge import merge
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.changes import Changes, Full


def opened(part: Changes, table: TensorTable) -> list[DeltaReader]:
    """A version with these changes: distances and tensors in full in one object, new bits in another."""
    relative = Changes([group for group in part.sparse if group.relative], part.full)
    absolute = Changes([group for group in part.sparse if not group.relative])
    left = dict(part.fingerprints)
    for changes in (relative, absolute):
        carried = {tensor for group in changes.sparse for tensor in group.ids.tolist()}
        carried |= {full.id for full in changes.full}
        # What both carry is declared by the first.
        changes.fingerprints = {tensor: left.pop(tensor, Fingerprint()) for tensor in sorted(carried)}
    data = [
        *([encode(relative, table, "plain", "zstd", CONTEXT)] if relative.changed else []),
        *([encode(absolute, table, "raw", "none", CONTEXT)] if absolute.changed else []),
    ]
    return [DeltaReader(each, table, CONTEXT) for each in data]


def merged(parts: Sequence[Changes], table: TensorTable) -> Changes:
    """What has the effect of all parts, one after the other, with the sum of what they declare."""
    sums: dict[int, Fingerprint] = {}
    for part in parts:
        for tensor, change in part.fingerprints.items():
            sums[tensor] = sums.get(tensor, Fingerprint()) + change
    found = Changes()
    for piece in merge([opened(part, table) for part in parts], table):
        if isinstance(piece, Full):
            found.full.append(piece)
        else:
            found.sparse.append(piece)
    carried = {tensor for group in found.sparse for tensor in group.ids.tolist()}
    carried |= {full.id for full in found.full}
    found.full.sort(key=lambda full: full.id)
    found.fingerprints = {
        tensor: sums[tensor] for tensor in sorted(sums) if tensor in carried or sums[tensor] != Fingerprint()
    }
    return found

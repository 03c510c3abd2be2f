"""``simulate_fingerprints`` hashes what changes would make of weights; ``first_damaged_tensor`` locates damage."""

import numpy as np

from vllm_delta_sync.codec.delta_reader import DeltaReader
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.documents import Anchor, MergedDelta
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_change, fingerprint_tensor
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.run.checks import delta_context, read_shard
from vllm_delta_sync.tensors.changes import Bits, Changes, Positions, Sparse
from vllm_delta_sync.tensors.state import ModelState, write_elements

_Rows = list[tuple[Sparse, Positions, Bits]]


def simulate_fingerprints(state: ModelState, changes: Changes) -> dict[int, Fingerprint]:
    """Return tensor id → the fingerprint change that ``state.apply(changes)`` would make; changes no state."""
    rows: dict[int, _Rows] = {}
    for group in changes.sparse:
        for tensor, positions, data in group.tensors():
            rows.setdefault(tensor, []).append((group, positions, data))
    found = {tensor: _simulate_tensor(state, tensor, parts) for tensor, parts in rows.items()}
    for full in changes.full:
        found[full.id] = fingerprint_tensor(state.table[full.id].name, full.bits) - state.fingerprints[full.id]
    return found


def _simulate_tensor(state: ModelState, tensor: int, rows: _Rows) -> Fingerprint:
    """Change a copy of the elements that the rows name; a later row starts from what an earlier one left."""
    one = len(rows) == 1
    touched = rows[0][1] if one else np.unique(np.concatenate([positions for _, positions, _ in rows]))
    before = state.bits[tensor][touched]
    after = before.copy()
    for group, positions, data in rows:
        write_elements(group, after, np.arange(touched.size) if one else np.searchsorted(touched, positions), data)
    return fingerprint_change(state.table[tensor].name, touched, before, after)


def first_wrong_tensor(state: ModelState, changes: Changes) -> str | None:
    """Return the first tensor that ``state.apply(changes)`` would not change as declared; None if there is none."""
    measured = simulate_fingerprints(state, changes)
    wrong = [tensor for tensor, declared in changes.fingerprints.items() if measured.get(tensor) != declared]
    return state.table[min(wrong)].name if wrong else None


def first_damaged_tensor(
    document: Manifest | MergedDelta | Anchor, data: bytes, table: TensorTable, state: ModelState | None
) -> str | None:
    """Return the first damaged tensor of a damaged object; None if that cannot be determined.

    Args:
        document: lists the object. data: its damaged bytes, of the right size.
        state: the base weights of a delta; without them, only tensors that cannot be decoded are found.
    """
    context = delta_context(document)
    try:
        if context is None:
            declared = {} if isinstance(document, MergedDelta) else document.tensor_fingerprints or {}
            return next(
                (
                    name
                    for name, bits in read_shard(data, table, "object")
                    if fingerprint_tensor(name, bits).hex() != declared.get(name)
                ),
                None,
            )
        part = DeltaReader(data, table, context, None if state is None else state.base_tensor)
        if part.codec == "tiled" and state is None:
            return None
        return _first_damaged_in(part, table, state)
    except DeltaSyncError:
        return None  # the object's header or directory is damaged


def _first_damaged_in(part: DeltaReader, table: TensorTable, state: ModelState | None) -> str | None:
    bad = []
    for tensor in part.full:
        try:
            changes = Changes(full=[part.full[tensor]])
        except DeltaSyncError:
            bad.append(tensor)
            continue
        if not _fits(part, changes, tensor, state):
            bad.append(tensor)
    for dtype, (ids, _) in part.directory.items():
        for tensor in ids.tolist():
            try:
                changes = Changes(part.take(dtype, tensor + 1))
            except DeltaSyncError:
                bad.append(tensor)
                break
            if not _fits(part, changes, tensor, state):
                bad.append(tensor)
                break
    return table[min(bad)].name if bad else None


def _fits(part: DeltaReader, changes: Changes, tensor: int, state: ModelState | None) -> bool:
    if state is None:
        return True
    return simulate_fingerprints(state, changes).get(tensor) == part.fingerprints[tensor]

"""``simulate_fingerprints`` hashes what changes would make of weights; ``first_wrong_tensor`` compares it."""

import numpy as np

from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_change, fingerprint_tensor
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

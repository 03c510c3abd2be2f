"""Hash what changes would make of weights, without making it; name the first tensor of an object that is damaged."""

from collections.abc import Mapping

import numpy as np

from vllm_delta_sync.codec.delta_reader import LazyDelta, decode
from vllm_delta_sync.errors import DeltaSyncError, UnsupportedError
from vllm_delta_sync.format.codecs import BASE_CODECS
from vllm_delta_sync.format.documents import Anchor, MergedDelta
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_change, fingerprint_tensor
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.run.checks import context_of, read_shard
from vllm_delta_sync.tensors.bits import Bits, Positions, apply_distances
from vllm_delta_sync.tensors.changes import Changes, Sparse
from vllm_delta_sync.tensors.state import ModelState

_Rows = list[tuple[Sparse, Positions, Bits]]


def measure(state: ModelState, changes: Changes) -> dict[int, Fingerprint]:
    """Per tensor id, the change of fingerprint that ``state.apply(changes)`` would make; the state is not touched."""
    rows: dict[int, _Rows] = {}
    for group in changes.sparse:
        for tensor, positions, data in group.tensors():
            rows.setdefault(tensor, []).append((group, positions, data))
    found = {tensor: _moved(state, tensor, pieces) for tensor, pieces in rows.items()}
    for full in changes.full:
        found[full.id] = fingerprint_tensor(state.table[full.id].name, full.bits) - state.fingerprints[full.id]
    return found


def _moved(state: ModelState, tensor: int, rows: _Rows) -> Fingerprint:
    name, bits = state.table[tensor].name, state.bits[tensor]
    if len(rows) > 1:
        positions = np.concatenate([positions for _, positions, _ in rows])
        if np.unique(positions).size < positions.size:
            # One element is moved twice: what the second finds is what the first left.
            bits = bits.copy()
            for group, positions, data in rows:
                _move(group, bits, positions, data)
            return fingerprint_tensor(name, bits) - state.fingerprints[tensor]
    total = Fingerprint()
    for group, positions, data in rows:
        before = bits[positions]
        after = before.copy()
        _move(group, after, np.arange(after.size), data)
        total += fingerprint_change(name, positions, before, after)
    return total


def _move(group: Sparse, bits: Bits, positions: Positions, data: Bits) -> None:
    if group.relative:
        apply_distances(group.element, bits, positions, data)
    else:
        bits[positions] = data


def first_wrong(
    table: TensorTable, declared: Mapping[int, Fingerprint], measured: Mapping[int, Fingerprint]
) -> str | None:
    """Name of the first tensor whose change is not as declared."""
    wrong = [tensor for tensor, value in declared.items() if measured.get(tensor) != value]
    return table[min(wrong)].name if wrong else None


def first_bad_tensor(
    document: Manifest | MergedDelta | Anchor, data: bytes, table: TensorTable, state: ModelState | None
) -> str | None:
    """Name of the first tensor that a damaged object no longer holds as it should; None where nobody can tell.

    Args:
        document: what lists the object. data: its bytes, damaged, of the right size.
        state: weights that a delta builds on; without them only what cannot be read at all is found.
    """
    context = context_of(document)
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
        try:
            part = LazyDelta(data, table, context, None if state is None else state.base_tensor)
        except UnsupportedError:
            changes = decode(data, table, context)
            return None if state is None else first_wrong(table, changes.fingerprints, measure(state, changes))
        if part.codec in BASE_CODECS and state is None:
            return None
        return _first_bad_part(part, table, state)
    except DeltaSyncError:
        return None  # damaged where it says what it holds


def _first_bad_part(part: LazyDelta, table: TensorTable, state: ModelState | None) -> str | None:
    bad = []
    for tensor in part.full:
        try:
            held = Changes(full=[part.full[tensor]])
        except DeltaSyncError:
            bad.append(tensor)
            continue
        if not _fits(part, held, tensor, state):
            bad.append(tensor)
    for dtype, (ids, _) in part.directory.items():
        for tensor in ids.tolist():
            try:
                held = Changes(part.take(dtype, tensor + 1))
            except DeltaSyncError:
                bad.append(tensor)
                break
            if not _fits(part, held, tensor, state):
                bad.append(tensor)
                break
    return table[min(bad)].name if bad else None


def _fits(part: LazyDelta, changes: Changes, tensor: int, state: ModelState | None) -> bool:
    if state is None:
        return True
    return measure(state, changes).get(tensor) == part.fingerprints[tensor]

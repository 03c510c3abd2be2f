"""A model in memory: moved from version to version, and never silently wrong."""

import numpy as np
import pytest

from tests.support.samples import changes_between, every_dtype_table, nudge, random_bits, state_of
from vllm_delta_sync.errors import FingerprintError, TensorMismatchError
from vllm_delta_sync.wire.changes import Changes, Full, Sparse
from vllm_delta_sync.wire.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.wire.state import ModelState
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

TABLE = TensorTable([TensorSpec("a", "BF16", (40,)), TensorSpec("b", "F32", (3,))])


def bits_of_table() -> list[np.ndarray]:
    return random_bits(TABLE, np.random.default_rng(8))


def test_a_walk_over_versions_in_both_codecs() -> None:
    table = every_dtype_table(100)
    random = np.random.default_rng(2)
    bits = random_bits(table, random)
    state = state_of(table, bits)
    for step in range(4):
        new = nudge(bits, random, 0.1)
        state.apply(changes_between(table, bits, new, "raw" if step % 2 else "packed", full=[step]))
        bits = new
        assert all(np.array_equal(found, array) for found, array in zip(state.bits, bits, strict=True))
        assert state.fingerprint == state_of(table, bits).fingerprint


def test_a_tensor_whose_changes_come_from_two_ranks() -> None:
    old = bits_of_table()
    new = [bits + bits.dtype.type(1) for bits in old]
    whole = changes_between(TABLE, old, new)
    merged = Changes(fingerprints=dict(whole.fingerprints))
    for group in whole.sparse:
        tensor, positions, data = next(group.tensors())
        for part in (slice(0, 2), slice(2, None)):
            ids, counts = np.array([tensor], np.uint32), np.array([positions[part].size])
            merged.sparse.append(Sparse(group.dtype, ids, counts, positions[part], data[part], True))
    state = state_of(TABLE, old)
    state.apply(merged)
    assert state.fingerprint == state_of(TABLE, new).fingerprint


def test_changes_made_against_other_weights_are_noticed() -> None:
    old = bits_of_table()
    new = [old[0].copy(), old[1].copy()]
    new[0][5] += np.uint16(1)
    other = [old[0].copy(), old[1].copy()]
    other[0][5] += np.uint16(9)
    with pytest.raises(FingerprintError, match="tensor 'a' does not have the declared fingerprint"):
        state_of(TABLE, other).apply(changes_between(TABLE, old, new))
    declared = Changes(fingerprints={0: Fingerprint(1, 1)})
    with pytest.raises(FingerprintError, match="tensor 'a'"):
        state_of(TABLE, old).apply(declared)
    wrong_full = Changes(full=[Full(1, new[1] + np.uint32(1))], fingerprints={1: Fingerprint()})
    with pytest.raises(FingerprintError, match="tensor 'b'"):
        state_of(TABLE, old).apply(wrong_full)


def test_the_state_keeps_its_own_copy() -> None:
    old = bits_of_table()
    state = state_of(TABLE, old)
    before = state.fingerprint
    old[0][:] = 0
    assert fingerprint_tensor("a", state.bits[0]) + fingerprint_tensor("b", state.bits[1]) == before


def test_tensors_must_be_the_tables() -> None:
    a, b = bits_of_table()
    wrong: dict[str, list[tuple[str, np.ndarray]]] = {
        "tensor 'b' is missing": [("a", a)],
        "'c' is not in this run's tensor table": [("a", a), ("b", b), ("c", b)],
        "'a' has 39 elements": [("a", a[1:]), ("b", b)],
        "'b' has 3 elements of uint16": [("a", a), ("b", b.astype(np.uint16))],
    }
    for message, pairs in wrong.items():
        with pytest.raises(TensorMismatchError, match=message):
            ModelState(TABLE, pairs)

"""A model in memory: moved from version to version, and never silently wrong."""

import numpy as np
import pytest

from tests.support.samples import changes_between, random_bits, state_of
from vllm_delta_sync.errors import FingerprintError, TensorMismatchError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Changes, Full
from vllm_delta_sync.tensors.state import ModelState

TABLE = TensorTable([TensorSpec("a", "BF16", (40,)), TensorSpec("b", "F32", (3,))])


def test_changes_made_against_other_weights_are_noticed() -> None:
    old = random_bits(TABLE, np.random.default_rng(8))
    new, other = ([array.copy() for array in old] for _ in range(2))
    new[0][5] += np.uint16(1)
    other[0][5] += np.uint16(9)
    for held, changes, tensor in (
        (other, changes_between(TABLE, old, new), "a"),
        (old, Changes(fingerprints={0: Fingerprint(1, 1)}), "a"),
        (old, Changes(full=[Full(1, new[1] + np.uint32(1))], fingerprints={1: Fingerprint()}), "b"),
    ):
        with pytest.raises(FingerprintError, match=f"tensor '{tensor}'"):
            state_of(TABLE, held).apply(changes)


def test_tensors_must_be_the_tables() -> None:
    a, b = random_bits(TABLE, np.random.default_rng(8))
    wrong: dict[str, list[tuple[str, np.ndarray]]] = {
        "'b' is missing": [("a", a)],
        "'c' is not": [("a", a), ("b", b), ("c", b)],
        "'a' has 39": [("a", a[1:]), ("b", b)],
        "'b' has 3": [("a", a), ("b", b.astype(np.uint16))],
    }
    for message, pairs in wrong.items():
        with pytest.raises(TensorMismatchError, match=message):
            ModelState(TABLE, pairs)

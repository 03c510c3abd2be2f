"""Whether a tensor goes in full: whichever is smaller by the bytes that the codec then writes."""

from typing import Any

import numpy as np
import pytest

from tests.support.samples import CONTEXT
from trainer_side.choice import FEW, full_is_smaller
from trainer_side.detection_notes import Extracted, Wide
from vllm_delta_sync.wire.bits import Bits, diff
from vllm_delta_sync.wire.changes import Changes, Full, Sparse
from vllm_delta_sync.wire.delta import encode
from vllm_delta_sync.wire.dtypes import DTYPES
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

NUMEL = 60_000


def weights(seed: int, scale: float = 0.02) -> Bits:
    values = (scale * np.random.default_rng(seed).standard_normal(NUMEL)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def moved(share: float, most: int) -> tuple[Bits, Bits]:
    random, old = np.random.default_rng(3), weights(1)
    steps = random.integers(1, most + 1, NUMEL) * random.choice([-1, 1], NUMEL)
    return old, np.where(random.random(NUMEL) < share, old + steps.astype(np.uint16), old)


CASES: dict[str, tuple[Bits, Bits]] = {
    "few": moved(0.01, 1),
    "half, a little": moved(0.5, 2),
    "all, a little": moved(1.0, 3),
    "all, a hundred": moved(1.0, 100),
    "all, thousands": moved(1.0, 10_000),
    "drawn anew": (weights(1), weights(2)),
    "set to zero": (weights(1), np.zeros(NUMEL, np.uint16)),
    "from zero": (np.zeros(NUMEL, np.uint16), weights(1)),
    "rounded": (weights(1), weights(1) & np.uint16(0xFFF0)),
}


@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("case", CASES)
def test_the_smaller_one_is_chosen(case: str, compression: Any) -> None:
    old, new = CASES[case]
    table = TensorTable([TensorSpec("w", "BF16", (NUMEL,))])
    positions, distances, change = diff("w", DTYPES["BF16"], old.copy(), new)
    one, count = np.zeros(1, np.uint32), np.array([positions.size])
    sparse = Changes([Sparse("BF16", one, count, positions, distances, True)], [], {0: change})
    full = Changes([], [Full(0, new)], {0: change})
    sizes = {whole: len(encode(changes, table, "packed", compression, CONTEXT)) for whole, changes in
             ((False, sparse), (True, full))}  # fmt: skip
    found = Extracted(DTYPES["BF16"])
    found.parts = [[Wide(positions, distances)]]
    asked: list[int] = []
    chosen = full_is_smaller(table[0], found, "packed", compression, lambda: asked.append(1) or new)  # type: ignore[func-returns-value]
    assert sizes[chosen] < 1.03 * min(sizes.values()) + 600
    assert not asked or (compression == "zstd" and positions.size * FEW >= NUMEL)


def test_what_changes_little_is_never_sent_in_full() -> None:
    """It could not be taken back, for a few bytes."""
    ones = np.full(500, 0x3F80, np.uint16)
    new = ones.copy()
    new[::4] += 1
    found = Extracted(DTYPES["BF16"])
    positions, distances, _ = diff("w", DTYPES["BF16"], ones, new)
    found.parts = [[Wide(positions, distances)]]
    for compression in ("zstd", "none"):
        assert not full_is_smaller(TensorSpec("w", "BF16", (500,)), found, "packed", compression, lambda: new)  # type: ignore[arg-type]

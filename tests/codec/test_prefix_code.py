"""Prefix codes of tiles: short, near the best, and those of docs/FORMAT.md."""

import heapq
from collections.abc import Sequence

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support import reference_tiles as reference
from vllm_delta_sync.codec.tiles.alphabets import GAP_TOKENS, LONGEST, SYMBOLS
from vllm_delta_sync.codec.tiles.coder import code_lengths, overfull

COUNTS = st.one_of(
    st.lists(st.integers(0, 1000), min_size=1, max_size=SYMBOLS),
    # Few symbols, of which some are far more frequent than others.
    st.lists(st.sampled_from([0, 1, 2, 3, 50, 10**4, 10**7, 10**12]), min_size=1, max_size=40),
    # The best codes are as long as there are symbols.
    st.integers(2, 50).map(lambda size: [2 ** min(place, 40) for place in range(size)]),
    st.integers(13, SYMBOLS).map(lambda size: [1] * size),
)
RAW = [reference.least_of(token)[1] for token in range(SYMBOLS)]
"""Raw bits by token."""


def lengths_of(counts: Sequence[int]) -> list[int]:
    row = np.zeros((1, SYMBOLS), np.int64)
    row[0, : len(counts)] = counts
    found: list[int] = code_lengths(row)[0].tolist()
    return found


def cost(counts: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(count * length for count, length in zip(counts, lengths, strict=False))


def best_cost(counts: Sequence[int]) -> int:
    """Of all codes of at most LONGEST bits, by package-merge (L. L. Larmore, D. S. Hirschberg, 1990)."""
    leaves = sorted((count, [symbol]) for symbol, count in enumerate(counts) if count)
    if len(leaves) < 2:
        return sum(count for count, _ in leaves)
    packages: list[tuple[int, list[int]]] = []
    for _ in range(LONGEST):
        merged = list(heapq.merge(leaves, packages))
        packages = [(one[0] + two[0], one[1] + two[1]) for one, two in zip(merged[::2], merged[1::2], strict=False)]
    return sum(weight for weight, _ in packages[: len(leaves) - 1])


@given(COUNTS)
@example([5])
@example([0, 0, 7])
@example([1] * SYMBOLS)
@example([3, 3])
def test_codes_are_short_and_near_the_best(counts: list[int]) -> None:
    lengths = lengths_of(counts)
    used = [length for length in lengths if length]
    assert [length > 0 for length in lengths[: len(counts)]] == [count > 0 for count in counts]
    assert max(lengths) <= LONGEST
    assert not overfull(np.array(lengths, np.uint8)[None])
    if len(used) > 1:
        # No bits are left unused.
        assert sum(2 ** (LONGEST - length) for length in used) == 2**LONGEST
        assert cost(counts, lengths) <= 1.01 * best_cost(counts)
    else:
        assert used == [1] * len(used)


def test_all_gaps_of_a_tile_have_a_token() -> None:
    assert reference.token_of(2**22 - 1)[0] == GAP_TOKENS - 1

"""Shards: what the ranks find in their own parts is what comparing the whole tensor finds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.detection import NAME, compared, disturbed, expected, tensor_of
from trainer_side.detection import Detector
from trainer_side.detection_held import HostHeld
from trainer_side.detection_shards import Shard
from vllm_delta_sync.errors import TensorMismatchError
from vllm_delta_sync.wire.fingerprint import Fingerprint


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    whole = draw(st.lists(st.integers(1, 6), max_size=4))
    offsets = [draw(st.integers(0, size)) for size in whole]
    shape = [draw(st.integers(0, size - offset)) for size, offset in zip(whole, offsets, strict=True)]
    return Shard(tuple(offsets), tuple(shape), tuple(whole))


@given(shards())
@settings(max_examples=200, deadline=None)
def test_positions_are_those_of_the_box(shard: Shard) -> None:
    box = tuple(slice(start, start + size) for start, size in zip(shard.offsets, shard.shape, strict=True))
    inside = np.arange(math.prod(shard.whole)).reshape(shard.whole)[box].reshape(-1)
    assert shard.positions(np.arange(inside.size)).tolist() == inside.tolist()
    assert shard.positions(np.arange(inside.size)[::2]).tolist() == inside[::2].tolist()


def test_positions_beyond_32_bits() -> None:
    shard = Shard((70_000, 5), (2, 3), (80_000, 70_000))
    assert shard.positions(np.array([0, 5])).tolist() == [70_000 * 70_000 + 5, 70_001 * 70_000 + 7]


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_shards_of_all_ranks_are_the_whole(dimension: int) -> None:
    """Cut unevenly, as FSDP and tensor parallelism do."""
    shape = (7, 12, 10)
    new = np.random.default_rng(0).integers(0, 1 << 16, math.prod(shape), np.uint16)
    old = disturbed(new, 0.1)
    live, before = tensor_of("BF16", new).view(shape), old.reshape(shape)
    pairs: list[tuple[int, int]] = []
    change, start = Fingerprint(), 0
    for part in torch.chunk(live, 3, dimension):
        offsets = tuple(start if axis == dimension else 0 for axis in range(3))
        shard = Shard(offsets, tuple(part.shape), shape)
        own = np.take(before, range(start, start + part.shape[dimension]), dimension).reshape(-1)
        held = HostHeld(own.copy())
        _, local = compared("BF16", held, part, Detector())
        where = np.array(local.positions, np.int64)
        pairs += zip(shard.positions(where).tolist(), local.distances, strict=True)
        change += shard.fingerprint_change(NAME, where, own[where], held.bits[where])
        start += part.shape[dimension]
    whole = expected("BF16", old, new)
    assert len(whole.positions) > 50
    assert sorted(pairs) == list(zip(whole.positions, whole.distances, strict=True))
    assert change == whole.fingerprint


@pytest.mark.parametrize(
    ("offsets", "shape", "whole"),
    [((0,), (3,), (2,)), ((1,), (2,), (2,)), ((-1,), (1,), (2,)), ((0, 0), (1,), (2,)), ((0,), (-1,), (2,))],
)
def test_boxes_outside_are_refused(offsets: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> None:
    with pytest.raises(TensorMismatchError, match="is not inside a tensor"):
        Shard(offsets, shape, whole)


@pytest.mark.parametrize("position", [-1, 6])
def test_positions_outside_are_refused(position: int) -> None:
    with pytest.raises(TensorMismatchError, match="not inside 6 elements"):
        Shard((1, 1), (2, 3), (4, 4)).positions(np.array([position]))

"""What a rank's model holds of each checkpoint tensor, copied out in checkpoint order."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.chains import TABLE, models_of
from tests.support.samples import changes_between, random_bits
from vllm_delta_sync.engine.compiling import trace_routes
from vllm_delta_sync.engine.old import MOST_RECTANGLES, HeldBits, held_rectangles, moved
from vllm_delta_sync.engine.regions import Region, coalesce
from vllm_delta_sync.errors import EngineError, UnsupportedError
from vllm_delta_sync.torch_bits import tensor_from_bits
from vllm_delta_sync.wire.bits import Bits
from vllm_delta_sync.wire.old import OldTensor
from vllm_delta_sync.wire.table import TensorSpec, TensorTable
from vllm_delta_sync.wire.tiles import extent

EXPERTS = TensorTable([TensorSpec("experts.down", "BF16", (6, 8, 10)), TensorSpec("experts.gate", "F16", (6, 10, 8))])


class Experts(nn.Module):
    """Some experts of two stacks, of which one is cut inside each expert and one is held transposed."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.mine = slice(3 * rank, 3 * rank + 3)
        self.down = nn.Parameter(torch.zeros(6, 4, 10, dtype=torch.bfloat16), requires_grad=False)
        self.gate = nn.Parameter(torch.zeros(3, 8, 10, dtype=torch.float16), requires_grad=False)
        self.rows = slice(4 * rank, 4 * rank + 4)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "experts.down":
                self.down.data.copy_(tensor[:, self.rows])
            else:
                self.gate.data.copy_(tensor[self.mine].transpose(1, 2))


def held_by(model: Any, table: TensorTable, bits: list[Bits]) -> list[OldTensor]:
    model.load_weights((spec.name, tensor_from_bits(bits[i].copy(), spec)) for i, spec in enumerate(table))
    ask = HeldBits(trace_routes(model, table), lambda: 0)
    return [ask(tensor) for tensor in range(len(table))]


def covered(spec: TensorSpec, held: OldTensor) -> np.ndarray:
    """(rows, columns) how often each element is named."""
    count = np.zeros(extent(spec.shape), np.int64)
    whole = ((0, count.shape[0], 0, count.shape[1]),)
    for first, last, left, right in whole if held.held is None else held.held:
        assert 0 <= first < last <= count.shape[0]
        assert 0 <= left < right <= count.shape[1]
        count[first:last, left:right] += 1
    return count


def expect_held(spec: TensorSpec, held: OldTensor, bits: Bits) -> np.ndarray:
    count = covered(spec, held)
    assert count.max(initial=0) <= 1
    inside = count.reshape(-1) == 1
    assert np.array_equal(held.bits[inside], bits[inside])
    return count


def test_whole_model_is_gathered_through_fused_padded_and_transposed_weights() -> None:
    table = TensorTable([*TABLE, TensorSpec("head.weight", "BF16", (50, 128))])
    bits = random_bits(table, np.random.default_rng(1))
    held = held_by(models_of(random_bits(TABLE, np.random.default_rng(2)))[0], table, bits)
    for tensor, spec in enumerate(table):
        assert held[tensor].bits.shape == (spec.numel,)
        assert held[tensor].held == (() if spec.name == "head.weight" else None)
        if spec.name != "head.weight":
            assert np.array_equal(held[tensor].bits, bits[tensor]), spec.name


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_hold_every_element_of_slices(ranks: int) -> None:
    bits = random_bits(TABLE, np.random.default_rng(1))
    found = [held_by(model, TABLE, bits) for model in models_of(random_bits(TABLE, np.random.default_rng(2)), ranks)]
    for tensor, spec in enumerate(TABLE):
        count = sum(expect_held(spec, held[tensor], bits[tensor]) for held in found)
        copied = spec.name in ("k.weight", "v.weight", "model.norm.weight")
        assert np.all(count == (ranks if copied else 1)), spec.name
    names = [spec.name for spec in TABLE]
    assert found[1][names.index("q.weight")].held == ((16 // ranks, 32 // ranks, 0, 128),)
    assert found[1][names.index("out.weight")].held == ((0, 24, 128 // ranks, 256 // ranks),)


def test_experts_are_held_by_slices_of_the_stack_and_inside_each() -> None:
    bits = random_bits(EXPERTS, np.random.default_rng(1))
    found = [held_by(Experts(rank), EXPERTS, bits) for rank in range(2)]
    for tensor, spec in enumerate(EXPERTS):
        assert np.all(sum(expect_held(spec, held[tensor], bits[tensor]) for held in found) == 1)
    assert found[1][0].held == tuple((8 * expert + 4, 8 * expert + 8, 0, 10) for expert in range(6))
    assert found[1][1].held == ((30, 60, 0, 8),)


@settings(deadline=None)
@given(st.data())
def test_rectangles_are_what_a_view_covers(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple))
    view = torch.arange(int(np.prod(shape))).reshape(shape)
    for dim, size in enumerate(shape):
        first = data.draw(st.integers(0, size - 1))
        last, step = data.draw(st.integers(first + 1, size)), data.draw(st.integers(1, 3))
        view = view[(slice(None),) * dim + (slice(first, last, step),)]
    if data.draw(st.booleans()):
        view = view.movedim(0, -1)
    region, _ = coalesce(view.shape, (int(view.storage_offset()), view.stride()), (0, view.contiguous().stride()))
    spec = TensorSpec("a", "U8", shape)
    count = covered(spec, OldTensor(np.empty(0, np.uint8), held_rectangles(spec, [region])))
    expected = np.zeros(spec.numel, np.int64)
    expected[view.reshape(-1).numpy()] = 1
    assert np.array_equal(count.reshape(-1), expected)


def test_runs_that_begin_in_the_middle_of_a_row() -> None:
    spec = TensorSpec("a", "U8", (5, 10))
    assert held_rectangles(spec, [Region(7, (36,), (1,))]) == ((0, 1, 7, 10), (1, 4, 0, 10), (4, 5, 0, 3))
    assert held_rectangles(spec, [Region(8, (3, 4), (10, 1))]) == ((0, 3, 8, 10), (1, 4, 0, 2))


def test_what_is_scattered_is_refused_by_name() -> None:
    spec = TensorSpec("mixed.weight", "U8", (3, 4 * MOST_RECTANGLES))
    every_second = Region(0, (3, 2 * MOST_RECTANGLES), (4 * MOST_RECTANGLES, 2))
    with pytest.raises(UnsupportedError, match=r"mixed\.weight.*publish with codec='packed'"):
        held_rectangles(spec, [every_second])
    other = Region(1, every_second.sizes, every_second.strides)
    assert held_rectangles(spec, [every_second, other]) is None


def test_steps_before_are_laid_over_a_copy() -> None:
    random = np.random.default_rng(4)
    states = [random_bits(TABLE, random) for _ in range(5)]
    full = TABLE.index("q.weight")
    parts = [
        changes_between(TABLE, states[0], states[1]),
        changes_between(TABLE, states[1], states[2], full=[full]),
        changes_between(TABLE, states[2], states[3], "raw"),
        changes_between(TABLE, states[3], states[4]),
    ]
    held = OldTensor(states[0][0].copy(), ((0, 1, 0, 1),))
    after = moved(lambda tensor: held if tensor == 0 else OldTensor(states[0][tensor].copy()), parts)
    for tensor, spec in enumerate(TABLE):
        assert np.array_equal(after(tensor).bits, states[4][tensor]), spec.name
    assert after(0).held == held.held
    assert np.array_equal(parts[1].full[0].bits, states[2][full])


def test_weights_that_move_while_they_are_copied_are_not_handed_on() -> None:
    model = models_of(random_bits(TABLE, np.random.default_rng(1)))[0]
    moves = 0
    ask = HeldBits(trace_routes(model, TABLE), lambda: moves)
    ask(0)
    moves = 1
    with pytest.raises(EngineError, match="staged again"):
        ask(0)

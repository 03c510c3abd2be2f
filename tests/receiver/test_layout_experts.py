"""The plain experts of a rank that has some of a model's experts: each expert's part comes from one rank, and once."""

import pytest
import torch

from vllm_delta_sync.engine.plain_moe import plain_experts

EXPERTS, TOKENS, CHOSEN, HIDDEN, INNER = 8, 40, 2, 32, 16


class Layer:
    """Random experts, and tokens that chose among them."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.x = random(TOKENS, HIDDEN)
        self.w13, self.bias13 = random(EXPERTS, 2 * INNER, HIDDEN), random(EXPERTS, 2 * INNER)
        self.w2, self.bias2 = random(EXPERTS, HIDDEN, INNER), random(EXPERTS, HIDDEN)
        self.ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(TOKENS)]).int()
        self.weights = torch.rand(TOKENS, CHOSEN, generator=generator)

    def computed(self, here: list[int] | None = None) -> torch.Tensor:
        """What a rank makes of it that has those experts (None: one rank that has all)."""
        rows = slice(None) if here is None else torch.tensor(here)
        expert_map = None
        if here is not None:
            expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
            expert_map[rows] = torch.arange(len(here), dtype=torch.int32)
        out = torch.full_like(self.x, torch.nan)
        plain_experts(
            out,
            self.x,
            self.w13[rows],
            self.w2[rows],
            self.bias13[rows],
            self.bias2[rows],
            self.weights,
            self.ids,
            expert_map,
            "swigluoai",
            True,
        )
        return out


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[6, 1], [0, 2, 3, 4, 5, 7]], [list(range(8)), [3]]])
def test_ranks_together_are_one_rank(parts: list[list[int]]) -> None:
    layer = Layer(torch.float32)
    if len(parts[1]) == 1:
        # A rank that nobody chose an expert of has nothing to add.
        layer.ids[layer.ids == parts[1][0]] = 5
    summed = sum((layer.computed(part) for part in parts), torch.zeros_like(layer.x))
    torch.testing.assert_close(summed, layer.computed())
    if len(parts[1]) == 1:
        assert not layer.computed(parts[1]).any()


def test_tokens_of_one_rank_are_exact() -> None:
    """Where all that a token chose is on one rank, that rank's bits are those of a rank that has every expert."""
    layer = Layer(torch.bfloat16)
    here = [1, 3, 4, 6]
    mine = torch.isin(layer.ids, torch.tensor(here)).all(1)
    assert mine.any()
    assert not mine.all()
    assert torch.equal(layer.computed(here)[mine].view(torch.int16), layer.computed()[mine].view(torch.int16))


def test_input_that_is_not_finite_stays_with_its_own_rank() -> None:
    layer = Layer(torch.float32)
    layer.x[0] = torch.inf
    elsewhere = [expert for expert in range(EXPERTS) if expert not in layer.ids[0].tolist()]
    assert not layer.computed(elsewhere)[0].any()

"""Weights that are trained on noise: true steps of Adam, at the rate that changes about 1 % of their bf16 roundings.

What is learnt does not matter here, only which elements cross a rounding boundary, and by how much. The moments begin
as Adam leaves them on such gradients, m ~ N(0, (1 − β₁) / (1 + β₁)) and v = 1, so that no step is special.
"""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
SAMPLE = 1_000_000
HALVINGS = 30
SHARE = 0.01
"""Of the elements that change with each version: what reinforcement learning of large models was seen to do."""


def qwen3_config(
    hidden: int, inner: int, layers: int, vocabulary: int, positions: int, head_dim: int = 64, **more: Any
) -> Qwen3Config:
    """A dense Qwen3 in bfloat16, with tied embeddings unless ``more`` says otherwise."""
    heads = hidden // 64
    settings: dict[str, Any] = {"tie_word_embeddings": True, "attn_implementation": "eager", **more}
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_dim,
        max_position_embeddings=positions,
        dtype="bfloat16",
        **settings,
    )


class NoisyAdam:
    """fp32 masters with their moments, and their bf16 roundings.

    Attributes:
        served: the roundings; ``step`` writes them in place. rate: learning rate.
    """

    def __init__(self, masters: Iterable[torch.Tensor], seed: int = 0) -> None:
        """``masters``: as they begin, drawn with another seed: with the same one the noise would be the weights."""
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._masters = [master.detach().clone() for master in masters]
        self.served = [master.bfloat16() for master in self._masters]
        spread = ((1 - BETA_1) / (1 + BETA_1)) ** 0.5
        self._first = [self._noise(master).mul_(spread) for master in self._masters]
        self._second = [torch.ones_like(master) for master in self._masters]
        self.rate = self._rate(spread)

    @torch.no_grad()
    def step(self) -> None:
        """One step, rounded to nearest even."""
        for served, master, first, second in zip(self.served, self._masters, self._first, self._second, strict=True):
            gradient = self._noise(master)
            first.mul_(BETA_1).add_(gradient, alpha=1 - BETA_1)
            second.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
            master.addcdiv_(first, second.sqrt().add_(EPSILON), value=-self.rate)
            served.copy_(master)

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self._generator)

    def _rate(self, spread: float) -> float:
        """The rate at which about ``SHARE`` changes: bisection on a sample of every tensor."""
        total = sum(master.numel() for master in self._masters)
        # Spread over all rows: the one of a padding token is zero, where every step changes everything.
        sample = torch.cat([master.reshape(-1)[:: -(-total // SAMPLE)] for master in self._masters])
        direction = self._noise(sample).mul_(spread)
        old = sample.bfloat16()
        low, high = 1e-9, 1e-1
        for _ in range(HALVINGS):
            rate = (low * high) ** 0.5
            changed = torch.add(sample, direction, alpha=-rate).bfloat16() != old
            low, high = (rate, high) if float(changed.float().mean()) < SHARE else (low, rate)
        return low


class NoisyModel:
    """A Qwen3 that is trained on noise.

    Attributes:
        model: in bf16; ``step`` moves it in place.
    """

    def __init__(self, config: Qwen3Config, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Qwen3ForCausalLM(config).float()
        adam = NoisyAdam(self.model.parameters(), seed)
        for parameter, served in zip(self.model.parameters(), adam.served, strict=True):
            parameter.data = served
        self.model.to(torch.bfloat16)
        self.step = adam.step

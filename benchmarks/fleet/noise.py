"""A model that is trained on noise: true steps of Adam, at the rate that changes about 1 % of its bf16 weights.

What is learnt does not matter here, only which elements cross a rounding boundary, and by how much. The moments begin
as Adam leaves them on such gradients, m ~ N(0, (1 − β₁) / (1 + β₁)) and v = 1, so that no step is special.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.fleet.replica import CONTEXT

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
SAMPLE = 1_000_000
HALVINGS = 30
SHARE = 0.01
"""Of the elements that change with each version: what reinforcement learning of large models was seen to do."""
PROMPTS = ("DELTA>", "A FLEET OF FOUR", "0123", "TRAINER")
IDS = {entry: number for number, entry in enumerate(["<pad>", "<eos>", "<unk>", *map(chr, range(32, 93))])}


@dataclass(frozen=True)
class Size:
    """Shape of a Qwen3 with tied embeddings over characters."""

    layers: int
    hidden: int
    inner: int
    heads: int

    def config(self) -> Qwen3Config:
        """For transformers."""
        return Qwen3Config(
            vocab_size=len(IDS),
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            head_dim=64,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            pad_token_id=IDS["<pad>"],
            eos_token_id=IDS["<eos>"],
            bos_token_id=None,
            dtype="bfloat16",
        )


SIZES = {
    "small": Size(layers=4, hidden=256, inner=768, heads=4),
    "full": Size(layers=8, hidden=1024, inner=3072, heads=16),
}
"""3.2 M and 100.7 M parameters; beside the small one round trips weigh more than all its bytes."""


class NoisyAdam:
    """A bf16 model beside its fp32 masters and moments.

    Attributes:
        model: what is served; ``step`` moves it in place. rate: learning rate.
    """

    def __init__(self, size: Size, seed: int = 0) -> None:
        torch.manual_seed(seed)
        # Another seed: with the same one the noise would be the weights once more.
        self._generator = torch.Generator().manual_seed(seed + 1)
        model = Qwen3ForCausalLM(size.config())
        self._masters = [parameter.detach().clone() for parameter in model.parameters()]
        self.model = model.to(torch.bfloat16)
        self._served = [parameter.detach() for parameter in self.model.parameters()]
        spread = ((1 - BETA_1) / (1 + BETA_1)) ** 0.5
        self._first = [self._noise(master).mul_(spread) for master in self._masters]
        self._second = [torch.ones_like(master) for master in self._masters]
        self.rate = self._rate(SHARE, spread)

    @torch.no_grad()
    def step(self) -> None:
        """One step, rounded to nearest even into the model."""
        for served, master, first, second in zip(self._served, self._masters, self._first, self._second, strict=True):
            gradient = self._noise(master)
            first.mul_(BETA_1).add_(gradient, alpha=1 - BETA_1)
            second.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
            master.addcdiv_(first, second.sqrt().add_(EPSILON), value=-self.rate)
            served.copy_(master)

    def save(self, path: Path) -> None:
        """Write a checkpoint directory that vLLM loads, with a tokenizer of one token per character."""
        tokenizer = Tokenizer(WordLevel(IDS, unk_token="<unk>"))
        tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
        special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        self.model.save_pretrained(path)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=CONTEXT, **special).save_pretrained(path)

    def prompts(self) -> list[list[int]]:
        """Token ids of some characters."""
        return [[IDS[character] for character in text] for text in PROMPTS]

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self._generator)

    def _rate(self, share: float, spread: float) -> float:
        """The rate at which about this share changes: bisection on a sample of every tensor."""
        total = sum(master.numel() for master in self._masters)
        # Spread over all rows: the one of the padding token is zero, where every step changes everything.
        parts = [master.reshape(-1)[:: -(-total // SAMPLE)] for master in self._masters]
        sample = torch.cat(parts)
        direction = self._noise(sample).mul_(spread)
        old = sample.bfloat16()
        low, high = 1e-9, 1e-1
        for _ in range(HALVINGS):
            rate = (low * high) ** 0.5
            changed = torch.add(sample, direction, alpha=-rate).bfloat16() != old
            low, high = (rate, high) if float(changed.float().mean()) < share else (low, rate)
        return low
